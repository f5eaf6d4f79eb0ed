"""Lines that come first: preconditions of all others, in seconds."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.gpu_digests import L, format_losses, network
from benchmarks.gpu_lines import Line, NotYetError, Outcome
from benchmarks.gpu_workers import LOCALHOST, Bench, device_of, timed
from ray_app.checkpoint.store import CheckpointStore
from ray_app.devices import kind_of
from ray_app.driver.single import train_in_process
from ray_app.errors import PeerLostError
from ray_app.reduction.bucketed import BucketedReducer
from ray_app.reduction.peer_errors import clear_group, collective
from ray_app.reduction.world import World
from ray_app.runlog.evaluations import read_evaluations
from ray_app.task import environment
from ray_app.testing import DieAfter, KilledError
from ray_app.train.job import Hooks
from ray_app.train.membership import KEY_BYTES, GenerationInfo, SingleProcessMembership
from ray_app.train.process_group import ProcessGroup
from tests.support.library_names import LIBRARIES, missing, names

CLASSES: dict[str, dict[str, str]] = {
    "as torch chooses": {},
    "older class": {"TORCH_DIST_USE_NCCL2": "0"},
    "newer class": {"TORCH_DIST_USE_NCCL2": "1"},
}
"""Environments of the backend "nccl": PyTorch 2.15 has two classes for it."""


def library_names(bench: Bench) -> Outcome:
    """Checks that every library name that the code uses exists in the installed libraries."""
    del bench
    libraries = [library for library in LIBRARIES if importlib.util.find_spec(library) is not None]
    used = {name: location for name, location in names().items() if name.split(".")[0] in libraries}
    absent = missing(used)
    text = f"{len(used)} names of {', '.join(libraries)}" + "".join(
        f"; {location} uses {name}" for name, location in absent.items()
    )
    return Outcome(text, not absent, {"missing": absent})


def train_single(bench: Bench) -> Outcome:
    """Compares two steps in this process (`train.strategy: single`) to two steps with a restart between them."""
    described = environment.describe(bench.first)
    unknown = [name for name, value in described.items() if "unknown" in value]
    fields: dict[str, Any] = {"train__max_steps": 2, "checkpoint__every_steps": 1, "train__strategy": "single"}
    fields |= {"data__eval_path": str(bench.few), "evaluate__where": "workers"}
    digests, losses = [], []
    for hooks in (Hooks(), Hooks(after_step=DieAfter(1))):
        job = bench.job(network(bench), bench.few, logical_workers=L, batch=bench.sizes.digest_batch, **fields)
        try:
            train_in_process(job, SingleProcessMembership(L, lambda: False), hooks)
        except KilledError:
            train_in_process(job, SingleProcessMembership(L, lambda: False), Hooks())
        digests.append(CheckpointStore(job.paths).commits()[-1].params_digest)
        losses.append([evaluation.metrics["loss"] for evaluation in read_evaluations(job.paths)])
    text = (
        f"{digests[0][:12]}, resumed {digests[1][:12]}; losses of evaluations {format_losses(losses[0])},"
        f" {format_losses(losses[1])}"
    )
    text += f"; unknown is {', '.join(unknown)}" if unknown else ""
    same = digests[0] == digests[1] and losses[0] == losses[1] and len(losses[0]) == 2
    return Outcome(text, same and not unknown, {"digests": digests, "environment": described})


def group_of_one(bench: Bench) -> Outcome:
    """Checks that a process group of one can be opened, used, aborted, closed and opened again, with each class that
    PyTorch has for NCCL; measures both, and whether other threads run meanwhile.
    """
    newer = hasattr(dist.distributed_c10d, "ProcessGroupNCCL2")
    classes = CLASSES if newer and bench.device == "cuda" else {"as torch chooses": CLASSES["as torch chooses"]}
    facts_of = dict[str, GroupFacts]()
    for name, variables in classes.items():
        with bench.pool(1) as pool:
            store = TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
            [facts_of[name]] = pool.run(1, open_group_twice, store.port, bench.device, variables)
    wrong = [name for name, facts in facts_of.items() if not facts.raised and bench.device == "cuda"]
    text = "; ".join(f"{name}: {facts.describe()}" for name, facts in facts_of.items())
    return Outcome(text, not wrong, {name: asdict(facts) for name, facts in facts_of.items()})


@dataclass
class GroupFacts:
    """What was seen of a group of one.

    Args:
        raised: The error of a reduction after the abort; empty: there was none.
        open_s: Seconds in which the first group formed.
        abort_s: Seconds of its abort.
        device_bytes: Memory of the device that it took, outside of the allocator, too.
        silent_s: Longest time in which another thread did not run while it formed.
    """

    raised: str = ""
    open_s: float = 0.0
    abort_s: float = 0.0
    device_bytes: int = 0
    silent_s: float = 0.0

    def describe(self) -> str:
        """Returns the facts as text."""
        raised = self.raised or "a reduction after the abort raises nothing, as with gloo, which has no peer to lose"
        return (
            f"{raised}; open {self.open_s:.2f} s, abort {self.abort_s:.2f} s, {self.device_bytes / 1e6:,.0f} MB, other"
            f" threads waited {self.silent_s * 1e3:.0f} ms"
        )


def open_group_twice(rank: int, store: Path, port: int, device: str, variables: dict[str, str]) -> GroupFacts:
    """Opens and aborts a group of one process, and opens another; returns what was seen of the first.

    Raises:
        RuntimeError: The reduction gave a wrong value.
        Exception: Any error that does not count as the loss of a peer.
    """
    del store
    os.environ |= variables
    torch_device, facts = device_of(device, 0), GroupFacts()
    kind_of(torch_device).use(torch_device)
    # The context of the device is not to be counted for the group.
    torch.ones(1, device=torch_device).item()
    free = _free_bytes(torch_device)
    for number in (1, 2):
        group, formed = ProcessGroup(), threading.Event()
        began_s = time.perf_counter()
        with ThreadPoolExecutor(1) as other:
            silence = other.submit(_longest_silence, formed)
            with collective():
                group.open(GenerationInfo(number, rank, 1, LOCALHOST, port, key="ab" * KEY_BYTES), torch_device, "auto")
            open_s = time.perf_counter() - began_s
            formed.set()
        _reduce(group, torch_device)
        if number == 1:
            facts.open_s, facts.silent_s = open_s, silence.result()
            facts.device_bytes = free - _free_bytes(torch_device)
            began_s = time.perf_counter()
            group.abort()
            for abort in group._abort_threads.values():
                abort.join()
            facts.abort_s = time.perf_counter() - began_s
            # Otherwise the reduction would be refused before it reaches the backend.
            clear_group(group)
            try:
                _reduce(group, torch_device)
            except PeerLostError as error:
                facts.raised = f"{type(error.__cause__ or error).__name__}: {str(error)[:80]}"
        group.close(broken=number == 1)
    return facts


def buckets_alone(bench: Bench) -> Outcome:
    """Compares the gradients that a worker sends to itself in buckets, by the collectives of its device, with its sums;
    measures what the collectives cost.
    """
    with bench.pool(1) as pool:
        store = TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
        [seconds] = pool.run(1, send_to_itself, store.port, bench.first)
    return Outcome(", ".join(f"{name} {1e3 * step_s:.2f} ms" for name, step_s in seconds.items()), True, seconds)


def send_to_itself(rank: int, store: Path, port: int, device: torch.device) -> dict[str, float]:
    """Returns the seconds of a step by how a worker alone reduces its gradients.

    Raises:
        RuntimeError: A way gives other gradients.
    """
    del store
    kind_of(device).use(device)
    group = ProcessGroup()
    with collective():
        group.open(GenerationInfo(1, rank, 1, LOCALHOST, port, key="ab" * KEY_BYTES), device, "auto")
    world = World(rank, 1, L, has_device_collectives=group.has_device_collectives)
    expected, seconds = _reduce_steps(world, "exact", device, sends=False)
    times = {"nothing sent": seconds}
    reduction: Literal["exact", "overlapped"]
    for reduction in ("exact", "overlapped"):
        gradients, times[reduction] = _reduce_steps(world, reduction, device, sends=True)
        if not all(map(torch.equal, gradients, expected)):
            raise RuntimeError(f"{reduction}: the gradients are not the sums that were sent")
    group.close()
    return times


def _reduce_steps(
    world: World, reduction: Literal["exact", "overlapped"], device: torch.device, sends: bool
) -> tuple[list[torch.Tensor], float]:
    """Returns the gradients of a step with six buckets, and the seconds of the fastest of three."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))).to(device)
    rows, weights = torch.randn(L, 16, 256).to(device), torch.full((16,), 0.5).to(device)
    reducer, times = BucketedReducer(model, world, reduction, bucket_mb=0.3), list[float]()
    if sends:
        # The reducer of a worker alone sends nothing by itself.
        reducer._world = replace(world, size=2, assignment=(range(L),) * 2)
    for _ in range(3):
        began_s = time.perf_counter()
        for logical_worker in range(L):
            reducer.backward(model(rows[logical_worker]).square().mean(1), weights, logical_worker)
        reducer.launch()
        reducer.finish()
        kind_of(device).synchronize(device)
        times.append(time.perf_counter() - began_s)
    gradients = [gradient.clone() for gradient in reducer.gradients()]
    reducer.close()
    return gradients, min(times)


