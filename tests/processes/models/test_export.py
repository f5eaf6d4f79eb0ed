"""Exported models: written without Ray and MLflow, used where neither is installed, complete or refused."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from ray_app import load_for_training, load_model, read_rows
from ray_app.checkpoint.format import params_digest
from ray_app.checkpoint.store import CheckpointStore
from ray_app.cli.export import main
from ray_app.errors import ConfigError, RegistryError
from ray_app.models import export
from ray_app.models.export import write_export
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import list_tree, put_atomic
from ray_app.storage.object_stores import ObjectPath
from ray_app.task.tabular import TabularClassification
from tests.support.paths import ROOT

ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Absent())
"""

TRAIN = """
import json, ray
from ray_app import load_config, run_training

def refuse(*args, **kwargs):
    raise AssertionError("Ray was started")

ray.init = refuse
digits, folder = sys.argv[1:]
fields = {"data__path": f"{digits}/train", "data__eval_path": f"{digits}/eval", "run__storage_path": f"{folder}/runs"}
fields |= {"train__strategy": "single", "evaluate__where": "workers", "tracking__enabled": False, "checkpoint__every_epochs": 1}
config = load_config("conf/digits.yaml", **fields, run__name="run", train__epochs=2)
first = run_training(config)
said = first.export(f"{folder}/model")
place = f"{folder}/model/data/model/model.safetensors"
second = run_training(config.replace(run__name="on", train__init_from=place, train__max_steps=3, data__cache="none"))
assert not ray.is_initialized()
losses = [record.loss for record in second.metrics()]
print(json.dumps({"summary": first.summary, "said": said, "first": first.metrics()[0].loss, "on": second.summary, "losses": losses}))
"""  # noqa: E501

USE = """
import numpy, torch
torch.set_num_threads(1)
torch.manual_seed(0)
from ray_app import load_model, load_for_training, read_rows

task, _ = load_for_training("model_folder")
rows = read_rows(task, "datasets/digits/eval")
numpy.save("predicted.npy", load_model("model_folder").predict(rows["image"].numpy(), scores=True))
exec(open("snippet.py").read())
assert not {"ray", "mlflow"} & {name.partition(".")[0] for name in sys.modules}
"""


def run_python(code: str, absent: tuple[str, ...], *arguments: object, folder: Path = ROOT) -> str:
    """Runs a program in which some modules cannot be imported; returns the last line that it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "PYTHONPATH": str(ROOT)
    }
    whole = ABSENT.replace("ABSENT", repr(absent), 1) + code
    done = subprocess.run(
        [sys.executable, "-c", whole, *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return (done.stdout.splitlines() or [""])[-1]


@pytest.fixture(scope="module")
def trained(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with a run of two epochs and its export, written without MLflow and without a start of Ray; and the
    values that the program printed.
    """
    folder = tmp_path_factory.mktemp("trained")
    return folder, json.loads(run_python(TRAIN, ("mlflow",), digits, folder))


@pytest.mark.rest
def test_an_in_process_run_starts_no_ray_and_begins_from_an_export(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    folder, printed = trained
    best = printed["summary"]["best"]
    assert (printed["said"]["step"], printed["said"]["metrics"]["accuracy"]) == (best["step"], best["value"])
    assert printed["said"]["format"] == "torch.export"
    assert (folder / "model" / "data" / "model" / "model.pt2").exists()
    state = safetensors.torch.load_file(folder / "model" / "data" / "model" / "model.safetensors")
    [commit] = [c for c in CheckpointStore(RunPaths(folder / "runs" / "run")).commits() if c.step == best["step"]]
    assert params_digest(state) == printed["said"]["params_digest"] == commit.params_digest
    assert f"init_digest: {commit.params_digest}" in (folder / "runs" / "on" / "config.yaml").read_text()
    assert (printed["on"]["status"], len(printed["losses"])) == ("finished", 3)
    assert max(printed["losses"]) < printed["first"], "the second run did not begin with the exported parameters"


@pytest.mark.rest
def test_an_export_predicts_and_trains_without_ray_and_mlflow(
    trained: tuple[Path, dict[str, Any]], digits: Path, tmp_path: Path
) -> None:
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "digits").symlink_to(digits)
    shutil.copytree(trained[0] / "model", tmp_path / "model_folder")
    page = (ROOT / "docs" / "saving.md").read_text()
    [snippet] = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "load_for_training" in code]
    (tmp_path / "snippet.py").write_text(snippet)
    run_python(USE, ("ray", "mlflow"), folder=tmp_path)

    torch.set_num_threads(1)
    task, model = load_for_training(tmp_path / "model_folder")
    rows = read_rows(task, str(digits / "eval"))
    with torch.inference_mode():
        scores = task.forward(model.eval(), rows)
    predicted = np.load(tmp_path / "predicted.npy")
    assert np.array_equal(predicted, scores.numpy()), "the exported program computes other outputs than the model"
    accuracy = float((predicted.argmax(1) == rows["label"].numpy()).mean())
    assert accuracy == pytest.approx(trained[1]["said"]["metrics"]["accuracy"], abs=1e-6), (
        "the exported program has another accuracy than the evaluation"
    )
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "trained.safetensors"))
    with torch.inference_mode():
        after = task.forward(model.eval(), rows).argmax(1)
    assert float((after == rows["label"]).float().mean()) > accuracy, "two more epochs did not raise the accuracy"


