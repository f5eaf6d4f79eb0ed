"""Predict a data set.

python jobs/predict.py --config FILE --predict.data DATA --predict.out FOLDER [--predict.run RUN]
python jobs/predict.py --help
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ray_app.cli.main import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[0], "predict"))
