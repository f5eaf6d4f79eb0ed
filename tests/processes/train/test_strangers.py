"""Strangers at the ports of workers: they execute nothing, and no port is open to other machines."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from ray_app.errors import ForgedMessageError, PeerLostError
from ray_app.reduction import messages
from ray_app.reduction.peer_errors import collective
from ray_app.reduction.world import World
from ray_app.testing import WorkerPool, cache_windows
from ray_app.train.job import Hooks
from ray_app.train.membership import KEY_BYTES, GenerationInfo
from ray_app.train.process_group import ProcessGroup, open_store
from tests.support.local_world import CPU, make_job, write_images
from tests.support.mutations import Malicious

LOCALHOST = "127.0.0.1"
KEY = "ab" * KEY_BYTES


def open_listeners() -> set[str]:
    """Returns the addresses at which this process listens, from `/proc/net/tcp` and `tcp6` by its inodes."""
    connections = psutil.Process().net_connections("tcp")
    return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}


def meet(rank: int, _store: Path, port: int, marker: Path, kind: str) -> list[Any]:
    """Opens two generations; in the first, rank 1 is a stranger without the key and sends a hostile pickle."""
    answers: list[Any] = []
    for number in (1, 2):
        is_stranger = (rank, number) == (1, 1)
        key = "cd" * KEY_BYTES if is_stranger else KEY
        group, world = ProcessGroup(), World(rank, 2, 2)
        group.open(GenerationInfo(number, rank, 2, LOCALHOST, port, key=key), CPU, "gloo")
        value = Malicious(marker) if is_stranger else number
        try:
            if kind == "gather":
                answers += messages.gather(value, world)
            elif kind == "broadcast":
                answers.append(messages.broadcast(value, 1, world))
            elif rank == 1:
                with collective():
                    for work in messages.start_send_value(value, 0):
                        work.wait()
            else:
                answers.append(messages.receive_value(1))
        except PeerLostError as error:
            answers.append(type(error).__name__)
        finally:
            group.close(number == 1)
    return answers if rank == 0 else []


@pytest.mark.parametrize("kind", ["gather", "broadcast", "message"])
def test_a_stranger_in_place_of_a_rank_executes_nothing_and_the_next_generation_works(
    worker_pool: WorkerPool, tmp_path: Path, kind: str
) -> None:
    store = open_store(LOCALHOST)
    first = worker_pool.run(2, meet, store.port, tmp_path / "executed", kind)[0]
    assert first[0] == "ForgedMessageError"
    assert first[1:] == ([2, 2] if kind == "gather" else [2])
    assert not (tmp_path / "executed").exists()


def test_the_store_of_a_worker_listens_at_the_address_of_its_node() -> None:
    before = open_listeners()
    store = open_store("127.0.0.3")
    assert open_listeners() - before == {"127.0.0.3"}
    store.set("a", b"b")
    assert store.get("a") == b"b"


@pytest.mark.parametrize("garbage", [b"\xff", b'{"a": 1}', b"[1]", b"[[1]]"])
def test_garbage_in_the_store_ends_the_generation(garbage: bytes) -> None:
    class Store:
        def set(self, key: str, value: str) -> None: ...

        def multi_get(self, keys: list[str]) -> list[bytes]:
            return [garbage, b"[]"]

    with pytest.raises(ForgedMessageError):
        ProcessGroup()._find_group_sockets(Store(), GenerationInfo(1, 0, 2, LOCALHOST, 1))


@dataclass(frozen=True)
class RecordListeners:
    """A hook that writes where the process of each rank listens after a step."""

    folder: Path

    def __call__(self, rank: int, step: int) -> None:
        (self.folder / f"{step}-{rank}").write_text(json.dumps(sorted(open_listeners())))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"train__reduction": "overlapped"},
        {"train__strategy": "local_sgd", "train__local_steps": 2},
        {"train__strategy": "fsdp"},
        {"train__strategy": "central_storage"},
    ],
    ids=["ddp", "overlapped", "local_sgd", "fsdp", "central_storage"],
)
def test_no_worker_listens_at_all_addresses(worker_pool: WorkerPool, tmp_path: Path, fields: dict[str, Any]) -> None:
    data = write_images(tmp_path / "data", [[32]])
    job = make_job(tmp_path / "run", data, logical_workers=2, batch=8, **fields)
    (tmp_path / "listeners").mkdir()
    results = worker_pool.train(job, 2, Hooks(after_step=RecordListeners(tmp_path / "listeners")), cache_windows)
    assert [result.error for result in results] == [None, None], results[0].trace
    addresses = {file.name: json.loads(file.read_text()) for file in (tmp_path / "listeners").iterdir()}
    assert {file[-1] for file in addresses} == {"0", "1"}
    assert all(value == [LOCALHOST] for value in addresses.values()), addresses
