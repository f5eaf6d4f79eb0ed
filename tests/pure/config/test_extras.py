"""The error about an optional dependency that is not installed names the extra that contains it."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ray_app import load_config
from ray_app.config.import_paths import EXTRAS
from ray_app.errors import ConfigError
from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.ingest.tokenize import Texts
from ray_app.plan.manifest import DataFacts
from ray_app.storage.object_stores import ObjectPath
from ray_app.task.detection import ObjectDetection
from ray_app.task.image import ImageClassification
from ray_app.track.mlflow_client import connect
from ray_app.track.tensorboard import check_board
from ray_app.track.tracker import check_available
from tests.support.paths import ROOT

_DIGITS = ROOT / "conf" / "digits.yaml"


@pytest.mark.parametrize(
    ("use", "extra"),
    [
        (lambda out: check_available(load_config(_DIGITS)), "tracking"),
        (lambda out: connect(f"sqlite:///{out}/mlflow.db"), "tracking"),
        (lambda out: check_board(load_config(_DIGITS, tracking__tensorboard=True)), "tensorboard"),
        (lambda out: ImageClassification(model="resnet18"), "vision"),
        (lambda out: ObjectDetection({"class_path": "none"}).prepare(DataFacts("data", 0, {})), "detection"),
        (lambda out: ingest(IngestOptions(source="digits", out=str(out / "digits"))), "digits"),
        (lambda out: Texts(IngestOptions("jsonl", tokenizer="tokenizer.json")), "text"),
        (lambda out: ObjectPath("s3", "bucket", "key", f"region={out.name}").read_bytes(), "s3"),
    ],
    ids=["run", "registry", "tensorboard", "vision", "detection", "digits", "text", "s3"],
)
def test_a_dependency_that_is_not_installed_is_named_with_its_extra(
    use: Callable[[Path], object], extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name in EXTRAS else find_spec(name, *more)
    )
    with pytest.raises(ConfigError, match=rf'not installed: pip install "PATH_TO_RAY_APP\[{extra}\]"'):
        use(tmp_path)


def test_each_extra_in_an_error_is_declared_by_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    libraries = {name: Requirement(extras[name][0]).name for name in EXTRAS.values()}
    assert {library: libraries[extra] for library, extra in EXTRAS.items()} == {name: name for name in EXTRAS} | {
        "sklearn": "scikit-learn"
    }
    assert set(EXTRAS.values()) | {"all"} == set(extras)
