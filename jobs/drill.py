"""Disturb runs of a configuration and compare their results.

python jobs/drill.py --config conf/digits.yaml [--drill.scenarios kill,node ...]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ray_app.cli.main import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[0], "drill"))
