"""Mutated files for each reader, in a child process that may die: `python -m tests.support.fuzzing CASE LOW HIGH`.

The child prints what became of the mutants as JSON. It keeps the number of the present mutant in the file `seed`, by
which the parent knows which one has ended it.
"""

import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ray_app.channel import FrameReader, pack_frame
from ray_app.checkpoint.format import MODEL, TRAINING, unpack, unpack_model
from ray_app.checkpoint.store import parse_commit
from ray_app.cluster.rendezvous.server import decode_heartbeat, decode_reply, encode
from ray_app.data.dataset import open_dataset
from ray_app.data.parquet_files import DataFile
from ray_app.errors import RayAppError
from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.models import loader
from ray_app.models.export import load_model, read_export
from ray_app.models.package import make_package
from ray_app.plan.manifest import Manifest
from ray_app.runlog.journal import StepRecord, _to_bytes, read_segment
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import to_location
from ray_app.task import images as images_module
from ray_app.task.images import convert_image, decode_image, decode_mask
from ray_app.task.tabular import TabularClassification
from ray_app.train.membership import Flags, GenerationInfo, Heartbeat, HeartbeatReply
from ray_app.train.state.parameters import read_parameters
from tests.support.checkpoints import make_store_of_three
from tests.support.encoded_images import intact_files
from tests.support.ingest_sources import OBJECTS, SOURCES
from tests.support.mutations import mutate
from tests.support.paths import ROOT

MAX_BYTES = 512 << 20
_MAX_SECONDS = 20
MARKER = "it-ran"
_CODE = (
    f"__import__('os').system('touch {MARKER}')".encode(),
    f"cos\nsystem\n(S'touch {MARKER}'\ntR.".encode(),
    f'{{"class_path": "os.system", "init_args": {{"command": "touch {MARKER}"}}}}'.encode(),
)
Files = dict[str, bytes]


class Case(NamedTuple):
    """Valid files, the function that reads them, the errors that it may raise, and the number of mutants."""

    files: Files
    read: Callable[[Files], object]
    allowed: tuple[type[Exception], ...]
    count: int


def of(data: bytes, read: Callable[[bytes], object], allowed: type[Exception], count: int) -> Case:
    """Returns the case of one file that is read from memory."""
    return Case({"file": data}, lambda files: read(files["file"]), (allowed,), count)


def on_disk(name: str, data: bytes, read: Callable[[str], object], count: int) -> Case:
    """Returns the case of one file that is read from a disk."""

    def write(files: Files) -> object:
        Path(name).write_bytes(files["file"])
        return read(name)

    return Case({"file": data}, write, (RayAppError,), count)


RECORD = StepRecord(3, 0, 1.0, 1.5, 0.1, 0.2, 1.0, 2.0, 1, [4], [7], "1.1")


def frames() -> dict[str, Case]:
    beat = Heartbeat("worker", "node", "127.0.0.1", 1, record=RECORD)
    reply = HeartbeatReply(1, Flags.SAVE, formed=GenerationInfo(1, 0, 2, "127.0.0.1", 1, ("a", "b")))
    return {
        "frames": of(pack_frame(b"some data") * 3, lambda data: FrameReader().feed(data), ValueError, 9_000),
        "heartbeat": of(encode(beat), decode_heartbeat, ValueError, 9_000),
        "reply": of(encode(reply), decode_reply, ValueError, 9_000),
    }


