"""Writes the files next to this one with TensorFlow 2.21.0, which the tests do not have: `python make.py` in an
environment with tensorflow-cpu.

Rows 0 to 4 are in two files of the split `train`, 5 to 7 in one of `test`, which is compressed with gzip without
the suffix.
"""

from pathlib import Path

import numpy as np
import tensorflow as tf

FOLDER = Path(__file__).parent


def example(i: int) -> bytes:
    """Returns a row: an encoded image, a label, floats, integers of all sizes, text."""
    pixels = np.full((5, 4, 3), 10 * i, np.uint8)
    features = {
        "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[tf.io.encode_png(pixels).numpy()])),
        "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[i % 3])),
        "image/class/text": tf.train.Feature(bytes_list=tf.train.BytesList(value=[f"class {i % 3} \u00e4".encode()])),
        "floats": tf.train.Feature(float_list=tf.train.FloatList(value=[i, i / 8, -1e30, 0.1])),
        "integers": tf.train.Feature(int64_list=tf.train.Int64List(value=[-i, 2**63 - 1, -(2**63)])),
        "boxes": tf.train.Feature(float_list=tf.train.FloatList(value=[0.5] * i)),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString(deterministic=True)


def main() -> None:
    """Writes the three files."""
    files = {
        "train.tfrecord-00000-of-00002": range(3),
        "train.tfrecord-00001-of-00002": range(3, 5),
        "test.tfrecord-00000-of-00001": range(5, 8),
    }
    for name, rows in files.items():
        with tf.io.TFRecordWriter(str(FOLDER / name), "GZIP" if name.startswith("test") else None) as writer:
            for i in rows:
                writer.write(example(i))
    print(tf.__version__)


if __name__ == "__main__":
    main()
