"""A parameter server: it keeps a part of the parameters with their optimizer and schedule, and applies gradients.

In synchronous training the gradients of a step are added in the fixed tree over the logical workers and applied once,
when the coordinator has the norm over all servers. In asynchronous training each gradient is applied when it arrives
(Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012). Either way each logical worker's gradient of each
step counts once, however often it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ray_app.checkpoint.format import pack, unpack
from ray_app.config.config import Config
from ray_app.devices import HOST
from ray_app.errors import DataError
from ray_app.reduction.reducer import gradient_norms, scale_and_clip
from ray_app.reduction.tree import TreeSum, tree_parents
from ray_app.task.base import Batch, Task
from ray_app.train.state.state import StateBackend, TrainingState
from ray_app.train.strategies.parameter_server.layout import Bytes, from_bytes, to_bytes
from ray_app.train.strategies.parameter_server.protocol import Pulled, Pushed


class ParameterServer:
    """One parameter server, see the module; its methods are called one after the other.

    An era is the time between two restores of all servers. A call for another era than the present one returns None and
    changes nothing.

    Args:
        config: The run's configuration.
        total_steps: Steps of the run.
    """

    def __init__(self, config: Config, total_steps: int) -> None:
        torch.set_num_threads(config.scaling.threads_per_worker)
        self._config, self._total_steps = config.replace(train__freeze=None, train__init_from=None), total_steps
        self._synchronous = config.train.staleness == 0
        self._parents = tree_parents(config.logical_workers)
        self._era = 0
        self._sums: dict[int, _StepGradients] = {}

    def era(self) -> int:
        """Returns the era of the server's state; 0 without a state."""
        return self._era

    def load(self, era: int, files: dict[str, bytes], buffers: Bytes) -> None:
        """Begins an era with a state.

        Args:
            era: The new era.
            files: This server's part of the state, as `checkpoint.format.pack` makes it.
            buffers: The model's buffers, which one server keeps; empty for the others.
        """
        snapshot = unpack(files)
        trained = snapshot.extra_state.get("parameters", snapshot.model)
        task = _ServerTask([trained[str(i)] for i in range(len(trained))])
        backend = _ServerBackend([group["params"] for group in snapshot.optimizer["param_groups"]])
        self._state = TrainingState(self._config, task, HOST, self._total_steps, backend)
        self._state.load(snapshot)
        self._parameters: list[Tensor] = list(self._state.model.parameters())
        self._buffers = buffers
        self._era, self._sums = era, {}

    def pull(self, era: int) -> Pulled | None:
        """Returns what a worker needs to compute a gradient, see `Pulled`."""
        return (self._state.step, to_bytes(self._parameters), self._buffers) if era == self._era else None

    def push(
        self, era: int, step: int, logical_worker: int, gradient: Bytes | None, buffers: Bytes | None
    ) -> Pushed | None:
        """Receives a gradient; its memory belongs to the server from then on.

        Args:
            era: Era of the gradient, see the class.
            step: Number of the step, from 0 over the run.
            logical_worker: Logical worker of the gradient.
            gradient: Gradient of this server's parameters; None if the logical worker had no rows.
            buffers: The buffers after this step, if this server keeps them.

        Returns:
            The learning rate for the gradient and, in asynchronous training, the parameters for the next unit, which
            waits for no other worker then.
        """
        if era != self._era:
            return None
        lr = self._state.lr
        step_gradients = (
            self._sums.setdefault(step, _StepGradients(TreeSum(self._parents)))
            if step >= self._state.step
            else _NO_GRADIENTS
        )
        if step_gradients is not _NO_GRADIENTS and logical_worker not in step_gradients.received:
            step_gradients.received.add(logical_worker)
            step_gradients.buffers = buffers if buffers is not None else step_gradients.buffers
            if self._synchronous:
                data = to_bytes([torch.zeros_like(p) for p in self._parameters]) if gradient is None else gradient
                step_gradients.add(logical_worker, torch.from_numpy(data).view(self._parameters[0].dtype))
            else:
                self._apply_now(gradient, step_gradients)
        return lr, None if self._synchronous else self.pull(era)

    def norms(self, era: int, step: int, incomplete: list[int]) -> tuple[list[float], Bytes] | None:
        """Returns the norm of each parameter's gradient in a step with all gradients; only in synchronous training.

        Args:
            era: Era of the step, see the class.
            step: Number of the step, from 0 over the run.
            incomplete: Numbers of the parameters that are only a part of one; of these the gradient itself is returned.

        Raises:
            DataError: Gradients of the step are missing.
        """
        if era != self._era or step < self._state.step:
            return None
        added = self._sums.get(step, _NO_GRADIENTS).tree.nodes
        if [node for node, _ in added] != [(0, self._config.logical_workers)]:
            raise DataError(
                f"Step {step} would end with the gradients of only {[node for node, _ in added]}; please report this."
            )
        [(_, total)] = added
        parts = total.split([p.numel() for p in self._parameters])
        for p, part in zip(self._parameters, parts, strict=True):
            p.grad = part.view_as(p)
        whole = [part for i, part in enumerate(parts) if i not in incomplete]
        norms = torch.stack(gradient_norms(whole)).tolist() if whole else []
        return norms, to_bytes([parts[i] for i in incomplete])

    def apply(self, era: int, step: int, norm: float, factor: float) -> bool | None:
        """Ends a step after `norms`; only in synchronous training.

        Args:
            era: Era of the step, see the class.
            step: Number of the step, from 0 over the run.
            norm: Norm of the gradient on all servers, times the factor.
            factor: Factor for the gradient; 0 leaves the parameters as they are.
        """
        if era != self._era:
            return None
        if step == self._state.step:
            if factor:
                scale_and_clip(
                    [p.grad for p in self._parameters if p.grad is not None],
                    factor,
                    norm,
                    self._config.train.grad_clip_norm,
                )
            self._keep_buffers(self._sums.pop(step))
            self._state.optimizer_step() if factor else self._state.advance_schedule()
        return True

    def state(self, era: int) -> tuple[dict[str, bytes], Bytes] | None:
        """Returns this server's part of the state and the buffers, for `load`."""
        return (pack(self._state.snapshot()), self._buffers) if era == self._era else None

    def _apply_now(self, gradient: Bytes | None, step_gradients: _StepGradients) -> None:
        """Applies a gradient in asynchronous training, and ends the steps that have all gradients."""
        if gradient is not None:
            for p, value in zip(
                self._parameters, from_bytes(gradient, [p.detach() for p in self._parameters]), strict=True
            ):
                p.grad = value
            self._state.optimizer.step()
        self._keep_buffers(step_gradients)
        while len(self._sums.get(self._state.step, _NO_GRADIENTS).received) == self._config.logical_workers:
            del self._sums[self._state.step]
            if self._state.average is not None:
                self._state.average.update(self._state.step)
            self._state.advance_schedule()

    def _keep_buffers(self, step_gradients: _StepGradients) -> None:
        if step_gradients.buffers is not None:
            self._buffers, step_gradients.buffers = step_gradients.buffers, None


