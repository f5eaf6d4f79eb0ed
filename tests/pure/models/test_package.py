"""The outputs of a package are compared with those of the trained model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch import Tensor, nn

from ray_app.errors import RegistryError
from ray_app.models import package
from ray_app.models.package import _compare_outputs


class Scaled(nn.Module):
    def __init__(self, model: nn.Module, relative_error: float) -> None:
        super().__init__()
        self.model, self.relative_error = model, relative_error

    def forward(self, features: Tensor) -> Tensor:
        return self.model(features) * (1 + self.relative_error)


@pytest.mark.parametrize(("relative_error", "expected"), [(0.0, "equal"), (3e-6, "close")])
def test_outputs_are_reported_as_equal_or_close(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, relative_error: float, expected: str
) -> None:
    model = nn.Linear(3, 2)
    monkeypatch.setattr(package.loader, "load", lambda data: Scaled(model, relative_error))
    assert _compare_outputs(model, {"features": np.ones((2, 3), np.float32)}, tmp_path) == expected  # type: ignore[arg-type]


def test_different_outputs_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    monkeypatch.setattr(package.loader, "load", lambda data: Scaled(model, 0.01))
    with pytest.raises(RegistryError, match="predicts something else for 1 rows"):
        _compare_outputs(model, {"features": np.ones((2, 3), np.float32)}, tmp_path)  # type: ignore[arg-type]
