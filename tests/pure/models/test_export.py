"""An exported model computes on its device, with all tensors that it creates; `meta` stands for a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ray_app.checkpoint.format import params_digest
from ray_app.models import loader
from ray_app.models.export import exported_module
from ray_app.retrain.gate import PackageFiles

DEVICE = torch.device("meta")


class Positions(nn.Module):
    """Creates a tensor on the device of its input, as models with positions and masks do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + torch.arange(4, device=x.device)


@pytest.fixture
def exported() -> torch.export.ExportedProgram:
    return torch.export.export(Positions(), (torch.zeros(2, 4),))


def test_an_exported_model_creates_its_tensors_on_its_device(
    exported: torch.export.ExportedProgram,
) -> None:
    # `Module.to` alone does not move the tensors that the program creates.
    with pytest.raises(Exception, match="meta"):
        exported.module().to(DEVICE)(torch.zeros(2, 4, device=DEVICE))
    assert exported_module(exported, DEVICE)(torch.zeros(2, 4, device=DEVICE)).device == DEVICE


def test_an_exported_model_on_the_cpu_is_bit_identical_to_the_model(exported: torch.export.ExportedProgram) -> None:
    x = torch.rand(2, 4)
    assert torch.equal(exported_module(exported, torch.device("cpu"))(x), Positions()(x))


def test_the_retrain_gate_scores_an_exported_model_on_a_device(
    exported: torch.export.ExportedProgram, tmp_path: Path
) -> None:
    # Packages leave the example inputs out.
    exported.example_inputs = None
    torch.export.save(exported, tmp_path / "model.pt2")
    description = {
        "format": "torch.export",
        "inputs": [{"name": "x", "dtype": "float32", "shape": [4]}],
        "params_digest": params_digest(dict(Positions().state_dict())),
    }
    files = {
        loader.EXPORTED: (tmp_path / "model.pt2").read_bytes(),
        loader.DESCRIPTION: json.dumps(description).encode(),
    }
    package = PackageFiles("champion", files, None)
    assert package.inputs == ["x"]
    assert package.load(DEVICE)({"x": torch.zeros(2, 4, device=DEVICE)}).device == DEVICE
