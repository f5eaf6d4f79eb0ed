"""Checks whether the evaluation of a row depends on the rows of its batch, on some rows before the start.

Losses with negatives from the batch compare rows, layers may normalize over a batch, and a model without a mask reads
what shorter rows are padded with. Such an evaluation has fixed batches (`evaluate.fixed_batches`).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ray_app.config.sections import EvaluateSection
from ray_app.errors import ConfigError
from ray_app.preflight.context import SHORT_LENGTH, CheckResult, PreflightContext, cut_unevenly, truncate
from ray_app.preflight.metric_checks import MAX_PERTURBED, MIN_ROWS, are_close, perturbed
from ray_app.preflight.model_checks import first_line
from ray_app.task.base import Task
from ray_app.task.losses import Losses
from ray_app.task.ragged import Arrays, Ragged, to_batch
from ray_app.task.user_code import user_code
from ray_app.task.whole_batches import BatchTask
from ray_app.torch_private import BatchNorm, tree_leaves

_MAX_SECONDS = 1.0
"""Time after which no other parameters are tried."""
_TOLERANCE = 1e-3
"""Difference beyond rounding, as a share of the largest number."""


class Dependence(NamedTuple):
    """What depends on the other rows of a batch, and the error of the model for a row alone, if it takes none."""

    value: Literal["predictions", "loss"]
    error: str | None = None


def try_batches(context: PreflightContext) -> CheckResult | None:
    """Warns if the evaluation of a row depends on the rows beside it, and fixes the batches of the run then.

    Raises:
        ConfigError: The model takes no single row, and the last batch of the evaluation has one.
    """
    section, model = context.config.evaluate, context.model
    if section.fixed_batches is not None or context.eval_source is None:
        return None
    rows = _rows_to_compare(context)
    model.eval()
    with user_code(lambda: "evaluating rows alone and together with others"), torch.no_grad():
        if (dependence := find_dependence(context.task, model, rows)) is None:
            return None
        reads_padding = _reads_padding(context.task, model, rows)
    all_rows, size = context.eval_source.manifest.num_rows, section.batch_size
    if dependence.error is not None and 1 in (size, all_rows % size):
        raise ConfigError(
            f"The model does not take a single row ({dependence.error}), and the last batch has one row: the data has"
            f" {all_rows} rows, evaluate.batch_size is {size}. Set another evaluate.batch_size."
        )
    context.config = context.config.replace(evaluate__fixed_batches=True)
    context.job = replace(context.job, config=context.config)
    consequence = (
        f"Every evaluation therefore uses batches of evaluate.batch_size = {size} rows in the order of the data, so"
        " that the metrics are the same for any number of workers. This run refuses another size, because the metrics"
        " would change with it. evaluate.fixed_batches: true accepts this without a warning."
    )
    warning = f"{_explain(context, dependence, reads_padding)} {consequence}"
    return CheckResult("The evaluation of a row depends on the other rows of its batch.", "warning", [warning])


def refuse_other_batches(name: str, before: EvaluateSection, batch_size: int) -> None:
    """Raises ConfigError for another `evaluate.batch_size` than that of a run with fixed batches."""
    if before.fixed_batches and batch_size != before.batch_size:
        raise ConfigError(
            f"evaluate.batch_size is {batch_size}, but the evaluations of {name!r} depend on their batches"
            f" (evaluate.fixed_batches) of {before.batch_size} rows, so metrics of another batch size could not be"
            f" compared with them. Set it to {before.batch_size}, or choose another name for the run or evaluator."
        )


def _rows_to_compare(context: PreflightContext) -> Arrays:
    """Returns rows of the evaluation data, of different lengths where batches of it are padded to different lengths."""
    rows = context.accepted_rows if context.eval_rows is None else context.eval_rows
    ragged = {name: values for name, values in rows.items() if isinstance(values, Ragged)}
    if not any(len(np.unique(-(-values.lengths // values.multiple))) > 1 for values in ragged.values()):
        return truncate(rows, SHORT_LENGTH) if context.are_short else rows
    rows = {**rows, **{name: values.padded_with(values.fill) for name, values in ragged.items()}}
    return cut_unevenly(rows) if context.are_short else rows


def find_dependence(task: Task, model: nn.Module, rows: Arrays) -> Dependence | None:
    """Returns how the evaluation of some rows depends on their batch, also with other parameters; None if not at all.

    A new model may give the same for every row. Nothing is compared where an evaluation is random.
    """
    start_s, count = time.monotonic(), len(next(iter(rows.values())))
    rows = {name: values[np.linspace(0, count - 1, MIN_ROWS).round().astype(np.int64)] for name, values in rows.items()}
    is_small = sum(p.numel() for p in model.parameters()) <= MAX_PERTURBED
    for perturbation in range(2 if is_small else 1):
        with perturbed(model, perturbation):
            if (dependence := _compare_batches(task, model, rows)) is not None:
                return dependence
        if time.monotonic() - start_s > _MAX_SECONDS:
            break
    return None


def _compare_batches(task: Task, model: nn.Module, rows: Arrays) -> Dependence | None:
    """Compares rows alone, the shortest and the longest among them, with the same in a batch of all."""
    everything = np.arange(len(next(iter(rows.values()))))
    try:
        whole = _evaluate(task, model, rows, everything)
    except Exception:
        # The checks of one row and of rare rows tell which rows a model does not take.
        return None
    lengths = sum((v.lengths for v in rows.values() if isinstance(v, Ragged)), np.zeros(len(everything), np.int64))
    for row in {0, int(lengths.argmin()), int(lengths.argmax())}:
        try:
            alone = _evaluate(task, model, rows, np.array([row]))
        except Exception as error:
            # A model may take no single row, and raise any error; all rows together it has taken.
            return Dependence("predictions", f"{type(error).__name__}: {first_line(error)}".rstrip("."))
        for name, values in whole.items():
            if any(not _are_equal(a[row], b[0]) for a, b in zip(values, alone[name], strict=False)):
                again = _evaluate(task, model, rows, everything)[name]
                is_random = any(not _are_equal(a, b) for a, b in zip(values, again, strict=True))
                return None if is_random else Dependence(name)
    return Dependence("loss") if isinstance(task, BatchTask) and _compares_rows(task, model, rows, everything) else None


def _evaluate(
    task: Task, model: nn.Module, rows: Arrays, index: npt.NDArray[np.int64]
) -> dict[Literal["predictions", "loss"], list[Tensor]]:
    """Returns the outputs of some rows and their losses, each (rows, ...); a mean loss of a batch is left out."""
    batch = to_batch(rows, index)
    outputs = task.forward(model, batch)
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.shape[:1] == (len(index),)]
    predictions = [tensor for tensor in tensors if tensor.is_floating_point()]
    if isinstance(task, BatchTask):
        return {"predictions": predictions}
    if type(task).eval_outputs is not Task.eval_outputs:
        outputs = task.eval_outputs(model, batch)
    losses = Losses.of(task.loss(outputs, batch))
    return {"predictions": predictions, "loss": [losses.values, *([] if losses.weights is None else [losses.weights])]}


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors are equal except for rounding, without what one of them is longer."""
    if one.ndim != other.ndim:
        return False
    common = tuple(slice(min(sizes)) for sizes in zip(one.shape, other.shape, strict=True))
    first, second = one[common].double(), other[common].double()
    largest = max((float(t.nan_to_num().abs().max()) for t in (first, second) if t.numel()), default=0.0)
    return torch.allclose(first, second, 0.0, _TOLERANCE * largest + 1e-6, equal_nan=True)


