"""Elastic, bit-exact PyTorch training on Ray clusters whose size changes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_app.drill.local import LocalCluster, kill_worker
    from ray_app.pipeline.background import Training, Worker, start_training
    from ray_app.pipeline.cli import load_config
    from ray_app.pipeline.comparing import compare_runs
    from ray_app.pipeline.result import Result
    from ray_app.pipeline.run import run_training
    from ray_app.report.comparison import Comparison
    from ray_app.track.exported import load_for_training, load_model, read_rows

__all__ = [
    "Comparison",
    "LocalCluster",
    "Result",
    "Training",
    "Worker",
    "compare_runs",
    "kill_worker",
    "load_config",
    "load_for_training",
    "load_model",
    "read_rows",
    "run_training",
    "start_training",
]

logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)  # in a notebook Ray asks for ipywidgets, which nothing here needs

_PLACES = {
    "Comparison": "report.comparison",
    "LocalCluster": "drill.local",
    "Result": "pipeline.result",
    "Training": "pipeline.background",
    "Worker": "pipeline.background",
    "compare_runs": "pipeline.comparing",
    "kill_worker": "drill.local",
    "load_config": "pipeline.cli",
    "load_for_training": "track.exported",
    "load_model": "track.exported",
    "read_rows": "track.exported",
    "run_training": "pipeline.run",
    "start_training": "pipeline.background",
}


def __getattr__(name: str) -> Any:
    """Imports the public names when they are first used, so that importing a part does not import all of it."""
    import importlib

    if name not in _PLACES:
        raise AttributeError(f"module 'ray_app' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ray_app.{_PLACES[name]}"), name)
