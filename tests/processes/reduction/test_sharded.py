"""Fully sharded training is bit-identical to `ddp`, or close to it if the network adds, as workers leave and join."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ray_app.checkpoint.format import params_digest
from ray_app.checkpoint.store import Commit
from ray_app.data.feed import Feed
from ray_app.devices import KINDS
from ray_app.drill.faults import HookChain
from ray_app.errors import ConfigError, NonFiniteError, PeerLostError
from ray_app.plan.order import Cursor
from ray_app.reduction.peer_errors import launch_lock
from ray_app.reduction.sharded import MappedInit, build_without_values
from ray_app.reduction.world import World
from ray_app.runlog.journal import read_events, read_records
from ray_app.task.environment import set_up_torch
from ray_app.task.image import ImageClassification
from ray_app.testing import DieAfter, KilledError, TrainedRun, WorkerPool, cache_windows, read_trained_run
from ray_app.train.build import build_state, build_step
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import Flags
from ray_app.train.state.state import TrainingState
from tests.support.bit_identity import assert_bit_identical
from tests.support.local_world import CLASSES, CPU, CustomTrainingStep, LocalMembership, TinyImages, feed_of
from tests.support.sharded import ONE_CYCLE, Units, committed_before, fsdp_job
from tests.support.shifting_world import KillOnce, train_shifting


class OwnUnits(CustomTrainingStep, Units):
    """A task with its own training step and its own shard units."""


def assert_close(run: TrainedRun, expected: TrainedRun, tolerance: float = 1e-3) -> None:
    """Asserts that two runs have the same rows in each step, and nearly the same losses and values."""
    assert [step[4:] for step in run.steps] == [step[4:] for step in expected.steps]
    assert [step[1] for step in run.steps] == pytest.approx([step[1] for step in expected.steps], abs=tolerance)
    assert [step[3] for step in run.steps] == pytest.approx([step[3] for step in expected.steps], rel=100 * tolerance)
    assert run.snapshot.model.keys() == expected.snapshot.model.keys()
    for name, value in expected.snapshot.model.items():
        assert torch.allclose(run.snapshot.model[name].float(), value.float(), atol=tolerance), name


@pytest.mark.rest
def test_overlapped_reduction_is_close_to_ddp_on_any_workers_and_after_a_resume(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    fields = {"schedule": ONE_CYCLE, "train__ema_decay": 0.9, "train__grad_clip_norm": 0.5, "train__freeze": ["0.*"]}
    job = fsdp_job(tmp_path / "run", data, **fields, train__reduction="overlapped")
    plain = worker_pool.train_new_run(
        fsdp_job(tmp_path / "plain", data, train__strategy="ddp", **fields), 2, cache_windows
    )
    for size in (1, 2, 3):
        sharded = worker_pool.train_new_run(job, size, cache_windows)
        assert_close(sharded, plain)
    repeated = worker_pool.train_new_run(job, 3, cache_windows)
    assert repeated.digests == sharded.digests, "two runs on the same number of workers differ"
    worker_pool.train(job, 3, Hooks(after_step=DieAfter(6)), cache_windows)
    partial_run = read_trained_run(job)
    assert partial_run.commit.step == 6
    worker_pool.train_to_end(job, 2, cache_windows)
    assert_close(read_trained_run(job), plain)

    state = TrainingState(
        fsdp_job(tmp_path / "plain", data, train__strategy="ddp", **fields).config, job.task, CPU, job.total_steps
    )
    state.backend.adopt(partial_run.snapshot)
    assert params_digest(state.snapshot().model) == partial_run.commit.params_digest, (
        "a checkpoint of shards differs after it is loaded with ddp"
    )
    trained_parameters = [p for p in state.model.parameters() if p.requires_grad]
    assert [state.optimizer.state[p]["momentum_buffer"].shape for p in trained_parameters] == [
        p.shape for p in trained_parameters
    ]


@pytest.mark.rest
def test_fsdp_with_adam_is_bit_identical_to_ddp_and_close_in_half_precision(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    fields = {"optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.001}}, "train__max_steps": 9}
    plain = worker_pool.train_new_run(
        fsdp_job(tmp_path / "plain", data, train__strategy="ddp", **fields), 2, cache_windows
    )
    assert_bit_identical(
        worker_pool.train_new_run(
            fsdp_job(tmp_path / "run", data, Units(names_units=False), **fields), 2, cache_windows
        ),
        plain,
    )
    half = worker_pool.train_new_run(
        fsdp_job(tmp_path / "half", data, train__precision="bf16", **fields), 3, cache_windows
    )
    assert {v.dtype for name, v in half.snapshot.model.items() if "num_batches" not in name} == {torch.float32}
    assert_close(half, plain, 2e-2)
    assert half.commit.params_digest != plain.commit.params_digest


@pytest.mark.rest
def test_fsdp_with_a_custom_training_step_is_bit_identical_to_ddp(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    plain = worker_pool.train_new_run(
        fsdp_job(tmp_path / "plain", data, OwnUnits(), train__strategy="ddp", train__max_steps=9), 2, cache_windows
    )
    sharded = worker_pool.train_new_run(
        fsdp_job(tmp_path / "run", data, OwnUnits(), train__max_steps=9), 3, cache_windows
    )
    assert_bit_identical(sharded, plain)
    assert (
        max(float(v.abs().max()) for name, v in sharded.snapshot.model.items() if name.endswith("weight")) <= 0.2 + 1e-6
    )


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.rest)])
def test_a_lost_worker_rolls_its_peers_back_to_the_last_checkpoint(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, lost: int
) -> None:
    """Shards are lost with their worker; the survivor reads the parts of the last checkpoint."""
    job = fsdp_job(tmp_path / "run", data)
    plain = worker_pool.train_new_run(fsdp_job(tmp_path / "plain", data, train__strategy="ddp"), 2, cache_windows)
    kill = KillOnce(tmp_path / "killed", step=8, rank=lost)
    after_step = HookChain((committed_before(job, 8), kill))
    outcomes = train_shifting(worker_pool, job, [[0, 1], [1 - lost]], [], Hooks(after_step=after_step))
    assert kill.proof.exists()
    assert outcomes[1 - lost].trace == ""
    assert [e.details["step"] for e in read_events(job.paths, "resumed")] == [6]
    sizes = sizes_by_step(job)
    assert [sizes[step] for step in range(9, 19)] == [{1}] * 10
    assert all(1 in sizes[step] for step in (7, 8)), "a step after the checkpoint was not repeated"
    assert not any(1 in sizes[step] for step in range(1, 7))
    assert_bit_identical(read_trained_run(job), plain)


@pytest.mark.rest
@pytest.mark.parametrize("strategy", ["fsdp", "central_storage"])
def test_a_restart_after_a_killed_worker_is_bit_identical(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, strategy: str
) -> None:
    """As with `failure.recovery: restart`, all workers end and restart from the checkpoint, here on fewer workers."""
    job = fsdp_job(tmp_path / "run", data, train__strategy=strategy)
    plain = worker_pool.train_new_run(fsdp_job(tmp_path / "plain", data, train__strategy="ddp"), 2, cache_windows)
    kill = HookChain((committed_before(job, 8), DieAfter(8, killed=0)))
    outcomes = worker_pool.train(job, 3, Hooks(after_step=kill), cache_windows)
    assert isinstance(outcomes[0].error, KilledError)
    assert [type(o.error) for o in outcomes[1:]] == [PeerLostError] * 2
    assert read_trained_run(job).commit.step == 6
    worker_pool.train_to_end(job, 2, cache_windows)
    assert [e.details["step"] for e in read_events(job.paths, "resumed")] == [6]
    assert_bit_identical(read_trained_run(job), plain)


@pytest.mark.parametrize(
    ("strategy", "groups"),
    [
        ("fsdp", [[0, 1, 2], [2], [2, 3]]),
        pytest.param("fsdp", [[0, 1], [1, 2, 3], [3, 1]], marks=pytest.mark.rest),
        ("central_storage", [[0, 1], [1], [1, 2, 3]]),
    ],
    ids=["two neighbors leave", "one leaves and two join", "the holder leaves"],
)
def test_workers_leave_and_join_without_repeating_steps(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, strategy: str, groups: list[list[int]]
) -> None:
    """Each rank receives its rows from those that the others have kept, also from those of ranks that leave."""
    fields = {"checkpoint__every_steps": None, "train__ema_decay": 0.9, "schedule": ONE_CYCLE}
    job = fsdp_job(tmp_path / "run", data, **fields, train__strategy=strategy)
    plain = worker_pool.train_new_run(
        fsdp_job(tmp_path / "plain", data, train__strategy="ddp", **fields), 2, cache_windows
    )
    outcomes = train_shifting(worker_pool, job, groups, [4, 5])
    assert [o.trace for o in outcomes] == [""] * 4
    run = read_trained_run(job)
    sizes = [len(group) for group in groups]
    assert [set(workers) for workers in run.workers] == [
        *([{sizes[0]}] * 4),
        *([{sizes[1]}] * 5),
        *([{sizes[2]}] * 9),
    ], "a step was repeated"
    assert_bit_identical(run, plain)


def test_a_model_that_is_built_in_files_has_the_values_of_any_other() -> None:
    def build() -> dict[str, Tensor]:
        torch.manual_seed(1)
        layers = nn.Sequential(nn.Embedding(700, 512, padding_idx=3), nn.Linear(512, 600), nn.Linear(4, 4))
        nn.init.trunc_normal_(layers[1].weight)
        nn.init.orthogonal_(layers[0].weight)
        return layers.state_dict()

    with MappedInit():
        mapped = build()
    assert [tensor.untyped_storage().filename is not None for tensor in mapped.values()] == [True, True, *[False] * 3]
    plain = build()
    assert all(torch.equal(mapped[name], plain[name]) for name in plain)


@pytest.mark.rest
def test_initial_parameters_of_a_file_are_read_by_rows(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    built = fsdp_job(tmp_path / "model", data).task.build_model().state_dict()
    model = {name: value + 1 for name, value in built.items()}
    safetensors.torch.save_file(model, tmp_path / "initial.safetensors")
    runs = {}
    for strategy in ("ddp", "fsdp"):
        fields = {"train__strategy": strategy, "train__ema_decay": 0.9, "train__epochs": 1}
        job = replace(fsdp_job(tmp_path / strategy, data, **fields), initial=str(tmp_path / "initial.safetensors"))
        runs[strategy] = worker_pool.train_new_run(job, 3, cache_windows)
    assert_bit_identical(runs["fsdp"], runs["ddp"])


class OwnGenerator(Units):
    """A task with a model that differs from worker to worker."""

    def build_model(self) -> nn.Module:
        torch.manual_seed(os.getpid())
        return super().build_model()


def get_pid(rank: int, store: Path) -> int:
    return os.getpid()


@pytest.mark.rest
def test_a_model_that_differs_between_workers_begins_as_that_of_rank_0(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    no_change = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.0}}
    run = worker_pool.train_new_run(
        fsdp_job(tmp_path / "run", data, OwnGenerator(), optimizer=no_change), 2, cache_windows
    )
    torch.manual_seed(worker_pool.run(2, get_pid)[0])
    built = dict(fsdp_job(tmp_path / "plain", data).task.build_model().named_parameters())
    assert all(torch.equal(run.snapshot.model[name], p) for name, p in built.items())


class LargeLayer(Units):
    """A task with a large layer, which notes of each model that it builds whether the layer has values."""

    def __init__(self, notes: Path) -> None:
        super().__init__()
        self.notes = notes

    def build_model(self) -> nn.Module:
        layers = [nn.Linear(64, 4200), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4200, CLASSES)]
        model = nn.Sequential(nn.Flatten(), *layers)
        with open(self.notes, "a") as notes:
            notes.write("-" if model[1].weight.is_meta else "v")
        return model


@pytest.mark.rest
def test_only_rank_0_of_a_new_run_draws_initial_values(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    job = fsdp_job(tmp_path / "run", data, LargeLayer(tmp_path / "notes"))
    plain = worker_pool.train_new_run(
        fsdp_job(tmp_path / "plain", data, LargeLayer(tmp_path / "plain notes"), train__strategy="ddp"),
        2,
        cache_windows,
    )
    (tmp_path / "notes").unlink(missing_ok=True)
    kill = KillOnce(tmp_path / "killed", step=8, rank=2)
    after_step = HookChain((committed_before(job, 8), kill))
    outcomes = train_shifting(worker_pool, job, [[0, 1, 2], [0, 1]], [], Hooks(after_step=after_step))
    assert kill.proof.exists()
    assert [outcome.trace for outcome in outcomes[:2]] == ["", ""]
    # Each of three workers builds a model for the state and one for its shards; two build one more for other shards.
    assert sorted((tmp_path / "notes").read_text()) == sorted("v" + 7 * "-")
    assert_bit_identical(read_trained_run(job), plain)


def build_large(change: Callable[[Any], None]) -> nn.Module | None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Embedding(700, 512, padding_idx=3), nn.Linear(512, 600))
        nn.init.trunc_normal_(model[1].weight)
        change(model)
        return model

    return build_without_values(build)


def test_a_model_without_values_has_all_other_tensors() -> None:
    model: Any = build_large(lambda model: model.register_buffer("angles", torch.arange(4.0), persistent=False))
    assert {name: p.is_meta for name, p in model.named_parameters()} == {
        "0.weight": True,
        "1.weight": True,
        "1.bias": False,
    }
    assert model.angles.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.register_buffer("noise", 2 * torch.randn(4), persistent=False),
        lambda model: setattr(model, "initial", [p.detach().clone() for p in model.parameters()]),
        lambda model: setattr(model, "scale", float(model[1].bias.detach().sum())),
        lambda model: model[1].weight.sum().item(),
        lambda model: model.register_buffer("large", torch.empty(1000, 1000)),
    ],
    ids=["random buffer", "copies of parameters", "number of drawn values", "needs values", "large buffer"],
)
def test_a_model_is_built_with_values_if_what_depends_on_them_is_not_loaded(change: Any) -> None:
    assert build_large(change) is None


@dataclass(frozen=True)
class KillBeforeCommit:
    """A hook that kills the worker that is about to commit the checkpoint of step 6, once."""

    proof: Path

    def __call__(self, commit: Commit) -> None:
        if commit.step == 6 and not self.proof.exists():
            self.proof.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.rest
def test_the_next_rank_0_commits_a_checkpoint_of_which_all_parts_are_written(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    job = fsdp_job(tmp_path / "run", data)
    plain = worker_pool.train_new_run(fsdp_job(tmp_path / "plain", data, train__strategy="ddp"), 2, cache_windows)
    hooks = Hooks(before_commit=KillBeforeCommit(tmp_path / "killed"))
    train_shifting(worker_pool, job, [[0, 1, 2], [1, 2]], [], hooks)
    assert [e.details["step"] for e in read_events(job.paths, "resumed")] == [6]
    assert_bit_identical(read_trained_run(job), plain)


@contextmanager
def state_after_a_step(
    rank: int, store: Path, job: Job, size: int, device: torch.device = CPU
) -> Iterator[TrainingState]:
    """Yields the state of a worker after a step, while it still has its shards."""
    set_up_torch(job.config, device)
    world = World(rank, size, job.plan.logical_workers)
    state = build_state(job.config, job.task, device, job.total_steps)
    with LocalMembership(world, store).generation(-1, False), state.backend.bind(world) as world:
        state.backend.share(world, lambda: state.initialize(None))
        step = build_step(job, state, world, device, lambda phase: None)
        feed = Feed(job.plan, lambda cursor, assigned: cache_windows(job, cursor, assigned), device)
        feed.seek(Cursor(), world.assigned)
        step.run(Cursor.at(0, 9), feed.next(), 12, Flags(0))
        yield state


def local_tensors(state: TrainingState) -> dict[str, list[Tensor]]:
    """Returns the parameters, gradients and moments of this worker, each as the local shard."""
    parameters = list(state.model.parameters())
    tensors: dict[str, list[Any]] = {
        "parameters": parameters,
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer": [v for values in state.optimizer.state.values() for v in values.values() if v.ndim],
    }
    return {kind: [v.to_local() if isinstance(v, DTensor) else v for v in values] for kind, values in tensors.items()}


def measure_local_bytes(rank: int, store: Path, job: Job, size: int) -> dict[str, int]:
    """Returns the bytes of the state of a worker after a step; asserts that gradients of `fsdp` use shard memory."""
    with state_after_a_step(rank, store, job, size) as state:
        tensors = local_tensors(state)
        if job.config.train.strategy == "fsdp":
            storages = {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in tensors["gradients"]}
            shapes = [p.shape for p in state.model.parameters()]
            assert sum(storages.values()) == sum(-(-shape[0] // size) * shape[1:].numel() * 4 for shape in shapes)
        return {kind: sum(v.nbytes for v in values) for kind, values in tensors.items()}


def test_each_worker_holds_only_its_shards(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    adam = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}}
    [whole] = worker_pool.run(
        1, measure_local_bytes, fsdp_job(tmp_path / "plain", data, train__strategy="ddp", optimizer=adam), 1
    )
    shares = worker_pool.run(4, measure_local_bytes, fsdp_job(tmp_path / "run", data, optimizer=adam), 4)
    assert whole["optimizer"] == 2 * whole["parameters"] == 2 * whole["gradients"] > 0
    for kind, total_bytes in whole.items():
        assert sum(share[kind] for share in shares) == total_bytes
        assert max(share[kind] for share in shares) < 0.3 * total_bytes, kind


@pytest.mark.rest
def test_offloaded_shards_are_in_host_memory_and_compute_the_same_values(data: Path, tmp_path: Path) -> None:
    """Without a GPU the device is the CPU, and the test only compares the values."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
    task = ImageClassification(model_args={"channels": 4, "dropout": 0.0})
    offload = {"train__cpu_offload": True, "scaling__gpus_per_worker": 1}
    with state_after_a_step(
        0, tmp_path / "a", fsdp_job(tmp_path / "plain", data, task, train__strategy="ddp"), 1
    ) as state:
        plain = local_tensors(state)
    with state_after_a_step(0, tmp_path / "b", fsdp_job(tmp_path / "run", data, task, **offload), 1, device) as state:
        assert {b.device.type for b in state.model.buffers()} == {device.type}
        for kind, values in local_tensors(state).items():
            assert {v.device.type for v in values} == {"cpu"}, kind
            for value, expected in zip(values, plain[kind], strict=True):
                torch.testing.assert_close(value, expected, rtol=1e-2, atol=1e-3)


