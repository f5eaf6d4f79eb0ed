"""Whether what a task computes follows from its rows, the keys and torch's seeds alone; called in a process of its own.

Who draws random numbers from where nobody may: generators that were moved by a call, and the user's line that did it.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ray_app.config.import_paths import load_class
from ray_app.data.local_readers import load_all
from ray_app.data.reader import fetch_in_process
from ray_app.plan.hashing import hash_array
from ray_app.preflight.changes import iter_import_paths
from ray_app.task.base import Batch, Losses, Rows, Task
from ray_app.task.ragged import Arrays, Field, Ragged, to_batch
from ray_app.task.user_code import is_user_code, user_code
from ray_app.train.job import Job
from ray_app.train.state.state import seed_init, seed_step

T = TypeVar("T")
_MAX_TRACED_LINES = 20_000
"""Lines of the user's after which no more are looked at: a loop over pixels would take minutes."""
_MAX_DEPTH = 4


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


_GLOBAL_STATES: dict[str, Callable[[], Any]] = {
    "Python's generator (random)": random.getstate,
    "NumPy's generator (numpy.random)": partial(np.random.get_state, legacy=False),
    "torch's default generator": torch.default_generator.get_state,
}
TORCH = "torch's default generator"


_GENERATOR_TYPES = (random.Random, np.random.Generator, np.random.RandomState)


def list_generators() -> list[Any]:
    """All generators that a process has made, but the global ones."""
    shared = (random._inst, np.random.mtrand._rand)
    return [
        each
        for each in gc.get_objects()
        if issubclass(type(each), _GENERATOR_TYPES) and all(each is not one for one in shared)
    ]


def call_watched(call: Callable[[], T], task: object, own: list[Any]) -> tuple[T, list[Draw]]:
    """Calls something that the user wrote.

    Args:
        call: What.
        task: Where a generator of the user's own may be.
        own: `list_generators` of before.

    Returns:
        What it returned, and what it drew from.
    """
    before = [_generator_state(each) for each in own]
    with _LineTracer() as lines:
        value = call()
    moved = [Draw(name, line, True) for name, line in lines.moved.items()]
    moved += [
        Draw(_describe_generator(each, task), None, False)
        for each, state in zip(own, before, strict=True)
        if not _is_same(state, _generator_state(each))
    ]
    fresh = [Draw("a generator made without a seed (numpy.random.default_rng)", line, False) for line in lines.unseeded]
    return value, moved + fresh


class _LineTracer:
    """Looks at the generators after every line of the user's own; a context."""

    def __init__(self) -> None:
        self.moved: dict[str, str | None] = {}
        self.unseeded: list[str | None] = []
        self._looks, self._last = 0, None
        self._before = {name: state() for name, state in _GLOBAL_STATES.items()}

    def __enter__(self) -> _LineTracer:
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
            self.unseeded.append(
                next(
                    (
                        _describe_line(frame)
                        for frame in _iter_callers(sys._getframe(1))
                        if is_user_code(frame.f_code.co_filename)
                    ),
                    None,
                )
            )
        return self._make(seed)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        del event, argument
        return self._line if is_user_code(frame.f_code.co_filename) else None

    _last: str | None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        del argument
        self._looks += 1
        if self._looks > _MAX_TRACED_LINES:
            sys.settrace(None)
            return None
        self._look()
        caller = frame.f_back if event == "return" else frame
        self._last = (
            _describe_line(caller) if caller is not None and is_user_code(caller.f_code.co_filename) else self._last
        )
        return self._line

    def _look(self) -> None:
        for name, state in _GLOBAL_STATES.items():
            now = state()
            if not _is_same(now, self._before[name]):
                self.moved.setdefault(name, self._last)
                self._before[name] = now


def _iter_callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _describe_line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}, line {frame.f_lineno}, in {frame.f_code.co_name}"


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, random.SystemRandom):
        return None
    return generator.getstate() if isinstance(generator, random.Random) else _numpy_state(generator)


def _numpy_state(generator: Any) -> Any:
    return (
        generator.bit_generator.state
        if isinstance(generator, np.random.Generator)
        else generator.get_state(legacy=False)
    )


def _describe_generator(generator: Any, task: object) -> str:
    kind = f"{type(generator).__module__.partition('.')[0]}'s {type(generator).__name__}"
    name = next(
        (name for name, held in _iter_members(task, type(task).__name__, _MAX_DEPTH) if held is generator), None
    )
    return f"a generator of its own, {name} ({kind})" if name else f"a generator of its own ({kind})"


