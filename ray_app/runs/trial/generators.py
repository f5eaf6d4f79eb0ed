"""Who draws random numbers from where nobody may: generators that were moved by a call, and the user's line that did it."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch

from ray_app.task.own_code import is_own

T = TypeVar("T")
_MOST_LOOKS = 20_000
"""Lines of the user's after which no more are looked at: a loop over pixels would take minutes."""
_MOST_DEPTH = 4


@dataclass(frozen=True)
class Draw:
    """A generator that a call drew from.

    Args:
        generator: Which, in words.
        line: The user's line that did it, if it is known.
        is_global: Whether it is one that a process has by itself.
    """

    generator: str
    line: str | None
    is_global: bool

    def __str__(self) -> str:
        return self.generator + (f" ({self.line})" if self.line else "")


_GLOBAL: dict[str, Callable[[], Any]] = {
    "Python's generator (random)": random.getstate,
    "NumPy's generator (numpy.random)": partial(np.random.get_state, legacy=False),
    "torch's default generator": torch.default_generator.get_state,
}
TORCH = "torch's default generator"


_OWN = (random.Random, np.random.Generator, np.random.RandomState)


def generators() -> list[Any]:
    """All generators that a process has made, but the global ones."""
    shared = (random._inst, np.random.mtrand._rand)
    return [each for each in gc.get_objects() if issubclass(type(each), _OWN) and all(each is not one for one in shared)]


def watched(call: Callable[[], T], task: object, own: list[Any]) -> tuple[T, list[Draw]]:
    """Calls something that the user wrote.

    Args:
        call: What.
        task: Where a generator of the user's own may be.
        own: `generators` of before.

    Returns:
        What it returned, and what it drew from.
    """
    before = [_state_of(each) for each in own]
    with _Lines() as lines:
        value = call()
    moved = [Draw(name, line, True) for name, line in lines.moved.items()]
    moved += [Draw(_named(each, task), None, False) for each, state in zip(own, before, strict=True) if not _same(state, _state_of(each))]
    fresh = [Draw("a generator made without a seed (numpy.random.default_rng)", line, False) for line in lines.unseeded]
    return value, moved + fresh


class _Lines:
    """Looks at the generators after every line of the user's own; a context."""

    def __init__(self) -> None:
        self.moved: dict[str, str | None] = {}
        self.unseeded: list[str | None] = []
        self._looks, self._last = 0, None
        self._before = {name: state() for name, state in _GLOBAL.items()}

    def __enter__(self) -> _Lines:
        self._tracer, self._make = sys.gettrace(), np.random.default_rng
        np.random.default_rng = self._default_rng
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self._tracer)
        np.random.default_rng = self._make
        self._look()

    def _default_rng(self, seed: Any = None) -> np.random.Generator:
        if seed is None:
            self.unseeded.append(next((_place(frame) for frame in _callers(sys._getframe(1)) if is_own(frame.f_code.co_filename)), None))
        return self._make(seed)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        del event, argument
        return self._line if is_own(frame.f_code.co_filename) else None

    _last: str | None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        del argument
        self._looks += 1
        if self._looks > _MOST_LOOKS:
            sys.settrace(None)
            return None
        self._look()
        caller = frame.f_back if event == "return" else frame
        self._last = _place(caller) if caller is not None and is_own(caller.f_code.co_filename) else self._last
        return self._line

    def _look(self) -> None:
        for name, state in _GLOBAL.items():
            now = state()
            if not _same(now, self._before[name]):
                self.moved.setdefault(name, self._last)
                self._before[name] = now


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}, line {frame.f_lineno}, in {frame.f_code.co_name}"


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.SystemRandom):
        return None
    return generator.getstate() if isinstance(generator, random.Random) else _of_numpy(generator)


def _of_numpy(generator: Any) -> Any:
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state(legacy=False)


def _named(generator: Any, task: object) -> str:
    kind = f"{type(generator).__module__.partition('.')[0]}'s {type(generator).__name__}"
    name = next((name for name, held in _held(task, type(task).__name__, _MOST_DEPTH) if held is generator), None)
    return f"a generator of its own, {name} ({kind})" if name else f"a generator of its own ({kind})"


def _held(holder: object, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """What an object holds, by the way to it."""
    if not depth:
        return
    if isinstance(holder, list | tuple):
        parts = [(f"{name}[{i}]", part) for i, part in enumerate(holder)]
    elif isinstance(holder, dict):
        parts = [(f"{name}[{key!r}]", part) for key, part in holder.items()]
    else:
        parts = [(f"{name}.{key}", part) for key, part in getattr(holder, "__dict__", {}).items()]
    for called, part in parts:
        yield called, part
        yield from _held(part, called, depth - 1)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def same(one: Any, other: Any) -> bool:
    """Whether two results have the same bits; what is no number, text, tensor or array, or a collection of these, is not compared."""
    return _same(one, other)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bytes(one), _bytes(other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return bool(one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other) if isinstance(one, bool | int | float | str | bytes) else True
