"""A CPU in the place of a device that captures: the operators of forward and backward are recorded and called again,
into the same memory.

As with a CUDA graph, Python does not run in a replay: what it decided at the capture stays, what it read stays read.
Operators that draw random numbers draw from the generator as it is at the replay. The memory of what is captured holds
garbage until the first replay, and reading a value on the host ends a capture with CUDA's words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

REFUSED = "CUDA error: operation not permitted when stream is capturing"
_GARBAGE = 0.125


class RecordedGraphs:
    """See the module and `GraphBackend`.

    Attributes:
        captures, replays: How many there were.
    """

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def warm_up(self, work: Callable[[], object]) -> None:
        """See `GraphBackend.warm_up`."""
        work()

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        """See `GraphBackend.capture`."""
        self.captures += 1
        recorded = _Recorded()
        with recorded:
            work()

        def replay() -> None:
            self.replays += 1
            with torch.no_grad():
                recorded.replay()

        for tensor in recorded.made():
            if tensor.is_floating_point():
                tensor.detach().fill_(_GARBAGE)
        return replay


class _Recorded(TorchDispatchMode):
    """The operators that were called inside."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if operator in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError(REFUSED)
        found = operator(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        new = [t if t.untyped_storage().data_ptr() not in given else None for t in _tensors(found)]
        self._calls.append((operator, args, kwargs or {}, new))
        return found

    def made(self) -> list[Tensor]:
        """What operators made, not what they changed."""
        return [t for *_, new in self._calls for t in new if t is not None]

    def replay(self) -> None:
        """Calls them again."""
        for operator, args, kwargs, new in self._calls:
            for old, now in zip(new, _tensors(operator(*args, **kwargs)), strict=True):
                if old is not None:
                    old.copy_(now)


def _tensors(of: Any) -> list[Tensor]:
    return [each for each in tree_leaves(of) if isinstance(each, Tensor)]
