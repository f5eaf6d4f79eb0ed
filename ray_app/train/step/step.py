"""One optimizer step over all logical workers: the arithmetic that does not know how many workers there are."""

from __future__ import annotations

import math
import platform
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ray_app.config.config import Config
from ray_app.data.feed.windows import MicroBatch
from ray_app.errors import ConfigError, DataError, NonFiniteError, PeerLostError
from ray_app.exchange.exchange import Exchange, World, collective, gather
from ray_app.plan.cursor import Cursor
from ray_app.task.base import Task
from ray_app.task.own_code import own_code
from ray_app.train.group.messages import Flags, Phase
from ray_app.train.state.seeds import seed_step
from ray_app.train.state.state import TrainingState
from ray_app.train.step.logical import Buffers, single_values

_ROW = struct.Struct("<qQdqdq")
"""A logical worker's part of the table that all ranks exchange in a step, six times eight bytes: see `Row`."""


class Row(NamedTuple):
    """What one logical worker has to say about a step.

    Args:
        logical_worker: Which.
        rows: Its rows.
        row_hash: The sum of their hashes.
        loss: Its share of the mean loss.
        flags: Those of its rank.
        norm: Its share of the square of the gradient's norm, where that is not known from the sum of the gradients.
        skipped: Its planned rows that cannot be decoded.
    """

    logical_worker: int
    rows: int
    row_hash: int
    loss: float
    flags: int
    norm: float = 0.0
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What all ranks know after a step.

    Args:
        loss: Mean loss per row of the global batch.
        grad_norm: L2 norm of the global gradient before clipping.
        rows: Rows of every logical worker.
        row_hash: Sum of row hashes of every logical worker, modulo 2**64.
        flags: Every flag that any rank set.
        skipped: Planned rows of every logical worker that cannot be decoded.
    """

    loss: float
    grad_norm: float
    rows: list[int]
    row_hash: list[int]
    flags: Flags
    skipped: list[int]


class Step:
    """Runs steps for one generation of workers.

    Args:
        config: Seed, precision, clipping.
        task: Forward and loss.
        state: What the step changes.
        exchange: How gradients meet.
        world: The workers of now.
        device: Where it runs.
        enter: Told what the step is doing.
    """

    unknown_culprit: ClassVar[str] = "the sum of finite gradients"
    """Where a NaN comes from that no logical worker's rows gave."""

    def __init__(
        self,
        config: Config,
        task: Task,
        state: TrainingState,
        exchange: Exchange,
        world: World,
        device: torch.device,
        enter: Callable[[Phase], None] = lambda phase: None,
    ) -> None:
        self._config, self._task, self._state, self._enter = config, task, state, enter
        self._exchange, self._world, self._device = exchange, world, device
        self._buffers = Buffers(state.model, world)
        self._autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.train.precision)
        if config.train.compile:
            _need_compiler(device)
        self._compiled_models: dict[nn.Module, Any] = {}
        self._scale = state.scale
        self._parameters = [p for p in state.model.parameters() if p.requires_grad]

    def close(self) -> None:
        """Ends it; see `Exchange.close`."""
        self._exchange.close()

    @property
    def lr(self) -> float:
        """Learning rate of the next step, that of the first parameter group."""
        return self._state.lr

    def run(self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, flags: Flags) -> StepResult:
        """Does one step.

        Args:
            cursor: Which.
            batches: One micro-batch per logical worker of this rank, in their order.
            global_rows: Rows that the plan has for the step over all logical workers. Losses and gradients are means over those of them
                that can be decoded, which is known only after the exchange: they are made with this number and then corrected.
            flags: What this rank has to say to all.

        Raises:
            NonFiniteError: The loss or the gradient is NaN or infinite; the optimizer did not move.
            PeerLostError: A peer left; the state is that before the step.
        """
        self._buffers.begin()
        try:
            result = self._gather(cursor, batches, global_rows, flags)
        except PeerLostError:
            self._buffers.roll_back()
            raise
        if not sum(result.rows):  # all of them are bad: nothing moves
            self._state.pass_over()
            return result
        norm = self._clip(self._parameters, global_rows / sum(result.rows))
        if math.isfinite(result.loss) and math.isfinite(norm):
            self._state.advance()
        else:
            self._buffers.roll_back()
            if self._scale is None or not self._scale.can_fall or not math.isfinite(result.loss):
                self._refuse(cursor, batches, global_rows, result)
            self._state.pass_over()
        if self._scale is not None:
            self._scale.update(math.isfinite(norm))
        return replace(result, grad_norm=norm)

    def _gather(self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, flags: Flags) -> StepResult:
        """Everything of a step but the optimizer: afterwards all ranks hold the gradient, the buffers and the table of the step."""
        self._state.refresh()
        mine: list[Row] = []
        for batch in batches:
            with self._blaming(batch):
                loss = self._play(cursor, batch, global_rows)
            mine.append(Row(batch.logical_worker, batch.rows, batch.row_hash, loss, flags, skipped=batch.num_skipped))
            self._buffers.end_logical_worker(batch.logical_worker)
        self._enter("exchange")
        self._exchange.launch()
        self._buffers.launch()
        result = self._exchange_table(mine)
        self._exchange.finish()
        self._buffers.finish()
        return self._settled(cursor, result, global_rows)

    def _settled(self, cursor: Cursor, result: StepResult, global_rows: int) -> StepResult:
        """Holds the rows against the plan, and makes of means over the planned rows means over those that were not skipped."""
        rows, skipped = sum(result.rows), sum(result.skipped)
        if rows + skipped != global_rows:
            raise DataError(f"Step {cursor} consumed {rows} rows and skipped {skipped}, {global_rows} were planned; please report this.")
        if not skipped or not rows:
            return result
        more = global_rows / rows
        return replace(result, loss=result.loss * more, grad_norm=result.grad_norm * math.sqrt(more))

    def _blaming(self, batch: MicroBatch) -> AbstractContextManager[None]:
        """The context of forward and backward of a micro-batch: what is raised is told with the logical worker and the rows."""
        return own_code(lambda: f"logical worker {batch.logical_worker}", batch.positions.tolist)

    def _play(self, cursor: Cursor, batch: MicroBatch, global_rows: int) -> float:
        """Forward and backward of one logical worker; returns its share of the mean loss."""
        if not batch.rows:
            self._exchange.skip(batch.logical_worker)
            return 0.0
        losses = self._losses(cursor, batch, self._state.model)
        scale = self._scale.value if self._scale is not None else 1.0
        self._exchange.backward(losses, self._weights(batch.rows, global_rows, scale), batch.logical_worker)
        return losses.detach().sum().item() / global_rows

    def _weights(self, rows: int, global_rows: int, scale: float) -> Tensor:
        """One over the global number of rows, scaled, for every row of a micro-batch, shape (rows,)."""
        return torch.full((rows,), scale / global_rows, device=self._device)

    def _losses(self, cursor: Cursor, batch: MicroBatch, model: nn.Module) -> Tensor:
        """The losses of a micro-batch's rows, shape (rows,)."""
        seed_step(self._config.seed, cursor.epoch, cursor.step, batch.logical_worker, self._device)
        fields = self._task.augment(batch.fields, batch.keys)
        if self._config.train.channels_last:  # not the parameters: fused optimizers take a gradient's values for ones in their layout
            fields = {name: v.contiguous(memory_format=torch.channels_last) if v.ndim == 4 else v for name, v in fields.items()}
        single = single_values(model) if batch.rows == 1 else nullcontext()
        called = self._compiled(model) if self._config.train.compile and batch.rows > 1 else model
        with torch.autocast(self._device.type, self._autocast) if self._autocast else nullcontext(), single:
            losses = self._task.training_loss(called, fields)
        refuse_if_not_per_row(self._task, losses, batch.rows)
        return losses.float()

    def _compiled(self, model: nn.Module) -> Any:
        """A model compiled for every shape that comes, each on its own: what a shape gives must not depend on those before it."""
        if model not in self._compiled_models:
            self._compiled_models[model] = torch.compile(model, dynamic=False)
        return self._compiled_models[model]

    def _exchange_table(self, mine: list[Row]) -> StepResult:
        """Tells all ranks every logical worker's rows, loss and flags; each row of the table comes from one rank, so sums are exact."""
        table = mine
        if self._world.size > 1:
            packed = torch.zeros(self._world.logical_workers, _ROW.size // 8, dtype=torch.int64)
            for row in mine:
                packed[row.logical_worker] = torch.frombuffer(bytearray(_ROW.pack(*row[1:])), dtype=torch.int64)
            with collective():
                dist.all_reduce(packed)
            table = [Row(v, *values) for v, values in enumerate(_ROW.iter_unpack(packed.numpy().tobytes()))]
        flags = 0
        for row in table:
            flags |= row.flags
        shares = [row.loss for row in table]
        loss = math.fsum(shares) if all(map(math.isfinite, shares)) else sum(shares)  # fsum raises for infinities of both signs
        norm = math.sqrt(sum(row.norm for row in table))
        rows, row_hash, skipped = ([getattr(row, name) for row in table] for name in ("rows", "row_hash", "skipped"))
        return StepResult(loss, norm, rows, row_hash, Flags(flags), skipped)

    def _clip(self, parameters: list[nn.Parameter], correction: float = 1.0) -> float:
        """The gradient's norm; corrects it for bad rows, takes the loss's scale out of it, and clips it to the configured norm."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        factor = correction / (self._scale.value if self._scale is not None else 1.0)
        if factor != 1:
            torch._foreach_mul_(gradients, factor)
        norms = torch._foreach_norm(gradients)  # get_total_norm costs 30 us more
        norm = math.sqrt(math.fsum(n * n for n in torch.stack(norms).tolist()))
        if self._config.train.grad_clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self._config.train.grad_clip_norm, torch.tensor(norm))
        return norm

    def _refuse(self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, result: StepResult) -> None:
        """Finds out which logical workers' rows gave the NaN or infinity, and raises on every rank alike."""
        found = []
        for batch in batches:
            if batch.rows and not self._is_finite(cursor, batch, global_rows):
                found.append((batch.logical_worker, batch.positions.tolist()))
        everyone = gather(found, self._world)
        culprits = "; ".join(f"logical worker {v}, rows at manifest positions {p}" for part in everyone for v, p in part)
        raise NonFiniteError(
            f"Epoch {cursor.epoch}, step {cursor.step} of the epoch: the loss ({result.loss}) or the gradient is not finite, from"
            f" {culprits or self.unknown_culprit}. The optimizer did not move. Look at these rows, lower the learning rate, or set"
            " train.grad_clip_norm."
        )

    def _is_finite(self, cursor: Cursor, batch: MicroBatch, global_rows: int) -> bool:
        loss = self._losses(cursor, batch, self._state.model).sum() / global_rows
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        return bool(loss.isfinite()) and all(bool(g.isfinite().all()) for g in gradients if g is not None)


def refuse_if_not_per_row(task: Task, losses: Tensor, rows: int) -> None:
    """Refuses losses that are not one for each row.

    Raises:
        ConfigError: They are not.
    """
    if losses.shape != (rows,):
        raise ConfigError(
            f"{type(task).__name__}.loss returned shape {tuple(losses.shape)} for {rows} rows; it must return one value per row, shape"
            " (rows,). Use reduction='none' in the loss function."
        )


def _need_compiler(device: torch.device) -> None:
    """Refuses `train.compile` where it cannot work.

    Raises:
        ConfigError: There is no compiler here.
    """
    if device.type == "cpu":
        from torch._inductor import cpp_builder
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            cpp_builder.get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise ConfigError(
                f"train.compile needs a C++ compiler such as g++ on every node, and {platform.node()} has none. Install one, or set it to"
                " false."
            ) from error
