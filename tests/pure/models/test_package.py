"""The outputs of a package are compared with those of the trained model, and its code is found through imports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch import Tensor, nn

from ray_app.errors import RegistryError
from ray_app.models import loader
from ray_app.models.package import compare_outputs, sources_of, write_files
from ray_app.task.base import Batch
from ray_app.task.ragged import Ragged
from ray_app.task.tabular import TabularClassification


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
    monkeypatch.setattr(loader, "load", lambda data, trust: Scaled(model, relative_error))
    assert compare_outputs(model, {"features": np.ones((2, 3), np.float32)}, tmp_path) == expected


def test_different_outputs_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    monkeypatch.setattr(loader, "load", lambda data, trust: Scaled(model, 0.01))
    with pytest.raises(RegistryError, match="predicts other values for 1 rows"):
        compare_outputs(model, {"features": np.ones((2, 3), np.float32)}, tmp_path)


class TokenScores(TabularClassification):
    """Scores each token of a text, and its first tokens."""

    max_length: int

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Returns the scores of all tokens, of the two first ones, and of the text."""
        assert batch["tokens"].shape[1] <= self.max_length
        scores = model(batch["tokens"])
        return {"token": scores, "first": scores[:, :2], "text": scores.mean(1)}


@pytest.mark.parametrize(("max_length", "length"), [(100, -1), (5, 5)], ids=["any length", "no longer example"])
def test_output_shapes_follow_the_length_of_ragged_fields(tmp_path: Path, max_length: int, length: int) -> None:
    task = TokenScores.__new__(TokenScores)
    vars(task).update(label="label", features=["a"], scale=1.0, inputs=3, num_classes=2, max_length=max_length)
    rows = {"tokens": Ragged.of([[1, 2, 3], [4, 5, 6, 7, 8]], np.int32), "label": np.zeros(2, np.int64)}
    files = write_files(task, nn.Embedding(10, 2), rows, tmp_path)
    assert files.input_shapes == {"tokens": (-1, -1)}
    assert files.output_shapes == {"token": (-1, length, 2), "first": (-1, 2, 2), "text": (-1, 2)}


def test_code_is_found_through_imports_and_ray_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "own_tasks" / "deep"
    folder.mkdir(parents=True)
    (folder / "one.py").write_text("import json\nfrom . import two\nif TYPE_CHECKING:\n    import ray\n")
    (folder / "two.py").write_text("def f():\n    import torchvision\n    from ray_app.plan.hashing import key\n")
    sources = sources_of("own_tasks.deep.one")
    assert sorted(sources.files) == [
        "own_tasks.deep.one",
        "own_tasks.deep.two",
        "ray_app",
        "ray_app.plan",
        "ray_app.plan.hashing",
        "ray_app.version",
    ]
    assert sources.libraries == {"torchvision", "numpy"}
    (folder / "two.py").write_text("import ray\n")
    with pytest.raises(RegistryError, match="imports ray"):
        sources_of("own_tasks.deep.one")
