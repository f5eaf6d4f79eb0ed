"""Register the best checkpoint of a run.

python jobs/register.py --run runs/NAME [--name MODEL] [--promote "why it is better"]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ray_app.cli.main import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[0], "register"))
