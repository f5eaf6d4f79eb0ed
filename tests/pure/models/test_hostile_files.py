"""Untrusted files are refused without running their code, and no name leads out of its folder: see SECURITY.md."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from ray_app import load_config, load_for_training, load_model
from ray_app.checkpoint.format import MODEL, TRAINING, Snapshot, pack, params_digest, unpack
from ray_app.checkpoint.store import CheckpointStore, Fallback
from ray_app.cluster import ray_private
from ray_app.cluster.ray_private import require_token, restore_auth_mode
from ray_app.config.config import Config
from ray_app.errors import CheckpointError, ConfigError, DataError, RegistryError
from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.models import loader
from ray_app.models.export import fetch_package, read_export
from ray_app.models.package import make_package
from ray_app.plan.manifest import Manifest
from ray_app.predict.actor import Model
from ray_app.preflight.prepare import prepare
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import register_secrets
from ray_app.task.tabular import TabularClassification
from tests.support.checkpoints import commit_of
from tests.support.mlflow_server import load_pyfunc
from tests.support.mutations import Malicious
from tests.support.paths import ROOT


@pytest.fixture
def executed_marker(tmp_path: Path) -> Path:
    return tmp_path / "it ran"


@pytest.fixture
def payload(executed_marker: Path) -> bytes:
    """Returns a pickle that creates the marker file when it is unpickled."""
    data = pickle.dumps(Malicious(executed_marker))
    pickle.loads(data)
    assert executed_marker.exists(), "the payload does not work"
    executed_marker.unlink()
    return data


# Tests of checkpoints.


@pytest.mark.parametrize("name", [MODEL, TRAINING])
def test_a_checkpoint_with_a_pickle_is_skipped_without_running_it(
    tmp_path: Path, executed_marker: Path, payload: bytes, name: str
) -> None:
    """The checkpoint is committed with the right digests, and a resuming run loads it."""
    store = CheckpointStore(RunPaths(tmp_path / "run"))
    for step in (3, 9):
        files = pack(Snapshot(step, {"w": torch.ones(3)}, {}, None))
        store.write(files if step == 3 else files | {name: payload}, commit_of(step))
    fallbacks: list[Fallback] = []
    newest = store.load_newest(fallbacks.append)
    assert newest is not None
    assert newest[0].step == 3
    assert [fallback.name for fallback in fallbacks] == ["step-00000009-0001"]
    assert not executed_marker.exists()
    with pytest.raises(CheckpointError, match=f"{name} is refused"):
        unpack(pack(newest[1]) | {name: payload})


@pytest.mark.parametrize("name", ["../../outside.txt", "/etc/hostname", "a/../../../outside.txt"])
def test_a_commit_that_names_files_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    """A `COMMIT.json` of an attacker has a right digest; the file that it names is not read."""
    from ray_app.checkpoint.store import seal

    paths = RunPaths(tmp_path / "run")
    (tmp_path / "outside.txt").write_text("secret")
    store = CheckpointStore(paths)
    folder = store.write(pack(Snapshot(3, {"w": torch.ones(3)}, {}, None)), commit_of(3))
    values = json.loads((folder / "COMMIT.json").read_text())
    values.pop("sha256")
    values["files"][name] = {"sha256": "0" * 64, "bytes": 6}
    (folder / "COMMIT.json").write_text(json.dumps(seal(values)))
    fallbacks: list[Fallback] = []
    with pytest.raises(CheckpointError, match="names the file"):
        store.load_newest(fallbacks.append)
    with pytest.raises(CheckpointError, match="names the file"):
        store.load(replace(commit_of(3), files=values["files"]))
    assert (tmp_path / "outside.txt").read_text() == "secret"


@pytest.mark.parametrize("path", ["../other/part.parquet", "/etc/part.parquet", "a/../../part.parquet"])
def test_a_manifest_that_names_files_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(DataError, match="leads out of the data set"):
        Manifest.from_json(Manifest.from_files([(path, [3])]).to_json())


# Tests of models.


def make_task(kind: type[TabularClassification] = TabularClassification, **attributes: Any) -> TabularClassification:
    """Returns a task of 3 inputs and 2 classes that no data prepared."""
    task = kind.__new__(kind)
    vars(task).update(label="label", features=["a"], hidden=[4], dropout=0.0, scale=1.0, inputs=3, num_classes=2)
    vars(task).update(attributes)
    return task


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Returns a package of a model with the format `torch.export`, and the digest of its parameters."""
    task = make_task(classes=["no", "yes"])
    model = task.build_model()
    rows = {"features": np.ones((2, 3), np.float32), "label": np.zeros(2, np.int64)}
    folder = make_package(task, model, rows, tmp_path_factory.mktemp("package") / "model").folder
    assert json.loads((folder / "data" / "model" / "package.json").read_text())["classes"] == ["no", "yes"]
    return folder / "data" / "model", params_digest(dict(model.state_dict()))


