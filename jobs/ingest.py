"""Raw data -> Parquet shards.

python jobs/ingest.py --source digits --out datasets/digits
python jobs/ingest.py --source images --input DIR --out datasets/flowers
python jobs/ingest.py --source csv --input iris.csv --label species --out datasets/iris
python jobs/ingest.py --source idx --input DIR --out datasets/mnist
python jobs/ingest.py --source numpy --input arrays.npz --out datasets/arrays
python jobs/ingest.py --source jsonl --input s3://bucket/rows.jsonl --label kind --out s3://bucket/datasets/rows
python jobs/ingest.py --source webdataset --input 'shards/train-{000..012}.tar' --out datasets/pictures
python jobs/ingest.py --source tfrecord --input records/ --label image/class/label --out datasets/records
python jobs/ingest.py --help
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ray_app.cli.main import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[0], "ingest"))
