"""Central storage: rank 0 has parameters and optimizer state in host memory, and all ranks compute on their devices.

`tf.distribute.experimental.CentralStorageStrategy` does the same on one machine. In each step rank 0 sends the
parameters to all ranks, every rank computes its gradients, the gradients are reduced as with `ddp`, and rank 0 alone
updates the parameters. A device has parameters and gradients, but no optimizer state. The result is bit-identical to
that of `ddp` on a CPU; on a GPU it may differ from that of `ddp`, because here the optimizer runs on the CPU.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ray_app.checkpoint.format import Snapshot
from ray_app.config.sections import TrainSection
from ray_app.devices import HOST, kind_of
from ray_app.errors import PeerLostError
from ray_app.reduction.messages import check_errors_on_all_ranks, gather
from ray_app.reduction.peer_errors import collective, launch_guard
from ray_app.reduction.world import World
from ray_app.train.state.parameters import ordered_parameters
from ray_app.train.state.state import NO_STATE, StateBackend
from ray_app.train.state.transfer import page_locked_like, ranks_without_state, transfer_snapshot
from ray_app.train.step.micro_batch import TensorGroup
from ray_app.train.strategies.partitioned import PeerReplicas


class CentralBackend(StateBackend):
    """The state of central storage: `model` is on the device, and the optimizer of rank 0 updates `master` on the host.

    On ranks other than 0 the master has the parameters from the start of the generation, and the optimizer has no
    state. `collect` leaves a whole copy in the host memory of every rank. The loop calls it at each checkpoint and
    snapshot, and at the end of a generation that ends as planned. If rank 0 is lost, the ranks continue from the newest
    whole copy that one of them has. With `train.peer_replica` rank 1 has a newer one.

    Args:
        device: Device of the model.
        train: The section of the configuration; with its `peer_replica` rank 0 sends a copy of the state to rank 1
            after every step.
        updates_buffers: Whether the task may write buffers in an update (averages), so that all ranks need the master's
            buffers.
    """

    def __init__(self, device: torch.device, train: TrainSection, updates_buffers: bool) -> None:
        self._device = device
        self._has_peer_replicas = train.peer_replica
        self._updates_buffers = updates_buffers
        # Whether this was rank 0 in its newest generation: only that rank has new parameters and optimizer state.
        self._has_master = False
        # Whether the master has buffers of the last update that the model does not have yet.
        self._has_newer_buffers = False
        # The step of the parameters in the model, and whether they are averaged ones.
        self._received = NO_STATE, False
        # Page-locked memory for the gradient of each trained parameter of the master, on rank 0 with a GPU.
        self._gradients: dict[Tensor, Tensor] = {}
        # Outside of a generation this worker counts as the only one.
        self._world = World(0, 1, 1)
        # The newest whole copy that this rank has.
        self._whole: Snapshot | None = None
        self._peer_replicas = PeerReplicas()

    def make_master(self, model: nn.Module, build_model: Callable[[], nn.Module]) -> nn.Module:
        """Returns a copy of the model in host memory."""
        try:
            master = copy.deepcopy(model).cpu()
        # Some models cannot be copied, because they have a lock, or a tensor that was computed from others
        # (weight_norm, pruning). Such a model is built a second time.
        except Exception:
            master = build_model().cpu()
            with torch.no_grad():
                for target, source in zip(_tensors(master), _tensors(model), strict=True):
                    target.copy_(source)
        # A copied parameter lacks attributes that the task has set on the original.
        for m, p in zip(master.parameters(), model.parameters(), strict=True):
            vars(m).update(vars(p))
        return master

    def update(self, apply: Callable[[], None]) -> None:
        """Updates the parameters of the master on rank 0, see `StateBackend.update`."""
        if self._has_master:
            self._fetch_gradients()
            if self._updates_buffers:
                self._take_buffers()
                self._has_newer_buffers = True
            apply()

    def _fetch_gradients(self) -> None:
        """Sets the gradients of the master to those of the model; from a GPU they are copied, and the host waits."""
        kind = kind_of(self._device)
        for m, p in zip(self.state.master.parameters(), self.state.model.parameters(), strict=True):
            if kind.is_host or p.grad is None:
                m.grad = p.grad
                continue
            m.grad = self._gradients[m].copy_(p.grad, non_blocking=True) if m in self._gradients else p.grad.cpu()
        kind.synchronize_stream(self._device)

    def _lock_pages(self) -> None:
        """Moves the master's parameters and gradients to page-locked memory, so that a GPU copies them concurrently.

        Only rank 0 makes such copies, so only its memory is page-locked, and only once.
        """
        parameters = list(self.state.master.parameters())
        if kind_of(self._device).is_host or self._gradients or not self._has_master:
            return
        for p, memory in zip(parameters, page_locked_like(parameters), strict=True):
            p.data = memory.copy_(p.data)
        trained = ordered_parameters(self.state.optimizer)
        self._gradients = dict(zip(trained, page_locked_like(trained), strict=True))

    @torch.no_grad()
    def broadcast_parameters(self, averaged: bool = False) -> None:
        """Copies the master's parameters into the model of every rank, unless it has those of the present step.

        Buffers are copied, too, if an update may write them. If a peer is lost, the state of rank 0 is unchanged.
        """
        state, world = self.state, self._world
        if self._received == (state.step, averaged):
            return
        self._received = NO_STATE, False
        parameters = [p.detach() for p in state.model.parameters()]
        if self._has_master:
            for p, m in zip(parameters, state.master.parameters(), strict=True):
                p.copy_(m, non_blocking=True)
        buffers = TensorGroup(list(state.model.buffers()) if self._updates_buffers else [])
        if self._has_newer_buffers:
            buffers.copy(TensorGroup(list(state.master.buffers())))
            self._has_newer_buffers = False
        if world.size > 1:
            is_on_host = not world.has_device_collectives
            sent = buffers.like(is_on_host)
            sent.copy(buffers)
            # Without collectives of the device, parameters on it travel as copies in the memory of the host.
            copies = [p.to(HOST) if is_on_host else p for p in parameters]
            with launch_guard(world)():
                for work in [dist.broadcast(p, 0, async_op=True) for p in (*copies, sent.memory) if p.numel()]:
                    work.wait()  # type: ignore[union-attr]
            for p, received in zip(parameters, copies, strict=True):
                if is_on_host and p.device != HOST:
                    p.copy_(received)
            buffers.copy(sent)
        self._received = state.step, averaged

    def _whole_copy(self) -> Snapshot | None:
        """Returns a copy of the whole state on rank 0, None on other ranks."""
        if not self._has_master:
            return None
        self._take_buffers()
        return self.state.copy_to_host()

    @torch.no_grad()
    def _take_buffers(self) -> None:
        """Copies the buffers of the model to the master, unless the buffers of the master are newer."""
        if self._has_newer_buffers:
            return
        for target, source in zip(self.state.master.buffers(), self.state.model.buffers(), strict=True):
            target.copy_(source)

    def _load(self, whole: Snapshot) -> None:
        """Loads a whole copy, on ranks other than 0 without the optimizer's state."""
        self._has_master, self._has_newer_buffers = self._world.rank == 0, False
        self._lock_pages()
        if not self._has_master:
            # The schedule advances without the optimizer, for which torch would print a warning.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        state = self.state
        optimizer = copy.deepcopy({**whole.optimizer, "state": whole.optimizer["state"] if self._has_master else {}})
        state.load(replace(whole, optimizer=optimizer, schedule=copy.deepcopy(whole.schedule)))
        state.model.load_state_dict(state.master.state_dict())
        self._received = state.step, False
        state.train()

    @contextmanager
    def bind(self, world: World) -> Iterator[World]:
        """Binds the state to a generation, see `StateBackend.bind`.

        If the generation breaks, this rank returns to the newest state that it can restore without other ranks.
        """
        try:
            self._world = world
            yield world
        except PeerLostError:
            # A rank with the whole state of the present step loses no step. If it has to leave before the next
            # generation forms, it saves this copy, without a group.
            self._whole = self._whole_copy() or self._whole
            self.state.step = self._whole.step if self._whole is not None else NO_STATE
            raise

    def share(self, world: World, restore: Callable[[], None], was_broken: bool = False) -> list[int]:
        """Gives every rank the newest whole copy and loads it, see `StateBackend.share`.

        The ranks do not compare their copies, because a whole copy is kept only after all ranks have checked for
        errors. So no rank is divergent.
        """
        del was_broken
        newest = self._peer_replicas.newest(world, self.state.step)
        if newest is not None and newest[1] == [world.rank]:
            self.adopt(Snapshot(**self._peer_replicas.parts_of(newest[0])[0].unpack()))
        steps = gather(self.state.step, world)
        if max(steps) == NO_STATE and world.rank == 0:
            restore()
        source = steps.index(max(steps))
        if world.rank == source:
            # Before the first generation the whole state is here.
            self._whole = self._whole_copy() or self._whole or self.state.copy_to_host()
        whole = transfer_snapshot(self._whole, world, source, ranks_without_state(steps, source))
        assert whole is not None
        self.adopt(whole)
        self._load(whole)
        self._peer_replicas.clear()
        return []

    def send_peer_replica(self) -> None:
        """Copies the state of rank 0 to rank 1, with `train.peer_replica`."""
        if self._has_peer_replicas and self._world.size > 1:
            part = None
            if self._world.rank == 0:
                self._take_buffers()
                part = vars(self.state.live())
            self._peer_replicas.store(self.state.step, part, self._world, owners=1)

    def collect(self) -> None:
        """Collects a whole copy on every rank, unless they have one of this step, see `StateBackend.collect`."""
        if self._whole is None or self._whole.step != self.state.step:
            with collective():
                whole = transfer_snapshot(self._whole_copy(), self._world, 0, range(1, self._world.size))
            check_errors_on_all_ranks(self._world)
            self._whole = whole

    def end_generation(self, leaves: bool) -> None:
        """Collects a whole copy on every rank, see `StateBackend.end_generation`."""
        del leaves
        self.collect()

    def snapshot(self, into: Snapshot | None = None) -> Snapshot:
        """Returns the whole copy that `collect` has made.

        The memory of an older copy is not reused: if a peer is lost meanwhile, that copy is needed.
        """
        del into
        assert self._whole is not None, "share has made it"
        assert self._whole.step == self.state.step, "collect has made it"
        return self._whole

    def adopt(self, snapshot: Snapshot) -> None:
        """Keeps a snapshot as the whole copy of this rank; `share` sends it to the others and loads it."""
        self._whole, self.state.step = snapshot, snapshot.step


def _tensors(model: nn.Module) -> list[Tensor]:
    """Returns the parameters and buffers of a model."""
    return [*model.parameters(), *model.buffers()]
