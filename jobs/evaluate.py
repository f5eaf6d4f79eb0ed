"""Evaluate the checkpoints of a run, also while it trains.

python jobs/evaluate.py --run runs/NAME [--follow] [--name N --data PATH]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ray_app.cli.main import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[0], "evaluate"))