def test_all_ranks_refuse_a_nan_and_name_its_rows(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    job = fsdp_job(tmp_path / "run", data, TinyImages(bad_rows=(5,)))
    outcomes = worker_pool.train(job, 3, Hooks(), cache_windows)
    for outcome in outcomes:
        assert isinstance(outcome.error, NonFiniteError)
        assert "rows at manifest positions" in str(outcome.error)
        assert str(outcome.error) == str(outcomes[0].error)
    outcomes = worker_pool.train(
        fsdp_job(tmp_path / "gradient", data, TinyImages(bad_rows=(5,), bad_value=0)), 3, Hooks(), cache_windows
    )
    assert all("so that the logical worker is not known" in str(outcome.error) for outcome in outcomes)


@pytest.mark.rest
def test_unused_and_frozen_parameters_are_bit_identical_to_ddp(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    for variant in ("unused", "frozen"):
        plain = worker_pool.train_new_run(
            fsdp_job(tmp_path / "a", data, TinyImages(variant), train__strategy="ddp"), 2, cache_windows
        )
        assert_bit_identical(
            worker_pool.train_new_run(fsdp_job(tmp_path / "b", data, TinyImages(variant)), 3, cache_windows), plain
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train__precision": "fp16"}, "use bf16"),
        ({"optimizer": {"class_path": "torch.optim.Adafactor"}}, "reads whole parameters.*train.reduction to"),
        ({"evaluate__where": "workers"}, "use actor"),
        ({"train__cpu_offload": True, "scaling__gpus_per_worker": 0}, "host memory already"),
    ],
)
def test_incompatible_fsdp_settings_are_refused(
    data: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        fsdp_job(tmp_path / "run", data, **fields)


def sizes_by_step(job: Job) -> dict[int, set[int]]:
    """Returns the numbers of workers that ran each step."""
    records, repeated = read_records(job.paths)
    sizes: dict[int, set[int]] = {}
    for record in [*records.values(), *repeated]:
        sizes.setdefault(record.step, set()).add(record.workers)
        assert math.isfinite(record.loss)
    return sizes


@pytest.mark.parametrize(
    ("device", "expected"),
    [(torch.device("cuda", 1), ("cpu:gloo,cuda:nccl", torch.device("cuda", 1))), (CPU, ("gloo", None))],
)
def test_the_group_of_a_single_worker_is_bound_to_its_device(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path, device: torch.device, expected: tuple[Any, ...]
) -> None:
    """Without a device, NCCL would take the first one that it sees."""
    job, groups = fsdp_job(tmp_path / "run", data), list[tuple[Any, ...]]()
    for name in KINDS["cuda"].group_settings:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(dist, "init_process_group", lambda name, **options: groups.append((name, options["device_id"])))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    state = build_state(job.config, job.task, device, job.total_steps)
    with pytest.raises(KilledError), state.backend.bind(World(0, 1, 2)):
        raise KilledError("made")
    assert groups == [expected]


def is_locked(lock: Any) -> bool:
    """Returns whether another thread would have to wait for a lock."""
    acquired = list[bool]()
    other = threading.Thread(target=lambda: acquired.append(lock.acquire(blocking=False) and lock.release() is None))
    other.start()
    other.join()
    return acquired == [False]


def record_locks_of_a_step(rank: int, store: Path, job: Job) -> dict[str, set[bool]]:
    """Returns for each collective that FSDP launches in a step whether an abort would have to wait."""
    lock_states: dict[str, set[bool]] = {}

    def with_record(name: str, collective: Any) -> Any:
        def record_and_call(*args: Any, **options: Any) -> Any:
            lock_states.setdefault(name, set()).add(is_locked(launch_lock))
            return collective(*args, **options)

        return record_and_call

    state = build_state(job.config, job.task, CPU, job.total_steps)
    membership = LocalMembership(World(rank, 2, 4), store)
    with (
        membership.generation(0, False) as (new_world, _),
        state.backend.bind(replace(new_world, has_device_collectives=True)) as world,
    ):
        state.backend.share(world, lambda: state.initialize(None))
        cursor = Cursor.at(0, job.plan.steps_per_epoch)
        with (
            closing(build_step(job, state, world, CPU, lambda phase: None)) as step,
            pytest.MonkeyPatch.context() as patch,
        ):
            for name in ("all_gather_single", "reduce_scatter_single", "all_to_all_single"):
                patch.setattr(dist, name, with_record(name, getattr(dist, name)))
            feed = feed_of(job.plan, cursor, world.assigned, cache_windows(job, cursor, world.assigned))
            step.run(cursor, feed.next(), job.plan.global_rows(cursor.step), Flags(0))
    return lock_states


@pytest.mark.rest
@pytest.mark.parametrize(
    ("reduction", "scatters"), [("exact", "all_to_all_single"), ("overlapped", "reduce_scatter_single")]
)
def test_an_abort_waits_for_the_collectives_that_fsdp_launches(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, reduction: str, scatters: str
) -> None:
    job = fsdp_job(tmp_path / "run", data, train__reduction=reduction)
    assert worker_pool.run(2, record_locks_of_a_step, job) == [{"all_gather_single": {True}, scatters: {True}}] * 2
