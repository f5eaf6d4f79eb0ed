"""Write the page about a run, which may also still train or have failed.

python jobs/report.py --run runs/NAME [--out FILE]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ray_app.cli.main import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[0], "report"))
