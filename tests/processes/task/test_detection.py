"""The detector of docs/detection.md needs no Python and trains bit-identically."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_app import check_task, load_config
from tests.support.paths import ROOT
from tests.support.shapes import write_shapes
from tests.support.task_checks import all_ok, levels


@pytest.mark.rest
def test_a_detector_trains_bit_identically_on_any_number_of_workers(tmp_path: Path) -> None:
    """`check_task` compares one worker with four, resumes midway, evaluates mean average precision, and exports with
    the task's code.
    """
    config = load_config(ROOT / "conf" / "detection.yaml", run__storage_path=str(tmp_path / "runs"))
    # In images this small, torchvision's pooling infers other scales for other batches; it must not keep them.
    small = {
        "class_path": "tests.support.small_models.detector",
        "init_args": {"num_classes": 3, "min_size": 64, "max_size": 96},
    }
    data = {f"data__{name}": value for name, value in write_shapes(tmp_path / "shapes").items()}
    check = check_task(config.replace(task__init_args=config.task.init_args | {"detector": small}, **data))
    assert levels(check) == all_ok() | {"export": "warning"}, check
    texts = {finding.topic: finding.text for finding in check.findings}
    assert "map_50 " in texts["evaluation"]
    assert "loss" not in texts["evaluation"]
    assert texts["export"].startswith(
        "The export is safetensors with the task's code, not a standalone program (torch.export: "
    )
