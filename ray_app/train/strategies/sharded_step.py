"""A step on sharded parameters: every pass gathers them from all ranks, so all ranks make the same number of passes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ray_app.data.feed.windows import MicroBatch
from ray_app.exchange.exchange import collective
from ray_app.exchange.fsdp import FullySharded
from ray_app.exchange.fsdp_exact import ExactlySharded
from ray_app.plan.assign import micro_batches
from ray_app.plan.cursor import Cursor
from ray_app.task.losses import Losses, Unread
from ray_app.train.group.messages import Flags
from ray_app.train.step.step import Step
from ray_app.train.step.table import Row, StepResult


class ShardedStep(Step):
    """See the module.

    A rank that plays fewer logical workers than another, or one without rows, makes a pass that counts for nothing: on rows that it had
    before, with weights of zero and without a trace in the buffers.
    """

    unknown_culprit = "gradients of finite losses, which are sharded, so whose is not known"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self._exchange, FullySharded), "build_exchange made it"
        self._sharded = self._exchange
        self._missing = micro_batches(self._world.size, self._world.logical_workers) - len(self._world.played)
        self._before: MicroBatch | None = None
        self._bad: set[int] = set()

    def run(self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, flags: Flags) -> StepResult:
        """See `Step.run`."""
        self._before = next((batch for batch in batches if batch.rows), self._before) or _blank(batches[0])
        return super().run(cursor, batches, global_rows, flags)

    def _play(self, cursor: Cursor, batch: MicroBatch, global_rows: int) -> Unread | None:
        sums = None
        if batch.rows:
            sums = super()._play(cursor, batch, global_rows)
        else:
            self._pass_idly(cursor)
        if batch.logical_worker == self._world.played[-1]:
            for _ in range(self._missing):
                self._pass_idly(cursor)
        return sums

    def _lines(self, batches: list[MicroBatch], found: list[Unread | None], global_rows: int, flags: Flags) -> list[Row]:
        lines = super()._lines(batches, found, global_rows, flags)
        self._bad = {row.logical_worker for row in lines if not math.isfinite(row.loss)}
        return lines

    def _pass_idly(self, cursor: Cursor) -> None:
        batch, buffers = self._before, list(self._state.model.buffers())
        assert batch is not None
        before = [b.clone() for b in buffers]
        self._sharded.idle(self._losses(cursor, batch, self._state.model).values)
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)

    def _losses(self, cursor: Cursor, batch: MicroBatch, model: nn.Module) -> Losses:
        with collective():
            return super()._losses(cursor, batch, model)

    def _clip(self, parameters: list[nn.Parameter], correction: float = 1.0) -> float:
        """See `Step._clip`; a collective, so that all ranks know the same norm."""
        shards = [p.grad.to_local() for p in parameters if p.grad is not None]  # type: ignore[attr-defined]
        if correction != 1:
            torch._foreach_mul_(shards, correction)
        if isinstance(self._sharded, ExactlySharded):
            norm = math.sqrt(math.fsum(n * n for n in self._sharded.norms()))
        else:
            squares = torch.tensor(math.fsum(n * n for n in torch.stack(torch._foreach_norm(shards)).tolist()), dtype=torch.float64)
            with collective():
                dist.all_reduce(squares)
            norm = math.sqrt(squares.item())
        most = self._config.train.grad_clip_norm
        if most is not None:  # as torch.nn.utils.clip_grads_with_norm_
            torch._foreach_mul_(shards, torch.clamp(most / (torch.tensor(norm) + 1e-6), max=1.0).to(shards[0].device))
        return norm

    def _is_finite(self, cursor: Cursor, batch: MicroBatch, global_rows: int) -> bool:
        """Known from the pass itself: another one would have to be one of all ranks."""
        return batch.logical_worker not in self._bad


def _blank(batch: MicroBatch) -> MicroBatch:
    """One row of zeros in the shape of a micro-batch without rows."""
    fields = {name: torch.zeros(1, *value.shape[1:], dtype=value.dtype, device=value.device) for name, value in batch.fields.items()}
    return MicroBatch(batch.logical_worker, 1, fields, torch.zeros(1, dtype=torch.int64), 0, batch.positions)
