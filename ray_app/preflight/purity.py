"""Checks that the results of a task depend only on its rows, the keys and torch's seeds; runs in a sandbox process.

Each method of the task is called three times with the same inputs while the states of all random generators of the
process are watched, so that a finding names the generator and the line of the user's code that drew from it.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sized
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import count, islice
from traceback import walk_stack
from types import FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ray_app.config.import_paths import load_class
from ray_app.data.reader import fetch_in_process, load_all
from ray_app.devices import HOST
from ray_app.plan.hashing import hash_array
from ray_app.preflight.changes import iter_import_paths
from ray_app.task.base import Batch, Rows, Task
from ray_app.task.losses import Losses
from ray_app.task.ragged import Arrays, Field, Ragged, to_batch
from ray_app.task.transforms import IS_SEEDED_ALIKE
from ray_app.task.user_code import is_user_code, user_code
from ray_app.train.job import Job
from ray_app.train.state.state import seed_init, seed_step

_MAX_TRACED_LINES = 20_000
"""Largest number of traced lines of user code: a loop over pixels would take minutes."""
_MAX_DEPTH, _MAX_ITEMS = 4, 1000
"""Depth, and number in each collection, of the attributes and items of objects that `kept_values` looks at."""
_MAX_VALUES = 1 << 20
"""Size of the largest tensor that `kept_values` copies."""


_GLOBAL_STATES: dict[str, Callable[[], Any]] = {
    "Python's generator (random)": random.getstate,
    "NumPy's generator (numpy.random)": lambda: pickle.dumps(np.random.get_state(legacy=False)),
    "torch's default generator": lambda: torch.default_generator.get_state().numpy().tobytes(),
}
"""Functions that return the states as values for `==`, which takes microseconds: they are compared at every line."""
TORCH = "torch's default generator"
_UNSEEDED = "a generator without a seed (numpy.random.default_rng)"
_GENERATOR_TYPES = (random.Random, np.random.Generator, np.random.RandomState)


class _LineTracer:
    """Watches the global generators after every line of user code in its context.

    `lines` has the first line that drew from each global generator, and the first that made a NumPy generator without a
    seed (`_UNSEEDED`); None where it is not known.
    """

    def __init__(self) -> None:
        self.lines: dict[str, str | None] = {}
        self._num_lines = 0
        self._last_line: str | None = None
        self._states = {name: get_state() for name, get_state in _GLOBAL_STATES.items()}

    def __enter__(self) -> _LineTracer:
        self._outer_tracer = sys.gettrace()
        self._default_rng = np.random.default_rng
        np.random.default_rng = self._make_generator
        sys.settrace(self._trace_call)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self._outer_tracer)
        np.random.default_rng = self._default_rng
        self._compare_states()

    def _make_generator(self, seed: Any = None) -> np.random.Generator:
        """Replaces `numpy.random.default_rng`, to record the user's line if there is no seed."""
        if seed is None:
            frames = (frame for frame, _ in walk_stack(sys._getframe(1)) if is_user_code(frame.f_code.co_filename))
            self.lines.setdefault(_UNSEEDED, next((_describe_line(frame) for frame in frames), None))
        return self._default_rng(seed)

    def _trace_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Traces the lines of functions of user code only; see `sys.settrace`."""
        del event, argument
        return self._trace_line if is_user_code(frame.f_code.co_filename) else None

    def _trace_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Compares the generators before each line, so that a change belongs to the line before."""
        del argument
        self._num_lines += 1
        if self._num_lines > _MAX_TRACED_LINES:
            sys.settrace(None)
            return None
        self._compare_states()
        caller = frame.f_back if event == "return" else frame
        if caller is not None and is_user_code(caller.f_code.co_filename):
            self._last_line = _describe_line(caller)
        return self._trace_line

    def _compare_states(self) -> None:
        """Records the last line for each global generator with a new state, but where all are seeded and restored."""
        if IS_SEEDED_ALIKE.get():
            return
        for name, get_state in _GLOBAL_STATES.items():
            state = get_state()
            if state != self._states[name]:
                self.lines.setdefault(name, self._last_line)
                self._states[name] = state


def _describe_line(frame: FrameType) -> str:
    """Returns file, line and function of a frame as text."""
    return f"{frame.f_code.co_filename.rpartition('/')[2]}, line {frame.f_lineno}, in {frame.f_code.co_name}"


