"""Runs as they are now: python jobs/watch.py runs/NAME ... [--port 8300]; on a disk or S3, also after their end."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ray_app.cli.main import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[0], "watch"))
