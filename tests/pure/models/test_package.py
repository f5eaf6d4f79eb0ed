"""What is said of a package's outputs against those of the model that was trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch import Tensor, nn

from ray_app.errors import RegistryError
from ray_app.models import package
from ray_app.models.package import _compare_outputs


class Off(nn.Module):
    def __init__(self, model: nn.Module, by: float) -> None:
        super().__init__()
        self.model, self.by = model, by

    def forward(self, features: Tensor) -> Tensor:
        return self.model(features) * (1 + self.by)


@pytest.mark.parametrize(("by", "said"), [(0.0, "equal"), (3e-6, "close")])
def test_outputs_are_equal_bit_for_bit_or_close(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by: float, said: str
) -> None:
    model = nn.Linear(3, 2)
    monkeypatch.setattr(package.loader, "load", lambda data: Off(model, by))
    assert _compare_outputs(model, {"features": np.ones((2, 3), np.float32)}, tmp_path) == said  # type: ignore[arg-type]


def test_outputs_that_are_neither_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    monkeypatch.setattr(package.loader, "load", lambda data: Off(model, 0.01))
    with pytest.raises(RegistryError, match="predicts something else for 1 rows"):
        _compare_outputs(model, {"features": np.ones((2, 3), np.float32)}, tmp_path)  # type: ignore[arg-type]
