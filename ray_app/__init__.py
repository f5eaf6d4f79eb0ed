"""Elastic, bit-exact PyTorch training on Ray clusters that grow and shrink while it runs."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_app.version import __version__

if TYPE_CHECKING:
    from ray_app.cluster.resources import session
    from ray_app.data.folds import fold_configs
    from ray_app.drill.cluster import LocalCluster, kill_worker
    from ray_app.driver.background import Training, Worker, start_training
    from ray_app.driver.parsing import load_config
    from ray_app.driver.result import Result, compare_runs
    from ray_app.driver.run import run_training
    from ray_app.ingest.in_memory import ingest_arrays, ingest_table
    from ray_app.ingest.ingest import describe, ingest_files
    from ray_app.models.export import load_for_training, load_model, read_rows
    from ray_app.preflight.prepare import TaskCheck, check_task
    from ray_app.report.html import Comparison
    from ray_app.task.losses import Losses, reduce
    from ray_app.task.ragged import Ragged
    from ray_app.task.transforms import drawing
    from ray_app.task.user_loop import Loop
    from ray_app.tune.study import Study, run_study
    from ray_app.watch.observers import Observer, Webhook

__all__ = [
    "Comparison",
    "LocalCluster",
    "Loop",
    "Losses",
    "Observer",
    "Ragged",
    "Result",
    "Study",
    "TaskCheck",
    "Training",
    "Webhook",
    "Worker",
    "__version__",
    "check_task",
    "compare_runs",
    "describe",
    "drawing",
    "fold_configs",
    "ingest_arrays",
    "ingest_files",
    "ingest_table",
    "kill_worker",
    "load_config",
    "load_for_training",
    "load_model",
    "read_rows",
    "reduce",
    "run_study",
    "run_training",
    "session",
    "start_training",
]

# In a notebook Ray warns that ipywidgets is missing, which nothing here needs.
logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message="IProgress not found")

_MODULES = {
    "Comparison": "report.html",
    "LocalCluster": "drill.cluster",
    "Loop": "task.user_loop",
    "Losses": "task.losses",
    "Observer": "watch.observers",
    "Ragged": "task.ragged",
    "Result": "driver.result",
    "Study": "tune.study",
    "TaskCheck": "preflight.prepare",
    "Training": "driver.background",
    "Webhook": "watch.observers",
    "Worker": "driver.background",
    "check_task": "preflight.prepare",
    "compare_runs": "driver.result",
    "drawing": "task.transforms",
    "describe": "ingest.ingest",
    "fold_configs": "data.folds",
    "ingest_arrays": "ingest.in_memory",
    "ingest_files": "ingest.ingest",
    "ingest_table": "ingest.in_memory",
    "kill_worker": "drill.cluster",
    "load_config": "driver.parsing",
    "load_for_training": "models.export",
    "load_model": "models.export",
    "read_rows": "models.export",
    "reduce": "task.losses",
    "run_study": "tune.study",
    "run_training": "driver.run",
    "session": "cluster.resources",
    "start_training": "driver.background",
}


def __getattr__(name: str) -> Any:
    """Imports the module of a public name at its first use, so that importing one part does not import all of them."""
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module 'ray_app' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"ray_app.{_MODULES[name]}"), name)
    except (ImportError, AttributeError) as error:
        import importlib.metadata

        # The folder of the program is searched first.
        program = Path(getattr(sys.modules["__main__"], "__file__", None) or "notebook").absolute()
        taken = sys.stdlib_module_names | importlib.metadata.packages_distributions().keys()
        for file in sorted(program.parent.glob("*.py")):
            if file.stem in taken and getattr(sys.modules.get(file.stem), "__file__", None) == str(file):
                raise ImportError(f"{file} hides a library or a module of Python: rename it.") from error
        raise
