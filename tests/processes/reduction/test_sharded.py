"""Fully sharded training: the bits of `ddp`, or its rows and weights if the network adds; checkpoints that know nothing
of shards.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ray_app.checkpoint.format import params_digest
from ray_app.data.feed import Feed
from ray_app.errors import ConfigError, NonFiniteError, PeerLostError
from ray_app.plan.order import Cursor
from ray_app.reduction import group_state
from ray_app.reduction.base import World
from ray_app.runlog.journal import MetricsReader, read_events
from ray_app.task.device import set_up_torch
from ray_app.task.image import ImageClassification
from ray_app.testing import DieAfter, KilledError, TrainedRun, WorkerPool, cache_windows, read_trained_run
from ray_app.train import process_group
from ray_app.train.build import build_state, build_step
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import Flags
from ray_app.train.state.state import TrainingState
from tests.support.local_world import CPU, LocalMembership, OwnStep, TinyImages, feed_of
from tests.support.sharded import ONE_CYCLE, Units, assert_bits, data, fsdp_job
from tests.support.shifting_world import KillOnce, train_shifting

__all__ = ["data"]


class OwnUnits(OwnStep, Units):
    """Both."""


def assert_close(found: TrainedRun, expected: TrainedRun, tolerance: float = 1e-3) -> None:
    """The same rows in every step, and nearly the same losses and values."""
    assert [step[4:] for step in found.steps] == [step[4:] for step in expected.steps]
    assert [step[1] for step in found.steps] == pytest.approx([step[1] for step in expected.steps], abs=tolerance)
    assert [step[3] for step in found.steps] == pytest.approx([step[3] for step in expected.steps], rel=100 * tolerance)
    assert found.snapshot.model.keys() == expected.snapshot.model.keys()
    for name, value in expected.snapshot.model.items():
        assert torch.allclose(found.snapshot.model[name].float(), value.float(), atol=tolerance), name


@pytest.mark.rest
def test_overlapped_values_are_close_to_ddp_on_any_workers_and_after_a_resume(
    pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    fields = {"schedule": ONE_CYCLE, "train__ema_decay": 0.9, "train__grad_clip_norm": 0.5, "train__freeze": ["0.*"]}
    job = fsdp_job(tmp_path / "run", data, **fields, train__reduction="overlapped")
    plain = pool.train_new_run(fsdp_job(tmp_path / "plain", data, train__strategy="ddp", **fields), 2, cache_windows)
    for size in (1, 2, 3):
        found = pool.train_new_run(job, size, cache_windows)
        assert_close(found, plain)
    again = pool.train_new_run(job, 3, cache_windows)
    assert again.digests == found.digests, "the same number of workers gives the same bits"
    pool.train(job, 3, Hooks(after_step=DieAfter(6)), cache_windows)
    at_six = read_trained_run(job)
    assert at_six.commit.step == 6
    pool.train_to_end(job, 2, cache_windows)
    assert_close(read_trained_run(job), plain)

    state = TrainingState(
        fsdp_job(tmp_path / "plain", data, train__strategy="ddp", **fields).config, job.task, CPU, job.total_steps
    )
    state.load(at_six.snapshot)
    assert params_digest(state.snapshot().model) == at_six.commit.params_digest, (
        "a checkpoint of shards is any strategy's"
    )
    trained = [p for p in state.model.parameters() if p.requires_grad]
    assert [state.optimizer.state[p]["momentum_buffer"].shape for p in trained] == [p.shape for p in trained]


@pytest.mark.rest
def test_adam_and_whole_layers_and_half_precision(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    fields = {"optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.001}}, "train__max_steps": 9}
    plain = pool.train_new_run(fsdp_job(tmp_path / "plain", data, train__strategy="ddp", **fields), 2, cache_windows)
    assert_bits(
        pool.train_new_run(fsdp_job(tmp_path / "run", data, Units(own=False), **fields), 2, cache_windows), plain
    )
    half = pool.train_new_run(fsdp_job(tmp_path / "half", data, train__precision="bf16", **fields), 3, cache_windows)
    assert {v.dtype for name, v in half.snapshot.model.items() if "num_batches" not in name} == {torch.float32}
    assert_close(half, plain, 2e-2)
    assert half.commit.params_digest != plain.commit.params_digest


def test_a_tasks_own_step(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    plain = pool.train_new_run(
        fsdp_job(tmp_path / "plain", data, OwnUnits(), train__strategy="ddp", train__max_steps=9), 2, cache_windows
    )
    found = pool.train_new_run(fsdp_job(tmp_path / "run", data, OwnUnits(), train__max_steps=9), 3, cache_windows)
    assert_bits(found, plain)
    assert (
        max(float(v.abs().max()) for name, v in found.snapshot.model.items() if name.endswith("weight")) <= 0.2 + 1e-6
    )


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_worker(pool: WorkerPool, data: Path, tmp_path: Path, lost: int) -> None:
    """Shards are lost with their worker; the other has the whole copy of the last snapshot, and no storage is read."""
    job = fsdp_job(tmp_path / "run", data, checkpoint__every_steps=None, checkpoint__snapshot_every_steps=3)
    plain = pool.train_new_run(fsdp_job(tmp_path / "plain", data, train__strategy="ddp"), 2, cache_windows)
    kill = KillOnce(tmp_path / "killed", step=8, rank=lost)
    outcomes = train_shifting(pool, job, [[0, 1], [1 - lost]], [], Hooks(after_step=kill))
    assert kill.proof.exists()
    assert outcomes[1 - lost].trace == ""
    sizes = sizes_by_step(job)
    assert [sizes[step] for step in range(9, 19)] == [{1}] * 10
    assert all(1 in sizes[step] for step in (7, 8)), "redone"
    assert not any(1 in sizes[step] for step in range(1, 7))
    assert_bits(read_trained_run(job), plain)


@pytest.mark.rest
def test_a_restart_after_a_worker_was_killed(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    """As with `failure.recovery: restart`: the others end, all start again from the checkpoint, here on fewer
    workers.
    """
    job = fsdp_job(tmp_path / "run", data)
    plain = pool.train_new_run(fsdp_job(tmp_path / "plain", data, train__strategy="ddp"), 2, cache_windows)
    outcomes = pool.train(job, 3, Hooks(after_step=DieAfter(8, killed=0)), cache_windows)
    assert isinstance(outcomes[0].error, KilledError)
    assert [type(o.error) for o in outcomes[1:]] == [PeerLostError] * 2
    assert read_trained_run(job).commit.step == 6
    pool.train_to_end(job, 2, cache_windows)
    assert [e.details["step"] for e in read_events(job.paths, "resumed")] == [6]
    assert_bits(read_trained_run(job), plain)


def test_workers_leave_and_join_as_planned(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    job = fsdp_job(tmp_path / "run", data, checkpoint__every_steps=None)
    plain = pool.train_new_run(fsdp_job(tmp_path / "plain", data, train__strategy="ddp"), 2, cache_windows)
    outcomes = train_shifting(pool, job, [[0, 1], [1], [1, 2, 3]], [4, 5])
    assert [o.trace for o in outcomes] == [""] * 4
    found = read_trained_run(job)
    assert [set(workers) for workers in found.workers] == [{2}] * 4 + [{1}] * 5 + [{3}] * 9, "no step is done again"
    assert_bits(found, plain)


@contextmanager
def after_a_step(rank: int, store: Path, job: Job, size: int, device: torch.device = CPU) -> Iterator[TrainingState]:
    """A worker's state while it still has its shards."""
    set_up_torch(job.config, device)
    world = World(rank, size, job.plan.logical_workers)
    state = build_state(job.config, job.task, device, job.total_steps)
    with LocalMembership(world, store).generation(-1, False), state.bind(world) as world:
        state.share(world, lambda: state.initialize(None))
        step = build_step(job, state, world, device, lambda phase: None)
        feed = Feed(job.plan, lambda cursor, played: cache_windows(job, cursor, played), device)
        feed.seek(Cursor(), world.assigned)
        step.run(Cursor.at(0, 9), feed.next(), 12, Flags(0))
        yield state


