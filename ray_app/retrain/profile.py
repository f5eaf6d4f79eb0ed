"""Data validation: the profile of a data set, its drift against other data, and the problems of a delivery.

`profile_dataset` reads a data set in one pass and returns its rows, missing values, class balance and the distribution
of its columns. `find_problems` is a pure function that compares the profiles of a delivery with those of the champion's
data and returns all problems at once.

The drift of a column is its population stability index (PSI) against the profile of other data. With shares p of a
sample and q of the reference in the bins between the reference's deciles, PSI = sum (p - q) ln(p / q); above 0.1 counts
as a change, above 0.25 as a big one (Siddiqi, "Credit Risk Scorecards", 2006). Without any drift it is distributed as
(1/n + 1/m) times a chi-squared variable of (bins - 1) degrees of freedom for samples of n and m rows (Yurdakul,
"Statistical Properties of Population Stability Index", 2018). A value that is not significant by this counts as 0, so
that a small delivery raises no alarm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_app.data.arrays import fixed_array, is_number, spec_of_field
from ray_app.data.dataset import Dataset
from ray_app.data.parquet_files import DataFile
from ray_app.plan.hashing import hash_array, key
from ray_app.retrain.options import RetrainSection
from ray_app.storage.data_files import locate, to_read_error

_BINS = 10
_SAMPLE_ROWS = 50_000
_SMALLEST_SHARE = 1e-4
"""The share of an empty bin, so that the logarithm is finite."""
_SIGNIFICANT = 0.999
Sample = dict[str, npt.NDArray[np.float64]]


@dataclass(frozen=True)
class Column:
    """The distribution of a column of numbers in a sample of the rows.

    Args:
        rows: Rows of the sample with a finite value.
        edges: Boundaries between the bins: the distinct deciles, and the next number after a value that many rows have.
        shares: Share of the rows in each bin; a value at a boundary belongs to the bin above.
    """

    rows: int
    mean: float
    std: float
    edges: list[float]
    shares: list[float]


@dataclass(frozen=True)
class Profile:
    """The profile of a data set.

    Args:
        nulls: Share of missing values of each column.
        classes: Rows of each class, by its number as text; empty if the task has no classes.
        columns: Distribution of each column of numbers; of an array column those of the rows' means and standard
            deviations.
    """

    rows: int
    schema: dict[str, str]
    nulls: dict[str, float]
    classes: dict[str, int]
    columns: dict[str, Column] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the profile as plain dictionaries."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Profile:
        """Returns the profile of which `to_json` returned these values."""
        return cls(**values | {"columns": {name: Column(**column) for name, column in values["columns"].items()}})


def profile_dataset(dataset: Dataset, columns: list[str], label: str | None) -> tuple[Profile, Sample]:
    """Reads a data set once and returns its profile, and the sample of each column, for `psi`.

    `label` is the column of class numbers, if there is one: the profile has its class balance instead of its
    distribution.
    """
    nulls, classes = Counter[str](), Counter[int]()
    parts: dict[str, list[npt.NDArray[np.float64]]] = {}
    schema: dict[str, str] = {}
    share = min(1.0, _SAMPLE_ROWS / dataset.manifest.num_rows)
    for first, table in iter_row_groups(dataset, columns):
        is_sampled = hash_array(key(1), np.arange(first, first + table.num_rows)) <= np.uint64(share * (2**64 - 2**12))
        for arrow_field, values in zip(table.schema, table.columns, strict=True):
            spec = spec_of_field(arrow_field)
            schema[arrow_field.name] = f"{spec.dtype} {spec.shape}" if spec else str(arrow_field.type)
            nulls[arrow_field.name] += values.null_count
            if arrow_field.name == label and pa.types.is_integer(arrow_field.type):
                class_numbers, counts = np.unique(values.drop_null().to_numpy(), return_counts=True)
                classes.update(dict(zip(class_numbers.tolist(), counts.tolist(), strict=True)))
                continue
            for name, numbers in _numeric_values(arrow_field, values.filter(pa.array(is_sampled))):
                parts.setdefault(name, []).append(numbers)
    whole = {name: np.concatenate(parts_of_column) for name, parts_of_column in parts.items()}
    sample = {name: values[np.isfinite(values)] for name, values in whole.items()}
    rows = dataset.manifest.num_rows
    null_shares = {name: nulls[name] / rows for name in schema}
    class_rows = {str(number): count for number, count in sorted(classes.items())}
    described = {name: describe_column(values) for name, values in sample.items() if len(values)}
    return Profile(rows, schema, null_shares, class_rows, described), sample


def psi(values: npt.NDArray[np.float64], reference: Column) -> float:
    """Returns the population stability index of finite values, (rows,), against a column; 0 if not significant."""
    if not len(values) or len(reference.shares) < 2:
        return 0.0
    shares = np.maximum(_bin_shares(values, reference.edges), _SMALLEST_SHARE)
    reference_shares = np.maximum(reference.shares, _SMALLEST_SHARE)
    index = float(((shares - reference_shares) * np.log(shares / reference_shares)).sum())
    deviation = chi_squared_quantile(len(reference_shares) - 1)
    significant_index = deviation * (1 / len(values) + 1 / reference.rows)
    return index if index > significant_index else 0.0


def chi_squared_quantile(degrees: int) -> float:
    """Returns the value that a chi-squared variable is below with the probability `_SIGNIFICANT`, to 3 %.

    The cube root is nearly normal: Wilson and Hilferty, "The Distribution of Chi-Square", PNAS 17 (1931).
    """
    variance = 2 / (9 * degrees)
    return degrees * (1 - variance + NormalDist().inv_cdf(_SIGNIFICANT) * math.sqrt(variance)) ** 3


def class_shift(now: dict[str, int], before: dict[str, int]) -> float:
    """Returns the total variation distance of two class balances, 0 (equal) to 1 (no class in common)."""
    total, total_before = max(1, sum(now.values())), max(1, sum(before.values()))
    names = now.keys() | before.keys()
    return math.fsum(abs(now.get(name, 0) / total - before.get(name, 0) / total_before) for name in names) / 2


def iter_row_groups(dataset: Dataset, columns: list[str]) -> Iterator[tuple[int, pa.Table]]:
    """Yields each row group with the position of its first row."""
    manifest, root = dataset.manifest, dataset.root
    for index, path in enumerate(manifest.paths):
        try:
            with DataFile(root, path, manifest.rules) as file:
                for group in np.flatnonzero(manifest.file_of == index).tolist():
                    table = file.read_row_group(int(manifest.index_in_file[group]), columns)
                    yield int(manifest.first_row[group]), table
        except (pa.ArrowException, OSError) as error:
            raise to_read_error(locate(root, path), error, "The file cannot be read; deliver it again.") from error


def _numeric_values(arrow_field: pa.Field, values: pa.ChunkedArray) -> list[tuple[str, npt.NDArray[np.float64]]]:
    """Returns names and values, (rows,), of a column of numbers, or the mean and std of rows of arrays."""
    spec = spec_of_field(arrow_field)
    if spec is not None:
        if not len(values) or spec.padding is not None or np.dtype(spec.dtype).kind not in "biuf":
            return []
        rows = fixed_array(values, spec).reshape(len(values), -1).astype(np.float64)
        return [(f"{arrow_field.name} (mean)", rows.mean(1)), (f"{arrow_field.name} (std)", rows.std(1))]
    if is_number(arrow_field.type):
        return [(arrow_field.name, values.drop_null().to_numpy().astype(np.float64))]
    return []


def describe_column(values: npt.NDArray[np.float64]) -> Column:
    """Returns the statistics of a column of numbers, with its distribution in bins."""
    edges = _bin_edges(values)
    return Column(len(values), float(values.mean()), float(values.std()), edges, _bin_shares(values, edges).tolist())


def _bin_edges(values: npt.NDArray[np.float64]) -> list[float]:
    """Returns the boundaries between the bins: the distinct deciles, and one boundary after each frequent value.

    So a frequent value gets its own bin. Otherwise all zeros and ones of a binary column would be in one bin.
    """
    deciles, times = np.unique(np.quantile(values, np.arange(1, _BINS) / _BINS), return_counts=True)
    frequent = deciles[(times > 1) | (deciles == values.min()) | (deciles == values.max())]
    return np.union1d(deciles, np.nextafter(frequent, np.inf)).tolist()


def _bin_shares(values: npt.NDArray[np.float64], edges: list[float]) -> npt.NDArray[np.float64]:
    """Returns the share of the values in each bin, shape (len(edges) + 1,)."""
    return np.bincount(np.searchsorted(edges, values, side="right"), minlength=len(edges) + 1) / len(values)


@dataclass(frozen=True)
class Agreement:
    """The agreement of the champion's predictions with the delivered labels."""

    metric: str
    mode: str
    accepted: float
    training: float
    evaluation: float

    def relative_loss(self, value: float) -> float:
        """Returns how much worse a value is than the accepted one, as a share of the accepted one."""
        worse = self.accepted - value if self.mode == "max" else value - self.accepted
        return worse / max(abs(self.accepted), 1e-12)