def run_files() -> dict[str, Case]:
    paths = RunPaths(Path("run").absolute())
    make_store_of_three(paths)
    folder = paths.checkpoint(3, 1)
    files = {name: (folder / name).read_bytes() for name in ("COMMIT.json", MODEL, TRAINING)}
    state = io.BytesIO()
    torch.save({"w": torch.ones(3), "b": torch.zeros(2)}, state)
    manifest = Manifest.from_files([("a/part-0.parquet", [500, 500, 3]), ("b.parquet", [0, 17])]).to_json().encode()
    segment = to_location("segment.json")

    def read_initial(name: str) -> object:
        return read_parameters(name, None)

    return {
        "COMMIT.json": of(files["COMMIT.json"], partial(parse_commit, folder.name), RayAppError, 9_000),
        "manifest.json": of(
            manifest, lambda data: Manifest.from_json(data.decode(errors="replace")), RayAppError, 7_000
        ),
        "training.pt": of(files[TRAINING], lambda data: unpack(files | {TRAINING: data}), RayAppError, 5_000),
        "model.safetensors": of(files[MODEL], lambda data: unpack_model({MODEL: data}), RayAppError, 9_000),
        "step log": of(_to_bytes([RECORD] * 3), lambda data: read_segment(segment, data), RayAppError, 9_000),
        "state dict": on_disk("w.pt", state.getvalue(), read_initial, 3_000),
        "initial weights": on_disk("w.safetensors", files[MODEL], read_initial, 4_000),
    }


def packages() -> dict[str, Case]:
    task = TabularClassification.__new__(TabularClassification)
    vars(task).update(
        label="y", features=["a"], hidden=[4], dropout=0.0, scale=1.0, inputs=3, num_classes=2, classes=["no", "yes"]
    )
    rows = {"features": np.ones((2, 3), np.float32), "y": np.zeros(2, np.int64)}
    folder = make_package(task, task.build_model(), rows, Path("package").absolute()).folder
    data = folder / "data" / "model"
    archive = (data / loader.EXPORTED).read_bytes()
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        members = {name: file.read(name) for name in file.namelist()}

    def load_members(files: Files) -> object:
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as file:
            for name, content in (members | files).items():
                file.writestr(name, content)
        return loader.load_exported(packed).module()

    def read_description(content: bytes) -> object:
        (data / "package.json").write_bytes(content)
        package = read_export(str(folder))
        return task.restore(package.settings, "It")

    def load(content: bytes) -> object:
        (data / "package.json").write_bytes(content)
        return load_model(folder).predict(np.ones((2, 3), np.float32))

    described = (data / "package.json").read_bytes()
    json_members = {name: content for name, content in members.items() if name.endswith(".json")}
    return {
        "model.pt2": of(archive, lambda content: loader.load_exported(io.BytesIO(content)), ValueError, 2_000),
        "members of model.pt2": Case(json_members, load_members, (ValueError,), 2_000),
        "package.json": of(described, read_description, RayAppError, 3_000),
        "load_model": Case({"": described}, lambda files: load(files[""]), (RayAppError, ValueError), 500),
    }


def images() -> dict[str, Case]:
    def case(data: bytes, decode: Callable[[bytes], object]) -> Case:
        return of(data, decode, ValueError, 400)

    files = intact_files()
    cases = {
        f"image, {name}": case(data, decode_image) for name, data in files.items() if name[:3] not in ("bmp", "tif")
    }
    cases |= {f"mask, {name}": case(data, decode_mask) for name, data in files.items() if name in ("png P", "png L")}
    return cases | {
        f"converted, {name}": case(data, partial(convert_image, first_frame=True))
        for name, data in files.items()
        if not name.startswith("jpeg")
    }


def sources() -> dict[str, Case]:
    """Returns a case for each reader of raw data, and one for a data set of Parquet."""
    cases = {}
    for name, (write, relative, options) in (SOURCES | OBJECTS).items():
        if name == "parquet":
            continue
        folder = Path(f"source of {name}").absolute()
        folder.mkdir()
        folder /= "in"
        write(folder)
        files = {str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}

        def read(
            changed: Files,
            files: Files = files,
            name: str = name,
            source: str = str(folder / relative),
            options: Any = options,
        ) -> None:
            for path, data in changed.items():
                if data is not files[path]:
                    Path(path).write_bytes(data)
            try:
                ingest(IngestOptions(name.partition(",")[0], "out", source, **options))
            finally:
                shutil.rmtree("out", ignore_errors=True)
                for path, data in changed.items():
                    if data is not files[path]:
                        Path(path).write_bytes(files[path])

        cases[f"ingest, {name}"] = Case(files, read, (RayAppError,), 350)

    def open_parquet(name: str) -> None:
        dataset = open_dataset(name)
        for path in dataset.manifest.paths:
            with DataFile(dataset.root, path, dataset.manifest.rules) as file:
                file.read(["a", "b"])

    table = io.BytesIO()
    pq.write_table(pa.table({"a": [1, 2], "b": ["u", "v"]}), table)
    return cases | {"parquet": on_disk("a.parquet", table.getvalue(), open_parquet, 1_000)}


