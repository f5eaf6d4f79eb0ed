"""Central storage: rank 0 has parameters and optimizer state in host memory, and all ranks compute on their devices.

`tf.distribute.experimental.CentralStorageStrategy` does the same on one machine. In each step rank 0 sends the
parameters to all ranks, every rank computes its gradients, the gradients are reduced as with `ddp`, and rank 0 alone
updates the parameters. A device has parameters and gradients, but no optimizer state. The result is bit-identical to
that of `ddp` on a CPU; on a GPU it may differ from that of `ddp`, because here the optimizer runs on the CPU.
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
    """The state of central storage: `model` computes on the device, and the optimizer updates `master` in host memory.

    On ranks other than 0 the master has the parameters from the start of the generation, and the optimizer has no
    state.
    """

    def __init__(self, config: Config, task: Task, device: torch.device, total_steps: int) -> None:
        self._has_master = False
        """Whether this was rank 0 in its newest generation: only that rank has new parameters and optimizer state."""
        self._has_newer_buffers = False
        """Whether the master has buffers of the last update that the model does not have yet."""
        self._refreshed_step = NO_STATE
        """The number of finished steps after which the model received its parameters; `NO_STATE` to send them again."""
        self._updates_buffers = type(task).apply_gradients is not Task.apply_gradients
        """Whether the task may write buffers in an update (averages), so that all ranks need the master's buffers."""
        self._gradients: dict[Tensor, Tensor] = {}
        """Page-locked memory for the gradient of each trained parameter of the master, on rank 0 with a GPU."""
        super().__init__(config, task, device, total_steps)

    def _make_master(self, model: nn.Module) -> nn.Module:
        """Returns a copy of the model in host memory."""
        try:
            master = copy.deepcopy(model).cpu()
        # Some models cannot be copied, because they have a lock, or a tensor that was computed from others
        # (weight_norm, pruning). Such a model is built a second time.
        except Exception:
            frozen_layers, master = self._frozen_layers, self._build_model().cpu()
            # `_build_model` has replaced the frozen layers by those of the master, but `train` needs the model's.
            self._frozen_layers = frozen_layers
            with torch.no_grad():
                for target, source in zip(_tensors(master), _tensors(model), strict=True):
                    target.copy_(source)
        # A copied parameter lacks attributes that the task has set on the original.
        for m, p in zip(master.parameters(), model.parameters(), strict=True):
            vars(m).update(vars(p))
        return master

    def optimizer_step(self) -> None:
        """Finishes a step, see `TrainingState.optimizer_step`; only rank 0 updates parameters."""
        if self._has_master:
            self._fetch_gradients()
            if self._updates_buffers:
                self._take_buffers()
                self._has_newer_buffers = True
            super().optimizer_step()
            return
        # On the other ranks the schedule advances without the optimizer, for which torch would print a warning.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            self.advance_schedule()

    def _fetch_gradients(self) -> None:
        """Sets the gradients of the master to those of the model; from a GPU they are copied, and the host waits."""
        on_gpu = self._device.type == "cuda"
        for m, p in zip(self.master.parameters(), self.model.parameters(), strict=True):
            if not on_gpu or p.grad is None:
                m.grad = p.grad
                continue
            m.grad = self._gradients[m].copy_(p.grad, non_blocking=True) if m in self._gradients else p.grad.cpu()
        if on_gpu:
            torch.cuda.current_stream(self._device).synchronize()

    def _lock_pages(self) -> None:
        """Moves the master's parameters and gradients to page-locked memory, so that a GPU copies them concurrently.

        Only rank 0 makes such copies, so only its memory is page-locked, and only once.
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
        """Copies the master's parameters into the model of every rank, and its buffers if an update may write them."""
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
        """Yields the model with the parameters of rank 0, see `TrainingState.eval_model`; a collective of all ranks.

        If the run averages parameters, these are the averaged ones. The next step sends the trained parameters again.
        """
        try:
            with self.average.in_place() if self.average is not None else nullcontext():
                self._send_parameters()
                yield self.model
        finally:
            self.train()
            self._refreshed_step = NO_STATE

    def _fall_back(self) -> None:
        if self._has_master:
            # Rank 0 has the whole state of the present step, so no step is lost. If this rank has to leave before the
            # next generation forms, it saves this copy, without a group.
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
        """Copies the buffers of the model to the master, unless the buffers of the master are newer."""
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
    """Returns the parameters and buffers of a model."""
    return [*model.parameters(), *model.buffers()]
