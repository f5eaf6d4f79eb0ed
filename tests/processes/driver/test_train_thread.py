"""Tests of which error is raised if the training thread and the thread that watches it both fail."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from ray_app import load_config
from ray_app.driver import train_thread
from ray_app.errors import DataError
from tests.support.paths import ROOT

WAIT_S = 20.0
START: Any = SimpleNamespace(job=SimpleNamespace(config=load_config(ROOT / "conf" / "digits.yaml")))


def test_an_application_error_replaces_the_error_of_the_watching_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(*_: Any) -> None:
        raise DataError("row 3 cannot be used")

    monkeypatch.setattr(train_thread, "fit", fit)

    def watch() -> None:
        with train_thread.TrainThread(START, 1) as training:
            training.join(WAIT_S)
            raise ray.exceptions.ActorDiedError

    with pytest.raises(DataError, match="row 3"):
        watch()


def test_an_error_after_abandoning_a_run_does_not_replace_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(start: Any, workers: int, abandoned: threading.Event) -> None:
        assert abandoned.wait(WAIT_S)
        raise DataError("aborted")

    monkeypatch.setattr(train_thread, "fit", fit)
    for error in (ray.exceptions.ActorDiedError, KeyboardInterrupt):
        with pytest.raises(error), train_thread.TrainThread(START, 1) as training:
            raise error
        assert training.error is None
