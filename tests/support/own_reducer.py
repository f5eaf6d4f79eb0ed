"""The gradient reducer of docs/strategies.md as a module, which workers import by its path."""

from typing import Any

from tests.support.pages import blocks
from tests.support.paths import ROOT

_names: dict[str, Any] = {}
exec(next(block.text for block in blocks(ROOT / "docs" / "strategies.md") if "GradientReducer" in block.text), _names)
OneDevice: Any = _names["OneDevice"]


class Warmup(OneDevice):
    """Keeps a number of steps, which no checkpoint has."""

    steps = 0

    def finish(self) -> None:
        super().finish()
        self.steps += 1
        for p in self.parameters:
            p.grad = None if p.grad is None else p.grad * min(1.0, self.steps / 10)
