"""What all parameter servers hold together, as one: moved step by step, taken over whole, and given to them anew in another era."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ray_app.checkpoint.format import pack, unpack
from ray_app.train.job import Job
from ray_app.train.state.state import TrainingState
from ray_app.train.step.norm import norm_of
from ray_app.train.strategies.parameter_server.layout import Layout, from_bytes, to_bytes
from ray_app.train.strategies.parameter_server.messages import NotReadyError, Servers, call_each


class ServedState:
    """See the module. Every method raises `NotReadyError` if a server is lost.

    Args:
        job: The run.
        servers: The parameter servers, whatever they hold.
        state: The state that is taken over from them and given to them.
    """

    def __init__(self, job: Job, servers: Servers, state: TrainingState) -> None:
        self._servers, self._state = servers, state
        self._clips = job.config.train.grad_clip_norm is not None
        self.layout = Layout(state.model, state.optimizer, job.config.train)
        self.era = 0

    def eras(self) -> list[int]:
        """In which era each server is; 0 for one that holds nothing."""
        return call_each(self._servers, "era", [()] * len(self.layout.parts))

    def norm(self, step: int, factor: float) -> float:
        """The norm of a step's gradient, times a factor. If it decides how far parameters move, its bits are those of `ddp`."""
        asked = self.layout.incomplete() if self._clips else [[] for _ in self.layout.parts]
        answers = call_each(self._servers, "norms", [(self.era, step, some) for some in asked])
        norms = [n for some, _ in answers for n in some]
        norms += self.layout.norms_of_joined([data for _, data in answers]) if self._clips else []
        return norm_of(norms, factor)

    def move(self, step: int, norm: float, factor: float) -> None:
        """Lets the servers move their parameters by the gradient that `norm` looked at, times the factor; 0: they go on without."""
        self._call("apply", step, norm, factor)

    def take_over(self) -> None:
        """Makes what they hold the state here."""
        held = self._call("state")
        for buffer, value in zip(self.layout.buffers, from_bytes(held[0][1], self.layout.buffers), strict=True):
            buffer.copy_(value)
        self._state.load(self.layout.merge([unpack(files) for files, _ in held], self._state.snapshot()))

    def give(self, eras: list[int]) -> None:
        """Begins an era, in which the servers, whose eras those are, hold the state here."""
        era = max(self.era, *eras, time.time_ns() // 1_000_000) + 1  # never one of a coordinator that died with all servers
        buffers, none = to_bytes(self.layout.buffers), np.empty(0, np.uint8)
        parts = self.layout.split(self._state.snapshot())
        sent = [(era, pack(part), none if place else buffers) for place, part in enumerate(parts)]
        if self._servers.call("load", sent) is None:
            raise NotReadyError
        self.era = era

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return call_each(self._servers, method, [(self.era, *arguments)] * len(self.layout.parts))
