"""Ingest of files of each kind beside the library that one would otherwise use: CSV and JSON lines (Polars), Parquet
of another tool (pyarrow), tar files of WebDataset (webdataset), folders of images (Hugging Face `datasets`).

The same is: read the file, make classes of a column of text, shuffle all rows, and write Parquet. Folders of images are
their classes; images are stored undecoded. This application also decides types over all rows, keeps the id of each
row, describes each column, and holds a block for each task instead of the table. A step is a row. All sides may use all
CPUs. `--side datasets csv` works, too; the shuffled copy of 10 million rows was not finished after five minutes, at 7.7
GB of memory (2026-11-28).

python3 -m venv .venv-data && .venv-data/bin/pip install -r benchmarks/requirements-data.txt
python benchmarks/ingest.py                # needs a quiet machine; half an hour
python benchmarks/ingest.py --kinds jsonl  # some kinds
python benchmarks/ingest.py --tiny         # that it runs
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import resource
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.harness import ROOT, Sample, alternate, report, run_side

PEERS = ROOT / ".venv-data" / "bin" / "python"
"""An environment with Polars and `datasets`, see benchmarks/requirements-data.txt."""
KINDS = ("oak", "ash", "elm", "fir", "yew")
IMAGE_BYTES = 4096


def write_csv(path: Path, rows: int) -> None:
    """Writes rows of two integers, three numbers, a date and a class."""
    generator = np.random.default_rng(0)
    with path.open("w") as file:
        file.write("number,count,width,height,weight,day,kind\n")
        for first in range(0, rows, 100_000):
            size = min(100_000, rows - first)
            numbers = generator.normal(size=(size, 3)).round(4).tolist()
            counts, kinds = generator.integers(0, 1000, size).tolist(), generator.integers(0, 5, size).tolist()
            file.writelines(
                f"{first + i},{counts[i]},{a},{b},{c},2026-{i % 12 + 1:02}-{i % 28 + 1:02},{KINDS[kinds[i]]}\n"
                for i, (a, b, c) in enumerate(numbers)
            )


def write_images(folder: Path, count: int) -> None:
    """Writes files of JPEG's form and a usual size in folders of classes; they are not decoded here."""
    generator = np.random.default_rng(0)
    for number in range(count):
        path = folder / KINDS[number % 5] / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\xff\xd8\xff\xe0" + generator.bytes(IMAGE_BYTES))


def write_json_lines(path: Path, rows: int) -> None:
    """Writes the rows of `write_csv`, one object a line."""
    table = path.with_suffix(".csv")
    write_csv(table, rows)
    with table.open() as source, path.open("w") as file:
        names = source.readline().strip().split(",")
        for line in source:
            *numbers, day, kind = line.strip().split(",")
            values = [*map(json.loads, numbers), day, kind]
            file.write(json.dumps(dict(zip(names, values, strict=True))) + "\n")
    table.unlink()


def write_other_parquet(path: Path, rows: int) -> None:
    """Writes the rows of `write_csv` by pyarrow."""
    from pyarrow import csv, parquet

    table = path.with_suffix(".csv")
    write_csv(table, rows)
    parquet.write_table(csv.read_csv(table), path)
    table.unlink()


