"""A run whose own files are damaged: refused by name, or gone on from what is intact; never another error, and no other
result.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from ray_app.checkpoint.store import COMMIT, CheckpointStore, Fallback
from ray_app.config.config import SECTIONS, Config
from ray_app.driver.parsing import load_config
from ray_app.errors import ConfigError, DataError
from ray_app.plan.manifest import Manifest
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.stored_config import read_config, read_manifest
from tests.support.checkpoints import store_of_three
from tests.support.mutations import mutant

FEW, MANY = 25, 500
USERS = """
task: {class_path: ray_app.task.image.ImageClassification}
optimizer:
  class_path: torch.optim.AdamW
  init_args: {lr: 0.003}
data:
  path: data/train
  eval_path: data/eval
  global_batch_size: 64
train: {epochs: 3}
scaling:
  max_workers: 2
"""
MANIFEST = Manifest.from_files([("a/part-0.parquet", [500, 500, 3]), ("b.parquet", [0, 17])])


def refusal(read: Callable[[], object], kind: type[Exception]) -> str:
    """What is said where it is refused; empty if it is read."""
    try:
        read()
    except kind as error:
        return str(error)
    return ""


def seeds() -> list[object]:
    return [
        pytest.param(range(FEW), id="few"),
        pytest.param(range(FEW, FEW + MANY), marks=pytest.mark.search, id="many"),
    ]


@pytest.mark.parametrize("seeds", seeds())
def test_a_damaged_marker_leads_to_the_checkpoint_before(tmp_path: Path, seeds: range) -> None:
    intact = RunPaths(tmp_path / "intact")
    store_of_three(intact)
    passed = []
    for seed in seeds:
        paths = RunPaths(tmp_path / "run")
        shutil.rmtree(paths.root, ignore_errors=True)
        shutil.copytree(intact.root, paths.root)
        marker = paths.checkpoint(3, 1) / COMMIT
        data = marker.read_bytes()
        marker.write_bytes(mutant(data, seed))
        told: list[Fallback] = []
        found = CheckpointStore(paths).load_newest(told.append)
        assert found is not None
        if marker.exists() and marker.read_bytes() == data:
            continue
        said = [fallback.name for fallback in told]
        assert (found[0].step, said) in ((2, [marker.parent.name]), (3, [])), (
            seed
        )  # what JSON does not care about may have changed
        passed += said
    assert len(passed) > len(seeds) / 2


@pytest.mark.parametrize("seeds", seeds())
def test_a_damaged_manifest_is_refused_by_name(tmp_path: Path, seeds: range) -> None:
    paths = RunPaths(tmp_path)
    text = MANIFEST.to_json().encode()
    refused = 0
    for seed in seeds:
        paths.manifest.write_bytes(mutant(text, seed))
        said = refusal(lambda: read_manifest(paths), DataError)
        assert str(paths.manifest) in said if said else read_manifest(paths).digest == MANIFEST.digest, seed
        refused += bool(said)
    assert refused > len(seeds) / 2


@pytest.mark.parametrize("seeds", seeds())
def test_a_damaged_configuration_is_refused_by_name(tmp_path: Path, seeds: range) -> None:
    paths = RunPaths(tmp_path)
    config = Config().replace(
        task__class_path="ray_app.task.image.ImageClassification", data__path="data", run__name="run"
    )
    text = yaml.safe_dump(config.to_dict()).encode()
    paths.config.write_bytes(text)
    assert read_config(paths) == config
    refused = 0
    for seed in seeds:
        paths.config.write_bytes(mutant(text, seed))
        said = refusal(lambda: read_config(paths), ConfigError)
        assert not said or str(paths.config) in said, seed
        refused += bool(said)
    assert refused > 0


@pytest.mark.parametrize("seeds", seeds())
def test_a_damaged_file_of_a_user_is_refused_by_name(tmp_path: Path, seeds: range) -> None:
    file = tmp_path / "my.yaml"
    text = USERS.encode()
    file.write_bytes(text)
    load_config(file)
    refused = 0
    for seed in seeds:
        file.write_bytes(mutant(text, seed))
        said = refusal(lambda: load_config(file), ConfigError)
        assert not said or str(file) in said, f"{seed}: no file is named: {said}"
        refused += bool(said)
    assert refused > len(seeds) / 2


@pytest.mark.parametrize("section", ["optimizer", *sorted(SECTIONS)])
def test_a_section_that_is_empty_is_refused_by_name(tmp_path: Path, section: str) -> None:
    given = {name: value for name, value in yaml.safe_load(USERS).items() if name != section}
    file = tmp_path / "my.yaml"
    file.write_text(f"{yaml.safe_dump(given)}{section}:\n")
    assert section in refusal(lambda: load_config(file), ConfigError)
