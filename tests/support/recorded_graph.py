"""CUDA graphs imitated on the CPU: the operators of forward and backward are recorded and called again, into the same
memory.

As with a CUDA graph, Python does not run in a replay: branches and values of the capture stay. Operators that draw
random numbers use the state of the generator at the replay. The memory of captured results has garbage until the first
replay, and reading a value on the host ends a capture with CUDA's error message.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

REFUSED = "CUDA error: operation not permitted when stream is capturing"
_GARBAGE = 0.125


class RecordedGraphs:
    """The `GraphBackend` that the module's docstring describes.

    Attributes:
        captures, replays: Number of captures and replays so far.
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

        def run_graph() -> None:
            self.replays += 1
            with torch.no_grad():
                recorded.run_again()

        for tensor in recorded.new_tensors():
            if tensor.is_floating_point():
                tensor.detach().fill_(_GARBAGE)
        return run_graph


class _Recorded(TorchDispatchMode):
    """Records the operators that are called inside of its context."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if operator in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError(REFUSED)
        results = operator(*args, **(kwargs or {}))
        input_storages = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        new = [t if t.untyped_storage().data_ptr() not in input_storages else None for t in _tensors(results)]
        self._calls.append((operator, args, kwargs or {}, new))
        return results

    def new_tensors(self) -> list[Tensor]:
        """Returns the tensors that operators created, without those that they changed."""
        return [t for *_, new in self._calls for t in new if t is not None]

    def run_again(self) -> None:
        """Calls the recorded operators again, with results in the same memory."""
        for operator, args, kwargs, new in self._calls:
            for old, now in zip(new, _tensors(operator(*args, **kwargs)), strict=True):
                if old is not None:
                    old.copy_(now)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