def write_tar(path: Path, rows: int) -> None:
    """Writes the files of `write_images` and their classes as a tar file of WebDataset."""
    generator = np.random.default_rng(0)
    with tarfile.open(path, "w") as tar:
        for number in range(rows):
            contents = {"jpg": b"\xff\xd8\xff\xe0" + generator.bytes(IMAGE_BYTES), "cls": str(number % 5).encode()}
            for suffix, content in contents.items():
                member = tarfile.TarInfo(f"{number:06}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def by_ray_app(kind: str, source: str, out: str) -> None:
    """Ingests here."""
    from ray_app.ingest.ingest import ingest
    from ray_app.ingest.options import IngestOptions

    if kind in ("images", "webdataset"):
        ingest(IngestOptions(kind, out, source, check=False, eval_fraction=0))  # type: ignore[arg-type]
    else:
        ingest(IngestOptions("hf" if kind == "parquet" else kind, out, source, label="kind"))  # type: ignore[arg-type]


def by_polars(kind: str, source: str, out: str) -> None:
    """Reads and writes a file of CSV or JSON lines by Polars."""
    polars: Any = importlib.import_module("polars")

    read = {"csv": polars.read_csv, "jsonl": polars.read_ndjson}[kind]
    table = read(source).with_columns(polars.col("kind").rank("dense").alias("label") - 1).drop("kind")
    os.mkdir(out)
    table.sample(fraction=1, shuffle=True, seed=0).write_parquet(f"{out}/0.parquet")


def by_pyarrow(kind: str, source: str, out: str) -> None:
    """Reads and writes a Parquet file by pyarrow."""
    import pyarrow as pa
    from pyarrow import compute, parquet

    assert kind == "parquet", "pyarrow is measured with Parquet alone"
    table = parquet.read_table(source)
    names = compute.unique(table["kind"]).sort()
    table = table.append_column("label", compute.index_in(table["kind"], names)).drop_columns(["kind"])
    os.mkdir(out)
    order = np.random.default_rng(0).permutation(table.num_rows)
    parquet.write_table(table.take(pa.array(order)), f"{out}/0.parquet")


def by_webdataset(kind: str, source: str, out: str) -> None:
    """Reads a tar file by webdataset, shuffles its rows in memory, and writes them by pyarrow."""
    import pyarrow as pa
    from pyarrow import parquet

    webdataset: Any = importlib.import_module("webdataset")
    assert kind == "webdataset", "webdataset reads tar files alone"
    rows = list(webdataset.WebDataset(source, shardshuffle=False))
    order = np.random.default_rng(0).permutation(len(rows))
    table = pa.table({"image": [rows[i]["jpg"] for i in order], "label": [int(rows[i]["cls"]) for i in order]})
    os.mkdir(out)
    parquet.write_table(table, f"{out}/0.parquet", compression="none")


def by_datasets(kind: str, source: str, out: str) -> None:
    """Reads and writes by Hugging Face `datasets`."""
    # By its name: a checker would take the folder `datasets` of this project for it.
    datasets: Any = importlib.import_module("datasets")
    datasets.disable_progress_bars()
    cache = f"{out}-cache"
    if kind == "csv":
        table = datasets.load_dataset("csv", data_files=source, cache_dir=cache, split="train")
        table = table.class_encode_column("kind")
    else:
        table = datasets.load_dataset(
            "imagefolder", data_dir=source, cache_dir=cache, split="train", num_proc=os.cpu_count()
        )
    os.mkdir(out)
    table.shuffle(seed=0).to_parquet(f"{out}/0.parquet")
    shutil.rmtree(cache)


SIDES = {
    "ray_app": by_ray_app,
    "polars": by_polars,
    "pyarrow": by_pyarrow,
    "webdataset": by_webdataset,
    "datasets": by_datasets,
}
KIND_SIDES = {
    "csv": ("rows.csv", write_csv, "polars"),
    "jsonl": ("rows.jsonl", write_json_lines, "polars"),
    "parquet": ("rows.parquet", write_other_parquet, "pyarrow"),
    "webdataset": ("images.tar", write_tar, "webdataset"),
    "images": ("images", write_images, "datasets"),
}
"""By kind: the name of the source, the function that writes it, and the other side."""


def run_one(side: str, kind: str, source: str, rows: int) -> None:
    """Runs a side, and prints wall and CPU milliseconds a row; its peak of memory goes to the file SOURCE.SIDE.peak."""
    with tempfile.TemporaryDirectory(dir=Path(source).parent) as folder:
        wall, usage = time.perf_counter(), os.times()
        SIDES[side](kind, source, f"{folder}/out")
        after = os.times()
        wall_ms = (time.perf_counter() - wall) / rows * 1e3
    cpu_s = sum(after[:4]) - sum(usage[:4])
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    Path(f"{source}.{side}.peak").write_text(str(max(peaks) // 1024))
    print(wall_ms, cpu_s / rows * 1e3)


def measure(kind: str, source: Path, rows: int, sides: list[str], rounds: int) -> None:
    """Measures sides in turn, and prints the table, rows a second and peaks of memory."""

    def side(name: str) -> Callable[[], Sample]:
        python = sys.executable if name == "ray_app" else str(PEERS)
        return partial(run_side, [python, __file__, "--side", name, kind, str(source), str(rows)])

    samples = alternate({name: side(name) for name in sides}, rounds)
    report(f"Ingest of {rows} rows of {kind}; a step is a row", samples, {})
    for name in sides:
        best = min(sample.wall_ms for sample in samples[name])
        peak = Path(f"{source}.{name}.peak").read_text()
        print(f"{name:<12}{1e3 / best:>12,.0f} rows/s in the fastest round, at most {peak} MiB")


def main() -> None:
    """Measures all sides."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000, help="Of tables; JSON lines have a tenth of them.")
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KIND_SIDES, default=list(KIND_SIDES))
    parser.add_argument("--tiny", action="store_true", help="Few rows and one round, here alone.")
    parser.add_argument("--side", nargs=4, metavar=("SIDE", "KIND", "SOURCE", "ROWS"), help="For internal use.")
    arguments = parser.parse_args()
    if arguments.side:
        side, kind, source = arguments.side[:3]
        run_one(side, kind, source, int(arguments.side[3]))
        return
    rows, images = (1000, 50) if arguments.tiny else (arguments.rows, arguments.images)
    rounds = 1 if arguments.tiny else arguments.rounds
    peers = PEERS.exists()
    if not peers and not arguments.tiny:
        sys.exit(f"{PEERS} is missing; make it as benchmarks/ingest.py says.")
    counts = {"images": images, "webdataset": images, "jsonl": rows // 10}
    for kind in arguments.kinds:
        name, write, peer = KIND_SIDES[kind]
        with tempfile.TemporaryDirectory() as temporary:
            source = Path(temporary) / name
            write(source, counts.get(kind, rows))
            measure(kind, source, counts.get(kind, rows), ["ray_app", peer] if peers else ["ray_app"], rounds)


if __name__ == "__main__":
    main()
