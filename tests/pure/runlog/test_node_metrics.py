"""Samples of the nodes: joining their files loses and duplicates no sample, and limits the number of files."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import ray

from ray_app.errors import ConfigError
from ray_app.runlog import node_metrics
from ray_app.runlog.journal import MAX_SMALL_FILES
from ray_app.runlog.node_metrics import NodeSample, join_samples, put_sample, read_samples, summarize_nodes
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import Location, list_files
from ray_app.track.mlflow_client import Backlog, SentState
from ray_app.watch.metrics import NodeSampler


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    # The tests need no durability.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    return RunPaths(tmp_path / "run")


def put_samples(paths: RunPaths, fence: int, numbers: range) -> None:
    for number in numbers:
        put_sample(paths, fence, number, NodeSample(number, 1e9 + number, {"10.0.0.1": {"cpu_percent": number / 3}}))


class StoppedError(Exception):
    pass


def test_joining_stopped_at_any_write_loses_and_duplicates_no_sample(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_metrics, "MAX_SMALL_FILES", 8)
    put_samples(paths, 1, range(7))
    put_samples(paths, 2, range(6))
    expected = read_samples(paths, "")
    before = {file: (paths.system / file).read_bytes() for file in list_files(paths.system)}
    assert list(expected) == sorted(before)
    stops = 0
    for after in (False, True):
        for full_bytes in (100, 10**9):
            for effect in range(1, 1000):
                for file in list_files(paths.system):
                    (paths.system / file).unlink()
                for file, data in before.items():
                    (paths.system / file).write_bytes(data)  # type: ignore[union-attr]
                remaining_effects = [effect]

                def stop_at_effect(
                    real: Callable[..., Any], remaining_effects: list[int] = remaining_effects, after: bool = after
                ) -> Callable[..., Any]:
                    def call(*arguments: Any, **options: Any) -> Any:
                        remaining_effects[0] -= 1
                        if remaining_effects[0] == 0 and not after:
                            raise StoppedError
                        result = real(*arguments, **options)
                        if remaining_effects[0] == 0:
                            raise StoppedError
                        return result

                    return call

                with monkeypatch.context() as patch:
                    patch.setattr(node_metrics, "put_atomic", stop_at_effect(node_metrics.put_atomic))
                    patch.setattr(Path, "unlink", stop_at_effect(Path.unlink))
                    try:
                        join_samples(paths, 2, full_bytes)
                    except StoppedError:
                        stops += 1
                if remaining_effects[0] > 0:
                    break
                assert read_samples(paths, "") == expected, effect
                join_samples(paths, 2, full_bytes)
                assert read_samples(paths, "") == expected, effect
            assert len(list_files(paths.system)) == 1
    assert stops > 50


def test_samples_that_are_sent_or_known_are_not_read_again(paths: RunPaths) -> None:
    put_samples(paths, 1, range(70))
    names = list(read_samples(paths, ""))
    join_samples(paths, 1)
    assert list(read_samples(paths, names[30])) == names[31:]
    assert list(read_samples(paths, names[30], names[31:60])) == names[60:]
    put_samples(paths, 1, range(70, 72))
    assert list(read_samples(paths, "", names)) == ["000001-000000070.json", "000001-000000071.json"]


def test_joining_during_writes_and_reads_keeps_all_samples_in_order(paths: RunPaths) -> None:
    is_over = threading.Event()

    def write() -> None:
        for number in range(600):
            put_samples(paths, 1, range(number, number + 1))
            if number % 20 == 0:
                join_samples(paths, 1, 20_000)
        is_over.set()

    def merge() -> None:
        while not is_over.is_set():
            join_samples(paths, 1, 20_000)

    threads = [threading.Thread(target=write), threading.Thread(target=merge)]
    for thread in threads:
        thread.start()
    backlog = Backlog(paths, 10)
    sent = SentState()
    sent_names = list[str]()
    while True:
        is_last = is_over.is_set()
        backlog.read(sent)
        for point in list(backlog.points(sent, finished=True)):
            sent.add(point)
            sent_names.append(str(point.look))
        backlog.sent(sent)
        if is_last:
            break
    for thread in threads:
        thread.join()
    assert sent_names == [f"000001-{number:09d}.json" for number in range(600)], "each sample is sent once and in order"
    assert list(read_samples(paths, "")) == sent_names
    assert len(list_files(paths.system)) < MAX_SMALL_FILES + 20


@pytest.mark.parametrize("full_bytes", [100, 10**9])
def test_joining_between_listing_and_reading_loses_no_sample(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, full_bytes: int
) -> None:
    put_samples(paths, 1, range(MAX_SMALL_FILES))
    expected, listings = read_samples(paths, ""), list[list[str]]()

    def list_and_join(folder: Location) -> list[str]:
        listings.append(list_files(folder))
        if len(listings) == 1:
            join_samples(paths, 1, full_bytes)
        return listings[0] if len(listings) <= 2 else list_files(folder)

    monkeypatch.setattr(node_metrics, "list_files", list_and_join)
    assert read_samples(paths, "") == expected
    assert len(list_files(paths.system)) == 1


def test_samples_of_a_later_start_are_not_joined(paths: RunPaths) -> None:
    put_samples(paths, 1, range(MAX_SMALL_FILES))
    put_samples(paths, 2, range(3))
    join_samples(paths, 1)
    assert sorted(list_files(paths.system)) == [
        "000001-000000063.json",
        *(f"000002-{number:09d}.json" for number in range(3)),
    ]


def test_a_damaged_sample_is_named_and_no_sample_is_joined(paths: RunPaths) -> None:
    put_samples(paths, 1, range(MAX_SMALL_FILES))
    (paths.system / "000001-000000005.json").write_bytes(b"{")  # type: ignore[union-attr]
    for operation in (lambda: join_samples(paths, 1), lambda: read_samples(paths, "")):
        with pytest.raises(ConfigError, match=r"000001-000000005\.json is damaged"):
            operation()
    assert len(list_files(paths.system)) == MAX_SMALL_FILES


def test_a_sample_of_an_earlier_version_is_read(paths: RunPaths) -> None:
    paths.system.mkdir(parents=True)  # type: ignore[union-attr]
    sample = NodeSample(3, 5.0, {"a": {"cpu_percent": 1.0}})
    (paths.system / "000001-000000000.json").write_text(json.dumps(asdict(sample)))  # type: ignore[union-attr]
    assert read_samples(paths, "") == {"000001-000000000.json": sample}


def test_the_sampler_joins_what_it_writes(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    class Here:
        def get_node_id(self) -> str:
            return "here"

    monkeypatch.setattr(ray, "get_runtime_context", Here)
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "here", "NodeName": "one", "Alive": True}])
    # A driver that was killed has left these samples.
    put_samples(paths, 1, range(10))
    sampler = NodeSampler(paths, 2, 1.0)
    for _ in range(300):
        sampler._record_load(0.0)
    assert len(list_files(paths.system)) <= MAX_SMALL_FILES + 1
    assert len(read_samples(paths, "")) == 309, "the first poll only lists the nodes"


def test_many_nodes_are_summarized_by_minimum_mean_and_maximum() -> None:
    few = {f"n{i}": {"cpu_percent": float(i)} for i in range(16)}
    assert summarize_nodes(few) == few
    many = {f"n{i}": {"cpu_percent": float(i), "memory_gb": 2.0} for i in range(1001)} | {"gpu": {"gpu0_percent": 7.0}}
    assert summarize_nodes(many) == {
        "least": {"cpu_percent": 0.0, "memory_gb": 2.0, "gpu0_percent": 7.0},
        "mean": {"cpu_percent": 500.0, "memory_gb": 2.0, "gpu0_percent": 7.0},
        "most": {"cpu_percent": 1000.0, "memory_gb": 2.0, "gpu0_percent": 7.0},
        "all": {"nodes": 1002},
    }


def test_an_empty_file_counts_as_damaged(paths: RunPaths) -> None:
    put_samples(paths, 1, range(3))
    (paths.system / "000001-000000001.json").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"000001-000000001\.json"):
        read_samples(paths, "")
