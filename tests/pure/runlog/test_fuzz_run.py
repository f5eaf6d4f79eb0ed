"""Damaged files of a run: a start refuses them by name or resumes from the intact ones, with the same result."""

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
from tests.support.checkpoints import make_store_of_three
from tests.support.mutations import mutate

FEW, MANY = 10, 500
USER_CONFIG = """
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
    """Returns the message of the refusal, or an empty text if the read succeeds."""
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
def test_a_damaged_commit_marker_falls_back_to_the_previous_checkpoint(tmp_path: Path, seeds: range) -> None:
    intact = RunPaths(tmp_path / "intact")
    make_store_of_three(intact)
    skipped = []
    for seed in seeds:
        paths = RunPaths(tmp_path / "run")
        shutil.rmtree(paths.root, ignore_errors=True)
        shutil.copytree(intact.root, paths.root)
        marker = paths.checkpoint(3, 1) / COMMIT
        data = marker.read_bytes()
        marker.write_bytes(mutate(data, seed))
        fallbacks: list[Fallback] = []
        loaded = CheckpointStore(paths).load_newest(fallbacks.append)
        assert loaded is not None
        if marker.exists() and marker.read_bytes() == data:
            continue
        damaged = [fallback.name for fallback in fallbacks]
        # A change that JSON ignores leaves the marker valid.
        assert (loaded[0].step, damaged) in ((2, [marker.parent.name]), (3, [])), seed
        skipped += damaged
    assert len(skipped) > len(seeds) / 2


@pytest.mark.parametrize("seeds", seeds())
def test_a_damaged_manifest_is_refused_by_name(tmp_path: Path, seeds: range) -> None:
    paths = RunPaths(tmp_path)
    text = MANIFEST.to_json().encode()
    num_refused = 0
    for seed in seeds:
        paths.manifest.write_bytes(mutate(text, seed))
        message = refusal(lambda: read_manifest(paths), DataError)
        assert str(paths.manifest) in message if message else read_manifest(paths).digest == MANIFEST.digest, seed
        num_refused += bool(message)
    assert num_refused > len(seeds) / 2


@pytest.mark.parametrize("seeds", seeds())
def test_a_damaged_configuration_is_refused_by_name(tmp_path: Path, seeds: range) -> None:
    paths = RunPaths(tmp_path)
    config = Config().replace(
        task__class_path="ray_app.task.image.ImageClassification", data__path="data", run__name="run"
    )
    text = yaml.safe_dump(config.to_dict()).encode()
    paths.config.write_bytes(text)
    assert read_config(paths) == config
    num_refused = 0
    for seed in seeds:
        paths.config.write_bytes(mutate(text, seed))
        message = refusal(lambda: read_config(paths), ConfigError)
        assert not message or str(paths.config) in message, seed
        num_refused += bool(message)
    assert num_refused > 0


@pytest.mark.parametrize("seeds", seeds())
def test_a_damaged_user_configuration_is_refused_by_name(tmp_path: Path, seeds: range) -> None:
    file = tmp_path / "my.yaml"
    text = USER_CONFIG.encode()
    file.write_bytes(text)
    load_config(file)
    num_refused = 0
    for seed in seeds:
        file.write_bytes(mutate(text, seed))
        message = refusal(lambda: load_config(file), ConfigError)
        assert not message or str(file) in message, f"{seed}: the message names no file: {message}"
        num_refused += bool(message)
    assert num_refused > len(seeds) / 2


@pytest.mark.parametrize("section", ["optimizer", *sorted(SECTIONS)])
def test_an_empty_section_is_refused_by_name(tmp_path: Path, section: str) -> None:
    settings = {name: value for name, value in yaml.safe_load(USER_CONFIG).items() if name != section}
    file = tmp_path / "my.yaml"
    file.write_text(f"{yaml.safe_dump(settings)}{section}:\n")
    assert section in refusal(lambda: load_config(file), ConfigError)
