"""Rows of different length from columns through windows and caches to batches: every row once, and bit-identical for
every number of workers.
"""

from __future__ import annotations

import threading
import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ray_app.data.arrays import ArraySpec, Columns, from_column, ragged_lists, spec_of_field, to_column
from ray_app.data.bad_rows import KEYS, decode_good_rows
from ray_app.data.dataset import Dataset, open_dataset
from ray_app.data.probes import probe
from ray_app.data.reader import Reader, RowSource, fetch_in_process, load_all
from ray_app.data.windows import CachedWindows, MicroBatch, StreamedWindows, Windows
from ray_app.plan.order import Cursor, Plan, order_by_length
from ray_app.task.ragged import Ragged, concat_ragged, to_batch
from ray_app.task.transforms import drawing
from tests.support.micro_batches import BatchPosition, assert_equal_batches, collect_batches

ROWS, EPOCHS = 300, 2


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Token lists of log-normal lengths (sigma 0.6), in four files; the first token is the number of the row."""
    root = tmp_path_factory.mktemp("texts")
    lengths = np.random.default_rng(0).lognormal(3.5, 0.6, ROWS).astype(int) + 1
    for i, rows in enumerate(np.array_split(np.arange(ROWS), 4)):
        tokens = [[int(row), *range(lengths[row] - 1)] for row in rows]
        table = pa.table({"tokens": pa.array(tokens, pa.list_(pa.int32())), "id": rows})
        pq.write_table(table, root / f"{i}.parquet", row_group_size=40)
    return open_dataset(str(root))


def decode(rows: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": rows["tokens"].padded_with(-1, 4), "id": rows["id"]}


def shifted_by_key(rows: dict[str, Any]) -> dict[str, Any]:
    """Decodes differently in every epoch: each row also has its key."""
    return decode(rows) | {"key": rows.get(KEYS, rows["id"])}


def windows(dataset: Dataset, plan: Plan, cursor: Cursor, assigned: range, cache: bool, keyed: bool = False) -> Windows:
    decoder = shifted_by_key if keyed else decode
    reader = Reader(dataset.root, ["tokens", "id"], decoder, probe(dataset, ["tokens", "id"], decoder), keyed=keyed)
    source = RowSource(reader, plan.manifest, 23)
    return (
        CachedWindows(load_all(fetch_in_process, source))
        if cache
        else StreamedWindows(plan, cursor, assigned, EPOCHS, fetch_in_process, source)
    )


def deliver(
    dataset: Dataset, plan: Plan, size: int, cache: bool = False, start: Cursor = Cursor(), keyed: bool = False
) -> dict[BatchPosition, MicroBatch]:
    return collect_batches(
        plan, EPOCHS, size, start, lambda assigned: windows(dataset, plan, start, assigned, cache, keyed)
    )


@pytest.mark.parametrize("field", [None, "tokens"])
def test_batches_are_equal_for_every_number_of_workers_cache_and_cursor(texts: Dataset, field: str | None) -> None:
    plan = Plan(texts.manifest, 3, 4, 32, 20, by_length=field)
    first = deliver(texts, plan, 1)
    for size, cache in ((3, False), (4, False), (2, True)):
        assert_equal_batches(first, deliver(texts, plan, size, cache))
    middle = Cursor(0, 4)
    assert_equal_batches(
        {position: batch for position, batch in first.items() if position[:2] >= (0, 4)},
        deliver(texts, plan, 2, start=middle),
    )
    for epoch in range(EPOCHS):
        counted = Counter(
            i for position, batch in first.items() if position[0] == epoch for i in batch.fields["id"].tolist()
        )
        assert counted == Counter(range(ROWS))


def test_loading_all_rows_of_different_length_holds_them_in_memory_once(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).lognormal(6, 0.6, 4000).astype(int) + 1
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(np.arange(offsets[-1])))
    pq.write_table(pa.table({"tokens": tokens, "id": np.arange(4000)}), tmp_path / "rows.parquet", row_group_size=100)
    dataset = open_dataset(str(tmp_path))
    reader = Reader(dataset.root, ["tokens", "id"], decode, probe(dataset, ["tokens", "id"], decode))
    # The length of 1.0 stands for first rows that are much shorter than the others.
    for length in (reader.fields["tokens"].length, 1.0):
        fields = {"tokens": replace(reader.fields["tokens"], length=length), "id": reader.fields["id"]}
        tracemalloc.start()
        loaded = load_all(fetch_in_process, RowSource(replace(reader, fields=fields), dataset.manifest, 100)).arrays[
            "tokens"
        ]
        # Python does not see the mapped memory of the loaded rows, so this is the peak of everything else.
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert isinstance(loaded, Ragged)
        assert np.array_equal(loaded.values, np.arange(offsets[-1]))
        assert np.array_equal(loaded.offsets, offsets)
        assert peak < 0.25 * loaded.nbytes


def test_columns_of_rows_of_different_length_grow_without_a_copy() -> None:
    rows = Ragged.of([np.arange(100_000)] * 5, np.int64)
    columns = Columns({"tokens": ArraySpec("int64", (), padding=(0, 1), length=80_000)}, 100)
    field, values = to_column("tokens", rows)
    table = pa.table([values], pa.schema([field]))
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins with the present memory.
    for _ in range(20):
        columns.add(table)
    loaded = columns.all()["tokens"]
    grown = memory_bytes("VmHWM") - before
    assert isinstance(loaded, Ragged)
    assert loaded.nbytes == 80_000_000
    assert np.array_equal(loaded.values, np.tile(np.arange(100_000), 100))
    assert grown < 1.25 * loaded.nbytes


def test_more_rows_than_memory_raise_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="Cannot allocate memory"):
        Columns({"tokens": ArraySpec("int64", (), padding=(0, 1), length=1e15)}, 100)


def memory_bytes(name: str) -> int:
    """Returns the memory of this process: now ("VmRSS") or its peak since it was reset ("VmHWM")."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