def faults() -> dict[str, Case]:
    """Returns readers with the faults that are looked for."""

    def only_mutants(fault: Callable[[], object]) -> Callable[[bytes], object]:
        return lambda data: None if data == b"intact" else fault()

    readers: dict[str, Callable[[], object]] = {
        "it ran": Path(MARKER).touch,
        "it took": lambda: b"x" * (MAX_BYTES + (64 << 20)),
        "KeyError": {}.popitem,
        "the process died of SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "refused": lambda: int("x"),
    }
    return {name: of(b"intact", only_mutants(fault), ValueError, 2) for name, fault in readers.items()}


GROUPS: dict[str, Callable[[], dict[str, Case]]] = {
    "frames": frames,
    "run": run_files,
    "packages": packages,
    "images": images,
    "sources": sources,
    "faults": faults,
}


def read_mutants(group: str, first: int, out: IO[str]) -> None:
    """Reads the mutants of a group from a number on; writes a line of JSON for each fault, and one for the counts."""
    # At the limit of 2**27 an image may take more memory, by design.
    images_module.MAX_PIXELS = 2**24
    cases = [(name, case, seed) for name, case in GROUPS[group]().items() for seed in range(case.count)]
    for case in {name: case for name, case, _ in cases}.values():
        case.read(case.files)
    start = _max_bytes()
    counts: Counter[str] = Counter()
    with Path("number").open("wb", 0) as present:
        for number, (name, case, seed) in enumerate(cases[first:], first):
            os.pwrite(present.fileno(), number.to_bytes(8, "little"), 0)
            signal.alarm(_MAX_SECONDS)
            changed = sorted(case.files)[seed % len(case.files)]
            mutant = case.files | {changed: mutate(case.files[changed], seed, _CODE)}
            fault = ""
            try:
                case.read(mutant)
                counts["read"] += 1
            except case.allowed:
                counts["refused"] += 1
            except BaseException as error:
                fault = f"{type(error).__name__}: {error}"
            if _max_bytes() - start > MAX_BYTES:
                fault, start = f"it took {_max_bytes() - start >> 20} MiB", _max_bytes()
            if Path(MARKER).exists():
                Path(MARKER).unlink()
                fault = "it ran"
            if fault:
                print(
                    json.dumps({"case": name, "file": changed, "seed": seed, "fault": fault[:300]}),
                    file=out,
                    flush=True,
                )
    print(json.dumps(counts), file=out, flush=True)


def _max_bytes() -> int:
    # `getrusage` would start at the memory of the parent, which a child keeps as its maximum across exec.
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


def find_faults(group: str, folder: Path) -> tuple[list[dict[str, Any]], int]:
    """Reads all mutants of a group in child processes; returns the faults, and the number of mutants that had none."""
    result: list[dict[str, Any]] = []
    first = num_good = 0
    while True:
        command = [sys.executable, "-m", __name__, group, str(first)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        child = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        lines = [json.loads(line) for line in child.stdout.splitlines()]
        result += [line for line in lines if "fault" in line]
        if child.returncode == 0:
            return result, num_good + sum(lines[-1].values())
        assert child.returncode < 0, child.stderr
        number = int.from_bytes((folder / "number").read_bytes(), "little")
        result.append({"number": number, "fault": f"the process died of {signal.Signals(-child.returncode).name}"})
        first = number + 1
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()


if __name__ == "__main__":
    logging.disable()
    read_mutants(sys.argv[1], int(sys.argv[2]), sys.stdout)
