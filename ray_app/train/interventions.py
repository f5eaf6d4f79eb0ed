"""The record of a run's interventions, see `ray_app.task.interventions`.

Rank 0 writes the model of a step as a question, and the driver answers with the intervention, which all ranks apply to
their states. It is written once, and applied again when a resume comes to its step.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import safetensors.torch
from torch import Tensor

from ray_app.runlog.paths import RunPaths, add_version
from ray_app.storage.files import (
    Location,
    list_files,
    put_atomic,
    put_json,
    read_json,
    restore_nan,
)
from ray_app.task.interventions import Intervention


def put_question(paths: RunPaths, step: int, model: Mapping[str, Tensor]) -> None:
    """Writes the model of a step, for which the driver is to answer."""
    _put_tensors(_tensors(paths, "question", step), model)


def read_question(paths: RunPaths, step: int) -> dict[str, Tensor] | None:
    """Returns the model of a step that waits for an answer; None if none waits."""
    return _read_tensors(_tensors(paths, "question", step))


def put_intervention(paths: RunPaths, step: int, change: Intervention, oldest_step: int) -> None:
    """Records the intervention of a step, and removes tensors that no resume needs.

    Where the last epoch of a run was followed by another one, the new intervention adds to that of its end.

    Args:
        oldest_step: The step of the oldest checkpoint, from which a resume may begin.
    """
    if (before := read_intervention(paths, step)) is not None:
        change = replace(
            change,
            lr=before.lr if change.lr is None else change.lr,
            parameters=before.parameters if change.parameters is None else change.parameters,
            logs={**before.logs, **change.logs},
        )
    if change.parameters is not None:
        _put_tensors(_tensors(paths, "parameters", step), change.parameters)
    if change.arrays:
        _put_tensors(_tensors(paths, "arrays", step), change.arrays)
    values: dict[str, Any] = {"stops": change.stops, "lr": change.lr, "has_parameters": change.parameters is not None}
    values |= {"logs": dict(change.logs), "state": change.state, "is_last": change.is_last}
    put_json(_record(paths, step), add_version(values))
    for name in list_files(paths.interventions):
        kind = name.partition("-")[0]
        if kind != "step" and _step_of(name) < (step + 1 if kind == "question" else min(oldest_step, step)):
            (paths.interventions / name).unlink(missing_ok=True)


def read_intervention(paths: RunPaths, step: int) -> Intervention | None:
    """Returns the intervention of a step; None if there is none yet."""
    if (values := read_json(_record(paths, step))) is None:
        return None
    parameters = _read_tensors(_tensors(paths, "parameters", step)) if values["has_parameters"] else None
    arrays = _read_tensors(_tensors(paths, "arrays", step)) or {}
    logs = restore_nan(values["logs"])
    return Intervention(values["stops"], values["is_last"], values["lr"], parameters, logs, values["state"], arrays)


def read_logs(paths: RunPaths) -> dict[int, dict[str, float]]:
    """Returns the values that interventions have added to epochs, by the last steps of the epochs."""
    return {step: restore_nan(read_json(_record(paths, step)))["logs"] for step in intervened_steps(paths)}


def intervened_steps(paths: RunPaths) -> list[int]:
    """Returns the steps with an intervention in their order."""
    return sorted(_step_of(name) for name in list_files(paths.interventions) if name.endswith(".json"))


def asked_steps(paths: RunPaths) -> list[int]:
    """Returns the steps that wait for an intervention."""
    return sorted(_step_of(name) for name in list_files(paths.interventions) if name.startswith("question"))


def stopped_at(paths: RunPaths) -> int | None:
    """Returns the step at which an intervention has ended training; None if none has."""
    newest = intervened_steps(paths)[-1:]
    return next((step for step in newest if read_json(_record(paths, step))["stops"]), None)


def _record(paths: RunPaths, step: int) -> Location:
    return paths.interventions / f"step-{step:08d}.json"


def _tensors(paths: RunPaths, kind: str, step: int) -> Location:
    return paths.interventions / f"{kind}-{step:08d}.safetensors"


def _step_of(name: str) -> int:
    return int(name.partition("-")[2].partition(".")[0])


def _put_tensors(file: Location, tensors: Mapping[str, Tensor]) -> None:
    # Tensors that share memory, such as tied weights, are refused, so each is copied.
    put_atomic(file, safetensors.torch.save({name: t.detach().cpu().clone() for name, t in tensors.items()}))


def _read_tensors(file: Location) -> dict[str, Tensor] | None:
    try:
        return safetensors.torch.load(file.read_bytes())
    except FileNotFoundError:
        return None
