"""Opening a data set of very many Parquet shards, on a disk and in a bucket that answers each request after 20 ms.

Each shard has 20 rows in one row group, so a footer is all there is to read. The bucket is a small server in a process
of its own, which knows listings and reads of the S3 protocol: moto, the emulator of the tests, needs 5 ms of CPU for a
request, so 100,000 footers would take it 8 minutes. `kept` has the footers file of an ingest in the data set, and a
start is a command of `ray-app train`, to its first step.

python benchmarks/shards.py                   # 100,000 shards, 5 minutes
python benchmarks/shards.py --shards 2000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from urllib.parse import parse_qs, unquote, urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.footers import resident_mb
from benchmarks.start import measure_command
from ray_app.data.dataset import open_dataset
from ray_app.data.parquet_files import FOOTERS_FILE, read_footers
from ray_app.storage.data_files import files_below

DELAY_S, BAR_S = 0.02, 60
ROWS, PAGE = 20, 1000
_DATE = "Mon, 30 Nov 2026 00:00:00 GMT"
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


class Bucket(asyncio.Protocol):
    """A connection to the bucket `b` with the same shard under many names, and some other objects.

    Args:
        shard: Content of each shard.
        keys: Names of the shards, in order.
        others: Contents of the other objects.
        counts: Number of requests of each kind.
    """

    def __init__(self, shard: bytes, keys: list[str], others: dict[str, bytes], counts: dict[str, int]) -> None:
        self._shard, self._keys = shard, keys
        self._others, self._counts = others, counts
        self._shard_keys = set(keys)
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Stores the connection."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answers each complete request after a pause; none has a body."""
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head, self._received = self._received[:end].decode(), self._received[end + 4 :]
            asyncio.get_running_loop().call_later(DELAY_S, self._answer, head)

    def _answer(self, head: str) -> None:
        line, *fields = head.split("\r\n")
        method, target, _ = line.split(" ")
        headers = {name.lower(): value for name, _, value in (field.partition(": ") for field in fields)}
        url = urlsplit(target)
        _, _, key = unquote(url.path).strip("/").partition("/")
        if "list-type=2" in url.query:
            self._send("listings", 200, self._list(parse_qs(url.query)), {"Content-Type": "application/xml"})
        elif (content := self._others.get(key, self._shard if key in self._shard_keys else None)) is None:
            self._send("missing", 404, b"<Error><Code>NoSuchKey</Code></Error>" * (method == "GET"), {})
        else:
            extra = {"ETag": '"1"', "Last-Modified": _DATE}
            status, size = 200, len(content)
            if part := headers.get("range"):
                low, high = part.removeprefix("bytes=").split("-")
                content = content[int(low) : int(high) + 1]
                status, extra["Content-Range"] = 206, f"bytes {low}-{int(low) + len(content) - 1}/{size}"
            self._send("heads" if method == "HEAD" else "reads", status, content, extra, method == "HEAD")

    def _list(self, query: dict[str, list[str]]) -> bytes:
        prefix, start = query.get("prefix", [""])[0], int(query.get("continuation-token", ["0"])[0])
        entry = "<Contents><Key>{}</Key><LastModified>2026-11-30T00:00:00.000Z</LastModified><ETag>&quot;1&quot;</ETag>"
        entry += "<Size>{}</Size></Contents>"
        objects = [(key, len(content)) for key, content in self._others.items()]
        objects = [*objects, *((key, len(self._shard)) for key in self._keys)]
        objects = [pair for pair in objects if pair[0].startswith(prefix)]
        page = objects[start : start + PAGE]
        is_cut = start + PAGE < len(objects)
        token = f"<NextContinuationToken>{start + PAGE}</NextContinuationToken>" if is_cut else ""
        body = "".join(entry.format(*pair) for pair in page)
        return (
            f"<ListBucketResult><Name>b</Name><Prefix>{prefix}</Prefix><KeyCount>{len(page)}</KeyCount>"
            f"<MaxKeys>{PAGE}</MaxKeys><IsTruncated>{str(is_cut).lower()}</IsTruncated>{token}{body}</ListBucketResult>"
        ).encode()

    def _send(self, kind: str, status: int, body: bytes, headers: dict[str, str], is_head: bool = False) -> None:
        self._counts[kind] = self._counts.get(kind, 0) + 1
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *(f"{k}: {v}" for k, v in headers.items())]
        assert isinstance(self._transport, asyncio.Transport)
        self._transport.write("\r\n".join([*lines, "", ""]).encode() + (b"" if is_head else body))


