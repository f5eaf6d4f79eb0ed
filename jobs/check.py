"""Try a task on some rows, without a cluster: python jobs/check.py --config conf/digits.yaml."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ray_app.cli.check import main

if __name__ == "__main__":
    sys.exit(main(prog=sys.argv[0]))
