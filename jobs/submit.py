"""Train as a Ray job.

python jobs/submit.py --config conf/digits.yaml --run.storage_path /shared/runs [--submit.dry_run true ...]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ray_app.cli.main import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[0], "submit"))
