"""The directory and the MLflow run of a finished run with two checkpoints, written without training."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ray_app import load_config
from ray_app.checkpoint.format import Snapshot, pack, params_digest
from ray_app.checkpoint.store import CheckpointStore
from ray_app.config.config import Config
from ray_app.config.sections import ClassSpec
from ray_app.driver.model_export import register_best
from ray_app.driver.result import Result
from ray_app.preflight.prepare import Prepared, claim, prepare
from ray_app.runlog.evaluations import Evaluation, put_evaluation
from ray_app.storage.files import put_json
from ray_app.track.mlflow_client import MlflowRun
from tests.support.checkpoints import commit_of
from tests.support.mlflow_server import make_database
from tests.support.paths import ROOT


class FinishedRun:
    """The directory of a finished run with two checkpoints, the first of them better, and its MLflow run."""

    def __init__(
        self,
        storage: Path,
        digits: Path,
        uri: str,
        name: str = "run",
        task: str = "",
        init_args: Any = None,
        **fields: Any,
    ) -> None:
        values = {
            "run__name": name,
            "run__storage_path": str(storage),
            "data__path": str(digits / "train"),
            "data__eval_path": None,
        }
        config = load_config(ROOT / "conf" / "digits.yaml").replace(**(values | {"tracking__uri": uri} | fields))
        if task:
            config = replace(config, task=ClassSpec(task, init_args or config.task.init_args))
        self.config: Config = config
        self.prepared: Prepared = claim(prepare(config), 1)
        self.job = self.prepared.job
        paths = self.job.paths
        for step, accuracy in ((8, 0.75), (16, 0.5)):
            model = self.job.task.build_model()
            for parameter in model.parameters():
                parameter.data.mul_(3)
            for buffer in model.buffers():
                buffer.add_(0.25 if buffer.is_floating_point() else 1)
            state = dict(model.state_dict())
            digests = {
                "params_digest": params_digest(state),
                "manifest_digest": self.job.plan.manifest.digest,
                "config_digest": "c" * 64,
            }
            commit = replace(commit_of(step), **digests)
            CheckpointStore(paths).write(pack(Snapshot(step, state, {}, None)), commit)
            metrics = {"accuracy": accuracy, "loss": 1.0}
            put_evaluation(
                paths, Evaluation(step, 0, commit.params_digest, metrics, 10, 0.1, 0.0, data_digest="d" * 64)
            )
        self.summary = {"status": "finished", "best": {"step": 8, "metric": "accuracy", "value": 0.75}}
        put_json(paths.summary, self.summary)
        mlflow_run = MlflowRun(uri, "registry", storage / "mlartifacts")
        self.run_id = mlflow_run.open(None, "uuid-" + name, paths.root, 0)
        put_json(paths.tracking, {"run_uuid": "uuid-" + name, "run_id": self.run_id, "uri": uri})

    def predictions(self, images: np.ndarray) -> np.ndarray:
        result = Result(self.job.paths.root, self.summary, self.job.task)
        with torch.inference_mode():
            return self.job.task.forward(result.load_model(), {"image": torch.from_numpy(images)}).numpy()


def make_champion_run(storage: Path, digits: Path) -> FinishedRun:
    """Returns a run and makes its best checkpoint, the first of two, the champion of the model `digits`."""
    run = FinishedRun(storage, digits, make_database(storage / "mlflow.db"))
    assert register_best(run.job, "digits", run.config.tracking.uri).aliases == ("challenger", "champion")
    return run


CHAMPION = ("--predict.model", "models:/digits@champion")


def predict_command(run: FinishedRun, data: Path | str, out: Path | str, *more: str) -> list[str]:
    """Returns the arguments of a prediction that uses the MLflow of the run."""
    arguments = [
        "--config",
        str(ROOT / "conf" / "digits.yaml"),
        "--tracking.uri",
        run.config.tracking.uri,
        "--predict.data",
        str(data),
    ]
    # A read task, and so a part, has 50 rows of 72 bytes: an image and its label.
    return [*arguments, "--predict.out", str(out), "--data.read_task_mb", "0.00365", *more]
