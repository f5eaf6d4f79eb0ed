"""Train on all machines of a job; call it on each of them, for instance by srun.

srun --ntasks-per-node=1 python jobs/launch.py --config conf/digits.yaml [--scaling.max_workers all ...]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ray_app.cli.main import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[0], "launch"))
