"""The gradient reducer of conf/own_reducer.py as a module, which workers import by its path."""

from __future__ import annotations

import runpy
from typing import Any

from tests.support.paths import ROOT

OneDevice: Any = runpy.run_path(str(ROOT / "conf" / "own_reducer.py"))["OneDevice"]


class Warmup(OneDevice):
    """Keeps a number of steps, which no checkpoint has."""

    steps = 0

    def finish(self) -> None:
        super().finish()
        self.steps += 1
        for p in self.parameters:
            p.grad = None if p.grad is None else p.grad * min(1.0, self.steps / 10)