@dataclass(frozen=True)
class ReferenceProfiles:
    """The profiles of the champion's data, of the gate's at its promotion; None if the record has none."""

    train: Profile | None = None
    evaluation: Profile | None = None
    gate: Profile | None = None


_MIN_BATCHES = 20
"""Fewest batches from which the gate draws, where their rows depend on each other."""


@dataclass(frozen=True)
class GateRows:
    """The rows of the gate; without a profile they are a part of the evaluation data.

    Those of a batch depend on each other where `evaluate.fixed_batches` is set; otherwise `batch_rows` is 1.
    """

    rows: int
    profile: Profile | None = None
    batch_rows: int = 1


def find_problems(
    train: Profile,
    evaluation: Profile,
    gate: GateRows,
    reference: ReferenceProfiles,
    agreement: Agreement | None,
    duplicates: list[str],
    section: RetrainSection,
) -> list[str]:
    """Returns a message for each problem of a delivery; training needs a delivery without problems."""
    messages = list(duplicates)
    if gate.rows < section.min_eval_rows:
        subject = (
            "the gate's data has"
            if gate.profile is not None
            else f"the evaluation data has {evaluation.rows:,} rows, and the gate's part of it"
        )
        messages.append(
            f"{subject} {gate.rows:,}; with fewer than retrain.min_eval_rows = {section.min_eval_rows}, a better model"
            " cannot be distinguished from luck"
        )
    batches = -(-gate.rows // gate.batch_rows)
    if gate.batch_rows > 1 and batches < _MIN_BATCHES:
        messages.append(
            f"the gate's {gate.rows:,} rows are {batches} batches of evaluate.batch_size = {gate.batch_rows}, on which"
            f" their evaluation depends (evaluate.fixed_batches); fewer than {_MIN_BATCHES} do not distinguish a better"
            " model from luck: lower evaluate.batch_size"
        )
    messages += _compare_profiles("training data", train, reference.train, section)
    messages += _compare_profiles("evaluation data", evaluation, reference.evaluation, section)
    if gate.profile is not None:
        messages += _compare_profiles("gate data", gate.profile, reference.gate, section)
    gate_data = "gate" if gate.profile is not None else "evaluation"
    return messages + (_find_disagreements(agreement, gate_data, section) if agreement is not None else [])


def _compare_profiles(
    data_name: str, current: Profile, reference: Profile | None, section: RetrainSection
) -> list[str]:
    """Returns the problems of one data set against a reference; none without a reference."""
    if reference is None:
        return []
    messages = []
    for name in sorted(current.schema.keys() | reference.schema.keys()):
        if current.schema.get(name) != reference.schema.get(name):
            messages.append(
                f"{data_name}: column {name!r} is {current.schema.get(name, 'missing')}, but was"
                f" {reference.schema.get(name, 'missing')}"
            )
    if current.rows < section.min_rows_ratio * reference.rows:
        messages.append(
            f"{data_name}: {current.rows:,} rows, {current.rows / reference.rows:.0%} of the {reference.rows:,} of the"
            f" champion's; allowed are {section.min_rows_ratio:.0%} (retrain.min_rows_ratio)"
        )
    for name, share in current.nulls.items():
        if share > reference.nulls.get(name, 0.0) + section.max_null_increase:
            messages.append(
                f"{data_name}: {share:.1%} of column {name!r} are missing, but were"
                f" {reference.nulls.get(name, 0.0):.1%}; allowed are {section.max_null_increase:.1%} more"
                " (retrain.max_null_increase)"
            )
    missing_classes = sorted(
        (name for name, rows in reference.classes.items() if rows and not current.classes.get(name)), key=int
    )
    if missing_classes:
        messages.append(
            f"{data_name}: no row of class {', '.join(missing_classes)}, of which there were"
            f" {', '.join(str(reference.classes[n]) for n in missing_classes)}"
        )
    shift = class_shift(current.classes, reference.classes)
    if shift > section.max_class_shift:
        messages.append(
            f"{data_name}: the class balance has shifted by {shift:.2f} (total variation); allowed are"
            f" {section.max_class_shift:.2f} (retrain.max_class_shift)"
        )
    return messages


def _find_disagreements(agreement: Agreement, gate_data: str, section: RetrainSection) -> list[str]:
    messages = []
    for data_name, value in (("training", agreement.training), (gate_data, agreement.evaluation)):
        loss = agreement.relative_loss(value)
        # The negated comparison finds NaN, too.
        if not loss <= section.max_disagreement:
            messages.append(
                f"labels of the {data_name} data: the champion's {agreement.metric} on them is {value:.4f}, it was"
                f" {agreement.accepted:.4f} when it was promoted, a loss of {loss:.0%}; allowed are"
                f" {section.max_disagreement:.0%} (retrain.max_disagreement). A model does not age like that: the"
                " labels look wrong"
            )
    return messages
