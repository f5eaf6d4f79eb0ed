"""Write the model of a run to a folder.

python jobs/export.py --run runs/NAME --out FOLDER [--checkpoint best|newest|step-120]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ray_app.cli.main import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[0], "export"))
