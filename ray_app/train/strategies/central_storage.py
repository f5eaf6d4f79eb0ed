"""Central storage: parameters and optimizer state are in the host memory of rank 0, all ranks compute on their devices.

`tf.distribute.experimental.CentralStorageStrategy` does the same on one machine. In each step every rank receives the
parameters and computes, the gradients are reduced as with `ddp`, and rank 0 alone updates the parameters in host
memory. So a device has parameters and gradients, but no optimizer state, and the result is bit-identical to that of
`ddp` if the optimizer runs on the CPU there, too.
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
    """The state of central storage: `model` computes on the device, and the optimizer updates `master` on the host.

    On ranks other than 0 the master is as old as the generation, and the optimizer has no state.
    """

    def __init__(self, config: Config, task: Task, device: torch.device, total_steps: int) -> None:
        self._has_master = False
        """Whether this rank has the parameters and the optimizer state, which is rank 0."""
        self._has_newer_buffers = False
        """Whether an update has written buffers of the master that the model does not have yet."""
        self._refreshed_step = NO_STATE
        """The step of the parameters in the model."""
        self._updates_buffers = type(task).apply_gradients is not Task.apply_gradients
        """Whether an update may write buffers (averages), which all ranks then need."""
        self._gradients: dict[Tensor, Tensor] = {}
        super().__init__(config, task, device, total_steps)

    def _make_master(self, model: nn.Module) -> nn.Module:
        try:
            master = copy.deepcopy(model).cpu()
        # Some models cannot be copied: they have a lock, or a tensor that was computed (weight_norm, pruning).
        except Exception:
            frozen, master = self._frozen, self._build_model().cpu()
            self._frozen = frozen
            with torch.no_grad():
                for target, source in zip(_tensors(master), _tensors(model), strict=True):
                    target.copy_(source)
        # A copy of a parameter lacks the attributes that were set on it.
        for m, p in zip(master.parameters(), model.parameters(), strict=True):
            vars(m).update(vars(p))
        return master

    def optimizer_step(self) -> None:
        """Updates the parameters on rank 0, see `TrainingState.optimizer_step`."""
        if self._has_master:
            self._fetch_gradients()
            if self._updates_buffers:
                self._take_buffers()
                self._has_newer_buffers = True
            super().optimizer_step()
            return
        # On the other ranks the schedule advances without the optimizer.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            self.advance_schedule()

    def _fetch_gradients(self) -> None:
        """Gives the master the gradients of the model; from a GPU through page-locked memory."""
        on_gpu = self._device.type == "cuda"
        for m, p in zip(self.master.parameters(), self.model.parameters(), strict=True):
            if not on_gpu or p.grad is None:
                m.grad = p.grad
                continue
            m.grad = self._gradients[m].copy_(p.grad, non_blocking=True) if m in self._gradients else p.grad.cpu()
        if on_gpu:
            torch.cuda.current_stream(self._device).synchronize()

    def _lock_pages(self) -> None:
        """Moves the master's parameters and gradients to page-locked memory, so that their copies run concurrently.

        Only rank 0 makes such copies, so only its memory is page-locked.
        """
        parameters = list(self.master.parameters())
        if self._device.type == "cpu" or self._gradients or not self._has_master:
            return
        for p, memory in zip(parameters, page_locked_like(parameters), strict=True):
            p.data = memory.copy_(p.data)
        trained = ordered_parameters(self.optimizer)
        self._gradients = dict(zip(trained, page_locked_like(trained), strict=True))

    def refresh(self) -> None:
        """Sends the parameters of the present step to all ranks, see `TrainingState.refresh`.

        Raises:
            PeerLostError: A peer left meanwhile; the state of rank 0 is unchanged.
        """
        if self._refreshed_step != self.step:
            self._send_parameters()
            self._refreshed_step = self.step

    @torch.no_grad()
    def _send_parameters(self) -> None:
        parameters = [p.detach() for p in self.model.parameters()]
        if self._has_master:
            for p, m in zip(parameters, self.master.parameters(), strict=True):
                p.copy_(m, non_blocking=True)
        buffers = TensorGroup(list(self.model.buffers()) if self._updates_buffers else [])
        if self._has_newer_buffers:
            buffers.copy(TensorGroup(list(self.master.buffers())))
            self._has_newer_buffers = False
        if self._world.size > 1:
            sent = buffers.like()
            sent.copy(buffers)
            with self._world.launch_guard():
                for work in [dist.broadcast(p, 0, async_op=True) for p in (*parameters, sent.memory) if p.numel()]:
                    work.wait()  # type: ignore[union-attr]
            buffers.copy(sent)

    @contextmanager
    def eval_model(self) -> Iterator[nn.Module]:
        """Yields the model with the parameters of rank 0, see `TrainingState.eval_model`; a collective of all ranks."""
        try:
            with self.average.in_place() if self.average is not None else nullcontext():
                self._send_parameters()
                yield self.model
        finally:
            self.train()
            self._refreshed_step = NO_STATE

    def _fall_back(self) -> None:
        if self._has_master:
            # If this rank has to leave now, it saves this copy without a group.
            self._whole = self._local_copy()
        else:
            super()._fall_back()

    def _local_copy(self) -> Snapshot:
        if not self._has_master:
            return super()._local_copy()
        self._take_buffers()
        return TrainingState.snapshot(self)

    @torch.no_grad()
    def _take_buffers(self) -> None:
        """Copies the buffers of the model to the master, unless those of the master are newer."""
        if self._has_newer_buffers:
            return
        for target, source in zip(self.master.buffers(), self.model.buffers(), strict=True):
            target.copy_(source)

    @property
    def _num_owners(self) -> int:
        return 1

    def _local_part(self) -> Any:
        if not self._has_master:
            return None
        self._take_buffers()
        return super()._local_part()

    def _collect(self) -> Snapshot:
        if self._has_master:
            self._whole = self._local_copy()
        return self._send_whole(0, range(1, self._world.size))

    def _load_part(self, whole: Snapshot) -> None:
        self._has_master, self._has_newer_buffers = self._world.rank == 0, False
        self._lock_pages()
        state = whole.optimizer["state"] if self._has_master else {}
        optimizer = copy.deepcopy({**whole.optimizer, "state": state})
        TrainingState.load(self, replace(whole, optimizer=optimizer, schedule=copy.deepcopy(whole.schedule)))
        self.model.load_state_dict(self.master.state_dict())
        self._refreshed_step = self.step
        self.train()


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
