"""Without one of its synchronizations, a training on simulated devices fails: the devices show a missing order.

`SITES` has every statement of the package that orders work of a device, with the training that fails without it, or
with the reason why none does. Each is removed in the processes of the workers alone.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import ray_app
from ray_app.testing import WorkerPool, read_trained_run
from tests.device.strategies import BIT_IDENTICAL, strategy_job
from tests.device.training import check_races, train_on_devices

ORDERING = {
    *("synchronize_stream", "synchronize", "wait_stream", "wait_event", "record_stream", "record", "hand_over"),
    *("make_available", "record_on_current_stream", "check_device_errors", "_wait_for_device"),
}
"""Names of functions that order work, or that do nothing but call one of these."""


class Site(NamedTuple):
    """A statement that orders work.

    Args:
        module: The module, without the name of the package.
        function: The function or method with the statement.
        statement: The statement, as `ast.unparse` writes it.
    """

    module: str
    function: str
    statement: str


class Case(NamedTuple):
    """A training that fails without a statement.

    Args:
        strategy: A name in `BIT_IDENTICAL`.
        workers: Number of workers.
    """

    strategy: str
    workers: int


def copy_state(rank: int, store: Path) -> list[float]:
    """Copies a tensor to the host, and reads the copy at once."""
    from ray_app.train.state.transfer import copy_to_host
    from tests.device.sim import DEVICE

    return copy_to_host({"values": torch.arange(5.0, device=DEVICE)})["values"].tolist()


def use_memory_of_a_side_stream(rank: int, store: Path) -> float:
    """Reads values that a side stream has written and handed over, and lets it use their memory again."""
    from ray_app.reduction.overlap import SideStream
    from tests.device.sim import DEVICE

    side = SideStream(DEVICE, "test of removals")
    with side.entered():
        values = torch.ones(5, device=DEVICE)
    side.hand_over([values], side.mark())
    total = values.sum()
    del values
    with side.entered():
        torch.zeros(5, device=DEVICE)
    return total.item()


def drop_memory_on_a_side_stream(rank: int, store: Path) -> float:
    """Reads values on a side stream, and lets the computing stream use their memory again."""
    from ray_app.reduction.overlap import SideStream, record_on_current_stream
    from tests.device.sim import DEVICE

    side, values = SideStream(DEVICE, "test of removals"), torch.ones(5, device=DEVICE)
    ready = torch.accelerator.current_stream(DEVICE).record_event()
    with side.entered():
        torch.accelerator.current_stream(DEVICE).wait_event(ready)
        total = values.sum()
        record_on_current_stream([values])
    del values
    torch.zeros(5, device=DEVICE)
    side.join()
    return total.item()


def add_on_the_host(rank: int, store: Path) -> list[float]:
    """Copies a gradient to a bucket in the memory of the host, and reads the sum at once."""
    from ray_app.reduction.bucketed import Bucket
    from ray_app.reduction.world import World
    from tests.device.sim import DEVICE

    bucket = Bucket([torch.nn.Parameter(torch.ones(5, device=DEVICE))], World(0, 2, 2), 0)
    bucket.add_leaf(0, [torch.arange(5.0, device=DEVICE)])
    bucket.add_copied_leaf()
    return bucket.result[:5].tolist()


Check = Callable[[int, Path], Any]
"""A function that one worker calls; without a statement it raises an error or returns another result."""
LINK = "tests/processes/train/test_device_group.py has lost links; those of the simulated devices are not tried"
ABORT = "an aborted kernel of NCCL may still write; simulated collectives are over when they are launched"
SITES: dict[Site, Case | Check | str] = {
    Site("data.feed", "Feed.next", "self._upload.make_available(batches)"): Case("ddp", 1),
    Site(
        "data.feed",
        "Upload.make_available",
        "self._side.hand_over([values for batch in batches for values in batch.fields.values()], batches.mark)",
    ): Case("ddp", 1),
    Site("reduction.overlap", "SideStream.hand_over", "computing.wait_event(mark)"): Case("ddp", 1),
    Site("reduction.overlap", "SideStream.hand_over", "tensor.record_stream(computing)"): use_memory_of_a_side_stream,
    Site(
        "reduction.overlap",
        "SideStream.join",
        "self._kind.current_stream(self._device).wait_stream(self._stream)",
    ): Case("ddp", 2),
    Site("reduction.bucketed", "Bucket.add_copied_leaf", "copied.synchronize()"): add_on_the_host,
    Site("train.state.transfer", "_broadcast_snapshot", "check_device_errors()"): LINK,
    Site("reduction.overlap", "StreamExecutor.drain", "self._side.join()"): Case("ddp", 2),
    Site("train.state.transfer", "copy_to_host", "kind_of(device).synchronize_stream(device)"): copy_state,
    Site("devices", "DeviceKind.synchronize_stream", "self.current_stream(device).synchronize()"): copy_state,
    Site(
        "train.strategies.central_storage",
        "CentralBackend._fetch_gradients",
        "kind.synchronize_stream(self._device)",
    ): Case("central_storage", 1),
    Site("train.step.step_stats", "StepTimer.begin", "self._events[0].record()"): Case("ddp", 2),
    Site("train.step.step_stats", "StepTimer.computed", "self._events[1].record()"): Case("ddp", 2),
    Site("train.step.step_stats", "StepStats.gather_on_device", "check_device_errors()"): LINK,
    Site("reduction.peer_errors", "check_device_errors", "_group.check_device_errors()"): LINK,
    Site("train.process_group", "ProcessGroup.check_device_errors", "self._wait_for_device()"): LINK,
    Site("train.process_group", "ProcessGroup._open", "self.check_device_errors()"): LINK,
    Site(
        "train.process_group",
        "ProcessGroup._wait_for_device",
        "kind_of(self.device).synchronize_stream(self.device)",
    ): LINK,
    Site(
        "reduction.overlap",
        "record_on_current_stream",
        "tensor.record_stream(kind.current_stream(tensor.device))",
    ): drop_memory_on_a_side_stream,
    Site(
        "reduction.sharded",
        "DeterministicShardedReducer._push",
        "record_on_current_stream(added)",
    ): "the stream that receives shards waits for the computing one before it receives others",
    Site("reduction.overlap", "StreamExecutor.close", "self._side.join()"): ABORT,
    Site("reduction.messages", "check_errors_on_all_ranks", "check_device_errors()"): LINK,
    Site("train.step.worker_evaluation", "WorkerEvaluation.run", "check_device_errors()"): LINK,
    Site("train.process_group", "ProcessGroup.close", "kind_of(self.device).synchronize(self.device)"): ABORT,
    Site("devices", "DeviceKind.synchronize", "self.module.synchronize(device)"): ABORT,
    Site(
        "train.step.step_stats", "StepTimer.breakdown", "self._events[1].synchronize()"
    ): "a GPU has no time of an event that it has not reached; the simulated devices reach each at once",
}
"""Every statement that orders work, but those of CUDA graphs, with a training or check that
fails without it, or the reason why none does."""


def functions_of(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields the functions of a module and the methods of its classes, by name."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{part.name}", part) for part in node.body if isinstance(part, ast.FunctionDef))


def is_ordering(statement: ast.AST) -> bool:
    """Returns whether a statement orders work of a device."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    called = ast.unparse(statement.value.func)
    return called.rpartition(".")[2] in ORDERING or called.endswith("_side.join")


