"""A step on sharded parameters: every pass gathers them from all ranks, so all ranks make the same number of passes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ray_app.data.feed.windows import MicroBatch
from ray_app.exchange.exchange import collective
from ray_app.exchange.fsdp import FullySharded
from ray_app.exchange.fsdp_exact import ExactlySharded
from ray_app.plan.assign import micro_batches
from ray_app.plan.cursor import Cursor
from ray_app.task.losses import Losses, Sums, Unread
from ray_app.train.group.messages import Flags
from ray_app.train.step.norm import norms_of
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

    def _lines(self, batches: list[MicroBatch], told: list[Sums], global_rows: int, flags: Flags) -> list[Row]:
        lines = super()._lines(batches, told, global_rows, flags)
        self._bad = {row.logical_worker for row in lines if not math.isfinite(row.loss)}
        return lines

    def _pass_idly(self, cursor: Cursor) -> None:
        batch, buffers = self._before, list(self._state.model.buffers())
        assert batch is not None
        before = [b.clone() for b in buffers]
        with self._blaming(batch):
            self._sharded.idle(self._losses(cursor, batch, self._state.model).values)
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)

    def _losses(self, cursor: Cursor, batch: MicroBatch, model: nn.Module) -> Losses:
        with collective():
            return super()._losses(cursor, batch, model)

    def _gradients(self) -> list[Tensor]:
        return [p.grad.to_local() for p in self._parameters if p.grad is not None]  # type: ignore[attr-defined]

    def _norms(self) -> list[Tensor]:
        """See `Step._norms`; a collective, so that all ranks know the same norm."""
        if isinstance(self._sharded, ExactlySharded):
            norms = self._sharded.norms()
        else:
            norms = torch.stack(norms_of(self._gradients())).double().square().sum()
            with self._world.launching():
                dist.all_reduce(norms)
            norms.sqrt_()
        return [norms.to(self._device, non_blocking=True)]

    def _is_finite(self, cursor: Cursor, batch: MicroBatch, global_rows: int) -> bool:
        """Known from the pass itself: another one would have to be one of all ranks."""
        return batch.logical_worker not in self._bad

    def _rows_to_blame(self, cursor: Cursor, batch: MicroBatch) -> list[int]:
        """All of the micro-batch: to look at each by itself would be a pass of all ranks."""
        del cursor
        return batch.positions.tolist()


def _blank(batch: MicroBatch) -> MicroBatch:
    """One row of zeros in the shape of a micro-batch without rows."""
    fields = {name: torch.zeros(1, *value.shape[1:], dtype=value.dtype, device=value.device) for name, value in batch.fields.items()}
    return MicroBatch(batch.logical_worker, 1, fields, torch.zeros(1, dtype=torch.int64), 0, batch.positions)