class _StepGradients:
    """The gradients of one step."""

    def __init__(self, tree: TreeSum) -> None:
        self.tree = tree
        self.buffers: Bytes | None = None
        self.received: set[int] = set()
        """The logical workers with a gradient that has arrived."""
        self._waiting: dict[int, Tensor] = {}
        self._next = 0

    def add(self, logical_worker: int, gradient: Tensor) -> None:
        """Adds a gradient; the tree gets the gradients in the order of the logical workers."""
        self._waiting[logical_worker] = gradient
        while self._next in self._waiting:
            self.tree.push((self._next, self._next + 1), self._waiting.pop(self._next))
            self._next += 1


_NO_GRADIENTS = _StepGradients(TreeSum({}))


class _ServerBackend(StateBackend):
    """The backend of a server's part, in the parameter groups of the whole model; some may have no parameter here.

    Args:
        members: The numbers of the parameters of each group.
    """

    def __init__(self, members: list[list[int]]) -> None:
        self._members = members

    def build_optimizer(
        self,
        build: Callable[[list[Any], bool], Optimizer],
        make_groups: Callable[[Mapping[str, nn.Parameter]], list[Any]],
        named: Mapping[str, nn.Parameter],
        optimizer_class: type[Optimizer],
    ) -> Optimizer:
        """Returns the optimizer with these groups, see `StateBackend.build_optimizer`."""
        del make_groups, optimizer_class
        parameters = list(named.values())
        return build([{"params": [parameters[i] for i in members]} for members in self._members], True)


class _ServerTask(Task):
    """The task of a server's training state: its model is the server's parts of parameters, which have no loss."""

    def __init__(self, values: list[Tensor]) -> None:
        self._values = values

    def build_model(self) -> nn.Module:
        return nn.ParameterList([value.clone() for value in self._values])

    def columns(self) -> list[str]:
        return []

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        raise NotImplementedError
