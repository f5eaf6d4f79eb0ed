"""Runs the command as a module: `python -m ray_app train ...` is `ray-app train ...`, also without a console script."""

import sys

from ray_app.cli.main import run

if __name__ == "__main__":
    sys.exit(run(prog="python -m ray_app"))
