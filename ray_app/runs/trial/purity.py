"""Whether what a task computes follows from its rows, the keys and torch's seeds alone; called in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ray_app.config.class_path import load_class
from ray_app.data.read.slices import fetch_here
from ray_app.data.read.whole import load_all
from ray_app.plan.keyed import hash_array
from ray_app.runs.preparing.code import classes_in
from ray_app.runs.trial.generators import TORCH, Draw, generators, same, watched
from ray_app.task.base import Batch, Rows, Task
from ray_app.task.losses import Losses
from ray_app.task.own_code import own_code
from ray_app.task.rows.ragged import Arrays, Field, Ragged, to_batch
from ray_app.train.job import Job
from ray_app.train.state.seeds import seed_init, seed_step

_CPU = torch.device("cpu")
_DRAWN = "Draw from the keys that it gets: with drawing(key): for what draws from torch, numpy.random.default_rng(key) for the rest"
_KEYED = "Draw from the keys that augment gets (uniform(keys, salt=1)), or from torch's default generators in the model and the loss"


def impurities(job: Job) -> list[str]:
    """What of a task depends on more than it may, and what to do about it."""
    return list(_found(job))


def _found(job: Job) -> Iterator[str]:
    for class_path in classes_in(job.config):
        load_class(class_path)  # what an import draws is nobody's
    task, rows = job.task, _raw(job)
    decoded = task.decode(rows)
    may_not = "Its result may be cached and used in every epoch, so it draws nothing: make the random part of it in augment, from the keys"
    drawn = list(_twice(task, "decode", lambda: _plain(task.decode(rows)), may_not, ()))
    yield from drawn or _alone(task, rows)
    batch = to_batch(decoded)
    keys = torch.from_numpy((hash_array(1, np.arange(len(next(iter(decoded.values()))))) >> np.uint64(1)).astype(np.int64))
    if task.decodes_by_epoch:
        yield from _twice(task, "decode_training", lambda: _plain(task.decode_training(rows, keys.numpy())), _DRAWN, ())
    yield from _twice(task, "augment", lambda: task.augment({k: v.clone() for k, v in batch.items()}, keys), _KEYED, (TORCH,))
    yield from _twice(task, "build_model", lambda: _model(task).state_dict(), _KEYED, (TORCH,))
    model, fields = _model(task).train(), task.augment(dict(batch), keys)
    for turn in job.config.optimizers or [""]:
        name = f"turn_loss of {turn}" if turn else "training_loss"
        yield from _twice(task, name, partial(_loss, task, turn, model, fields), _KEYED, (TORCH,))
    evaluated = _model(task).eval()
    may_not = "Evaluations and predictions of one checkpoint would differ: draw only where self.training is true, from torch's generators"
    yield from _twice(task, "forward (in an evaluation)", partial(_outputs, task, evaluated, batch), may_not, (TORCH,))


def _plain(fields: Arrays) -> dict[str, npt.NDArray]:
    """Decoded rows that can be compared."""
    return {name: _rows(values) for name, values in fields.items()}


def _rows(values: Field) -> npt.NDArray:
    return values.compact().values if isinstance(values, Ragged) else np.asarray(values)


def _raw(job: Job) -> Rows:
    """The rows of the trial before decoding."""
    seen: list[Rows] = []

    def decode(rows: Rows) -> Any:
        seen.append(rows)
        return job.task.decode(rows)

    source = job.source
    load_all(fetch_here, replace(source, reader=replace(source.reader, decode=decode)))
    return seen[0]


def _model(task: Task) -> nn.Module:
    seed_init(0, _CPU)
    return task.build_model()


def _copy(task: Task, model: nn.Module) -> nn.Module:
    try:
        return deepcopy(model)
    except Exception:  # it has what cannot be copied: a lock, a tensor that was computed (weight_norm, pruning)
        return _model(task).train(model.training)


def _loss(task: Task, turn: str, model: nn.Module, fields: Batch) -> Any:
    copied = _copy(task, model), {name: values.clone() for name, values in fields.items()}
    found = Losses.of(task.turn_loss(turn, *copied) if turn else task.training_loss(*copied))
    weights = {} if found.weights is None else {"weights": found.weights}
    return {name: values.detach() for name, values in {"values": found.values, **weights, **found.metrics}.items()}


def _outputs(task: Task, model: nn.Module, batch: Batch) -> Any:
    with torch.no_grad():
        return task.forward(_copy(task, model), {name: values.clone() for name, values in batch.items()})


def _twice(task: Task, name: str, call: Callable[[], Any], advice: str, allowed: tuple[str, ...]) -> Iterator[str]:
    """Calls something again with the same rows, keys and seeds of torch's."""
    results, draws, own = [], list[Draw](), generators()
    for _ in range(3):
        seed_step(0, 0, 0, 0, _CPU)
        with own_code(lambda: f"{name}, called three times on the same rows"):
            result, drew = watched(call, task, own)
        results.append(result)
        draws += [draw for draw in drew if draw.generator not in allowed]
    differs = not all(same(results[0], other) for other in results[1:])
    blamed = list(dict.fromkeys(str(draw) for draw in draws if draw.is_global or differs))
    if blamed:
        yield f"{name} draws from {', and from '.join(blamed)}. {advice}."
    elif differs:
        yield (
            f"{name} gives something else when it is called again with the same rows, keys and seeds of torch's: it keeps something from"
            f" one call for the next, looks at the time, or draws from a generator of its own. {advice}."
        )


def _alone(task: Task, rows: Rows) -> Iterator[str]:
    """Decodes each of the first rows by itself: it must not depend on the rows that are decoded with it."""
    count = min(4, len(next(iter(rows.values()))))
    together = task.decode({name: values[:count] for name, values in rows.items()})
    for i in range(count):
        one = task.decode({name: values[i : i + 1] for name, values in rows.items()})
        differing = [name for name in together if not same(_rows(together[name][i : i + 1]), _rows(one[name]))]
        if differing:
            yield (
                f"decode makes another {differing[0]!r} of a row by itself than of the same row with others, so the result would depend on"
                " how the data is read. Look at each row alone; take what is known of all of them from prepare or task.init_args."
            )
            return
