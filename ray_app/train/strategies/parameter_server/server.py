"""A parameter server: a part of the parameters, their optimizer and schedule, and what happens to them when gradients
arrive.

Synchronous, the gradients of a step are added in the fixed tree over the logical workers and applied once, when the
coordinator has the norm over all servers. Otherwise each is applied when it arrives (Dean et al., "Large Scale
Distributed Deep Networks", NIPS 2012). Either way each logical worker's gradient of each step counts once, however
often it is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ray_app.checkpoint.format import pack, unpack
from ray_app.config.config import Config
from ray_app.config.import_paths import OptimizerSpec
from ray_app.errors import DataError
from ray_app.reduction.tree import TreeSum, tree_parents
from ray_app.train.state.state import TrainingState
from ray_app.train.step.step import scale_and_clip
from ray_app.train.strategies.parameter_server.layout import Bytes, from_bytes, to_bytes
from ray_app.train.strategies.parameter_server.protocol import Pulled, Pushed

CPU = torch.device("cpu")


class ParameterServer:
    """See the module. Its methods are called one after the other.

    An era is the time between two restores of all servers. Who calls for another era than the present one gets None,
    and nothing happens.

    Args:
        config: The run's.
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
        """The era of what it holds; 0: nothing."""
        return self._era

    def load(self, era: int, files: dict[str, bytes], buffers: Bytes) -> None:
        """Begins an era with a state, as `checkpoint.format.pack` makes it, and the model's buffers, which one server
        keeps.
        """
        snapshot = unpack(files)
        trained = snapshot.more.get("parameters", snapshot.model)
        held = _ServerTask([trained[str(i)] for i in range(len(trained))])
        self._state = _ServerState(self._config, held, snapshot.optimizer["param_groups"], self._total_steps)
        self._state.load(snapshot)
        self._parameters: list[Tensor] = list(self._state.model.parameters())
        self._buffers = buffers
        self._era, self._sums = era, {}

    def pull(self, era: int) -> Pulled | None:
        """What is needed to compute a gradient."""
        return (self._state.step, to_bytes(self._parameters), self._buffers) if era == self._era else None

    def push(
        self, era: int, step: int, logical_worker: int, gradient: Bytes | None, buffers: Bytes | None
    ) -> Pushed | None:
        """Takes a gradient, whose memory is the server's from then on.

        Args:
            era: See the class.
            step: The step it is of, counted from 0 over the run.
            logical_worker: Whose it is.
            gradient: That of this server's parameters; None: it had no rows.
            buffers: What the buffers became in this step, if this server keeps them.

        Returns:
            The learning rate that it is used with and, unless synchronous, what the next unit needs: nothing waits for
            others before that.
        """
        if era != self._era:
            return None
        lr = self._state.lr
        found = (
            self._sums.setdefault(step, _StepGradients(TreeSum(self._parents)))
            if step >= self._state.step
            else _NO_GRADIENTS
        )
        if found is not _NO_GRADIENTS and logical_worker not in found.seen:
            found.seen.add(logical_worker)
            found.buffers = buffers if buffers is not None else found.buffers
            if self._synchronous:
                sent = to_bytes([torch.zeros_like(p) for p in self._parameters]) if gradient is None else gradient
                found.add(logical_worker, torch.from_numpy(sent).view(self._parameters[0].dtype))
            else:
                self._apply_now(gradient, found)
        return lr, None if self._synchronous else self.pull(era)

    def norms(self, era: int, step: int, incomplete: list[int]) -> tuple[list[float], Bytes] | None:
        """The norm of each parameter's gradient in a step whose gradients are all there; synchronous only.

        Args:
            era: See the class.
            step: The step, counted from 0 over the run.
            incomplete: Numbers of the parameters of which the gradient itself is wanted, since they are parts of one.

        Raises:
            DataError: They are not all there.
        """
        if era != self._era or step < self._state.step:
            return None
        added = self._sums.get(step, _NO_GRADIENTS).tree.nodes
        if [node for node, _ in added] != [(0, self._config.logical_workers)]:
            raise DataError(
                f"Step {step} is to end with the gradients of {[node for node, _ in added]} only; please report this."
            )
        [(_, total)] = added
        parts = total.split([p.numel() for p in self._parameters])
        for p, part in zip(self._parameters, parts, strict=True):
            p.grad = part.view_as(p)
        whole = [part for i, part in enumerate(parts) if i not in incomplete]
        norms = torch.stack(torch._foreach_norm(whole)).tolist() if whole else []
        return norms, to_bytes([parts[i] for i in incomplete])

    def apply(self, era: int, step: int, norm: float, factor: float) -> bool | None:
        """Ends a step after `norms`; `norm` is that of the gradient on all servers times a factor; 0: nothing moves.
        Synchronous.
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
        """What it holds, as `load` takes it."""
        return (pack(self._state.snapshot()), self._buffers) if era == self._era else None

    def _apply_now(self, gradient: Bytes | None, found: _StepGradients) -> None:
        if gradient is not None:
            for p, value in zip(
                self._parameters, from_bytes(gradient, [p.detach() for p in self._parameters]), strict=True
            ):
                p.grad = value
            self._state.optimizer.step()
        self._keep_buffers(found)
        while len(self._sums.get(self._state.step, _NO_GRADIENTS).seen) == self._config.logical_workers:
            del self._sums[self._state.step]
            if self._state.average is not None:
                self._state.average.update(self._state.step)
            self._state.advance_schedule()

    def _keep_buffers(self, found: _StepGradients) -> None:
        if found.buffers is not None:
            self._buffers, found.buffers = found.buffers, None


class _StepGradients:
    """The gradients of one step."""

    def __init__(self, tree: TreeSum) -> None:
        self.tree = tree
        self.buffers: Bytes | None = None
        self.seen: set[int] = set()
        self._waiting: dict[int, Tensor] = {}
        self._next = 0

    def add(self, logical_worker: int, gradient: Tensor) -> None:
        """The tree takes them in the order of the logical workers."""
        self._waiting[logical_worker] = gradient
        while self._next in self._waiting:
            self.tree.push((self._next, self._next + 1), self._waiting.pop(self._next))
            self._next += 1


_NO_GRADIENTS = _StepGradients(TreeSum({}))


class _ServerState(TrainingState):
    """What a server trains, in the groups of the whole, of which some may have no parameter here."""

    def __init__(self, config: Config, held: _ServerTask, groups: list[dict[str, Any]], total_steps: int) -> None:
        self._members = [group["params"] for group in groups]
        super().__init__(config, held, CPU, total_steps)

    def _parameter_groups(self, spec: OptimizerSpec, named: Mapping[str, nn.Parameter]) -> list[Any]:
        parameters = list(named.values())
        return [{"params": [parameters[i] for i in members]} for members in self._members]


class _ServerTask:
    """What a server's state trains, see `Trainable`: the parts of parameters that it holds."""

    def __init__(self, values: list[Tensor]) -> None:
        self._values = values

    def build_model(self) -> nn.Module:
        return nn.ParameterList([value.clone() for value in self._values])

    def apply_gradients(self, model: nn.Module, optimizer: Optimizer) -> None:
        del model
        optimizer.step()
