"""What a data set looks like: rows, missing values, class balance and the distribution of its columns, found in one
pass.

The drift of a column is its population stability index against the profile of other data. With shares p of a sample and
q of the reference in the bins between the reference's deciles, PSI = sum (p - q) ln(p / q); above 0.1 counts as a
change, above 0.25 as a big one (Siddiqi, "Credit Risk Scorecards", 2006). Without any drift it is distributed as (1/n +
1/m) times a chi-squared variable of (bins - 1) degrees of freedom for samples of n and m rows (Yurdakul, "Statistical
Properties of Population Stability Index", 2018); what is not significant by this is not called drift, so that a small
delivery raises no alarm.

Is a delivery of data sound? A pure function of its profile and of what is known of the champion's data; all problems at
once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_app.data.arrays import fixed_array, spec_of_field
from ray_app.data.dataset import Dataset
from ray_app.data.parquet_files import DataFile
from ray_app.plan.hashing import hash_array, key
from ray_app.retrain.options import RetrainSection
from ray_app.storage.data_files import locate_data, to_read_error

_BINS = 10
_SAMPLE_ROWS = 50_000
_SMALLEST_SHARE = 1e-4
"""What an empty bin counts as, so that the logarithm is finite."""
_SIGNIFICANT = 0.999
Sample = dict[str, npt.NDArray[np.float64]]


@dataclass(frozen=True)
class Column:
    """The distribution of a column of numbers, of a sample of its rows.

    Args:
        rows: Rows of the sample with a finite value.
        mean: Their mean.
        std: Their standard deviation.
        edges: Boundaries between the bins: their distinct deciles, and the next number after one that many rows have.
        shares: Share of the rows in each bin; a value at a boundary belongs to the bin above.
    """

    rows: int
    mean: float
    std: float
    edges: list[float]
    shares: list[float]


@dataclass(frozen=True)
class Profile:
    """A data set.

    Args:
        rows: How many.
        schema: Type of every column that the task reads.
        nulls: Share of missing values of each.
        classes: Rows of each class, by its number as text; empty if the task has no classes.
        columns: Distribution of every column of numbers, and of the mean and the standard deviation of every row of an
            array column.
    """

    rows: int
    schema: dict[str, str]
    nulls: dict[str, float]
    classes: dict[str, int]
    columns: dict[str, Column] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain dictionaries."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Profile:
        """Reads what `to_json` made."""
        return cls(**values | {"columns": {name: Column(**column) for name, column in values["columns"].items()}})


def profile(dataset: Dataset, columns: list[str], label: str | None) -> tuple[Profile, Sample]:
    """Reads a data set once, a row group at a time.

    Args:
        dataset: Where it is.
        columns: The columns that the task reads.
        label: The column of class numbers, if the task has classes; its balance is looked at instead of its
            distribution.

    Returns:
        The profile, and the sample of each column that it was made from, to be held against other profiles with `psi`.
    """
    nulls, classes = Counter[str](), Counter[int]()
    parts: dict[str, list[npt.NDArray[np.float64]]] = {}
    schema: dict[str, str] = {}
    share = min(1.0, _SAMPLE_ROWS / dataset.manifest.num_rows)
    for first, table in _row_groups(dataset, columns):
        chosen = hash_array(key(1), np.arange(first, first + table.num_rows)) <= np.uint64(share * (2**64 - 2**12))
        for item, values in zip(table.schema, table.columns, strict=True):
            spec = spec_of_field(item)
            schema[item.name] = f"{spec.dtype} {spec.shape}" if spec else str(item.type)
            nulls[item.name] += values.null_count
            if item.name == label and pa.types.is_integer(item.type):
                known, counts = np.unique(values.drop_null().to_numpy(), return_counts=True)
                classes.update(dict(zip(known.tolist(), counts.tolist(), strict=True)))
                continue
            for name, numbers in _numbers(item, values.filter(pa.array(chosen))):
                parts.setdefault(name, []).append(numbers)
    sample = {name: _finite(np.concatenate(found)) for name, found in parts.items()}
    rows = dataset.manifest.num_rows
    return (
        Profile(
            rows,
            schema,
            {name: nulls[name] / rows for name in schema},
            {str(number): count for number, count in sorted(classes.items())},
            {name: _column(values) for name, values in sample.items() if len(values)},
        ),
        sample,
    )


def psi(values: npt.NDArray[np.float64], reference: Column) -> float:
    """Population stability index of a sample against a column of another profile; 0 if it is not significant.

    Args:
        values: The sample, shape (rows,).
        reference: What it is held against.
    """
    from scipy.stats import chi2

    if not len(values) or len(reference.shares) < 2:
        return 0.0
    now = np.maximum(_shares(values, reference.edges), _SMALLEST_SHARE)
    before = np.maximum(reference.shares, _SMALLEST_SHARE)
    found = float(((now - before) * np.log(now / before)).sum())
    by_chance = chi2.ppf(_SIGNIFICANT, len(before) - 1) * (1 / len(values) + 1 / reference.rows)
    return found if found > by_chance else 0.0


def class_shift(now: dict[str, int], before: dict[str, int]) -> float:
    """Total variation distance of two class balances, 0 (equal) to 1 (no class in common)."""
    totals = max(1, sum(now.values())), max(1, sum(before.values()))
    return (
        math.fsum(
            abs(now.get(name, 0) / totals[0] - before.get(name, 0) / totals[1]) for name in now.keys() | before.keys()
        )
        / 2
    )


def _row_groups(dataset: Dataset, columns: list[str]) -> Iterator[tuple[int, pa.Table]]:
    """Every row group with the position of its first row.

    Raises:
        DataError: A file is damaged.
        StorageError: The storage does not answer.
    """
    manifest, root = dataset.manifest, locate_data(dataset.root)
    for index, path in enumerate(manifest.paths):
        try:
            with DataFile(root, path, manifest.partitions) as file:
                for group in np.flatnonzero(manifest.file_of == index).tolist():
                    yield (
                        int(manifest.first_row[group]),
                        file.read_row_group(int(manifest.index_in_file[group]), columns),
                    )
        except (pa.ArrowException, OSError) as error:
            raise to_read_error(root / path, error, "It cannot be read; deliver it again.") from error


def _numbers(item: pa.Field, values: pa.ChunkedArray) -> list[tuple[str, npt.NDArray[np.float64]]]:
    """What is looked at of some rows of a column, each of shape (rows,), by name."""
    spec = spec_of_field(item)
    if spec is not None:
        if not len(values) or spec.padding is not None or np.dtype(spec.dtype).kind not in "biuf":
            return []
        rows = fixed_array(values, spec).reshape(len(values), -1).astype(np.float64)
        return [(f"{item.name} (mean)", rows.mean(1)), (f"{item.name} (std)", rows.std(1))]
    if pa.types.is_integer(item.type) or pa.types.is_floating(item.type) or pa.types.is_boolean(item.type):
        return [(item.name, values.drop_null().to_numpy().astype(np.float64))]
    return []


def _finite(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return values[np.isfinite(values)]


def _column(values: npt.NDArray[np.float64]) -> Column:
    edges = _edges(values)
    return Column(len(values), float(values.mean()), float(values.std()), edges, _shares(values, edges).tolist())


def _edges(values: npt.NDArray[np.float64]) -> list[float]:
    """Boundaries between the bins; a value that many rows have is a bin of its own, else all zeros and ones were in
    one.
    """
    deciles, times = np.unique(np.quantile(values, np.arange(1, _BINS) / _BINS), return_counts=True)
    frequent = deciles[(times > 1) | (deciles == values.min()) | (deciles == values.max())]
    return np.union1d(deciles, np.nextafter(frequent, np.inf)).tolist()


def _shares(values: npt.NDArray[np.float64], edges: list[float]) -> npt.NDArray[np.float64]:
    """Share of the values in each bin, shape (len(edges) + 1,)."""
    return np.bincount(np.searchsorted(edges, values, side="right"), minlength=len(edges) + 1) / len(values)


@dataclass(frozen=True)
class Agreement:
    """How far the champion agrees with the labels of some rows.

    Args:
        metric: The metric that decides.
        mode: Whether more (`max`) or less (`min`) of it is better.
        accepted: Its value on the rows of the gate when it was promoted.
        training: Its value on a sample of the delivered training rows.
        evaluation: Its value on the delivered rows of the gate.
    """

    metric: str
    mode: str
    accepted: float
    training: float
    evaluation: float

    def loss(self, value: float) -> float:
        """How much worse a value is than the accepted one, relative to that."""
        worse = self.accepted - value if self.mode == "max" else value - self.accepted
        return worse / max(abs(self.accepted), 1e-12)


@dataclass(frozen=True)
class Known:
    """What a delivery is held against.

    Args:
        train: Profile of the training data of the champion; None: there is none that is known, as before the first
            champion.
        evaluation: Profile of its evaluation data.
        gate: Profile of the gate's own data that it was promoted on.
    """

    train: Profile | None = None
    evaluation: Profile | None = None
    gate: Profile | None = None


@dataclass(frozen=True)
class Gate:
    """The rows that the gate judges on.

    Args:
        rows: How many.
        own: Their profile, if they are a data set of its own (`retrain.gate_path`); None: they are a part of the
            evaluation data.
    """

    rows: int
    own: Profile | None = None


def problems(
    train: Profile,
    evaluation: Profile,
    gate: Gate,
    known: Known,
    agreement: Agreement | None,
    twice: list[str],
    section: RetrainSection,
) -> list[str]:
    """Everything that speaks against training on a delivery.

    Args:
        train: Profile of the delivered training data.
        evaluation: Profile of the delivered evaluation data.
        gate: What the gate judges on.
        known: What these are held against.
        agreement: How far the champion agrees with the labels; None without a champion.
        twice: Files that are there twice, as text.
        section: The thresholds.
    """
    found = list(twice)
    if gate.rows < section.min_eval_rows:
        whose = (
            "the gate's data has"
            if gate.own is not None
            else f"the evaluation data has {evaluation.rows:,} rows, and the gate's part of it"
        )
        found.append(
            f"{whose} {gate.rows:,}; with fewer than retrain.min_eval_rows = {section.min_eval_rows} no gate can tell a"
            f" better model"
            " from luck"
        )
    found += _against("training data", train, known.train, section)
    found += _against("evaluation data", evaluation, known.evaluation, section)
    if gate.own is not None:
        found += _against("gate data", gate.own, known.gate, section)
    judged = "gate" if gate.own is not None else "evaluation"
    return found + (_disagreements(agreement, judged, section) if agreement is not None else [])


def _against(what: str, now: Profile, before: Profile | None, section: RetrainSection) -> list[str]:
    """Problems of one data set; without one to compare it with, none."""
    if before is None:
        return []
    found = []
    for name in sorted(now.schema.keys() | before.schema.keys()):
        if now.schema.get(name) != before.schema.get(name):
            found.append(
                f"{what}: column {name!r} is {now.schema.get(name, 'missing')}, it was"
                f" {before.schema.get(name, 'not there')}"
            )
    if now.rows < section.min_rows_ratio * before.rows:
        found.append(
            f"{what}: {now.rows:,} rows, {now.rows / before.rows:.0%} of the {before.rows:,} of the champion's; allowed"
            f" are"
            f" {section.min_rows_ratio:.0%} (retrain.min_rows_ratio)"
        )
    for name, share in now.nulls.items():
        if share > before.nulls.get(name, 0.0) + section.max_null_increase:
            found.append(
                f"{what}: {share:.1%} of column {name!r} are missing, {before.nulls.get(name, 0.0):.1%} were; allowed"
                f" are"
                f" {section.max_null_increase:.1%} more (retrain.max_null_increase)"
            )
    gone = sorted((name for name, rows in before.classes.items() if rows and not now.classes.get(name)), key=int)
    if gone:
        found.append(
            f"{what}: no row of class {', '.join(gone)}, of which there were"
            f" {', '.join(str(before.classes[n]) for n in gone)}"
        )
    shift = class_shift(now.classes, before.classes)
    if shift > section.max_class_shift:
        found.append(
            f"{what}: the class balance has shifted by {shift:.2f} (total variation); allowed are"
            f" {section.max_class_shift:.2f}"
            " (retrain.max_class_shift)"
        )
    return found


def _disagreements(agreement: Agreement, judged: str, section: RetrainSection) -> list[str]:
    found = []
    for what, value in (("training", agreement.training), (judged, agreement.evaluation)):
        loss = agreement.loss(value)
        if not loss <= section.max_disagreement:  # also NaN
            found.append(
                f"labels of the {what} data: the champion's {agreement.metric} on them is {value:.4f}, it was"
                f" {agreement.accepted:.4f} when"
                f" it was promoted, a loss of {loss:.0%}; allowed are {section.max_disagreement:.0%}"
                f" (retrain.max_disagreement). A model"
                " does not age like that: the labels look wrong"
            )
    return found