def held_tensors(state: TrainingState) -> dict[str, list[Tensor]]:
    """This worker's parameters, gradients and moments."""
    parameters = list(state.model.parameters())
    held = {
        "parameters": parameters,
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer": [v for values in state.optimizer.state.values() for v in values.values() if v.ndim],
    }
    return {kind: [v.to_local() if isinstance(v, DTensor) else v for v in values] for kind, values in held.items()}


def held_bytes(rank: int, store: Path, job: Job, size: int) -> dict[str, int]:
    """What a worker holds after a step, in bytes, and that its gradient is a shard, too, in memory of its own size."""
    with after_a_step(rank, store, job, size) as state:
        held = held_tensors(state)
        if job.config.train.strategy == "fsdp":
            assert all(v.untyped_storage().nbytes() == v.nbytes for v in held["gradients"])
        return {kind: sum(v.nbytes for v in values) for kind, values in held.items()}


def test_each_worker_holds_its_share(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    adam = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}}
    [whole] = pool.run(1, held_bytes, fsdp_job(tmp_path / "plain", data, train__strategy="ddp", optimizer=adam), 1)
    shares = pool.run(4, held_bytes, fsdp_job(tmp_path / "run", data, optimizer=adam), 4)
    assert whole["optimizer"] == 2 * whole["parameters"] == 2 * whole["gradients"] > 0
    for kind, held in whole.items():
        assert sum(share[kind] for share in shares) == held
        assert max(share[kind] for share in shares) < 0.3 * held, kind