def kept_values(roots: Mapping[str, Any], skip: Container[int] = ()) -> dict[str, Any]:
    """Returns copies of the numbers, tensors and arrays, and the states of the generators (bytes), in objects, by path.

    Args:
        roots: The objects by their names.
        skip: Identities of parts that are left out.
    """
    values: dict[str, Any] = {}
    pending, visited = [(name, root, _MAX_DEPTH) for name, root in roots.items()], set[int]()
    while pending:
        path, value, depth = pending.pop()
        if isinstance(value, int | float):
            values[path] = repr(value)
        elif id(value) in visited or id(value) in skip or isinstance(value, type | FunctionType | ModuleType | str):
            continue
        elif isinstance(value, torch.Tensor):
            if value.numel() <= _MAX_VALUES and value.layout is torch.strided:
                values[path] = value.detach().clone()
        elif isinstance(value, np.ndarray):
            if value.size <= _MAX_VALUES and not value.dtype.hasobject:
                values[path] = value.copy()
        elif isinstance(value, count):
            values[path] = repr(value)
        elif isinstance(value, torch.Generator):
            values[path] = value.get_state().numpy().tobytes()
        elif isinstance(value, _GENERATOR_TYPES):
            values[path] = b"" if isinstance(value, random.SystemRandom) else pickle.dumps(value)
        elif depth:
            visited.add(id(value))
            pending += [(f"{path}{name}", part, depth - 1) for name, part in islice(iter_parts(value), _MAX_ITEMS)]
            if isinstance(value, Sized) and not isinstance(value, nn.Module):
                values[f"the length of {path}"] = len(value)
    return values


def iter_parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the items of a collection, or the attributes of another object."""
    if isinstance(value, Mapping):
        # The text of a tensor has its values.
        names = (n if isinstance(key, torch.Tensor) else key for n, key in enumerate(value))
        return ((f"[{name!r}]", part) for name, part in zip(names, value.values(), strict=True))
    if isinstance(value, list | tuple | deque):
        return ((f"[{index}]", part) for index, part in enumerate(value))
    return ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def is_same(one: Any, other: Any) -> bool:
    """Returns whether two results are bit-identical.

    Values other than numbers, text, tensors, arrays and collections of these are not compared.
    """
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_as_bytes(one), _as_bytes(other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return bool(one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other) if isinstance(one, bool | int | float | str | bytes) else True


_DRAWN = (
    "Draw from the keys in its arguments: use `with drawing(key):` for code that draws from torch, and"
    " numpy.random.default_rng(key) for other code"
)
_KEYED = (
    "Draw from the keys in the arguments of augment (uniform(keys, salt=1)), or from torch's default generators in the"
    " model and the loss"
)


def find_impurities(job: Job) -> list[str]:
    """Returns the methods of the task that depend on more than their inputs and seeds, with advice, as sentences."""
    return list(_iter_impurities(job))


def _iter_impurities(job: Job) -> Iterator[str]:
    """Yields the findings of `find_impurities`."""
    # Imports come first, because random numbers that an import draws are not drawn by a method of the task.
    for class_path in iter_import_paths(job.config):
        load_class(class_path)
    task, rows = job.task, _read_undecoded(job)
    decoded = task.decode(rows)
    advice = (
        "The result may be cached and used in every epoch, so it must not draw random numbers: move the random part to"
        " augment, and draw from the keys there"
    )
    findings = list(_check_repeatable("decode", lambda: _comparable(task.decode(rows)), advice, ()))
    yield from findings or _check_row_independence(task, rows)
    batch = to_batch(decoded)
    keys = torch.from_numpy(
        (hash_array(1, np.arange(len(next(iter(decoded.values()))))) >> np.uint64(1)).astype(np.int64)
    )
    if task.has_epoch_decode:
        yield from _check_repeatable(
            "decode_training", lambda: _comparable(task.decode_training(rows, keys.numpy())), _DRAWN, ()
        )
    yield from _check_repeatable(
        "augment", lambda: task.augment({k: v.clone() for k, v in batch.items()}, keys), _KEYED, (TORCH,)
    )
    allowed = tuple(_GLOBAL_STATES) if task.seeds_all_generators else (TORCH,)
    yield from _check_repeatable("build_model", lambda: _build_model(task).state_dict(), _KEYED, allowed)
    model, fields = _build_model(task).train(), task.augment(dict(batch), keys)
    for turn in job.config.optimizers or [""]:
        name = f"loss_for_optimizer of {turn}" if turn else "training_loss"
        yield from _check_repeatable(name, partial(_training_values, task, turn, model, fields), _KEYED, (TORCH,))
    eval_model = _build_model(task).eval()
    advice = (
        "Evaluations and predictions of one checkpoint would differ: draw only where self.training is true, from"
        " torch's generators"
    )
    yield from _check_repeatable(
        "forward (in an evaluation)", partial(_eval_outputs, task, eval_model, batch), advice, (TORCH,)
    )


def _comparable(fields: Arrays) -> dict[str, npt.NDArray]:
    """Returns decoded rows as arrays that `is_same` can compare."""
    return {name: _values_of(values) for name, values in fields.items()}


def _values_of(values: Field) -> npt.NDArray:
    """Returns the values of a decoded field as one array."""
    return values.compact().values if isinstance(values, Ragged) else np.asarray(values)


def _read_undecoded(job: Job) -> Rows:
    """Returns the rows of the job before decoding."""
    undecoded: list[Rows] = []

    def decode(rows: Rows) -> Any:
        undecoded.append(rows)
        return job.task.decode(rows)

    source = job.source
    load_all(fetch_in_process, replace(source, reader=replace(source.reader, decode=decode)))
    return undecoded[0]


def _build_model(task: Task) -> nn.Module:
    """Builds the model with torch's generators seeded."""
    seed_init(0, HOST)
    return task.build_model()


