"""Elastic, bit-exact PyTorch training on Ray clusters whose size changes."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

from ray_app.version import __version__

if TYPE_CHECKING:
    from ray_app.drill.local import LocalCluster, kill_worker
    from ray_app.ingest.from_arrays import ingest_arrays
    from ray_app.models.exported import load_for_training, load_model, read_rows
    from ray_app.report.comparison import Comparison
    from ray_app.runs.background import Training, Worker, start_training
    from ray_app.runs.given.configuration import load_config
    from ray_app.runs.in_process import run_training
    from ray_app.runs.outcome.comparing import compare_runs
    from ray_app.runs.outcome.result import Result
    from ray_app.runs.trial.check import TaskCheck, check_task
    from ray_app.task.losses import Losses
    from ray_app.task.rows.drawing import drawing
    from ray_app.task.rows.ragged import Ragged
    from ray_app.task.script.scripted import Loop
    from ray_app.watch.observer import Observer
    from ray_app.watch.webhook import Webhook

__all__ = [
    "Comparison",
    "LocalCluster",
    "Loop",
    "Losses",
    "Observer",
    "Ragged",
    "Result",
    "TaskCheck",
    "Training",
    "Webhook",
    "Worker",
    "__version__",
    "check_task",
    "compare_runs",
    "drawing",
    "ingest_arrays",
    "kill_worker",
    "load_config",
    "load_for_training",
    "load_model",
    "read_rows",
    "run_training",
    "start_training",
]

# In a notebook Ray asks for ipywidgets, which nothing here needs.
logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message="IProgress not found")

_PLACES = {
    "Comparison": "report.comparison",
    "LocalCluster": "drill.local",
    "Loop": "task.script.scripted",
    "Losses": "task.losses",
    "Observer": "watch.observer",
    "Ragged": "task.rows.ragged",
    "Result": "runs.outcome.result",
    "TaskCheck": "runs.trial.check",
    "Training": "runs.background",
    "Webhook": "watch.webhook",
    "Worker": "runs.background",
    "check_task": "runs.trial.check",
    "compare_runs": "runs.outcome.comparing",
    "drawing": "task.rows.drawing",
    "ingest_arrays": "ingest.from_arrays",
    "kill_worker": "drill.local",
    "load_config": "runs.given.configuration",
    "load_for_training": "models.exported",
    "load_model": "models.exported",
    "read_rows": "models.exported",
    "run_training": "runs.in_process",
    "start_training": "runs.background",
}


def __getattr__(name: str) -> Any:
    """Imports the public names when they are first used, so that importing a part does not import all of it."""
    import importlib

    if name not in _PLACES:
        raise AttributeError(f"module 'ray_app' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ray_app.{_PLACES[name]}"), name)