def copy_package(package: Path, to: Path, change: Callable[[str, bytes], bytes]) -> Path:
    """Returns a copy of a package with changed members in its archive."""
    to.mkdir()
    for file in package.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    with zipfile.ZipFile(package / loader.EXPORTED) as original, zipfile.ZipFile(to / loader.EXPORTED, "w") as archive:
        for member in original.namelist():
            archive.writestr(member, change(member, original.read(member)))
    return to


def replace_in_program(old: bytes, new: bytes) -> Callable[[str, bytes], bytes]:
    def change(member: str, data: bytes) -> bytes:
        if not member.endswith("/models/model.json"):
            return data
        assert old in data
        return data.replace(old, new)

    return change


def assert_refused(folder: Path, executed_marker: Path) -> None:
    """Asserts that plain PyTorch, the entry point of MLflow and batch prediction refuse a package."""
    for load in (loader.load, load_pyfunc):
        with pytest.raises(ValueError, match="is refused"):
            load(folder)
    model = Model(None, (folder / loader.EXPORTED).read_bytes(), ["features"], "0" * 64)
    with pytest.raises(ConfigError, match="is refused"):
        model.load(torch.device("cpu"))
    assert not executed_marker.exists()


def test_a_pickle_in_place_of_a_model_is_refused(
    package: tuple[Path, str], tmp_path: Path, executed_marker: Path, payload: bytes
) -> None:
    folder = copy_package(package[0], tmp_path / "model", lambda member, data: data)
    assert isinstance(loader.load(folder), nn.Module), "the unchanged copy does not load"
    (folder / loader.EXPORTED).write_bytes(payload)
    assert_refused(folder, executed_marker)
    zipped = io.BytesIO()
    torch.save(Malicious(executed_marker), zipped)
    (folder / loader.EXPORTED).write_bytes(zipped.getvalue())
    assert_refused(folder, executed_marker)
    for name in ("sample_inputs/model.pt", "constants/custom_obj_0", "../../../escaped"):
        with zipfile.ZipFile(folder / loader.EXPORTED, "w") as archive:
            archive.writestr(f"m/data/{name}", payload)
        assert_refused(folder, executed_marker)


def test_code_in_the_program_of_a_model_is_refused(
    package: tuple[Path, str], tmp_path: Path, executed_marker: Path
) -> None:
    """`torch.export.load` evaluates sizes as Python and looks operators up by name; without the check, the code
    in a size runs.
    """
    program = zipfile.ZipFile(package[0] / loader.EXPORTED).read("model/models/model.json").decode()
    size = program.partition('"expr_str": "')[2].partition('"')[0].encode()
    assert size.startswith(b"Symbol(")
    code = f"__import__('pathlib').Path('{executed_marker}').touch()".encode()
    package_with_code = copy_package(package[0], tmp_path / "size", replace_in_program(size, code))
    assert_refused(package_with_code, executed_marker)
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever torch makes of the None that it gets
        torch.export.load(package_with_code / loader.EXPORTED)
    assert executed_marker.exists(), "torch does not evaluate sizes any more, so the check can be removed"
    executed_marker.unlink()
    for number, operator in enumerate(
        ("torch.hub.load", "torch.ops.aten.from_file.default", "_operator.call", "#evil:op", "os.system")
    ):
        assert_refused(
            copy_package(
                package[0],
                tmp_path / f"op{number}",
                replace_in_program(b"torch.ops.aten.relu.default", operator.encode()),
            ),
            executed_marker,
        )
    guard_of = replace_in_program(b'"guards_code": []', b'"guards_code": ["' + code + b'"]')
    assert_refused(copy_package(package[0], tmp_path / "guard", guard_of), executed_marker)


