"""The command `ray-app demo`: ingests the bundled digits into a new folder and trains on them."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from ray_app.cli.main import exit_code
from ray_app.errors import ConfigError

_CONFIG = "digits.yaml"
_UNTRACKED = """tracking:
  enabled: false  # true: an MLflow run for each run; needs pip install "PATH_TO_RAY_APP[tracking]"
"""


def write_demo(folder: Path) -> None:
    """Writes data and configuration; raises `ConfigError` if the folder is not empty or cannot be written to."""
    from ray_app.ingest.ingest import ingest
    from ray_app.ingest.options import IngestOptions

    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(
                f"{folder} is not empty, and no file is overwritten. Name a new or an empty folder with --out. To train"
                f" a demo in this folder again: cd {shlex.quote(str(folder))} && ray-app train --config {_CONFIG}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        text = Path(__file__).with_name(_CONFIG).read_text().replace("datasets/digits", "data").replace("conf/", "")
        (folder / _CONFIG).write_text(text + _UNTRACKED)
    except OSError as error:
        raise ConfigError(
            f"The demo cannot be written to {folder}: {error}. Name a new, writable folder with --out."
        ) from error
    parts = ingest(IngestOptions("digits", str(folder / "data"))).parts
    training, evaluation = (f"{parts[name].rows:,}" for name in ("train", "eval"))
    print(
        f"{folder} has\n"
        f"  data         images of handwritten digits in Parquet, {training} to train on, {evaluation} to evaluate\n"
        f"  {_CONFIG}  the configuration: task, model, optimizer, data, workers\n"
        "  runs/demo    the run that starts now: checkpoints, evaluations, metrics, report.html, summary.json\n",
        flush=True,
    )


def main(arguments: list[str] | None = None, prog: str = "ray-app demo") -> int:
    """Runs `ray-app demo`; returns 2 if the folder is refused, otherwise what `ray-app train` returns."""
    description = "Ingests the bundled handwritten digits into a new folder, and trains a small network on 2 workers."
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    out_help = "a new or an empty folder; default: ./ray_app-demo"
    parser.add_argument("--out", metavar="FOLDER", default="ray_app-demo", help=out_help)
    out = parser.parse_args(arguments).out
    folder = Path(out).expanduser().resolve()
    if code := exit_code(lambda: write_demo(folder), "The demo could not be written"):
        return code
    from ray_app.cli.train import main as train

    # The configuration names data and runs relative to its folder, which therefore can be moved.
    os.chdir(folder)
    if code := train(["--config", _CONFIG, "--run.name", "demo"]):
        return code
    print(
        f"\nWhat to try next:\n  {shlex.join(['cd', out])}\n  ray-app train --config {_CONFIG} --scaling.max_workers 1"
        f"    # the same parameters from one worker\n  ray-app drill --config {_CONFIG} --scaling.max_workers 3    #"
        " the same after killed workers and lost nodes\n  ray-app init my_project                                    #"
        " a task, data and a configuration of your own"
    )
    return 0