def test_offloaded_shards_are_in_host_memory_and_the_device_computes(data: Path, tmp_path: Path) -> None:
    """Without a GPU the device is the CPU, too: then it is tested that offloading computes the same."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
    task, offload = (
        ImageClassification(model_args={"channels": 4, "dropout": 0.0}),
        {"train__cpu_offload": True, "scaling__gpus_per_worker": 1},
    )
    with after_a_step(0, tmp_path / "a", fsdp_job(tmp_path / "plain", data, task, train__strategy="ddp"), 1) as state:
        plain = held_tensors(state)
    with after_a_step(0, tmp_path / "b", fsdp_job(tmp_path / "run", data, task, **offload), 1, device) as state:
        assert {b.device.type for b in state.model.buffers()} == {device.type}
        for kind, values in held_tensors(state).items():
            assert {v.device.type for v in values} == {"cpu"}, kind
            for value, expected in zip(values, plain[kind], strict=True):
                torch.testing.assert_close(value, expected, rtol=1e-2, atol=1e-3)


def test_a_nan_is_refused_by_all_and_its_rows_are_named(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    job = fsdp_job(tmp_path / "run", data, TinyImages(bad=(5,)))
    outcomes = pool.train(job, 3, Hooks(), cache_windows)
    for outcome in outcomes:
        assert isinstance(outcome.error, NonFiniteError)
        assert "rows at manifest positions" in str(outcome.error)
        assert str(outcome.error) == str(outcomes[0].error)
    outcomes = pool.train(
        fsdp_job(tmp_path / "gradient", data, TinyImages(bad=(5,), bad_value=0)), 3, Hooks(), cache_windows
    )
    assert all("so that the logical worker is not known" in str(outcome.error) for outcome in outcomes)


@pytest.mark.rest
def test_what_uses_no_parameter_and_what_is_frozen(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    for variant in ("unused", "frozen"):
        plain = pool.train_new_run(
            fsdp_job(tmp_path / "a", data, TinyImages(variant), train__strategy="ddp"), 2, cache_windows
        )
        assert_bits(pool.train_new_run(fsdp_job(tmp_path / "b", data, TinyImages(variant)), 3, cache_windows), plain)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"train__precision": "fp16"}, "use bf16"),
        (
            {"optimizer": {"class_path": "torch.optim.Adafactor"}},
            "looks at whole parameters.*train.reduction to overlapped",
        ),
        ({"train__compile": True}, "train.compile"),
        ({"evaluate__where": "workers"}, "use actor"),
        ({"train__cpu_offload": True}, "host memory already"),
    ],
)
def test_what_does_not_fit_is_refused(data: Path, tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fsdp_job(tmp_path / "run", data, **fields)


def sizes_by_step(job: Job) -> dict[int, set[int]]:
    """The numbers of workers that did each step."""
    reader = MetricsReader(job.paths)
    reader.poll()
    found: dict[int, set[int]] = {}
    for record in [*reader.records.values(), *reader.repeated]:
        found.setdefault(record.step, set()).add(record.workers)
        assert math.isfinite(record.loss)
    return found


@pytest.mark.parametrize(
    ("device", "expected"),
    [(torch.device("cuda", 1), ("cpu:gloo,cuda:nccl", torch.device("cuda", 1))), (CPU, ("gloo", None))],
)
def test_the_group_of_a_lone_worker_is_made_for_its_device(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path, device: torch.device, expected: tuple[Any, ...]
) -> None:
    """Without one, NCCL would take the first that it sees."""
    job, made = fsdp_job(tmp_path / "run", data), list[tuple[Any, ...]]()
    for name in process_group._NCCL_SETTINGS:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(dist, "init_process_group", lambda name, **options: made.append((name, options["device_id"])))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    state = build_state(job.config, job.task, device, job.total_steps)
    with pytest.raises(KilledError), state.bind(World(0, 1, 2)):
        raise KilledError("made")
    assert made == [expected]


def is_held(lock: Any) -> bool:
    """Whether another thread would have to wait for a lock."""
    free = list[bool]()
    other = threading.Thread(target=lambda: free.append(lock.acquire(blocking=False) and lock.release() is None))
    other.start()
    other.join()
    return free == [False]


def exchanges_of_a_step(rank: int, store: Path, job: Job) -> dict[str, set[bool]]:
    """Whether aborts wait during each kind of exchange that FSDP gives a device in a step."""
    held: dict[str, set[bool]] = {}

    def noting(name: str, exchange: Any) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            held.setdefault(name, set()).add(is_held(group_state.launch_lock))
            return exchange(*args, **options)

        return noted

    state, membership = (
        build_state(job.config, job.task, CPU, job.total_steps),
        LocalMembership(World(rank, 2, 4), store),
    )
    with (
        membership.generation(0, False) as (met, _),
        state.bind(replace(met, check_device_errors=lambda: None)) as world,
    ):
        state.share(world, lambda: state.initialize(None))
        cursor = Cursor.at(0, job.plan.steps_per_epoch)
        with (
            closing(build_step(job, state, world, CPU, lambda phase: None)) as step,
            pytest.MonkeyPatch.context() as patch,
        ):
            for name in ("all_gather_single", "reduce_scatter_single", "all_to_all_single"):
                patch.setattr(dist, name, noting(name, getattr(dist, name)))
            feed = feed_of(job.plan, cursor, world.assigned, cache_windows(job, cursor, world.assigned))
            step.run(cursor, feed.next(), job.plan.global_rows(cursor.step), Flags(0))
    return held


@pytest.mark.rest
@pytest.mark.parametrize(
    ("reduction", "scatters"), [("exact", "all_to_all_single"), ("overlapped", "reduce_scatter_single")]
)
def test_an_abort_waits_for_the_exchanges_that_fsdp_begins(
    pool: WorkerPool, data: Path, tmp_path: Path, reduction: str, scatters: str
) -> None:
    job = fsdp_job(tmp_path / "run", data, train__reduction=reduction)
    assert pool.run(2, exchanges_of_a_step, job) == [{"all_gather_single": {True}, scatters: {True}}] * 2
