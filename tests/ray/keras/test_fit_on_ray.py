"""`fit` of a Keras program on workers of a real Ray cluster: their number does not change the weights."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from ray_app.cluster.rendezvous.actor import RendezvousHandle
from ray_app.keras import fit
from ray_app.runlog.paths import RunPaths
from ray_app.task.keras.library import import_keras
from tests.support import keras_programs

callbacks = import_keras().callbacks

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.rest]


def test_a_program_has_the_same_history_and_weights_on_one_and_two_workers(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 256, (96, 8, 8, 1), dtype=np.uint8), np.arange(96) % 5
    histories, weights = [], []
    for workers in (1, 2):
        fields = {
            "run.storage_path": str(tmp_path / str(workers)),
            "tracking.enabled": False,
            "scaling.logical_workers": 2,
            "scaling.min_workers": workers,
        }
        options = {"batch_size": 16, "epochs": 2, "validation_split": 0.25, "workers": workers, "verbose": 0}
        history = fit(keras_programs.get_plain, x, y, **options, fields=fields)
        assert history.result.summary["world_sizes"] == [[0, workers]]
        histories.append(history.history)
        weights.append(history.keras_model().get_weights())
    assert histories[0] == histories[1]
    assert histories[0].keys() == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert all(np.array_equal(one, other) for one, other in zip(*weights, strict=True))


class Killing(callbacks.Callback):  # type: ignore[name-defined]
    """Kills a worker of a run once, while all workers wait for the callbacks of an epoch."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._actor, self.has_killed = f"rendezvous-{RunPaths(folder).unique_name}-1", False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            workers = RendezvousHandle(ray.get_actor(self._actor)).workers()
            os.kill(max(workers, key=lambda worker: worker.rank).pid, signal.SIGKILL)
            self.has_killed = True


def test_callbacks_decide_alike_when_a_worker_is_lost_while_they_run(tmp_path: Path) -> None:
    """The same history, decisions and parameters as in one process without a loss."""
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 256, (64, 8, 8, 1), dtype=np.uint8), np.arange(64) % 5

    def decide() -> list[Any]:
        return [
            callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=0.5, factor=0.5),
            callbacks.EarlyStopping("val_loss", patience=4, min_delta=0.5, restore_best_weights=True),
        ]

    runs, killing = [], Killing(tmp_path / "lost")
    for name, used, workers in (("undisturbed", [], None), ("lost", [killing], 2)):
        fields = {"run.storage_path": str(tmp_path), "tracking.enabled": False, "scaling.logical_workers": 2}
        options = {"batch_size": 16, "epochs": 8, "validation_split": 0.25, "workers": workers, "verbose": 0}
        history = fit(keras_programs.get_plain, x, y, **options, name=name, callbacks=[*decide(), *used], fields=fields)
        runs.append(history)
    assert killing.has_killed
    assert runs[1].result.summary["restarts"] != runs[0].result.summary["restarts"], "a worker was lost"
    assert runs[0].history == runs[1].history
    assert len(runs[0].epoch) < 8, "they have stopped it"
    assert len(set(runs[0].history["learning_rate"])) > 1
    assert runs[0].result.summary["params_digest"] == runs[1].result.summary["params_digest"]
