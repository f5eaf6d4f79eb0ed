"""Send MLflow the points and artifacts that it lacks of a run that has ended.

python jobs/track.py --replay runs/NAME [--uri URI] [--experiment NAME]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ray_app.cli.main import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[0], "track"))