def serve(pipe: Connection, shard: bytes, keys: list[str]) -> None:
    """Serves the bucket at a port that it sends; answers each message with the counts, and takes new objects."""
    others: dict[str, bytes] = {}
    counts: dict[str, int] = {}

    def handle_message() -> None:
        others.update(pipe.recv())
        pipe.send(dict(counts))
        counts.clear()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Bucket(shard, keys, others, counts), "127.0.0.1", 0)
        loop.add_reader(pipe.fileno(), handle_message)
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    asyncio.run(run())


def make_shard() -> bytes:
    """Returns a Parquet file of a feature and a label."""
    generator = np.random.default_rng(0)
    columns = {"x": generator.random(ROWS), "label": generator.integers(0, 2, ROWS)}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return bytes(sink.getvalue())


def measure_opening(path: str) -> tuple[float, float, float]:
    """Returns wall seconds, CPU seconds and peak megabytes of opening a data set; runs in another process."""
    # This write resets the peak.
    Path("/proc/self/clear_refs").write_text("5")
    before_mb = resident_mb("VmRSS")
    began, began_cpu = time.perf_counter(), time.process_time()
    open_dataset(path)
    return time.perf_counter() - began, time.process_time() - began_cpu, resident_mb("VmHWM") - before_mb


def main() -> None:
    """Prints seconds, CPU seconds, memory and requests of each way, and the seconds to a first step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--starts", action="store_true", help="also start ray-app train")
    options = parser.parse_args()
    os.environ.update(_CREDENTIALS)
    context = multiprocessing.get_context("spawn")
    shard, names = make_shard(), [f"part-{number:06d}.parquet" for number in range(options.shards)]
    pipe, other_end = context.Pipe()
    server = context.Process(target=serve, args=(other_end, shard, [f"rows/{name}" for name in names]), daemon=True)
    server.start()
    bucket = f"s3://b/rows?endpoint_override=127.0.0.1:{pipe.recv()}&scheme=http"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "rows")
        folder.mkdir()
        for file in names:
            (folder / file).write_bytes(shard)
        print(f"{options.shards:,} shards, {options.rounds} rounds, {os.cpu_count()} cores; bar of a start: {BAR_S} s")
        for is_kept in (False, True):
            for kind, path in (("disk", str(folder)), ("bucket", bucket)):
                if is_kept:
                    keep_footers(path, folder, pipe)
                label = f"{kind}{', kept' * is_kept}"
                samples = []
                for _ in range(options.rounds):
                    pipe.send({})
                    pipe.recv()
                    with context.Pool(1) as pool:
                        samples.append(pool.apply(measure_opening, (path,)))
                    pipe.send({})
                    requests = json.dumps(pipe.recv())
                wall_s, cpu_s, peak_mb = (median(column) for column in zip(*samples, strict=True))
                print(f"  {label:<14} {wall_s:.1f} s, CPU {cpu_s:.1f} s, {peak_mb:.0f} MB, {requests}", flush=True)
                if options.starts:
                    print(f"  {label:<14} to the first step {start_s(path, Path(name)):.1f} s", flush=True)
    server.kill()


def keep_footers(path: str, folder: Path, pipe: Connection) -> None:
    """Puts the footers file of an ingest into a data set."""
    from ray_app.storage.files import to_location

    location = to_location(path)
    footers = read_footers(location, files_below(location, ".parquet"), trusted=True)
    footers.put(folder)
    if not isinstance(location, Path):
        pipe.send({f"rows/{FOOTERS_FILE}": (folder / FOOTERS_FILE).read_bytes()})
        pipe.recv()


def start_s(path: str, folder: Path) -> float:
    """Returns the seconds from a command to its first step."""
    config = folder / "train.yaml"
    config.write_text(
        "task: {class_path: ray_app.task.tabular.TabularClassification}\n"
        "optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}\n"
    )
    fields = [f"--data.path={path}", "--train.max_steps=1", "--train.strategy=single", "--data.global_batch_size=32"]
    measured = measure_command(folder / "runs", *fields, config=str(config))
    return measured["to the first step"].wall_ms / 1e3


if __name__ == "__main__":
    main()