def _longest_silence(ended: threading.Event) -> float:
    """Returns the longest time between two turns of this thread until an event, in seconds."""
    longest_s, last_s = 0.0, time.perf_counter()
    while not ended.wait(0.002):
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    return max(longest_s, time.perf_counter() - last_s)


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0


def copies(bench: Bench) -> Outcome:
    """Measures copies of a GB between device and host, from page-locked and from other memory, and the locking."""
    if bench.device == "cpu":
        raise NotYetError("a dry run has no device to copy to")
    with bench.pool(1) as pool:
        [seconds] = pool.run(1, time_copies)
    rates = {name: 1.0 / value for name, value in seconds.items()}
    return Outcome(", ".join(f"{name} {rate:.1f} GB/s" for name, rate in rates.items()), None, rates)


def time_copies(rank: int, store: Path) -> dict[str, float]:
    """Returns the seconds of each copy of 1 GB, the faster of two, and of locking the pages of 1 GB."""
    del rank, store
    on_host, on_device = torch.zeros(10**9, dtype=torch.uint8), torch.zeros(10**9, dtype=torch.uint8, device="cuda")
    seconds = {"page-locking": timed(on_host.pin_memory)}
    locked = on_host.pin_memory()
    for name, host in (("page-locked", locked), ("pageable", on_host)):
        for direction, (target, source) in {"to": (on_device, host), "from": (host, on_device)}.items():
            copy = partial(_copy_and_wait, target, source)
            seconds[f"{direction} the device, {name}"] = min(timed(copy), timed(copy))
    return seconds


