"""Central storage: parameters and optimizer state in the host memory of rank 0, computation on the devices of all
ranks.

What `tf.distribute.experimental.CentralStorageStrategy` does on one machine. In each step every rank takes the
parameters, computes, the gradients are added as with `ddp`, and rank 0 alone moves the parameters, in host memory. So a
device holds parameters and gradients, but no optimizer state, and the bits are those of `ddp` where the optimizer runs
on the CPU there, too.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ray_app.checkpoint.format import Snapshot
from ray_app.config.config import Config
from ray_app.task.base import Task
from ray_app.train.state.parameters import ordered_parameters
from ray_app.train.state.state import NO_STATE, TrainingState
from ray_app.train.state.transfer import page_locked_like
from ray_app.train.step.micro_batch import TensorGroup
from ray_app.train.strategies.partitioned import PartitionedState


class CentralState(PartitionedState):
    """See the module; `model` computes on the device, `master` is what the optimizer moves, on the host.

    The master of another rank than 0 is as old as the generation, and its optimizer has no state.
    """

    def __init__(self, config: Config, task: Task, device: torch.device, total_steps: int) -> None:
        self._holds = self._has_moved = False
        self._refreshed = NO_STATE
        self._moves_buffers = type(task).apply_gradients is not Task.apply_gradients
        """Whether an update may write buffers (averages), which all then have to have."""
        self._gradients: dict[Tensor, Tensor] = {}
        super().__init__(config, task, device, total_steps)

    def _make_master(self, model: nn.Module) -> nn.Module:
        try:
            master = copy.deepcopy(model).cpu()
        except Exception:  # it has what cannot be copied: a lock, a tensor that was computed (weight_norm, pruning)
            frozen, master = self._frozen, self._build_model().cpu()
            self._frozen = frozen
            with torch.no_grad():
                for mine, computed in zip(_tensors(master), _tensors(model), strict=True):
                    mine.copy_(computed)
        for m, p in zip(master.parameters(), model.parameters(), strict=True):
            vars(m).update(vars(p))  # which a copy does not have
        return master

    def optimizer_step(self) -> None:
        """See `TrainingState.optimizer_step`; only rank 0 has something to move."""
        if self._holds:
            self._fetch_gradients()
            if self._moves_buffers:
                self._take_buffers()
                self._has_moved = True
            super().optimizer_step()
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            self.advance_schedule()

    def _fetch_gradients(self) -> None:
        """Gives the master the gradients of the model, or none where there is none; on a GPU through page-locked
        memory.
        """
        on_gpu = self._device.type == "cuda"
        for m, p in zip(self.master.parameters(), self.model.parameters(), strict=True):
            if not on_gpu or p.grad is None:
                m.grad = p.grad
                continue
            m.grad = self._gradients[m].copy_(p.grad, non_blocking=True) if m in self._gradients else p.grad.cpu()
        if on_gpu:
            torch.cuda.current_stream(self._device).synchronize()

    def _lock_pages(self) -> None:
        """Lets copies of parameters and gradients not wait for each other; only rank 0 makes some, so only its memory
        is page-locked.
        """
        parameters = list(self.master.parameters())
        if self._device.type == "cpu" or self._gradients or not self._holds:
            return
        for p, memory in zip(parameters, page_locked_like(parameters), strict=True):
            p.data = memory.copy_(p.data)
        trained = ordered_parameters(self.optimizer)
        self._gradients = dict(zip(trained, page_locked_like(trained), strict=True))

    def refresh(self) -> None:
        """See `TrainingState.refresh`.

        Raises:
            PeerLostError: A peer left meanwhile; rank 0 has the state of before.
        """
        if self._refreshed != self.step:
            self._send_parameters()
            self._refreshed = self.step

    @torch.no_grad()
    def _send_parameters(self) -> None:
        parameters = [p.detach() for p in self.model.parameters()]
        if self._holds:
            for p, m in zip(parameters, self.master.parameters(), strict=True):
                p.copy_(m, non_blocking=True)
        buffers = TensorGroup(list(self.model.buffers()) if self._moves_buffers else [])
        if self._has_moved:
            buffers.copy(TensorGroup(list(self.master.buffers())))
            self._has_moved = False
        if self._world.size > 1:
            sent = buffers.like()
            sent.copy(buffers)
            with self._world.launch_guard():
                for work in [dist.broadcast(p, 0, async_op=True) for p in (*parameters, sent.memory) if p.numel()]:
                    work.wait()  # type: ignore[union-attr]
            buffers.copy(sent)

    @contextmanager
    def eval_model(self) -> Iterator[nn.Module]:
        """See `TrainingState.eval_model`; a collective of all ranks."""
        try:
            with self.average.in_place() if self.average is not None else nullcontext():
                self._send_parameters()
                yield self.model
        finally:
            self.train()
            self._refreshed = NO_STATE

    def _fall_back(self) -> None:
        if self._holds:
            self._whole = self._own()  # what it saves if it has to leave now, without a group
        else:
            super()._fall_back()

    def _own(self) -> Snapshot:
        if not self._holds:
            return super()._own()
        self._take_buffers()
        return TrainingState.snapshot(self)

    @torch.no_grad()
    def _take_buffers(self) -> None:
        if self._has_moved:  # the master's are newer
            return
        for mine, computed in zip(self.master.buffers(), self.model.buffers(), strict=True):
            mine.copy_(computed)

    @property
    def _owners(self) -> int:
        return 1

    def _part(self) -> Any:
        if not self._holds:
            return None
        self._take_buffers()
        return super()._part()

    def _collected(self) -> Snapshot:
        if self._holds:
            self._whole = self._own()
        return self._sent(0, range(1, self._world.size))

    def _take(self, whole: Snapshot) -> None:
        self._holds, self._has_moved = self._world.rank == 0, False
        self._lock_pages()
        state = whole.optimizer["state"] if self._holds else {}
        optimizer = copy.deepcopy({**whole.optimizer, "state": state})
        TrainingState.load(self, replace(whole, optimizer=optimizer, schedule=copy.deepcopy(whole.schedule)))
        self.model.load_state_dict(self.master.state_dict())
        self._refreshed = self.step
        self.train()


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