def test_every_statement_that_orders_work_of_a_device_has_a_test() -> None:
    folder = Path(ray_app.__file__).parent
    sites = {
        Site(".".join(file.relative_to(folder).with_suffix("").parts), name, ast.unparse(statement))
        for file in folder.rglob("*.py")
        if "cluster" not in file.relative_to(folder).parts
        and any(word in (code := file.read_text()) for word in (*ORDERING, "_side.join"))
        for name, function in functions_of(ast.parse(code))
        for statement in ast.walk(function)
        if is_ordering(statement)
    }
    graphs = {site for site in sites if site.function.startswith("CudaGraphBackend")}
    assert sites - graphs == set(SITES)


@pytest.mark.search
@pytest.mark.parametrize(
    "site",
    [
        pytest.param(site, id=f"{site.function}: {site.statement}")
        for site, case in SITES.items()
        if not isinstance(case, str)
    ],
)
def test_without_a_statement_that_orders_work_a_training_fails(
    device_pool: WorkerPool, data: Path, tmp_path: Path, site: Site
) -> None:
    case = SITES[site]
    assert not isinstance(case, str)
    workers = case.workers if isinstance(case, Case) else 1
    expected = run_case(device_pool, data, tmp_path / "expected", case)
    device_pool.run(workers, remove, site)
    try:
        with pytest.raises(AssertionError):
            assert run_case(device_pool, data, tmp_path / "run", case) == expected
    finally:
        device_pool.call(workers, restore, site)


def run_case(pool: WorkerPool, data: Path, folder: Path, case: Case | Check) -> Any:
    """Trains, checks that nothing was out of order, and returns the digests; or returns the result of a check."""
    if not isinstance(case, Case):
        return pool.run(1, case)
    job = strategy_job(folder, data, 0.3, **BIT_IDENTICAL[case.strategy])
    results = train_on_devices(pool, job, [[*range(case.workers)]])
    check_races(results)
    return read_trained_run(job).digests


def remove(rank: int, store: Path, site: Site) -> None:
    """Replaces a function by one without a statement, in this process."""
    module = importlib.import_module(f"ray_app.{site.module}")
    function = dict(functions_of(ast.parse(inspect.getsource(module))))[site.function]

    class Removal(ast.NodeTransformer):
        def visit_Expr(self, node: ast.Expr) -> ast.stmt:
            return ast.copy_location(ast.Pass(), node) if ast.unparse(node) == site.statement else node

    tree = ast.Module([ast.fix_missing_locations(Removal().visit(function))], [])
    namespace: dict[str, Any] = {}
    exec(compile(tree, str(module.__file__), "exec"), vars(module), namespace)
    owner, name = owner_of(module, site)
    _originals[site] = vars(owner)[name]
    setattr(owner, name, namespace[name])


def restore(rank: int, store: Path, site: Site) -> None:
    """Undoes `remove` in this process, unless it is a new one."""
    owner, name = owner_of(importlib.import_module(f"ray_app.{site.module}"), site)
    if site in _originals:
        setattr(owner, name, _originals.pop(site))


def owner_of(module: ModuleType, site: Site) -> tuple[Any, str]:
    """Returns the class or module of a function, and the function's name in it."""
    owner, _, name = site.function.rpartition(".")
    return (getattr(module, owner) if owner else module), name


_originals: dict[Site, Any] = {}
