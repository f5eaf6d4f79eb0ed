"""The memory of a generation is freed before the next one allocates its own, so a device need not hold both."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ray_app.errors import PeerLostError
from ray_app.plan.order import Cursor
from ray_app.reduction.bucketed import Bucket
from ray_app.reduction.reducer import GradientReducer
from ray_app.reduction.world import World
from ray_app.testing import KilledError, WorkerPool, cache_windows
from ray_app.train.build import build_state, build_step
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import Flags
from ray_app.train.state.state import TrainingState
from ray_app.train.step.step import Step
from ray_app.train.strategies.fully_sharded import ShardedBackend
from tests.support.local_world import CPU, TinyImages, feed_of, make_job, write_images
from tests.support.shifting_world import KillOnce, train_shifting


@dataclasses.dataclass(frozen=True)
class CountAliveObjects:
    """A hook that writes the objects of a step that are alive while a generation forms, to one file per process."""

    folder: Path

    def __call__(self, phase: str, rank: int, step: int) -> None:
        if phase == "forming":
            kinds = (Step, GradientReducer, Bucket, TrainingState)
            alive = Counter(
                kind.__name__ for alive_object in gc.get_objects() for kind in kinds if isinstance(alive_object, kind)
            )
            with (self.folder / f"{rank}.txt").open("a") as file:
                print(step, dict(sorted(alive.items())), file=file)


DECAY = {"class_path": "torch.optim.lr_scheduler.ExponentialLR", "init_args": {"gamma": 0.9}}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, averages": {"train__ema_decay": 0.9, "schedule": DECAY},
    "central_storage": {"train__strategy": "central_storage", "train__peer_replica": True},
    "local_sgd": {"train__strategy": "local_sgd", "train__local_steps": 2},
}


@pytest.mark.rest
@pytest.mark.parametrize("fields", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("loss", [True, False], ids=["lost peer", "planned"])
def test_the_objects_of_a_step_are_freed_before_the_next_generation_forms(
    worker_pool: WorkerPool, tmp_path: Path, fields: dict[str, Any], loss: bool
) -> None:
    data = write_images(tmp_path / "data", [[20, 13]])
    job = make_job(tmp_path / "run", data, logical_workers=3, batch=12, task=TinyImages(), train__epochs=2, **fields)
    hooks = Hooks(at=CountAliveObjects(tmp_path), after_step=KillOnce(tmp_path / "proof", 2, 2) if loss else None)
    outcomes = train_shifting(worker_pool, job, [[0, 1, 2], [0, 1]], [] if loss else [2], hooks)
    assert isinstance(outcomes[2].error, KilledError) == loss
    assert outcomes[0].value == "done", outcomes[0].trace
    lines = [line.partition(" ")[2] for line in (tmp_path / "0.txt").read_text().splitlines()]
    assert lines == ["{}"] * 2, "an object of the former generation is alive"


def step_once(job: Job, state: TrainingState, world: World) -> list[Any]:
    """Runs a step; returns weak references to the shards of parameters and of the optimizer state."""
    cursor = Cursor.at(0, job.plan.steps_per_epoch)
    with closing(build_step(job, state, world, CPU, lambda phase: None)) as step:
        feed = feed_of(job.plan, cursor, world.assigned, cache_windows(job, cursor, world.assigned))
        step.run(cursor, feed.next(), job.plan.global_rows(cursor.step), Flags(0))
    moments = [
        v for values in state.optimizer.state.values() for v in values.values() if isinstance(v, Tensor) and v.ndim
    ]
    with torch.no_grad():
        # With gradients it would be another object.
        shards = [p.to_local() for p in state.model.parameters()]  # type: ignore[attr-defined]
    assert len(moments) == 2 * len(shards)
    return [weakref.ref(tensor) for tensor in (*moments, *shards)]


def count_alive_shards(rank: int, store: Path, job: Job, breaks: bool) -> list[int]:
    """Returns how many shards of the former generation are alive when each of two generations allocates its own."""
    del rank, store
    state = build_state(job.config, job.task, CPU, job.total_steps)
    assert isinstance(state.backend, ShardedBackend)
    shards = list[Any]()
    alive_counts = list[int]()
    build_model = state.backend.build_model

    def count_and_build(*arguments: Any) -> nn.Module:
        alive_counts.append(sum(reference() is not None for reference in shards))
        return build_model(*arguments)

    state.backend.build_model = count_and_build
    for breaks_now in (breaks, False):
        try:
            with state.backend.bind(World(0, 1, 2)) as world:
                state.backend.share(world, lambda: state.initialize(None))
                shards = step_once(job, state, world)
                if breaks_now:
                    raise PeerLostError("a peer left in the middle of a step")
        except PeerLostError:
            assert breaks_now
    return alive_counts


@pytest.mark.rest
@pytest.mark.parametrize("breaks", [True, False], ids=["lost peer", "planned"])
def test_the_shards_of_a_generation_are_freed_before_the_next_allocates(
    worker_pool: WorkerPool, tmp_path: Path, breaks: bool
) -> None:
    data = write_images(tmp_path / "data", [[20, 13]])
    job = make_job(tmp_path / "run", data, logical_workers=2, batch=12, train__strategy="fsdp", train__epochs=1)
    assert worker_pool.run(1, count_alive_shards, job, breaks) == [[0, 0]]