def _copy_model(task: Task, model: nn.Module) -> nn.Module:
    """Returns a copy of a model in the same mode, or a new model if it cannot be copied."""
    try:
        return deepcopy(model)
    except Exception:
        # Locks and computed tensors (weight_norm, pruning) cannot be copied.
        return _build_model(task).train(model.training)


def _training_values(task: Task, turn: str, model: nn.Module, fields: Batch) -> Any:
    """Returns the losses of a batch, their weights and the logged values, computed on copies."""
    copies = _copy_model(task, model), {name: values.clone() for name, values in fields.items()}
    losses = Losses.of(task.loss_for_optimizer(turn, *copies) if turn else task.training_loss(*copies))
    weights = {} if losses.weights is None else {"weights": losses.weights}
    return {name: values.detach() for name, values in {"values": losses.values, **weights, **losses.metrics}.items()}


def _eval_outputs(task: Task, model: nn.Module, batch: Batch) -> Any:
    """Returns the outputs of a batch, computed on copies."""
    with torch.no_grad():
        return task.forward(_copy_model(task, model), {name: values.clone() for name, values in batch.items()})


def _check_repeatable(name: str, call: Callable[[], Any], advice: str, allowed: tuple[str, ...]) -> Iterator[str]:
    """Calls a method three times with the same inputs and seeds, and yields a finding if the results may differ.

    Args:
        name: Name of the method in messages.
        call: Calls the method.
        advice: What to do about random numbers, as a sentence without its full stop.
        allowed: Descriptions of the generators from which the method may draw.
    """
    results = []
    lines: dict[str, str | None] = {}
    for _ in range(3):
        seed_step(0, 0, 0, 0, HOST)
        with user_code(lambda: f"{name}, called three times on the same rows"), _LineTracer() as tracer:
            results.append(call())
        lines = tracer.lines | lines
    differs = not all(is_same(results[0], other) for other in results[1:])
    # What a generator without a seed gives may make no difference.
    drawn = {key: line for key, line in lines.items() if key not in allowed and (differs or key != _UNSEEDED)}
    if sources := [f"{key} ({line})" if line else key for key, line in drawn.items()]:
        yield f"{name} draws from {', and from '.join(sources)}. {advice}."
    elif differs:
        yield (
            f"{name} returns another result if it is called again with the same rows, keys and torch seeds: it keeps"
            f" state from one call to the next, reads the time, or draws from its own generator. {advice}."
        )


def _check_row_independence(task: Task, rows: Rows) -> Iterator[str]:
    """Yields a finding if the decoded values of a row depend on the rows that are decoded with it."""
    count = min(4, len(next(iter(rows.values()))))
    together = task.decode({name: values[:count] for name, values in rows.items()})
    for i in range(count):
        one = task.decode({name: values[i : i + 1] for name, values in rows.items()})
        differing = [
            name for name in together if not is_same(_values_of(together[name][i : i + 1]), _values_of(one[name]))
        ]
        if differing:
            yield (
                f"decode returns another {differing[0]!r} for a row alone than for the same row together with others,"
                " so the result would depend on how the data is read. Decode each row independently; facts about all"
                " rows come from prepare or task.init_args."
            )
            return
