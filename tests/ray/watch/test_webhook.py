"""Observers of a run on a real cluster get its events, and their errors do not end the run."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from ray_app import run_training
from ray_app.config.config import Config
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from tests.support.receiver import start_receiver

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_posts_arrive_and_an_unreachable_receiver_ends_no_run(
    make_short_config: Callable[..., Config], digits: Path, tmp_path: Path
) -> None:
    with start_receiver() as (closed_url, _):
        pass
    with start_receiver() as (url, posts):
        observers = [{"class_path": "ray_app.Webhook", "init_args": {"url": target}} for target in (closed_url, url)]
        config = make_short_config(
            observers=observers, data__eval_path=str(digits / "eval"), scaling__max_workers=2, scaling__min_workers=2
        )
        result = run_training(config, Console(quiet=True))
    assert result.status == "finished"
    assert len(posts) == 2, posts
    assert re.fullmatch(r"run: epoch 1, (accuracy [01]\.\d{4}, )?loss \d+\.\d{4}", posts[0])
    assert posts[1] == "run: finished after 30 steps"
    failed = [event.details["reason"] for event in read_events(RunPaths(tmp_path / "runs" / "run"), "observer_failed")]
    assert [re.sub(": .*", "", reason) for reason in failed] == ["Webhook.epoch_ended", "Webhook.ended"]
    assert all("Connection refused" in reason for reason in failed)