@pytest.mark.rest
def test_any_checkpoint_of_a_run_on_s3_is_exported(
    trained: tuple[Path, dict[str, Any]], s3_folder: ObjectPath, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained[0] / "runs" / "run"
    remote_run = s3_folder / "runs" / "run"
    for name, file in list_tree(run).items():
        put_atomic(remote_run / name, file.read_bytes())
    commits = CheckpointStore(RunPaths(run)).commits()
    out = tmp_path / "out"
    arguments = ["--run", str(remote_run), "--out", str(out), "--checkpoint"]
    assert main([*arguments, f"step-{commits[0].step}"]) == 0
    assert json.loads((out / "export.json").read_text())["params_digest"] == commits[0].params_digest
    assert main([*arguments, "newest"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*arguments, "newest", "--overwrite", "true"]) == 0
    assert json.loads((out / "export.json").read_text())["step"] == commits[-1].step
    assert params_digest(dict(load_for_training(out)[1].state_dict())) == commits[-1].params_digest
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    (tmp_path / "taken").mkdir()
    capsys.readouterr()
    for wrong, message in (
        (
            ["--run", str(run), "--out", str(tmp_path / "new"), "--checkpoint", "step-7"],
            f"newest or one of step-{commits[0].step:08d}-",
        ),
        (
            ["--run", str(run), "--out", str(tmp_path / "taken"), "--overwrite", "true"],
            "is not an export and is not replaced",
        ),
        (["--run", str(tmp_path), "--out", str(tmp_path / "new")], "is not a run: config.yaml is missing"),
        (["--run", str(run), "--out", str(s3_folder / "new")], "to a local folder"),
    ):
        assert main(wrong) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def tabular_task(kind: type[TabularClassification]) -> tuple[Any, nn.Module, dict[str, np.ndarray]]:
    task = kind.__new__(kind)
    vars(task).update(label="label", features=["a"], hidden=[4], dropout=0.0, scale=1.0, inputs=3, num_classes=2)
    return task, task.build_model(), {"features": np.ones((2, 3), np.float32), "label": np.zeros(2, np.int64)}


@pytest.mark.rest
def test_an_interrupted_export_leaves_nothing_and_a_damaged_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {"run": "run", "step": 1, "params_digest": "0" * 64}
    out = tmp_path / "out"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    task, model, example = tabular_task(TabularClassification)
    write_export(task, model, example, out, source)
    before = (out / "export.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(export, "_digests", interrupt)
        for target in (tmp_path / "other", out):
            with pytest.raises(KeyboardInterrupt):
                write_export(task, model, example, target, source, overwrite=True)
    rename = os.rename

    def fail_once(source: Path, target: Path) -> None:
        if target == out and not fail_once.has_failed:  # type: ignore[attr-defined]
            fail_once.has_failed = True  # type: ignore[attr-defined]
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    fail_once.has_failed = False  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail_once)
        with pytest.raises(OSError, match="Input/output"):
            write_export(task, model, example, out, source, overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert (out / "export.json").read_bytes() == before
    expected = model(torch.ones(2, 3)).detach().numpy()
    assert np.array_equal(load_model(out).predict(np.ones((2, 3), np.float32), scores=True), expected)
    weights = out / "data" / "model" / "model.pt2"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(RegistryError, match=r"data/model/model.pt2 changed since the export"):
        load_model(out)
    weights.unlink()
    with pytest.raises(RegistryError, match=r"model.pt2 changed"):
        load_for_training(out)
    with pytest.raises(ConfigError, match="is not an exported model"):
        load_model(tmp_path)


def test_a_model_that_cannot_be_exported_is_stored_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "own" / "branching_export.py"
    module.parent.mkdir()
    module.write_text(
        "from ray_app.task.tabular import TabularClassification\n\n\nclass Branching(TabularClassification):\n"
        "    def forward(self, model, batch):\n        scores = model(batch['features'])\n"
        "        return scores if scores.sum() > 0 else -scores\n"
    )
    monkeypatch.setattr(sys, "path", [str(module.parent), *sys.path])
    task, model, example = tabular_task(importlib.import_module("branching_export").Branching)
    entry = write_export(task, model, example, tmp_path / "out", {"run": "run", "step": 1, "params_digest": "0" * 64})
    assert entry["format"] == "safetensors"
    assert entry["refused"][0].startswith("torch.export: ")
    with torch.no_grad():
        expected = task.forward(model, {"features": torch.ones(2, 3)}).numpy()
    shutil.rmtree(module.parent)
    sys.path.pop(0)
    monkeypatch.delitem(sys.modules, "branching_export")
    for load in (load_model, load_for_training):
        with pytest.raises(ConfigError, match=r"none of its code was executed: .* Pass trust=True"):
            load(tmp_path / "out")
    assert "branching_export" not in sys.modules
    served = load_model(tmp_path / "out", trust=True)
    assert np.array_equal(served.predict(np.ones((2, 3), np.float32), scores=True), expected)
    assert type(load_for_training(tmp_path / "out", trust=True)[0]).__qualname__ == "Branching"
