"""Looks at the nodes: joining their files loses nothing and doubles nothing, wherever it is stopped, and their number
does not grow.
"""

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
from ray_app.watch.node_sampler import NodeSampler


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no power fails here
    return RunPaths(tmp_path / "run")


def put(paths: RunPaths, fence: int, numbers: range) -> None:
    for number in numbers:
        put_sample(paths, fence, number, NodeSample(number, 1e9 + number, {"10.0.0.1": {"cpu_percent": number / 3}}))


class Stopped(Exception):
    pass


def test_joining_that_is_stopped_at_each_write_loses_and_doubles_nothing(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_metrics, "MAX_SMALL_FILES", 8)
    put(paths, 1, range(7))
    put(paths, 2, range(6))
    whole, before = (
        read_samples(paths, ""),
        {file: (paths.system / file).read_bytes() for file in list_files(paths.system)},
    )
    assert list(whole) == sorted(before)
    stops = 0
    for after in (False, True):
        for full_bytes in (100, 10**9):
            for effect in range(1, 1000):
                for file in list_files(paths.system):
                    (paths.system / file).unlink()
                for file, data in before.items():
                    (paths.system / file).write_bytes(data)  # type: ignore[union-attr]
                left = [effect]

                def stopping(
                    real: Callable[..., Any], left: list[int] = left, after: bool = after
                ) -> Callable[..., Any]:
                    def call(*arguments: Any, **named: Any) -> Any:
                        left[0] -= 1
                        if left[0] == 0 and not after:
                            raise Stopped
                        made = real(*arguments, **named)
                        if left[0] == 0:
                            raise Stopped
                        return made

                    return call

                with monkeypatch.context() as broken:
                    broken.setattr(node_metrics, "put_atomic", stopping(node_metrics.put_atomic))
                    broken.setattr(Path, "unlink", stopping(Path.unlink))
                    try:
                        join_samples(paths, 2, full_bytes)
                    except Stopped:
                        stops += 1
                if left[0] > 0:
                    break
                assert read_samples(paths, "") == whole, effect
                join_samples(paths, 2, full_bytes)
                assert read_samples(paths, "") == whole, effect
            assert len(list_files(paths.system)) == 1
    assert stops > 50


def test_what_was_sent_and_what_is_known_is_not_told_again(paths: RunPaths) -> None:
    put(paths, 1, range(70))
    whole = list(read_samples(paths, ""))
    join_samples(paths, 1)
    assert list(read_samples(paths, whole[30])) == whole[31:]
    assert list(read_samples(paths, whole[30], whole[31:60])) == whole[60:]
    put(paths, 1, range(70, 72))
    assert list(read_samples(paths, "", whole)) == ["000001-000000070.json", "000001-000000071.json"]


def test_joined_while_they_are_written_and_read(paths: RunPaths) -> None:
    over = threading.Event()

    def write() -> None:
        for number in range(600):
            put(paths, 1, range(number, number + 1))
            if number % 20 == 0:
                join_samples(paths, 1, 20_000)
        over.set()

    def merge() -> None:
        while not over.is_set():
            join_samples(paths, 1, 20_000)

    threads = [threading.Thread(target=write), threading.Thread(target=merge)]
    for thread in threads:
        thread.start()
    backlog, sent, told = Backlog(paths, 10), SentState(), list[str]()
    while True:
        last = over.is_set()
        backlog.read(sent)
        for point in list(backlog.points(sent, finished=True)):
            sent.add(point)
            told.append(str(point.look))
        backlog.sent(sent)
        if last:
            break
    for thread in threads:
        thread.join()
    assert told == [f"000001-{number:09d}.json" for number in range(600)], "each once, in order"
    assert list(read_samples(paths, "")) == told
    assert len(list_files(paths.system)) < MAX_SMALL_FILES + 20


@pytest.mark.parametrize("full_bytes", [100, 10**9])
def test_joined_between_the_listing_and_the_reading(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, full_bytes: int
) -> None:
    put(paths, 1, range(MAX_SMALL_FILES))
    whole, listings = read_samples(paths, ""), list[list[str]]()

    def listed(folder: Location) -> list[str]:
        listings.append(list_files(folder))
        if len(listings) == 1:
            join_samples(paths, 1, full_bytes)
        return listings[0] if len(listings) <= 2 else list_files(folder)

    monkeypatch.setattr(node_metrics, "list_files", listed)
    assert read_samples(paths, "") == whole
    assert len(list_files(paths.system)) == 1


def test_looks_of_a_later_start_are_left_to_it(paths: RunPaths) -> None:
    put(paths, 1, range(MAX_SMALL_FILES))
    put(paths, 2, range(3))
    join_samples(paths, 1)
    assert sorted(list_files(paths.system)) == [
        "000001-000000063.json",
        *(f"000002-{number:09d}.json" for number in range(3)),
    ]


def test_a_damaged_look_is_named_and_nothing_is_joined(paths: RunPaths) -> None:
    put(paths, 1, range(MAX_SMALL_FILES))
    (paths.system / "000001-000000005.json").write_bytes(b"{")  # type: ignore[union-attr]
    for act in (lambda: join_samples(paths, 1), lambda: read_samples(paths, "")):
        with pytest.raises(ConfigError, match=r"000001-000000005\.json is damaged"):
            act()
    assert len(list_files(paths.system)) == MAX_SMALL_FILES


def test_a_look_as_earlier_versions_wrote_it(paths: RunPaths) -> None:
    paths.system.mkdir(parents=True)  # type: ignore[union-attr]
    look = NodeSample(3, 5.0, {"a": {"cpu_percent": 1.0}})
    (paths.system / "000001-000000000.json").write_text(json.dumps(asdict(look)))  # type: ignore[union-attr]
    assert read_samples(paths, "") == {"000001-000000000.json": look}


def test_the_sampler_joins_what_it_writes(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    class Here:
        def get_node_id(self) -> str:
            return "here"

    monkeypatch.setattr(ray, "get_runtime_context", Here)
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "here", "NodeName": "one", "Alive": True}])
    put(paths, 1, range(10))  # of a driver that was killed
    sampler = NodeSampler(paths, 2, 1.0)
    for _ in range(300):
        sampler._record_load(0.0)
    assert len(list_files(paths.system)) <= MAX_SMALL_FILES + 1
    assert len(read_samples(paths, "")) == 309, "the first look only finds out which nodes there are"


def test_of_many_nodes_there_are_as_many_values_as_of_three() -> None:
    few = {f"n{i}": {"cpu_percent": float(i)} for i in range(16)}
    assert summarize_nodes(few) == few
    many = {f"n{i}": {"cpu_percent": float(i), "memory_gb": 2.0} for i in range(1001)} | {"gpu": {"gpu0_percent": 7.0}}
    assert summarize_nodes(many) == {
        "least": {"cpu_percent": 0.0, "memory_gb": 2.0, "gpu0_percent": 7.0},
        "mean": {"cpu_percent": 500.0, "memory_gb": 2.0, "gpu0_percent": 7.0},
        "most": {"cpu_percent": 1000.0, "memory_gb": 2.0, "gpu0_percent": 7.0},
        "all": {"nodes": 1002},
    }


def test_an_empty_file_is_damaged_and_not_waited_for(paths: RunPaths) -> None:
    put(paths, 1, range(3))
    (paths.system / "000001-000000001.json").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"000001-000000001\.json"):
        read_samples(paths, "")
