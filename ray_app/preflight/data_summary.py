"""Descriptions of the data for the start of a run: the columns that a task uses and leaves out, and warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ray_app.config.config import Config
from ray_app.data.dataset import Dataset, read_description
from ray_app.errors import join_names
from ray_app.plan.manifest import ColumnFacts, DataFacts
from ray_app.plan.order import Plan
from ray_app.storage.files import to_location
from ray_app.task.base import Task
from ray_app.task.table_statistics import ROW_ID

_MAX_NAMED = 20


def describe_training_columns(task: Task, dataset: Dataset) -> list[str]:
    """Returns one or two lines: the columns that a task reads and its classes, and the unused columns with reasons.

    Args:
        task: The prepared task.
        dataset: The data set with which it was prepared.
    """
    columns, targets = task.columns(), task.targets()
    weights = task.weight_columns()
    inputs = [name for name in columns if name not in targets]
    predicted = [name for name in targets if name not in weights]
    classes = f", {len(task.classes)} classes" if task.classes else ""
    # Numbers are no names of classes.
    if task.classes and task.classes != [str(number) for number in range(len(task.classes))]:
        classes += f": {join_names(task.classes, _MAX_NAMED)}"
    used = (
        f"Columns used: {join_names(inputs, _MAX_NAMED)}"
        + (f"; to predict {join_names(predicted, _MAX_NAMED)}" if predicted else "")
        + classes
        + (f"; weights of rows from {join_names(weights)}" if weights else "")
    )
    return [used, *_describe_unused_columns(dataset, columns, task.left_out)]


def describe_prediction_columns(columns: Sequence[str], dataset: Dataset, carried: Sequence[str]) -> list[str]:
    """Returns one or two lines: the columns that a prediction reads and copies, and the unused columns with reasons.

    Args:
        columns: The columns that the model reads.
        dataset: The data set to predict.
        carried: The columns that are copied to the predictions.
    """
    used = f"Columns used: {join_names(columns, _MAX_NAMED)}" + (
        f"; copied to the predictions {join_names(carried, _MAX_NAMED)}" if carried else ""
    )
    return [used, *_describe_unused_columns(dataset, [*columns, *carried])]


def _describe_unused_columns(
    dataset: Dataset, used: Sequence[str], left_out: Mapping[str, str] | None = None
) -> list[str]:
    """Returns a line with the columns of a data set that are not used and the reasons, or no line if there are none."""
    unused = {name: facts for name, facts in dataset.facts.columns.items() if name not in (*used, ROW_ID)}
    if not unused:
        return []
    reasons = [
        f"{name!r} ({(left_out or {}).get(name) or _explain_unused(name, facts, dataset.facts)})"
        for name, facts in unused.items()
    ]
    return [f"Columns not used: {join_names(reasons, _MAX_NAMED)}"]


def _explain_unused(name: str, facts: ColumnFacts, data: DataFacts) -> str:
    """Returns the type of a column and the reason why it is not used."""
    kind = f"{facts.kind} {facts.dtype}".rstrip() if facts.kind == "other" else facts.kind
    if name in data.index_columns:
        return f"{kind}, which numbers the rows; name the column to use it"
    return f"{kind}, not named" if facts.kind in ("number", "integer", "array") else kind


def shuffle_warnings(config: Config, dataset: Dataset, plan: Plan) -> list[str]:
    """Returns a warning if data looks sorted by class, which shuffle windows mix badly, by its Parquet footers.

    Or if rows are to keep their order, and an ingest has mixed them.
    """
    if not config.data.shuffle:
        made_from = (read_description(to_location(str(dataset.root))) or {}).get("made_from")
        text = f"data.shuffle is false, and ray-app ingest has mixed the rows of {config.data.path}: rows come in that"
        text += " order. To keep the order of the source, ingest again with --shuffle false."
        options = made_from["options"] if made_from else {"shuffle": False}
        return [text] if options.get("shuffle", True) and options["source"] != "digits" else []
    rows = dataset.manifest.rows[dataset.manifest.rows > 0]
    window, name = plan.window_rows, config.data.balance_by or "label"
    facts = dataset.facts.columns.get(name)
    if window >= plan.manifest.num_rows or facts is None:
        return []
    if facts.group_span is not None and facts.minimum is not None and facts.maximum is not None:
        values, groups = facts.maximum - facts.minimum + 1, window / float(rows.mean()) + 1
        if groups * facts.group_span < 0.5 * min(values, window):
            return [
                f"{config.data.path} looks sorted by {name!r}: a row group spans {facts.group_span:,.1f} of"
                f" {values:,.0f} values on average, and a shuffle window of {window:,} rows mixes about {groups:.1f}"
                f" row groups, so at most about {groups * facts.group_span:,.0f} values. Ingest the data again (ray-app"
                " ingest mixes rows), or raise data.shuffle_window_rows."
            ]
    return []