def test_a_batch_is_padded_to_its_longest_row(texts: Dataset) -> None:
    for batch in deliver(texts, Plan(texts.manifest, 3, 2, 16, 20), 1).values():
        tokens, lengths = batch.fields["tokens"], batch.fields["tokens_lengths"]
        longest = int(lengths.max())
        assert tokens.shape == (batch.rows, -(-longest // 4) * 4)
        assert torch.equal(tokens[:, 0].long(), batch.fields["id"])
        assert torch.equal(tokens == -1, torch.arange(tokens.shape[1]) >= lengths[:, None])


def test_a_batch_of_empty_rows_is_padded_to_the_multiple() -> None:
    empty = Ragged.of([[], []], np.int64, fill=-1, multiple=8)
    assert empty.padded(np.arange(2)).tolist() == [[-1] * 8] * 2
    assert empty.batch("tokens", np.array([1]))["tokens_lengths"].tolist() == [0]


def test_a_batch_reads_the_lengths_of_its_own_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Ragged.of([[1], [2, 3], [4, 5, 6]], np.int64)
    monkeypatch.setattr(Ragged, "lengths", property(lambda rows: pytest.fail("the lengths of all rows were computed")))
    assert rows.batch("x", np.array([2, 0]))["x"].tolist() == [[4, 5, 6], [1, 0, 0]]


def test_grouping_by_length_keeps_the_padding_below_15_percent(texts: Dataset) -> None:
    """The limit for computed tokens / useful tokens is 1.15 for log-normal lengths (sigma 0.6)."""

    def waste(field: str | None) -> float:
        batches = deliver(texts, Plan(texts.manifest, 3, 1, 8, 300, by_length=field), 1).values()
        return sum(b.fields["tokens"].numel() for b in batches) / sum(
            int(b.fields["tokens_lengths"].sum()) for b in batches
        )

    assert waste("tokens") <= 1.15
    assert waste(None) > 1.5


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 9), st.integers(0, 2**40))
def test_an_order_by_length_is_a_permutation_with_rows_of_like_length(
    lengths: list[int], micro_batch: int, base: int
) -> None:
    given_lengths = np.array(lengths, np.int64)
    order = order_by_length(given_lengths, micro_batch, base)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    full = len(lengths) // micro_batch
    bounds = [given_lengths[order[i * micro_batch : (i + 1) * micro_batch]] for i in range(full)]
    ranges = sorted((part.min(), part.max()) for part in bounds)
    assert all(low >= high for (_, high), (low, _) in pairwise(ranges))


def test_the_keys_of_an_epoch_are_unique_and_independent_of_the_workers(texts: Dataset) -> None:
    plan = Plan(texts.manifest, 3, 4, 32, 20)
    first = deliver(texts, plan, 1, keyed=True)
    assert_equal_batches(first, deliver(texts, plan, 3, keyed=True))
    later = {position: batch for position, batch in first.items() if position[:2] >= (1, 2)}
    assert_equal_batches(later, deliver(texts, plan, 2, start=Cursor(1, 2), keyed=True))
    keys: set[tuple[int, int]] = set()
    for (epoch, _, _), batch in first.items():
        keys |= {(epoch, key) for key in batch.fields["key"].tolist()}
    assert len(keys) == len({key for _, key in keys}) == EPOCHS * ROWS


@given(st.lists(st.lists(st.integers(-100, 100), max_size=7), min_size=1, max_size=12), st.data())
@settings(deadline=None)
def test_columns_keep_rows_of_any_length(rows: list[list[int]], data: st.DataObject) -> None:
    ragged = Ragged.of(rows, np.int16, fill=-7, multiple=2)
    field, column = to_column("x", ragged)
    table = pa.table([column], pa.schema([field]))
    cut = data.draw(st.integers(0, len(rows)))
    moved = pa.concat_tables([table.slice(cut), table.slice(0, cut)])
    spec = spec_of_field(moved.schema.field(0))
    assert spec is not None
    restored = from_column(moved.column(0), spec)
    assert isinstance(restored, Ragged)
    assert [restored.row(i).tolist() for i in range(len(restored))] == rows[cut:] + rows[:cut]
    assert (restored.fill, restored.multiple, restored.values.dtype) == (-7, 2, np.int16)
    assert len(from_column(moved.column(0).slice(0, 0), spec)) == 0
    again = concat_ragged([ragged[:cut], ragged[cut:]])
    assert [again.row(i).tolist() for i in range(len(again))] == rows


