"""Keras' own tests of `fit`, `evaluate` and `predict`, from the installed wheel, with those methods replaced by ours.

`python -m tests.support.keras_suite [arguments of pytest]` runs them; this module is the plugin of pytest, too.
"""

import inspect
import shutil
import sys
import tempfile
import types
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from ray_app import keras as ours
from ray_app.process import set_variables
from ray_app.task.keras.library import import_keras
from tests.support.keras_suite_failures import ABSENT, FAILURES, WITH_WORKER
from tests.support.paths import ROOT

keras = import_keras()
SUITE = Path(keras.__file__).parent / "src"
FILES = ("trainers/trainer_test.py", "callbacks/*_test.py")
_PLUGIN = "tests.support.keras_suite"
BARS = {"trainer_test.py": 87, "callbacks/": 49}
"""How many tests must pass in this process, by what the names of their files contain: of 92, and 90 % of 54."""
_STUBS = ("conftest", "jax", "tensorflow", "tensorflow.python", "tensorflow.python.eager")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fit",
        choices=("process", "worker", "keras"),
        default="process",
        help="ray_app.keras.fit in this process; with a worker, a few tests; or Keras' own",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "requires_trainable_backend: of Keras")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Lets files import what they need for the tests of other backends alone, and Keras' own conftest."""
    modules = {name: types.ModuleType(name) for name in _STUBS}
    vars(modules["conftest"])["skip_if_backend"] = lambda name, reason: pytest.mark.skipif(
        name == "torch", reason=reason
    )
    vars(modules["tensorflow.python.eager"])["context"] = None
    absent = {name: module for name, module in modules.items() if name not in sys.modules}
    sys.modules.update(absent)
    try:
        return (yield)
    finally:
        for name in absent:
            # With these Keras would take another backend for installed.
            sys.modules.pop(name)


def test_name(item: pytest.Item) -> str:
    """Returns the name of a test as the lists have it: `trainer_test::test_fit_flow_eager`."""
    return f"{item.path.stem}::{item.name}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests that must fail, with the reason, and leaves out those that need what is absent."""
    mode = config.getoption("fit")
    names = {test_name(item) for item in items}
    kept: list[pytest.Item] = []
    for item in items:
        name = test_name(item)
        if name in ABSENT or (mode == "worker" and name not in WITH_WORKER):
            continue
        kept.append(item)
        if mode == "process" and name in FAILURES:
            item.add_marker(pytest.mark.xfail(reason=FAILURES[name], strict=True))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
    if {name.partition("::")[0] for name in names} >= {"trainer_test", "early_stopping_test"}:
        unknown = {name for name in {*FAILURES, *ABSENT, *WITH_WORKER} - names if "::" in name}
        assert not unknown, f"no such test of Keras: {sorted(unknown)}"


_passed = Counter[str]()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _passed.update(part for part in BARS if part in report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a run of all tests in which fewer pass than must, so that `FAILURES` cannot grow unnoticed."""
    options = session.config.option
    is_whole = options.fit == "process" and not (options.keyword or options.collectonly)
    # Processes of xdist have a part of the tests each.
    if is_whole and not hasattr(session.config, "workerinput"):
        for part, bar in BARS.items():
            print(f"\n{part}: {_passed[part]} passed, and at least {bar} must")
            if _passed[part] < bar:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def _cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.config.getoption("fit") != "worker":
        yield
        return
    import ray

    with set_variables(PYTHONPATH=str(ROOT)):
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 28)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def _replaced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replaces the methods of every model for a test."""
    mode = request.config.getoption("fit")
    if mode == "keras":
        yield
        return
    folder = tempfile.mkdtemp(prefix="keras-suite-")
    histories: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
    from keras.src.backend.torch.trainer import TorchTrainer

    if mode == "worker":
        # Workers lack what the file imports for other backends.
        cloudpickle.register_pickle_by_value(request.module)
    originals = {name: getattr(TorchTrainer, name) for name in ("fit", "evaluate", "predict")}
    fields = {"run.storage_path": folder, "tracking.enabled": False}

    def fit(self: Any, x: Any = None, y: Any = None, *arguments: Any, **options: Any) -> Any:
        model = as_model(self)
        workers = 1 if mode == "worker" else None
        history = ours.fit(model, x, y, *arguments, fields=fields, workers=workers, **options)
        histories[self] = history
        return history

    def replace(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = set(inspect.signature(function).parameters)

        def replaced(self: Any, x: Any = None, *arguments: Any, **options: Any) -> Any:
            # What ours does not take, such as callbacks, and models that no run has trained, are Keras'.
            if self in histories and hasattr(x, "shape") and not arguments and options.keys() <= parameters:
                return function(histories[self], x, **options)
            return originals[name](self, x, *arguments, **options)

        return replaced

    monkeypatch.setattr(TorchTrainer, "fit", fit)
    monkeypatch.setattr(TorchTrainer, "evaluate", replace("evaluate", ours.evaluate))
    monkeypatch.setattr(TorchTrainer, "predict", replace("predict", ours.predict))
    yield
    if mode == "worker":
        cloudpickle.unregister_pickle_by_value(request.module)
    shutil.rmtree(folder)


def as_model(program: Any) -> Any:
    """Returns a model, which a layer with Keras' private trainer becomes; many tests have one instead of a model."""
    if not isinstance(program, keras.Model):
        program.__class__ = _model_class(type(program))
    return program


@cache
def _model_class(kind: type) -> type:
    """Returns a class with the methods of another one, which is a `keras.Model`."""
    kept = {}
    for name in vars(keras.Model):
        value = inspect.getattr_static(kind, name, None)
        if not name.startswith("__") and value is not inspect.getattr_static(keras.layers.Layer, name, None):
            kept[name] = value
    return type(kind.__name__, (kind, keras.Model), {"__module__": kind.__module__, **kept})


def main() -> int:
    """Runs the tests; the arguments are those of pytest."""
    files = [str(file) for pattern in FILES for file in sorted(SUITE.glob(pattern)) if file.stem not in ABSENT]
    options = ["-c", "/dev/null", "--rootdir", str(SUITE), "-p", _PLUGIN, "-p", "no:cacheprovider", "--timeout", "300"]
    return pytest.main([*options, "-W", "ignore", "-q", "-rx", *sys.argv[1:], *files])


if __name__ == "__main__":
    sys.exit(main())