def _compares_rows(task: BatchTask, model: nn.Module, rows: Arrays, index: npt.NDArray[np.int64]) -> bool:
    """Returns whether a mean loss changes where every row of a batch occurs twice, unless it doubles as a sum does.

    A loss that another order of the rows changes, or a repetition, is random.
    """
    parts = (index, index, index[::-1], np.concatenate([index, index]))
    loss, *others = (float(task.eval_outputs(model, to_batch(rows, part.copy())).loss) for part in parts)
    repeated, reordered, doubled = others
    is_random = loss != repeated or not are_close(loss, reordered)
    return not is_random and not are_close(loss, doubled) and not are_close(2 * loss, doubled)


def _reads_padding(task: Task, model: nn.Module, rows: Arrays) -> bool:
    """Returns whether rows of one length do not depend on each other."""
    lengths = [values.lengths.min() for values in rows.values() if isinstance(values, Ragged)]
    try:
        return bool(lengths) and find_dependence(task, model, truncate(rows, max(1, int(min(lengths))))) is None
    except Exception:
        # Some rows cannot be cut.
        return False


def _explain(context: PreflightContext, dependence: Dependence, reads_padding: bool) -> str:
    """Returns what the evaluation of a row depends on, and what to change if that is not meant."""
    if reads_padding:
        return (
            f"The model reads the padding of shorter rows: the {dependence.value} of a row"
            f" differ{'s' * (dependence.value == 'loss')} with the longest row of its batch. Give the model a mask"
            " (task.init_args.inputs: COLUMN.mask) or the lengths (COLUMN_lengths in a Task), or pad all rows to one"
            " length: set task.init_args.pad_to and max_length to the length of the longest row."
        )
    if dependence.value == "loss":
        return (
            "The loss of a row depends on the other rows of its batch, as a loss with negatives from the batch does. In"
            f" training, a batch is the {context.plan.micro_batch} rows of a logical worker's micro-batch."
        )
    reason = f" (alone: {dependence.error})" if dependence.error is not None else ""
    layers = [
        f"{name or 'the model'} ({type(layer).__name__}, track_running_stats)"
        for name, layer in context.model.named_modules()
        if isinstance(layer, BatchNorm) and layer.running_mean is None
    ]
    cause = f": {layers[0]} normalizes by the statistics of the batch" if layers else ""
    return (
        f"The predictions of a row depend on the other rows of its batch{reason}{cause}, so a row alone, or in a batch"
        " of another size, gets another prediction. Let the model compute each row independently: with running"
        " statistics, or with a normalization per row (LayerNorm, GroupNorm)."
    )
