"""The detector of docs/detection.md: no Python, few lines, and the bits that are promised."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ray_app import check_task, load_config
from tests.support.places import ROOT
from tests.support.shapes import BLOCKS, write_shapes
from tests.support.task_checks import all_ok, levels


def test_the_page_shows_the_shipped_configuration_in_twenty_lines() -> None:
    shipped = (ROOT / "conf" / "detection.yaml").read_text()
    assert yaml.safe_load(BLOCKS["detection.yaml"]) == yaml.safe_load(shipped)
    assert len(BLOCKS["detection.yaml"].splitlines()) <= 20


@pytest.mark.rest
def test_a_detector_trains_with_the_same_bits_for_any_number_of_workers(tmp_path: Path) -> None:
    """One worker against four, a resume in the middle of an epoch, mean average precision, and an export with the
    task's code.
    """
    config = load_config(ROOT / "conf" / "detection.yaml", run__storage_path=str(tmp_path / "runs"))
    # so small that torchvision's pooling finds other scales in other batches, which it must not keep
    small = {
        "class_path": "tests.support.small_models.detector",
        "init_args": {"num_classes": 3, "min_size": 64, "max_size": 96},
    }
    data = {f"data__{name}": value for name, value in write_shapes(tmp_path / "shapes").items()}
    found = check_task(config.replace(task__init_args=config.task.init_args | {"detector": small}, **data))
    assert levels(found) == all_ok() | {"export": "warning"}, found
    said = {finding.topic: finding.text for finding in found.findings}
    assert "map_50 " in said["evaluation"]
    assert "loss" not in said["evaluation"]
    assert said["export"].startswith("as safetensors with the task's code; not as a program of its own (torch.export: ")
