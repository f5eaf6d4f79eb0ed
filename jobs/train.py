"""Train a model; `--help` explains every field of the configuration.

python jobs/train.py --config conf/digits.yaml [--scaling.max_workers 4 ...]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ray_app.cli.main import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[0], "train"))
