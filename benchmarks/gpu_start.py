"""Lines that come first: preconditions of all others, in seconds."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.gpu_digests import L, format_losses, network
from benchmarks.gpu_lines import Line, Outcome
from benchmarks.gpu_workers import LOCALHOST, Bench, device_of
from ray_app.checkpoint.store import CheckpointStore
from ray_app.devices import kind_of
from ray_app.driver.single import train_in_process
from ray_app.errors import PeerLostError
from ray_app.reduction.base import clear_group, collective
from ray_app.runlog.evaluations import read_evaluations
from ray_app.task import environment
from ray_app.testing import DieAfter, KilledError
from ray_app.train.job import Hooks
from ray_app.train.membership import GenerationInfo, SingleProcessMembership
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
    text += f"; nobody says {', '.join(unknown)}" if unknown else ""
    same = digests[0] == digests[1] and losses[0] == losses[1] and len(losses[0]) == 2
    return Outcome(text, same and not unknown, {"digests": digests, "environment": described})


def group_of_one(bench: Bench) -> Outcome:
    """Checks that a process group of one can be opened, used, aborted, closed and opened again, with each class that
    PyTorch has for NCCL.
    """
    newer = hasattr(dist.distributed_c10d, "ProcessGroupNCCL2")
    classes = CLASSES if newer and bench.device == "cuda" else {"as torch chooses": CLASSES["as torch chooses"]}
    raised_by_class = {}
    for name, variables in classes.items():
        with bench.pool(1) as pool:
            store = TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
            [raised_by_class[name]] = pool.run(1, open_group_twice, store.port, bench.device, variables)
    wrong = [name for name, raised in raised_by_class.items() if raised is None and bench.device == "cuda"]
    nothing = (
        "an exchange after the abort raises nothing"
        if bench.device == "cuda"
        else "gloo, which has no peer to lose in such a group"
    )
    text = "; ".join(f"{name}: {raised or nothing}" for name, raised in raised_by_class.items())
    return Outcome(text, not wrong, {"raised": raised_by_class})


def open_group_twice(rank: int, store: Path, port: int, device: str, variables: dict[str, str]) -> str | None:
    """Opens and aborts a group of one process, and opens another; returns the error of a reduction after the abort.

    Raises:
        RuntimeError: The reduction gave a wrong value.
        Exception: Any error that does not count as the loss of a peer.
    """
    del store
    os.environ |= variables
    torch_device, raised = device_of(device, 0), None
    kind_of(torch_device).use(torch_device)
    for number in (1, 2):
        group = ProcessGroup()
        with collective():
            group.open(GenerationInfo(number, rank, 1, LOCALHOST, port), torch_device, "auto")
        _reduce(group, torch_device)
        if number == 1:
            group.abort()
            for abort in group._abort_threads.values():
                abort.join()
            # Otherwise the reduction would be refused before it reaches the backend.
            clear_group(group)
            try:
                _reduce(group, torch_device)
            except PeerLostError as error:
                raised = f"{type(error.__cause__ or error).__name__}: {str(error)[:80]}"
        group.close(broken=number == 1)
    return raised


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
]