def _iter_members(holder: object, name: str, depth: int) -> Iterator[tuple[str, Any]]:
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
        yield from _iter_members(part, called, depth - 1)


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def is_same(one: Any, other: Any) -> bool:
    """Whether two results have the same bits; what is no number, text, tensor or array, or a collection of these, is
    not compared.
    """
    return _is_same(one, other)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_as_bytes(one), _as_bytes(other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return bool(one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other) if isinstance(one, bool | int | float | str | bytes) else True


_CPU = torch.device("cpu")
_DRAWN = (
    "Draw from the keys that it gets: with drawing(key): for what draws from torch, numpy.random.default_rng(key) for"
    " the rest"
)
_KEYED = (
    "Draw from the keys that augment gets (uniform(keys, salt=1)), or from torch's default generators in the model and"
    " the loss"
)


def find_impurities(job: Job) -> list[str]:
    """What of a task depends on more than it may, and what to do about it."""
    return list(_iter_impurities(job))


def _iter_impurities(job: Job) -> Iterator[str]:
    for class_path in iter_import_paths(job.config):
        load_class(class_path)  # what an import draws is nobody's
    task, rows = job.task, _read_undecoded(job)
    decoded = task.decode(rows)
    may_not = (
        "Its result may be cached and used in every epoch, so it draws nothing: make the random part of it in augment,"
        " from the keys"
    )
    drawn = list(_check_repeatable(task, "decode", lambda: _comparable(task.decode(rows)), may_not, ()))
    yield from drawn or _check_row_independence(task, rows)
    batch = to_batch(decoded)
    keys = torch.from_numpy(
        (hash_array(1, np.arange(len(next(iter(decoded.values()))))) >> np.uint64(1)).astype(np.int64)
    )
    if task.has_epoch_decode:
        yield from _check_repeatable(
            task, "decode_training", lambda: _comparable(task.decode_training(rows, keys.numpy())), _DRAWN, ()
        )
    yield from _check_repeatable(
        task, "augment", lambda: task.augment({k: v.clone() for k, v in batch.items()}, keys), _KEYED, (TORCH,)
    )
    yield from _check_repeatable(task, "build_model", lambda: _build_model(task).state_dict(), _KEYED, (TORCH,))
    model, fields = _build_model(task).train(), task.augment(dict(batch), keys)
    for turn in job.config.optimizers or [""]:
        name = f"loss_for_optimizer of {turn}" if turn else "training_loss"
        yield from _check_repeatable(task, name, partial(_training_values, task, turn, model, fields), _KEYED, (TORCH,))
    evaluated = _build_model(task).eval()
    may_not = (
        "Evaluations and predictions of one checkpoint would differ: draw only where self.training is true, from"
        " torch's generators"
    )
    yield from _check_repeatable(
        task, "forward (in an evaluation)", partial(_eval_outputs, task, evaluated, batch), may_not, (TORCH,)
    )


def _comparable(fields: Arrays) -> dict[str, npt.NDArray]:
    """Decoded rows that can be compared."""
    return {name: _values_of(values) for name, values in fields.items()}


def _values_of(values: Field) -> npt.NDArray:
    return values.compact().values if isinstance(values, Ragged) else np.asarray(values)


def _read_undecoded(job: Job) -> Rows:
    """The rows of the trial before decoding."""
    seen: list[Rows] = []

    def decode(rows: Rows) -> Any:
        seen.append(rows)
        return job.task.decode(rows)

    source = job.source
    load_all(fetch_in_process, replace(source, reader=replace(source.reader, decode=decode)))
    return seen[0]


def _build_model(task: Task) -> nn.Module:
    seed_init(0, _CPU)
    return task.build_model()


def _copy_model(task: Task, model: nn.Module) -> nn.Module:
    try:
        return deepcopy(model)
    except Exception:  # it has what cannot be copied: a lock, a tensor that was computed (weight_norm, pruning)
        return _build_model(task).train(model.training)


def _training_values(task: Task, turn: str, model: nn.Module, fields: Batch) -> Any:
    copied = _copy_model(task, model), {name: values.clone() for name, values in fields.items()}
    found = Losses.of(task.loss_for_optimizer(turn, *copied) if turn else task.training_loss(*copied))
    weights = {} if found.weights is None else {"weights": found.weights}
    return {name: values.detach() for name, values in {"values": found.values, **weights, **found.metrics}.items()}


def _eval_outputs(task: Task, model: nn.Module, batch: Batch) -> Any:
    with torch.no_grad():
        return task.forward(_copy_model(task, model), {name: values.clone() for name, values in batch.items()})


def _check_repeatable(
    task: Task, name: str, call: Callable[[], Any], advice: str, allowed: tuple[str, ...]
) -> Iterator[str]:
    """Calls something again with the same rows, keys and seeds of torch's."""
    results, draws, own = [], list[Draw](), list_generators()
    for _ in range(3):
        seed_step(0, 0, 0, 0, _CPU)
        with user_code(lambda: f"{name}, called three times on the same rows"):
            result, drew = call_watched(call, task, own)
        results.append(result)
        draws += [draw for draw in drew if draw.generator not in allowed]
    differs = not all(is_same(results[0], other) for other in results[1:])
    blamed = list(dict.fromkeys(str(draw) for draw in draws if draw.is_global or differs))
    if blamed:
        yield f"{name} draws from {', and from '.join(blamed)}. {advice}."
    elif differs:
        yield (
            f"{name} gives something else when it is called again with the same rows, keys and seeds of torch's: it"
            f" keeps something from"
            f" one call for the next, looks at the time, or draws from a generator of its own. {advice}."
        )


def _check_row_independence(task: Task, rows: Rows) -> Iterator[str]:
    """Decodes each of the first rows by itself: it must not depend on the rows that are decoded with it."""
    count = min(4, len(next(iter(rows.values()))))
    together = task.decode({name: values[:count] for name, values in rows.items()})
    for i in range(count):
        one = task.decode({name: values[i : i + 1] for name, values in rows.items()})
        differing = [
            name for name in together if not is_same(_values_of(together[name][i : i + 1]), _values_of(one[name]))
        ]
        if differing:
            yield (
                f"decode makes another {differing[0]!r} of a row by itself than of the same row with others, so the"
                f" result would depend on"
                " how the data is read. Look at each row alone; take what is known of all of them from prepare or"
                " task.init_args."
            )
            return
