"""Ingest the bundled digits into a new folder, and train on them.

python jobs/demo.py [--out FOLDER]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ray_app.cli.main import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[0], "demo"))
