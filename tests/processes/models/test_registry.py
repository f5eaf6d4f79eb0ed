"""The registry with real MLflow: versions serve the trained model without Ray and pickle, are made once, and the
champion moves last.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ray_app.checkpoint.format import params_digest
from ray_app.checkpoint.store import CheckpointStore
from ray_app.cli.register import main
from ray_app.data.probes import read_stored_rows
from ray_app.driver.model_export import register_best, try_to_register
from ray_app.errors import ConfigError, RegistryError, RunExistsError
from ray_app.models import loader
from ray_app.models import registry as registry_module
from ray_app.models.export import fetch_package
from ray_app.models.package import make_package, read_fields
from ray_app.models.registry import champion_of, download_version, promote, register, resolve_version
from ray_app.preflight.prepare import claim, prepare
from ray_app.retry import Retry
from ray_app.storage.files import put_json, read_json
from ray_app.task.base import Batch
from ray_app.task.tabular import TabularClassification
from ray_app.track.mlflow_client import connect
from tests.support.finished_run import FinishedRun
from tests.support.mlflow_server import MlflowServer, load_pyfunc, make_database
from tests.support.paths import ROOT
from tests.support.tabular_task import FIELDS, tabular_task


class Scaled(TabularClassification):
    """Reads two fields in `forward`, one of them optional, and returns two tensors."""

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        scores = model(batch["features"])
        return {"scores": scores, "scaled": scores * batch["scale"][:, None] if "scale" in batch else scores}


class NotExportable(Scaled):
    """A task that neither `torch.export` nor JSON can store."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = (4,)
        self.features = ["a"]
        self.inputs, self.num_classes = 3, 2

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        scores = model(batch["features"])
        return scores if scores.sum() > 0 else -scores


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_database(tmp_path_factory.mktemp("registry") / "mlflow.db")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = MlflowServer(tmp_path_factory.mktemp("server"))
    server.start()
    yield server.uri
    server.kill()


IMAGES = np.random.default_rng(0).integers(0, 17, (5, 1, 8, 8)).astype(np.uint8)

LOAD = """
import json, os, sys

class NoRay:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ImportError("there is no Ray on this machine")

sys.meta_path.insert(0, NoRay())
uri, model, images, out = sys.argv[1:]
import mlflow, mlflow.artifacts, mlflow.pyfunc, numpy, torch

unpickled = []
sys.addaudithook(lambda event, args: unpickled.append(args) if event == "pickle.find_class" else None)

def refuse(*args, **kwargs):
    raise AssertionError("torch.load was called")

torch.load = refuse
images = torch.from_numpy(numpy.load(images))
mlflow.set_tracking_uri(uri)
folder = mlflow.artifacts.download_artifacts(model)
if os.path.exists(f"{folder}/data/model/model.pt2"):
    module = torch.export.load(f"{folder}/data/model/model.pt2").module()
else:
    [name] = [name for name in os.listdir(f"{folder}/code") if name.startswith("ray_app_loader")]
    sys.path.insert(0, f"{folder}/code")
    module = __import__(name.removesuffix(".py")).load(f"{folder}/data/model", trust=True)
with torch.no_grad():
    plain = module(images)
predicted = mlflow.pyfunc.load_model(model).predict(images.numpy())
assert not unpickled, unpickled
numpy.savez(out, pyfunc=predicted, torch=plain.numpy())
ours = [name for name, module in sys.modules.items() if name.startswith("ray_app") and "ray_app_loader" not in name]
places = {os.path.dirname(os.path.dirname(sys.modules["ray_app"].__file__))} if ours else set()
print(json.dumps({"modules": ours, "places": list(places), "folder": folder}))
"""