def test_lists_of_boxes_become_one_array() -> None:
    column = pa.chunked_array([pa.array([[[1.0, 2.0], [3.0, 4.0]], []]), pa.array([[[5.0, 6.0]]])])
    boxes = ragged_lists(column)
    assert boxes is not None
    assert boxes.lengths.tolist() == [2, 0, 1]
    assert to_batch({"boxes": boxes})["boxes"].tolist() == [[[1, 2], [3, 4]], [[0, 0], [0, 0]], [[5, 6], [0, 0]]]
    assert ragged_lists(pa.chunked_array([pa.array([[[1.0], [3.0, 4.0]]])])) is None
    assert ragged_lists(pa.chunked_array([pa.array([[1], None])])) is None


def test_rows_that_cannot_be_decoded_have_a_length_of_zero() -> None:
    def decode_except_three(rows: dict[str, Any]) -> dict[str, Any]:
        if any(n == 3 for n in rows["n"]):
            raise ValueError("three")
        return {"x": Ragged.of([np.arange(n) for n in rows["n"]], np.int64)}

    from ray_app.data.arrays import spec_of_values

    fields = {"x": spec_of_values(decode_except_three({"n": np.array([1])})["x"])}
    decoded, reasons = decode_good_rows(decode_except_three, {"n": np.array([2, 3, 1, 3, 4])}, 5, fields)
    values = decoded["x"]
    assert isinstance(values, Ragged)
    assert values.lengths.tolist() == [2, 0, 1, 0, 4]
    assert [values.row(i).tolist() for i in range(5)] == [[0, 1], [], [0], [], [0, 1, 2, 3]]
    assert [reason is not None for reason in reasons] == [False, True, False, True, False]


def test_drawing_changes_no_other_generator() -> None:
    from torchvision.transforms import v2

    turn = v2.Compose([v2.RandomResizedCrop(8, antialias=True), v2.RandAugment(), v2.RandomErasing(0.5)])
    image = torch.arange(3 * 12 * 10, dtype=torch.uint8).reshape(3, 12, 10)

    def turned(key: int) -> torch.Tensor:
        with drawing(key):
            return turn(image)

    state, other = torch.random.get_rng_state(), list[torch.Tensor]()
    first = [turned(key) for key in range(20)]
    thread = threading.Thread(target=lambda: other.extend(turned(key) for key in range(20)))
    thread.start()
    thread.join()
    assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert len({a.numpy().tobytes() for a in first}) == 20
    assert torch.equal(state, torch.random.get_rng_state())
    with drawing(1):
        drawn = torch.rand(2)
        inside = torch.rand_like(drawn)
    assert not torch.equal(drawn, inside)


def test_a_column_of_lists_is_a_sequence_of_its_rows() -> None:
    lists = Ragged.of([[1, 2], [], [3]], np.int64)
    assert len(lists) == 3
    assert [row.tolist() for row in lists] == [[1, 2], [], [3]]
    assert lists[0].tolist() == [1, 2]
    assert lists[-1].tolist() == lists[np.int64(2)].tolist() == [3]
    assert [row.tolist() for row in lists[1:]] == [[], [3]]
    assert [row.tolist() for row in lists[::-2]] == [[3], [1, 2]]
    assert [row.tolist() for row in lists[np.array([True, False, True])]] == [[1, 2], [3]]
    assert [max(row, default=0) for row in lists] == [2, 0, 3]
    for row in (3, -4):
        with pytest.raises(IndexError, match=f"row {row} of 3 rows"):
            lists[row]


def test_drawing_makes_distributions_and_randint_like_deterministic() -> None:
    def draw(key: int) -> list[Tensor]:
        with drawing(key):
            like = torch.zeros(2, 3, 4, 4)
            return [
                torch.distributions.Beta(0.5, 0.5).sample((3,)),
                torch.distributions.Dirichlet(torch.ones(3)).sample(),
                torch.distributions.Gamma(torch.ones(3), 1.0).sample(),
                torch.randint_like(like, 1000),
                torch.randint_like(like, low=5, high=9, dtype=torch.int64),
                torch.rand_like(like, memory_format=torch.channels_last),
            ]

    state = torch.random.get_rng_state()
    first, again = draw(1), draw(1)
    other = draw(2)
    assert torch.equal(state, torch.random.get_rng_state())
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    assert first[3].dtype == torch.float32
    assert set(first[4].flatten().tolist()) <= {5, 6, 7, 8}
