"""Observers of the events of a run, and the trace of some of its steps."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from ray_app import Observer
from ray_app.driver.parsing import load_config
from ray_app.driver.result import Result
from ray_app.driver.run import run_training
from ray_app.errors import ConfigError
from ray_app.runlog.journal import Event, put_event, read_events
from ray_app.runlog.paths import RunPaths, add_version
from ray_app.storage.files import put_json
from ray_app.testing import WorkerPool, cache_windows, read_trained_run
from ray_app.watch.observers import Observers
from tests.support.local_world import make_job
from tests.support.pages import blocks
from tests.support.paths import ROOT
from tests.support.receiver import start_receiver

PAGE = next(block.text for block in blocks(ROOT / "docs" / "runs.md") if "class Evaluations" in block.text)
exec(PAGE, globals())
CALLS: list[tuple[Any, ...]] = []


class Noted(Observer):
    """Notes its calls; raises an error in the call named `raises`."""

    def __init__(self, raises: str = "") -> None:
        self.raises = raises

    def _note(self, *facts: Any) -> None:
        CALLS.append(facts)
        if facts[0] == self.raises:
            raise RuntimeError("the receiver is away")

    def begun(self, run: str) -> None:
        put_event(RunPaths(Path(run)), "failed", 1, errors={0: "made up"}, left=1, number=1)
        self._note("begun", run)

    def epoch_ended(self, epoch: int, step: int, metrics: dict[str, float], seconds: float) -> None:
        self._note("epoch", epoch, step, sorted(metrics))

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        self._note("evaluated", step, "accuracy" in metrics)

    def checkpointed(self, step: int) -> None:
        self._note("checkpointed", step)

    def failed(self, reason: str) -> None:
        self._note("failed", reason)

    def ended(self, status: str, summary: dict[str, Any]) -> None:
        self._note("ended", status, summary["steps"])


def train_observed(folder: Path, data: Path, observers: list[dict[str, Any]], **fields: Any) -> Result:
    config = load_config(
        task__class_path="ray_app.task.image.ImageClassification",
        task__init_args={"model_args": {"channels": 4}, "train_accuracy": True},
        data__path=str(data),
        data__eval_path=str(data),
        run__storage_path=str(folder),
        run__name="run",
        train__strategy="single",
        tracking__enabled=False,
        evaluate__where="workers",
        observers=observers,
        **({"train__epochs": 2} | fields),
    )
    return run_training(config, Console(quiet=True))


@pytest.mark.rest
def test_observers_get_the_recorded_events_and_their_errors_end_no_run(data: Path, tmp_path: Path) -> None:
    CALLS.clear()
    spec = {"class_path": f"{__name__}.Noted", "init_args": {"raises": "epoch"}}
    result = train_observed(tmp_path, data, [spec])
    assert result.status == "finished"
    assert CALLS[0] == ("begun", str(result.path))
    assert CALLS[-1] == ("ended", "finished", 8)
    calls = sorted(map(str, CALLS[1:-1]))
    assert calls == sorted(
        map(
            str,
            [
                ("epoch", 0, 4, ["accuracy", "loss"]),
                ("epoch", 1, 8, ["accuracy", "loss"]),
                ("evaluated", 4, True),
                ("evaluated", 8, True),
                ("checkpointed", 4),
                ("checkpointed", 8),
                ("failed", "{'0': 'made up'}"),
            ],
        )
    )
    events = read_events(RunPaths(result.path), "observer_failed")
    assert [event.details["reason"] for event in events] == [
        "Noted.epoch_ended: RuntimeError: the receiver is away"
    ] * 2
    CALLS.clear()
    train_observed(tmp_path, data, [spec], train__epochs=3)
    assert [facts[1:3] for facts in CALLS if facts[0] in ("epoch", "ended")] == [(2, 12), ("finished", 12)], (
        "the observer got events of an earlier start"
    )


@pytest.mark.rest
def test_the_observers_of_the_page_post_to_a_webhook(data: Path, tmp_path: Path) -> None:
    with start_receiver() as (url, posts):
        both = [
            {"class_path": name, "init_args": {"url": url}} for name in ("ray_app.Webhook", f"{__name__}.Evaluations")
        ]
        train_observed(tmp_path, data, both)
    run = "run: "
    assert all(text.startswith(run) for text in posts)
    counts = Counter(
        text.removeprefix(run).partition(",")[0] for text in posts if "accuracy 0" not in text.partition(",")[0]
    )
    assert counts == {"epoch 1": 2, "epoch 2": 2, "finished after 8 steps": 2}
    assert sum(text.startswith(f"{run}accuracy ") for text in posts) == 2, (
        "the class of the page must also get evaluations"
    )


@pytest.mark.parametrize(
    ("observers", "message"),
    [
        ([{"class_path": f"{__name__}.Nobody"}], "which cannot be created"),
        ([{"class_path": "collections.Counter"}], "not a subclass of ray_app.Observer"),
        ([{"init_args": {}}], "an entry without class_path"),
    ],
)
def test_an_invalid_observer_is_refused_at_start(
    data: Path, tmp_path: Path, observers: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train_observed(tmp_path, data, observers)
    assert not (tmp_path / "run").exists()


@pytest.mark.rest
def test_rank_0_traces_the_requested_steps(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    job = make_job(tmp_path / "run", data, train__profile_steps=[3, 4])
    worker_pool.train_to_end(job, 2, cache_windows)
    [trace] = job.paths.profile.glob("*")
    assert trace.name == "steps-00000003-00000004.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert any("aten::" in str(name) for name in names)
    [event] = read_events(job.paths, "profiled")
    assert event.details["file"] == f"profile/{trace.name}"
    plain = worker_pool.train_new_run(make_job(tmp_path / "plain", data), 2, cache_windows)
    assert read_trained_run(job).digests == plain.digests


@pytest.mark.parametrize("profile_steps", [[3], [0, 2], [5, 4], [-1, 2]])
def test_steps_that_cannot_be_traced_are_refused(data: Path, tmp_path: Path, profile_steps: Any) -> None:
    with pytest.raises(ConfigError, match=r"train.profile_steps is .*; it must be \[first, last\], counted from 1"):
        make_job(tmp_path / "run", data, train__profile_steps=profile_steps)


def test_each_event_is_delivered_once_also_from_a_slower_clock(tmp_path: Path) -> None:
    CALLS.clear()
    paths, now = RunPaths(tmp_path / "run"), time.time()

    def put(kind: str, time_s: float, **details: Any) -> None:
        put_json(
            paths.events / f"{int(time_s * 1e9):020d}-{kind}-1.json",
            add_version(asdict(Event(kind, time_s, 1, details))),
        )

    put("failed", now + 60, errors="before this start")
    job: Any = SimpleNamespace(paths=paths, steps_per_epoch=10, fence=1)
    observers = Observers(job, [Noted()])
    with observers.watching():
        put("checkpointed", now + 5, step=10)
        observers.process_news()
        put("failed", now - 5, errors="rank 1 died", left=1)
        observers.process_news()
    calls = [facts for facts in CALLS if facts[0] != "begun"]
    assert calls == [("failed", "{'0': 'made up'}"), ("checkpointed", 10), ("failed", "rank 1 died")]