def load_elsewhere(uri: str, model: str, folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Loads a model in a process without Ray and this repository; returns its predictions of `IMAGES`, and the imported
    modules.
    """
    folder.mkdir()
    np.save(folder / "images.npy", IMAGES)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", LOAD, uri, model, str(folder / "images.npy"), str(folder / "out.npz")]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(np.load(folder / "out.npz")), json.loads(done.stdout.splitlines()[-1])


def pickles_in(folder: Path) -> list[str]:
    """Returns the files of a folder and of its zip archives that are a pickle, or a zip archive that may hold one."""
    names = []
    for file in folder.rglob("*"):
        if file.is_file() and file.suffix in (".pkl", ".pickle", ".pt", ".pth"):
            names.append(file.name)
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                names += [
                    n
                    for n in archive.namelist()
                    if archive.read(n)[:2] in (b"\x80\x02", b"\x80\x04", b"PK") and "/weight" not in n
                ]
    return names


def assert_version(run: FinishedRun, name: str, package_format: str) -> None:
    client = connect(run.config.tracking.uri)
    [version] = client.search_model_versions(f"name = '{name}'")
    best = CheckpointStore(run.job.paths).commits()[0]
    expected = {
        "run_name": run.job.paths.name,
        "run_uuid": "uuid-" + run.job.paths.name,
        "step": "8",
        "params_digest": best.params_digest,
        "config_digest": best.config_digest,
        "manifest_digest": run.job.plan.manifest.digest,
        "eval_data_digest": "d" * 64,
        "metric": "accuracy",
        "metric_value": "0.75",
        "format": package_format,
        "outputs": "equal",
        "promoted_because": "first version",
        "replaces": "none",
    }
    assert ("ray_app.refused" in version.tags) == (package_format == "safetensors")
    assert {tag: version.tags.get(f"ray_app.{tag}") for tag in expected} == expected
    assert version.run_id == run.run_id
    model = client.get_registered_model(name)
    assert {alias: str(v) for alias, v in model.aliases.items()} == {"challenger": "1", "champion": "1"}


@pytest.mark.rest
def test_the_command_registers_a_version_that_serves_without_ray(
    store: str, digits: Path, tmp_path: Path, capsys: Any
) -> None:
    run = FinishedRun(tmp_path, digits, store)
    assert main(["--run", str(tmp_path / "run"), "--name", "digits"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "digits version 1 @challenger @champion"
    assert_version(run, "digits", "torch.export")
    assert read_json(run.job.paths.summary)["model"] == {
        "name": "digits",
        "version": "1",
        "aliases": ["challenger", "champion"],
    }
    predicted, imports = load_elsewhere(store, "models:/digits@champion", tmp_path / "elsewhere")
    assert np.array_equal(predicted["pyfunc"], run.predictions(IMAGES))
    assert np.array_equal(predicted["torch"], run.predictions(IMAGES))
    assert imports["modules"] == []
    assert pickles_in(Path(imports["folder"])) == []
    assert_mlflow_model(store, run)
    assert main(["--run", str(tmp_path / "run"), "--name", "digits", "--promote", "again"]) == 0
    assert len(connect(store).search_model_versions("name = 'digits'")) == 1


def assert_mlflow_model(uri: str, run: FinishedRun) -> None:
    import mlflow

    mlflow.set_tracking_uri(uri)
    info = mlflow.models.get_model_info("models:/digits@champion")
    [inputs], [outputs] = info.signature.inputs.inputs, info.signature.outputs.inputs
    assert (inputs.type, inputs.shape, inputs.name) == (np.dtype("uint8"), (-1, 1, 8, 8), None)
    assert (outputs.type, outputs.shape) == (np.dtype("float32"), (-1, 10))
    loaded = mlflow.pyfunc.load_model("models:/digits@champion")
    assert np.array_equal(loaded.input_example, read_stored_rows(run.job.paths.example)["image"])
    with pytest.raises(Exception, match="uint8"):
        loaded.predict(IMAGES.astype(np.float32) / 3)


@pytest.mark.rest
def test_a_model_that_cannot_be_exported_is_registered_with_its_code(server: str, digits: Path, tmp_path: Path) -> None:
    module = tmp_path / "code" / "branching_task.py"
    module.parent.mkdir()
    module.write_text(
        "from helper_of_task import twice\nfrom ray_app.task.image import ImageClassification\n\n\n"
        "class Branching(ImageClassification):\n    def forward(self, model, batch):\n"
        "        scores = super().forward(model, batch)\n        return scores if scores.sum() > 0 else twice(scores)\n"
    )
    (module.parent / "helper_of_task.py").write_text("def twice(x):\n    return 2 * x\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(module.parent))
        run = FinishedRun(tmp_path, digits, server, name="fallback", task="branching_task.Branching")
        done = register_best(run.job, "branching", server)
    assert (done.version, done.aliases) == ("1", ("challenger", "champion"))
    assert_version(run, "branching", "safetensors")
    predicted, imports = load_elsewhere(server, "models:/branching@champion", tmp_path / "elsewhere")
    assert np.array_equal(predicted["pyfunc"], run.predictions(IMAGES))
    assert np.array_equal(predicted["torch"], run.predictions(IMAGES))
    assert imports["places"]
    assert not Path(imports["places"][0]).is_relative_to(ROOT)
    assert pickles_in(Path(imports["folder"])) == []


@pytest.mark.rest
def test_several_inputs_and_outputs_are_named(tmp_path: Path) -> None:
    import mlflow.pyfunc
    import pandas as pd

    task, model = tabular_task(Scaled)
    package = make_package(task, model, FIELDS, tmp_path / "package")
    assert (package.format, package.outputs, package.refused) == ("torch.export", "equal", ())
    loaded = mlflow.pyfunc.load_model(str(package.folder))
    signature = loaded.metadata.signature
    assert signature.inputs.input_names() == ["features", "scale"]
    assert signature.outputs.input_names() == ["scores", "scaled"]
    assert [spec.shape for spec in signature.inputs.inputs] == [(-1, 3), (-1,)]
    batch = {name: np.concatenate([FIELDS[name]] * 3) for name in ("features", "scale")}
    with torch.no_grad():
        expected = task.forward(model, {name: torch.from_numpy(values) for name, values in batch.items()})
    for predicted in (
        loaded.predict(batch),
        loader.load(package.folder / "data" / "model")(*map(torch.from_numpy, batch.values())),
    ):
        assert {name: np.array_equal(np.asarray(predicted[name]), expected[name]) for name in predicted} == {
            "scores": True,
            "scaled": True,
        }
    with pytest.raises(Exception, match="scale"):
        loaded.predict({"features": batch["features"]})
    table = pd.DataFrame({"features": list(batch["features"]), "scale": batch["scale"]})
    assert np.array_equal(load_pyfunc(package.folder / "data" / "model").predict(table)["scaled"], expected["scaled"])


@pytest.mark.rest
def test_a_table_of_features_is_served_and_unfit_values_are_refused(tmp_path: Path) -> None:
    import mlflow.pyfunc
    import pandas as pd

    task, model = tabular_task(TabularClassification)
    package = make_package(task, model, FIELDS, tmp_path / "package")
    features = FIELDS["features"]
    expected = model(torch.from_numpy(features)).detach().numpy()
    served = mlflow.pyfunc.load_model(str(package.folder))
    assert np.array_equal(served.predict(pd.DataFrame(features)), expected)
    predictor = load_pyfunc(package.folder / "data" / "model")
    assert np.array_equal(predictor.predict(features.astype(np.float64)), expected)
    with pytest.raises(ValueError, match=r"shape \(rows, 3\)"):
        predictor.predict(features[:, :2])
    with pytest.raises(ValueError, match="its values are complex64"):
        predictor.predict(features.astype(np.complex64) + 1j)


def test_a_task_that_needs_pickle_is_refused(tmp_path: Path) -> None:
    task, model = tabular_task(NotExportable)
    task.hidden = (4,)
    with pytest.raises(RegistryError) as refusal:
        make_package(task, model, FIELDS, tmp_path / "package")
    assert "torch.export: " in str(refusal.value)
    assert "the task's attribute 'hidden' is a tuple that JSON cannot store" in str(refusal.value)
    assert not (tmp_path / "package").exists()


def test_fields_that_forward_reads_in_any_way_are_inputs() -> None:
    task, model = tabular_task(Scaled)
    assert read_fields(task, model, FIELDS) == ["features", "scale"]
    task.forward = lambda model, batch: dict(**batch)["features"]
    assert read_fields(task, model, FIELDS) == list(FIELDS)
    task.forward = lambda model, batch: sum(value.sum() for value in batch.values())
    assert read_fields(task, model, FIELDS) == list(FIELDS)


class LostCallError(Exception):
    """Stands for a killed client, or for a call that MLflow did not answer."""


class FailingClient:
    """MLflow's client, but the n-th call (from 1) is lost, before or after it took effect."""

    def __init__(self, client: Any, number: int, after: bool) -> None:
        self._client = client
        self._number, self._after = number, after
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            lost = len(self.calls) == self._number
            if lost and not self._after:
                raise LostCallError(name)
            value = getattr(self._client, name)(*args, **kwargs)
            if lost:
                raise LostCallError(name)
            return value

        return call


@pytest.fixture(scope="module")
def copy_package(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("packaged") / "package"
    package = make_package(*tabular_task(TabularClassification), FIELDS, folder)
    return lambda target: replace(package, folder=Path(shutil.copytree(folder, target)))


def new_run(client: Any) -> str:
    experiment = client.get_experiment_by_name("versions")
    return client.create_run(
        experiment.experiment_id if experiment else client.create_experiment("versions")
    ).info.run_id


def versions(client: Any, name: str) -> list[Any]:
    return sorted(client.search_model_versions(f"name = '{name}'"), key=lambda v: int(v.version))


@pytest.mark.rest
@pytest.mark.parametrize(("after", "uri"), [(False, "server"), (True, "store")])
def test_a_retry_after_any_lost_call_makes_one_complete_version(
    request: pytest.FixtureRequest, copy_package: Any, after: bool, uri: str
) -> None:
    client = connect(request.getfixturevalue(uri))
    run_id = new_run(client)
    sequence: list[str] = []
    for number in range(1, 40):
        name = f"stopped-{after}-{number}"
        failing = FailingClient(client, number, after)
        tags = {"ray_app.run_name": "run"}
        try:
            register(failing, name, run_id, "uuid", "p" * 64, tags, copy_package, "me")
            sequence = failing.calls
            break
        except LostCallError:
            assert champion_of(client, name) in (None, "1")
            done = register(client, name, run_id, "uuid", "p" * 64, tags, copy_package, "me")
        assert register(client, name, run_id, "uuid", "p" * 64, tags, copy_package, "me") == done
        [version] = versions(client, name)
        assert (done.version, done.aliases) == ("1", ("challenger", "champion"))
        assert {
            "ray_app.run_name",
            "ray_app.format",
            "ray_app.promoted_because",
            "ray_app.registered_at",
        } <= version.tags.keys()
        files = {
            f.path.rpartition("/")[2]
            for f in client.list_artifacts(run_id, "models/" + version.source.rpartition("/")[2])
        }
        assert {"MLmodel", "data", "code", "requirements.txt"} <= files
    assert {"log_artifacts", "create_model_version", "set_registered_model_alias"} <= set(sequence)
    assert number == len(sequence) + 1


@pytest.mark.rest
def test_a_promotion_that_loses_a_call_leaves_the_old_champion(server: str, copy_package: Any) -> None:
    client = connect(server)
    run_id = new_run(client)
    for uuid in ("first", "second"):
        register(client, "promoted", run_id, uuid, uuid * 10, {}, copy_package, "me")
    assert champion_of(client, "promoted") == "1"
    assert client.get_model_version_by_alias("promoted", "challenger").version == "2"
    for number in range(1, 40):
        failing = FailingClient(client, number, after=False)
        try:
            assert promote(failing, "promoted", "2", "better on the new data", "me")
            break
        except LostCallError:
            assert client.get_model_version_by_alias("promoted", "champion").version == "1", failing.calls
    assert failing.calls.count("set_registered_model_alias") == 1
    assert failing.calls[-1] == "set_registered_model_alias"
    assert number == len(failing.calls) + 1 > 4
    champion = client.get_model_version_by_alias("promoted", "champion")
    assert champion.version == "2"
    values = {tag: champion.tags[f"ray_app.{tag}"] for tag in ("promoted_because", "promoted_by", "replaces")}
    assert values == {"promoted_because": "better on the new data", "promoted_by": "me", "replaces": "1"}
    assert champion.tags["ray_app.promoted_at"].endswith("+00:00")
    assert not promote(client, "promoted", "2", "once more", "me")
    assert versions(client, "promoted")[1].tags["ray_app.promoted_because"] == "better on the new data"
    for version, reason, message in (
        ("1", " ", "needs a reason"),
        ("7", "x", "has no version"),
        ("x", "x", "has no version"),
    ):
        with pytest.raises(RegistryError, match=message):
            promote(client, "promoted", version, reason, "me")
    assert champion_of(client, "promoted") == "2"
    assert champion_of(client, "unknown") is None


@pytest.mark.rest
@pytest.mark.parametrize("uri", ["server", "store"])
def test_a_version_is_fetched_without_code_and_foreign_versions_are_refused(
    request: pytest.FixtureRequest, copy_package: Any, uri: str, tmp_path: Path
) -> None:
    tracking_uri = request.getfixturevalue(uri)
    client = connect(tracking_uri)
    run_id = new_run(client)
    register(client, "fetched", run_id, "uuid", "p" * 64, {}, copy_package, "me")
    client.create_model_version("fetched", versions(client, "fetched")[0].source, run_id)
    for model in ("models:/fetched@champion", "models:/fetched/1"):
        package = fetch_package(tracking_uri, model)
        assert (package.source, package.params_digest) == ({"name": "fetched", "version": "1"}, "p" * 64)
        (tmp_path / "to").mkdir()
        folder = download_version(tracking_uri, resolve_version(tracking_uri, model), tmp_path / "to")
        assert {file.name for file in (tmp_path / "to").rglob("*.*")} == {
            "model.pt2",
            "model.safetensors",
            "package.json",
        }
        assert folder == next((tmp_path / "to").rglob("package.json")).parent
        shutil.rmtree(tmp_path / "to")
    with pytest.raises(RegistryError, match="was not packaged by ray_app"):
        download_version(tracking_uri, resolve_version(tracking_uri, "models:/fetched/2"), tmp_path)
    with pytest.raises(ConfigError, match="was not packaged by ray_app"):
        fetch_package(tracking_uri, "models:/fetched/2")
    for model in ("models:/fetched@nobody", "models:/fetched/9", "models:/nothing@champion"):
        with pytest.raises(ConfigError, match=f"MLflow has no {model}"):
            resolve_version(tracking_uri, model)


@pytest.mark.rest
@pytest.mark.parametrize("uri", ["server", "store"])
def test_a_run_resolves_its_initial_model_version_once(
    request: pytest.FixtureRequest, digits: Path, uri: str, tmp_path: Path
) -> None:
    tracking_uri, name = request.getfixturevalue(uri), f"begun-{uri}"
    before = FinishedRun(tmp_path, digits, tracking_uri, tracking__registered_model=name)
    register_best(before.job, name, tracking_uri)
    first, second = CheckpointStore(before.job.paths).commits()
    config = before.config.replace(
        run__name="on", tracking__registered_model=None, train__init_from=f"models:/{name}@champion"
    )
    prepared = prepare(config)
    assert not prepared.job.paths.root.exists()
    job = claim(prepared, 1).job
    assert job.initial == str(tmp_path / "on" / "initial.safetensors")
    assert job.config.train.init_digest == params_digest(job.read_initial() or {}) == first.params_digest
    assert f"init_from: models:/{name}@champion" in job.paths.config.read_text()
    unreachable = config.replace(tracking__uri="http://127.0.0.1:9")
    assert prepare(unreachable).resumes, "a resume must not ask MLflow again"
    for fields, message in (
        ({"tracking__uri": "http://127.0.0.1:9"}, r"cannot be loaded from http://127.0.0.1:9"),
        ({"train__init_from": f"models:/{name}/9"}, f"MLflow has no models:/{name}/9"),
        ({"train__init_digest": "d" * 64}, f"the digest {first.params_digest}, but the run began with {'d' * 64}"),
        ({"train__init_from": "models:/"}, "models:/NAME@ALIAS"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(config.replace(run__name="other", **fields))
    other = before.job.paths.checkpoint(second.step, second.fence) / "model.safetensors"
    with pytest.raises(RunExistsError, match=r"\+ train.init_digest"):
        prepare(config.replace(train__init_from=str(other)))


@pytest.mark.rest
def test_files_damaged_by_the_upload_make_no_version(server: str, copy_package: Any, tmp_path: Path) -> None:
    client = connect(server)

    class Damaging(FailingClient):
        def download_artifacts(self, *args: Any) -> str:
            folder = client.download_artifacts(*args)
            (Path(folder) / "MLmodel").write_text("other")
            return folder

    with pytest.raises(RegistryError, match=r"stored other files .* MLmodel"):
        register(Damaging(client, 0, False), "damaged", new_run(client), "uuid", "p" * 64, {}, copy_package, "me")
    assert champion_of(client, "damaged") is None


@pytest.mark.rest
def test_registering_survives_slow_uploads_and_a_server_restart(
    copy_package: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server is frozen for longer than the timeout of other calls, then killed before a download."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setattr(registry_module, "_RETRY", Retry(0.1, factor=200.0, attempts=3))
    server = MlflowServer(tmp_path)
    server.start()
    client = connect(server.uri)
    run_id = new_run(client)

    class Disturbed(FailingClient):
        def log_artifacts(self, *args: Any) -> None:
            if self.calls.count("log_artifacts") == 0:
                server.freeze()
                threading.Timer(3.0, server.thaw).start()
            self.calls.append("log_artifacts")
            client.log_artifacts(*args)

        def download_artifacts(self, *args: Any) -> str:
            if self.calls.count("download_artifacts") == 0:
                server.kill()
                threading.Thread(target=server.start).start()
            self.calls.append("download_artifacts")
            return client.download_artifacts(*args)

    disturbed = Disturbed(client, 0, False)
    try:
        done = register(disturbed, "patient", run_id, "uuid", "p" * 64, {}, copy_package, "me")
    finally:
        server.kill()
    assert done.version == "1"
    assert (disturbed.calls.count("log_artifacts"), disturbed.calls.count("download_artifacts") > 1) == (1, True)
    assert "next try in" in caplog.text
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "1"


def test_an_outage_at_the_end_of_a_run_is_a_warning(
    digits: Path, tmp_path: Path, store: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FinishedRun(tmp_path, digits, store, name="outage", tracking__registered_model="late")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        uri = f"http://user:secret@127.0.0.1:{silent.getsockname()[1]}"
        job = replace(run.job, config=run.config.replace(tracking__uri=uri))
        began = time.monotonic()
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")
        with caplog.at_level(logging.WARNING):
            assert try_to_register(job, limit_s=0.5) is None
        assert time.monotonic() - began < 60, "registering waited for an answer longer than its limit"
        assert "not registered within 0.5 s" in caplog.text
    assert f"ray-app register --run {run.job.paths.root} --name late" in caplog.text
    assert "secret" not in caplog.text


def test_the_command_refuses_runs_that_have_not_finished(digits: Path, tmp_path: Path, store: str, capsys: Any) -> None:
    run = FinishedRun(tmp_path, digits, store, name="unfinished")
    put_json(run.job.paths.summary, {"status": "interrupted"})
    for arguments, message in (
        (["--run", str(tmp_path / "none")], "is not a run: config.yaml is missing"),
        (["--run", str(run.job.paths.root), "--promote", " "], "--promote needs a reason"),
        (["--run", str(run.job.paths.root)], "has no tracking.registered_model; name the registered model"),
        (["--run", str(run.job.paths.root), "--name", "x"], "'unfinished' is interrupted"),
        (["--run", str(run.job.paths.root), "--name", "a/b"], "characters except slashes"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
