"""Disturb runs of a configuration and compare: python jobs/drill.py --config conf/digits.yaml [--drill.scenarios kill,node ...]."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ray_app.cli.drill import main

if __name__ == "__main__":
    sys.exit(main(prog=sys.argv[0]))
