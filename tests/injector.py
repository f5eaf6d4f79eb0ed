"""Faults that tests inject into a run. Each leaves a file behind when it happens, so that a test can prove that it did."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from ray_app.checkpoint.store import Commit
from ray_app.errors import NonFiniteError


@dataclass(frozen=True)
class At:
    """Something that happens once.

    Args:
        proof: File that is made when it happens.
        step: Finished steps at which it happens.
        rank: Rank to which it happens; None: to all.
    """

    proof: str
    step: int
    rank: int | None = None

    def is_due(self, rank: int, step: int) -> bool:
        if step != self.step or (self.rank is not None and rank != self.rank):
            return False
        try:
            Path(f"{self.proof}-{rank}").open("x").close()
        except FileExistsError:
            return False
        return True

    @property
    def happened(self) -> int:
        """To how many it happened."""
        return len(list(Path(self.proof).parent.glob(Path(self.proof).name + "-*")))


class Kill(At):
    """SIGKILL of a worker after a step."""

    def __call__(self, rank: int, step: int) -> None:
        if self.is_due(rank, step):
            os.kill(os.getpid(), signal.SIGKILL)


class Break(At):
    """An error in every worker that starting again cannot mend: the run ends."""

    def __call__(self, rank: int, step: int) -> None:
        if self.is_due(rank, step):
            raise NonFiniteError(f"injected at step {step}")


@dataclass(frozen=True)
class KillEvaluator:
    """SIGKILL of the evaluator while it evaluates the checkpoint of a step."""

    proof: str
    step: int

    def __call__(self, commit: Commit) -> None:
        if commit.step == self.step and not Path(self.proof).exists():
            Path(self.proof).touch()
            os.kill(os.getpid(), signal.SIGKILL)