def _copy_and_wait(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()


_BREAK = """
import time, torch
values = torch.zeros(4, device="cuda")
for operation in (lambda: values[torch.tensor([9], device="cuda")], lambda: values + 1):
    try:
        operation()
        torch.cuda.synchronize()
        print("none")
    except RuntimeError as error:
        print(type(error).__name__)
print(time.time())
"""


def broken_device(bench: Bench) -> Outcome:
    """Shows which error a failed assertion on the device raises, then and ever after, and that the process can end."""
    if bench.device == "cpu":
        raise NotYetError("a dry run has no device that could fail")
    done = subprocess.run([sys.executable, "-c", _BREAK], capture_output=True, text=True, check=True, timeout=60)
    *errors, last_s = done.stdout.split()
    text = f"{' and then '.join(errors)}; the process ended {time.time() - float(last_s):.1f} s later"
    return Outcome(text, set(errors) == {torch.AcceleratorError.__name__}, {"errors": errors})


def _reduce(group: ProcessGroup, torch_device: torch.device) -> None:
    values = torch.full((1024,), 3.0, device=torch_device)
    with collective():
        dist.all_reduce(values)
    group.check_device_errors()
    if not torch.equal(values.cpu(), torch.full((1024,), 3.0)):
        raise RuntimeError(f"the sum over one process of 3 is {values[0].item()}")


LINES = [
    Line("names of libraries", library_names, 30, "all exist"),
    Line("start: two steps, a checkpoint between them", train_single, 30, "equal", stops=True),
    Line("NCCL, a group of one", group_of_one, 45, "an abort is the loss of a peer"),
    Line("NCCL, buckets of a group of one", buckets_alone, 20, "equal"),
    Line("copies: host to device, device to host", copies, 20),
    Line("an error of the device in a child", broken_device, 20, "AcceleratorError, ever after"),
]
