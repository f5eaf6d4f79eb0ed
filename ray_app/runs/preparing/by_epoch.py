"""What a task makes of rows to train on, where that is another in every epoch: it must look like what it evaluates on."""

from __future__ import annotations

import numpy as np

from ray_app.data.dataset.arrays import ArraySpec, spec_like
from ray_app.errors import ConfigError, TaskError
from ray_app.task.base import Rows, Task
from ray_app.task.environment import given_back
from ray_app.task.own_code import own_code

_KEYS = np.array([3, 5, 8], np.int64)


def refuse_other_fields(task: Task, rows: Rows, fields: dict[str, ArraySpec]) -> None:
    """Decodes a row to train on with some keys.

    Args:
        task: The prepared task.
        rows: The row as it was read.
        fields: What `decode` makes of it.

    Raises:
        ConfigError: It cannot be decoded so, or to something else than `decode` makes of it.
    """
    if not task.decodes_by_epoch:
        return
    where = " Look at task.init_args.transforms." if getattr(task, "transforms", None) else ""
    for key in _KEYS:
        try:
            with given_back(), own_code(lambda: "decoding a row to train on"):
                decoded = task.decode_training(rows, key[None])
        except TaskError as error:
            raise ConfigError(f"A row to train on cannot be decoded: {error}{where}") from error
        found = {name: spec_like(values) for name, values in decoded.items()}
        for name in fields.keys() | found.keys():
            if found.get(name) != fields.get(name):
                raise ConfigError(
                    f"{type(task).__name__} decodes {name!r} of a row to train on to {_told(found.get(name))}, of one to evaluate on to"
                    f" {_told(fields.get(name))}; both must be alike, in every epoch."
                    + (" Let task.init_args.transforms and evaluate_transforms give the same size and type." if where else "")
                )


def _told(spec: ArraySpec | None) -> str:
    if spec is None:
        return "nothing"
    return f"{np.dtype(spec.dtype).name} of shape {spec.shape if spec.padding is None else ('length', *spec.shape)}"