def test_a_structure_of_arguments_that_imports_a_module_is_refused(
    package: tuple[Path, str], tmp_path: Path, executed_marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.export.load` imports the module of a default factory or an enumeration; without the check, the
    first one is imported.
    """
    (tmp_path / "imports").mkdir()
    (tmp_path / "imports" / "evil_of_a_package.py").write_text(f"open({str(executed_marker)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path / "imports"))
    program = zipfile.ZipFile(package[0] / loader.EXPORTED).read("model/models/model.json")
    spec = json.dumps(json.loads(program)["graph_module"]["module_call_graph"][0]["signature"]["out_spec"]).encode()
    factory = {"default_factory_module": "evil_of_a_package", "default_factory_name": "list", "dict_context": []}
    member = {"__enum__": True, "fqn": "evil_of_a_package:Kind", "name": "A"}
    for number, (kind, context) in enumerate(
        (
            ("collections.defaultdict", factory),
            ("builtins.dict", json.dumps([member])),
            ("builtins.tuple", json.dumps(member)),
            ("builtins.dict", json.dumps([[member]])),
            ("builtins.list", json.dumps([member]).replace("__enum__", "\\u005f_enum__")),
        )
    ):
        inner = {"type": kind, "context": context, "children_spec": []}
        evil = json.dumps(
            json.dumps([1, {"type": "builtins.tuple", "context": "null", "children_spec": [inner]}])
        ).encode()
        package_with_import = copy_package(package[0], tmp_path / f"spec{number}", replace_in_program(spec, evil))
        assert_refused(package_with_import, executed_marker)
        if number == 0:
            with pytest.raises(AttributeError):
                torch.export.load(package_with_import / loader.EXPORTED)
            assert executed_marker.exists(), "torch does not import these modules any more, so the check can be removed"
            executed_marker.unlink()
            monkeypatch.delitem(sys.modules, "evil_of_a_package", raising=False)
    leaf = {"type": None, "context": None, "children_spec": []}
    for kind, context in (
        ("collections.namedtuple", "null"),
        (None, "null"),
        ("builtins.list", 1),
        ("builtins.tuple", "{}"),
    ):
        assert not loader.is_nesting(json.dumps([1, {"type": kind, "context": context, "children_spec": [leaf]}]))


@pytest.mark.parametrize(
    ("text", "is_size"),
    [
        ("Mul(Integer(2), Symbol('s0', positive=True, integer=True))", True),
        ("Max(1, FloorDiv(s0, 2)) + Mod(u3, 4)", True),
        ("2*s0 - 1", True),
        ("__import__('os')", False),
        ("Symbol('a b')", False),
        ("s0.__class__", False),
        ("(lambda: 1)()", False),
        ("[s0 for s0 in (1,)]", False),
        ("exec('x')", False),
        ("open('x')", False),
        ("Symbol(", False),
    ],
)
def test_symbolic_sizes_may_only_be_arithmetic(text: str, is_size: bool) -> None:
    assert loader.is_size(text) is is_size


@pytest.mark.parametrize(
    "content", ["", "{", "{}", "[]", "null", '"x"', '{"files": null}', '{"files": {}}', '{"task": {}, "inputs": 1}']
)
@pytest.mark.parametrize("name", ["export.json", "data/model/package.json"])
def test_a_damaged_description_of_an_export_is_refused(
    package: tuple[Path, str], tmp_path: Path, name: str, content: str
) -> None:
    folder = tmp_path / "export"
    shutil.copytree(package[0].parents[1], folder)
    assert load_model(folder).predict(np.ones((2, 3), np.float32), scores=True).shape == (2, 2), (
        "the unchanged copy does not load"
    )
    assert read_export(str(folder)).params_digest == package[1]
    (folder / name).write_text(content)
    for load in (load_model, load_for_training, lambda path: read_export(str(path))):
        with pytest.raises(RegistryError, match=f"{name} is damaged"):
            load(folder)


def test_a_pickle_in_place_of_weights_is_refused(
    tmp_path: Path, executed_marker: Path, payload: bytes, package: tuple[Path, str]
) -> None:
    task = make_task(classes=[])
    with pytest.raises(ConfigError, match="is refused"):
        Model(task, payload, None, package[1]).load(torch.device("cpu"))
    with pytest.raises(ConfigError, match="parameters have the digest"):
        Model(task, safetensors.torch.save(dict(task.build_model().state_dict())), None, "0" * 64).load(
            torch.device("cpu")
        )
    assert not executed_marker.exists()


def test_a_package_holds_no_secret(tmp_path: Path) -> None:
    task = make_task(api_token="canary-token")
    register_secrets({"task": {"init_args": {"api_token": "canary-token"}}})
    rows = {"features": np.ones((2, 3), np.float32), "label": np.zeros(2, np.int64)}
    folder = make_package(task, task.build_model(), rows, tmp_path / "model").folder
    assert json.loads((folder / "data" / "model" / "package.json").read_text())["task"]["settings"] is None
    assert [file.name for file in folder.rglob("*") if file.is_file() and b"canary" in file.read_bytes()] == []

    class_ = type(
        "Branching",
        (TabularClassification,),
        {"forward": lambda self, model, batch: branching(model(batch["features"]))},
    )
    class_.__module__, class_.__qualname__ = __name__, "Branching"
    task = make_task(class_, api_token="canary-token")
    with pytest.raises(RegistryError, match="'api_token' holds a secret"):
        make_package(task, task.build_model(), rows, tmp_path / "other")


def branching(scores: torch.Tensor) -> torch.Tensor:
    return scores if scores.sum() > 0 else -scores


@pytest.mark.parametrize(
    "uri", ["models:/../x/1", "models:/a/b/1", "runs:/x/model", "/tmp/model", "models:/m@../x", "models:/m/../../1"]
)
def test_a_model_uri_outside_the_registry_is_refused(tmp_path: Path, uri: str) -> None:
    with pytest.raises(ConfigError, match="must be models:/NAME"):
        fetch_package(f"sqlite:///{tmp_path / 'mlflow.db'}", uri)


# Tests of data.


@pytest.mark.parametrize("packed", ["npz", "npy"])
def test_objects_in_arrays_are_not_unpickled(
    tmp_path: Path, executed_marker: Path, payload: bytes, packed: str
) -> None:
    del payload
    objects = np.array([Malicious(executed_marker)], dtype=object)
    if packed == "npz":
        np.savez(tmp_path / "x.npz", x=objects)
    else:
        np.save(tmp_path / "x.npy", objects)
    with pytest.raises(DataError, match="nothing is unpickled"):
        ingest(IngestOptions("numpy", str(tmp_path / "out"), str(tmp_path / f"x.{packed}")))
    assert not executed_marker.exists()


def test_member_names_of_an_npz_write_no_file_elsewhere(tmp_path: Path) -> None:
    array = io.BytesIO()
    np.save(array, np.zeros((3, 2)))
    (tmp_path / "in").mkdir()
    with zipfile.ZipFile(tmp_path / "in" / "x.npz", "w") as archive:
        archive.writestr("../../escaped.npy", array.getvalue())
    ingest(IngestOptions("numpy", str(tmp_path / "sets" / "out"), str(tmp_path / "in" / "x.npz")))
    assert {path.name for path in tmp_path.iterdir()} == {"in", "sets"}
    assert {path.name for path in (tmp_path / "sets").iterdir()} == {"out"}


# Tests of names.


@pytest.mark.rest
@pytest.mark.parametrize(
    "name", ["../x", "a/b", "/abs", "", ".", "..", ".hidden", "-x", "a\nb", "a\0b", "a ", "x" * 129, "a\\b", "x\n"]
)
def test_names_of_runs_that_are_paths_are_refused(digits_config: Config, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name is"):
        prepare(digits_config.replace(run__name=name))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a/b", "..", ".", "", "a:b", "a\nb", "a'b", "x" * 257])
def test_names_of_models_that_are_paths_are_refused(digits_config: Config, name: str) -> None:
    with pytest.raises(ConfigError, match=r"tracking\.registered_model is"):
        prepare(digits_config.replace(tracking__registered_model=name))


@pytest.fixture
def digits_config(tmp_path: Path) -> Config:
    return load_config(ROOT / "conf" / "digits.yaml").replace(run__storage_path=str(tmp_path))


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "", "a.b", "a\n"])
def test_names_of_evaluators_that_are_paths_are_refused(tmp_path: Path, digits_config: Config, name: str) -> None:
    from ray_app.cli.evaluate import EvaluateOptions, config_of_evaluation

    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.config.write_text(digits_config.to_yaml())
    with pytest.raises(ConfigError, match="--name is"):
        config_of_evaluation(paths, EvaluateOptions(str(paths.root), name=name), None)


def find_insecure_calls(source: str) -> list[str]:
    """Returns what in a program turns authentication off, opens a dashboard or listens on all addresses."""
    # Each problem has one of these words.
    if not re.search(r"RAY_AUTH_MODE|0\.0\.0\.0|\binit\b|\bCluster\b|ray\.scripts", source):
        return []
    nodes = list(ast.walk(ast.parse(source)))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    names = {ast.unparse(call.func) for call in calls}
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    problems = [text for text in texts if text == "RAY_AUTH_MODE" or "0.0.0.0" in text]
    problems += [keyword.arg for call in calls for keyword in call.keywords if keyword.arg == "RAY_AUTH_MODE"]
    heads = [call for call in calls if ast.unparse(call.func) == "ray.init" and starts_cluster(call)]
    clusters = [call for call in calls if ast.unparse(call.func) == "Cluster"]
    first_nodes = [call for call in calls if ast.unparse(call.func).endswith(".add_node")][:1]
    heads += [call for call in clusters if call.keywords] or (first_nodes if clusters else [])
    problems += [
        ast.unparse(call) for call in heads if not re.search(r"include_dashboard'?[=:] ?False", ast.unparse(call))
    ]
    starts = {"ray.scripts.scripts", "start"} <= texts and "require_shared_token" not in names
    return problems + (["no token"] if starts or (clusters and "require_token" not in names) else [])


def starts_cluster(call: ast.Call) -> bool:
    """Returns whether a call of `ray.init` starts a cluster instead of joining one."""
    address = [keyword.value for keyword in call.keywords if keyword.arg == "address"]
    return not address or ast.unparse(address[0]) in ("'local'", "None")


@pytest.mark.parametrize(
    "source",
    [
        "os.environ['RAY_AUTH_MODE'] = 'disabled'",
        "os.environ.update(RAY_AUTH_MODE='disabled')",
        "serve('0.0.0.0:80')",
        "ray.init()",
        "ray.init(address='local', num_cpus=2)",
        "ray.init(address='local', include_dashboard=True)",
        "require_token(); Cluster(initialize_head=True, head_node_args={'num_cpus': 1})",
        "require_token(); cluster = Cluster(); cluster.add_node(num_cpus=1); cluster.add_node(include_dashboard=False)",
        "from x import require_token; Cluster(initialize_head=True, head_node_args={'include_dashboard': False})",
        "run(['python', '-m', 'ray.scripts.scripts', 'start', '--head'])",
    ],
)
def test_insecure_calls_are_detected(source: str) -> None:
    assert len(find_insecure_calls(source)) == 1


@pytest.mark.parametrize(("before", "after"), [(None, "token"), ("token", "token"), ("disabled", "disabled")])
def test_a_local_cluster_requires_a_token_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: str | None, after: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    # This process may be connected to a cluster with another token.
    for name in ("READ_AUTH_MODE", "TOKEN_LOADER"):
        monkeypatch.setattr(ray_private, name, SimpleNamespace(find=lambda: None))
    with restore_auth_mode():
        if before is not None:
            os.environ["RAY_AUTH_MODE"] = before
        require_token()
        assert os.environ["RAY_AUTH_MODE"] == after
    token = tmp_path / ".ray" / "auth_token"
    assert token.exists() == (after == "token")
    assert after == "disabled" or token.stat().st_mode & 0o777 == 0o600


def test_our_code_keeps_authentication_on_and_opens_no_dashboard() -> None:
    files = [file for folder in ("ray_app", "jobs", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    assert {
        file.relative_to(ROOT).as_posix(): problems
        for file in files
        if (problems := find_insecure_calls(file.read_text()))
    } == {"ray_app/cluster/ray_private.py": ["RAY_AUTH_MODE"]}, "only `require_token` there sets it"
    starting = [file.name for file in files if "require_token()" in file.read_text()]
    assert len(starting) >= 3, "the files that start a cluster were not found"
