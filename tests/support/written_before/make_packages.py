"""What is made of the run, with the code of that time: an export, and a package of the registry in each format."""

import copy
import sys
from pathlib import Path

from doubtful import Doubtful

from ray_app.pipeline.exporting import ExportOptions, export_run
from ray_app.pipeline.registering import example_of
from ray_app.pipeline.trained import chosen, load_model, trained_job
from ray_app.record.paths import RunPaths
from ray_app.track.package import make_package

export_run(ExportOptions("runs/digits", "export", "newest"))
job = trained_job(RunPaths(Path("runs/digits")))
model, example = load_model(job, chosen(job, "newest")), example_of(job)
assert make_package(job.task, model, example, Path("packages/torch.export")).format == "torch.export"
doubtful = copy.copy(job.task)
doubtful.__class__ = Doubtful
assert make_package(doubtful, model, example, Path("packages/safetensors")).format == "safetensors"
