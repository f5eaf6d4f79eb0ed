"""Find good settings with many trials.

python jobs/tune.py --config conf/digits.yaml --config tune.yaml
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ray_app.cli.main import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[0], "tune"))
