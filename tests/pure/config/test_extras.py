"""The error about an optional dependency that is not installed names the extra that contains it."""

import importlib.util
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ray_app import load_config
from ray_app.config.import_paths import EXTRAS
from ray_app.errors import ConfigError
from ray_app.ingest.ingest import IngestOptions
from ray_app.ingest.splits import Texts
from ray_app.plan.manifest import ColumnFacts, DataFacts
from ray_app.storage.object_stores import ObjectPath
from ray_app.task.detection import ObjectDetection
from ray_app.task.image import ImageClassification
from ray_app.task.module import ModuleTask
from ray_app.track.mlflow_client import connect
from ray_app.track.tracker import check_available
from tests.support.paths import ROOT

_DIGITS = ROOT / "conf" / "digits.yaml"
IMAGES = {"image": ColumnFacts("array", "|u1", (8, 8)), "label": ColumnFacts("integer", minimum=0, maximum=9)}
CROSS_ENTROPY = {"class_path": "torch.nn.CrossEntropyLoss"}
CROPPED = ModuleTask(
    model={"class_path": "torch.nn.Flatten"},
    inputs=["image"],
    target="label",
    loss=CROSS_ENTROPY,
    transforms=[{"class_path": "of.ones.own.Crop"}],
)


@pytest.mark.parametrize(
    ("use", "extra"),
    [
        (lambda out: check_available(load_config(_DIGITS)), "tracking"),
        (lambda out: connect(f"sqlite:///{out}/mlflow.db"), "tracking"),
        (lambda out: ImageClassification(model="resnet18"), "vision"),
        (lambda out: ObjectDetection({"class_path": "none"}).prepare(DataFacts("data", 0, {})), "detection"),
        (lambda out: CROPPED.prepare(DataFacts("data", 1, IMAGES)), "vision"),
        (lambda out: Texts(IngestOptions("jsonl", tokenizer="tokenizer.json")), "text"),
        (lambda out: ObjectPath("s3", "bucket", "key", f"region={out.name}").read_bytes(), "s3"),
    ],
    ids=["run", "registry", "vision", "detection", "transforms", "text", "s3"],
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


def test_an_import_path_into_a_library_that_is_not_installed_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    arguments = {"model": {"class_path": "transformers.Bert"}, "inputs": ["x"], "target": "y", "loss": CROSS_ENTROPY}
    task = {"class_path": "ray_app.task.module.ModuleTask", "init_args": arguments}
    message = r"but transformers is not installed: pip install \"PATH_TO_RAY_APP\[text\]\"\."
    with pytest.raises(ConfigError, match=rf"task\.init_args\.model\.class_path is 'transformers.Bert', {message}"):
        load_config(task=task)


def test_each_extra_in_an_error_is_declared_by_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for library, extra in EXTRAS.items():
        assert library in {Requirement(line).name for line in extras[extra]}
    assert set(EXTRAS.values()) | {"all"} == set(extras)
    assert set(Requirement(extras["all"][0]).extras) == set(EXTRAS.values())
    page = (ROOT / "docs" / "index.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(extras)
