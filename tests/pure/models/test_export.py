"""An exported model computes on the device that it is put on, with all that it makes there; `meta` stands for a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ray_app.models import loader
from ray_app.models.export import exported_module
from ray_app.retrain.gate import _load

DEVICE = torch.device("meta")


class Positions(nn.Module):
    """Makes a tensor on the device of its input, as models with positions and masks do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + torch.arange(4, device=x.device)


@pytest.fixture
def exported() -> torch.export.ExportedProgram:
    return torch.export.export(Positions(), (torch.zeros(2, 4),))


def test_an_exported_model_makes_its_tensors_on_the_device_that_it_is_put_on(
    exported: torch.export.ExportedProgram,
) -> None:
    with pytest.raises(Exception, match="meta"):
        exported.module().to(DEVICE)(torch.zeros(2, 4, device=DEVICE))  # `Module.to` is not enough
    assert exported_module(exported, DEVICE)(torch.zeros(2, 4, device=DEVICE)).device == DEVICE


def test_an_exported_model_on_the_cpu_gives_the_values_that_it_gave(exported: torch.export.ExportedProgram) -> None:
    x = torch.rand(2, 4)
    assert torch.equal(exported_module(exported, torch.device("cpu"))(x), Positions()(x))


def test_the_gate_of_a_retraining_scores_an_exported_model_on_a_device(
    exported: torch.export.ExportedProgram, tmp_path: Path
) -> None:
    exported.example_inputs = None  # as packages leave them out
    torch.export.save(exported, tmp_path / "model.pt2")
    description = {"format": "torch.export", "inputs": [{"name": "x", "dtype": "float32", "shape": [4]}]}
    files = {
        loader.EXPORTED: (tmp_path / "model.pt2").read_bytes(),
        loader.DESCRIPTION: json.dumps(description).encode(),
    }
    (tmp_path / "package").mkdir()
    model, inputs = _load(files, tmp_path / "package", DEVICE)
    assert inputs == ["x"]
    assert model(torch.zeros(2, 4, device=DEVICE)).device == DEVICE
