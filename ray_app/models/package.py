"""The files of a packaged model, without pickle, and the MLflow model that contains them.

The model is stored by `torch.export` where that works, and otherwise as safetensors with the code of its task.
`sources_of` determines the source files to ship with a model and the libraries that it requires.

::

    MLmodel  requirements.txt  ...      of MLflow: signature, input example, environment
    code/ray_app_loader_1a2b3c4d.py     a copy of `models/loader.py`, and the code of the task if it is needed
    data/model/package.json             format, inputs, digest of the parameters, classes, class and settings of a task
    data/model/model.safetensors        the parameters, also to continue training from
    data/model/model.pt2                the task's `forward` for any number of rows, as `torch.export` saves it; or
    data/model/task.json                the class and the settings of the prepared task
    data/model/_tokenizer.json          the tokenizer of the texts that were trained on, if the data set has one
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import Tensor, nn

from ray_app.checkpoint.format import params_digest
from ray_app.errors import RegistryError
from ray_app.models import loader
from ray_app.runlog.redaction import redact_value
from ray_app.storage.files import to_json
from ray_app.task import table_encoding
from ray_app.task.base import Batch, Task
from ray_app.task.ragged import Arrays, Ragged, to_batch
from ray_app.task.texts import TOKENIZER_FILE

_LIBRARY_FOLDERS = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class Sources:
    """The files that a module needs, by dotted names, packages included, and the libraries that it imports."""

    files: dict[str, Path]
    libraries: set[str]


def sources_of(module: str) -> Sources:
    """Returns files and libraries to ship with a model; raises RegistryError without a file, or if it imports Ray."""
    sources = follow_imports(module)
    if module not in sources.files:
        raise RegistryError(f"The task's module {module!r} is not a source file that could be shipped with the model.")
    if "ray" in sources.libraries:
        raise RegistryError(
            f"The code of {module!r} imports ray, so the model could not be loaded without it; import it elsewhere."
        )
    return sources


def digest_sources(sources: Sources) -> dict[str, str]:
    """Returns the SHA-256 of each source file by the name of its module, as `task.json` has them."""
    return {module: hashlib.sha256(file.read_bytes()).hexdigest() for module, file in sources.files.items()}


def follow_imports(module: str, ours: bool = True) -> Sources:
    """Follows the imports of a module anywhere in its code except under `TYPE_CHECKING`, without running it."""
    files: dict[str, Path] = {}
    libraries: set[str] = set()
    todo = _module_and_parents(module)
    while todo:
        name = todo.pop()
        top = name.partition(".")[0]
        if name in files or top in sys.stdlib_module_names:
            continue
        if not _is_shippable(top) or (top == "ray_app" and not ours):
            libraries.add(top)
            continue
        file = _source_file(name)
        if file is None:
            continue
        files[name] = file
        for imported in _imported_names(name, file):
            todo += _module_and_parents(imported)
    return Sources(files, libraries)


def requirements(libraries: set[str]) -> list[str]:
    """Returns the installed versions of libraries as lines of `requirements.txt`, without missing libraries."""
    owners = importlib.metadata.packages_distributions()
    names = {owner for library in libraries for owner in owners.get(library, [])}
    return sorted(f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in names)


def _module_and_parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


def _is_shippable(top: str) -> bool:
    """Whether a top-level module is of the user or of ray_app, and not an installed library."""
    # `__main__` has no import specification.
    if top == "__main__":
        return True
    spec = importlib.util.find_spec(top)
    if spec is None or top == "ray_app":
        return spec is not None
    paths = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or [])
    return any(path and not set(_LIBRARY_FOLDERS) & set(Path(path).parts) for path in paths)


def _source_file(module: str) -> Path | None:
    """Returns the source file of a module, None if it has none or does not exist."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    file = Path(spec.origin).resolve() if spec is not None and spec.origin and spec.origin.endswith(".py") else None
    # A module in a zip archive has no file.
    return file if file is not None and file.is_file() else None


def _imported_names(module: str, file: Path) -> set[str]:
    """Returns the dotted names that a source file imports: of `from a import b` `a` and, if it is a module, `a.b`."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    imported: set[str] = set()
    todo: list[ast.AST] = [ast.parse(file.read_bytes())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            imported.add(base)
            if base.partition(".")[0] not in sys.stdlib_module_names and _is_shippable(base.partition(".")[0]):
                imported |= {
                    f"{base}.{alias.name}" for alias in node.names if _source_file(f"{base}.{alias.name}") is not None
                }
        todo += ast.iter_child_nodes(node)
    return imported


def _versioned(name: str, file: str) -> str:
    """Returns the name of a copy of a module: one process can load models with several versions of it."""
    return f"{name}_{hashlib.sha256(Path(file).read_bytes()).hexdigest()[:8]}"


LOADER_MODULE = _versioned("ray_app_loader", loader.__file__)
ENCODING_MODULE = _versioned("ray_app_encoding", table_encoding.__file__)
_SEED = 1
_TOLERANCES = {"rtol": 1e-5, "atol": 1e-6}


@dataclass(frozen=True)
class Package:
    """A packaged model.

    Args:
        folder: The folder of the MLflow model, or of its folders `data/model` and `code` alone.
        format: The format of the model: `torch.export` or `safetensors`.
        outputs: How its outputs for 1, 2 and 3 rows compare with the trained model's: `equal`, bit for bit, or `close`,
            within 1e-5.
        refused: Why the formats before this one were not possible.
    """

    folder: Path
    format: str
    outputs: Literal["equal", "close"]
    refused: tuple[str, ...]


@dataclass(frozen=True)
class Files(Package):
    """A packaged model, and what MLflow is told about it.

    Args:
        example: The input example, (rows, ...) by field.
        predicted: The outputs for the example by name.
        input_shapes: The shape of each field; -1 is any number of rows, and any length of a ragged field.
        output_shapes: The shape of each output; -1 is any number of rows, and a size that follows these lengths.
        takes_rows: Whether the package takes raw rows of a table, too, see `Task.encoding`.
    """

    libraries: set[str]
    example: dict[str, npt.NDArray]
    predicted: dict[str, npt.NDArray]
    input_shapes: dict[str, tuple[int, ...]]
    output_shapes: dict[str, tuple[int, ...]]
    takes_rows: bool

    @property
    def data(self) -> Path:
        """Folder with `package.json`."""
        return self.folder / "data" / "model"

    @property
    def code(self) -> Path:
        """Folder of the loader and the task's code."""
        return self.folder / "code"


def write_files(task: Task, model: nn.Module, rows: Arrays, folder: Path, tokenizer: bytes | None = None) -> Files:
    """Writes the files of a packaged model, and checks that the loaded model predicts what the trained one does.

    It does not need MLflow.

    Args:
        model: The trained model, on the CPU; it is set to evaluation mode, without gradients.
        rows: Every decoded field of some rows; the fields that `forward` reads become the input example.
        tokenizer: The content of `TOKENIZER_FILE` of the data trained on, if it was texts.

    Raises:
        RegistryError: The model cannot be stored without pickle; the message has the reasons.
    """
    model = model.eval().requires_grad_(False)
    example = {name: values.numpy() for name, values in to_batch(rows).items()}
    inputs = {name: example[name] for name in read_fields(task, model, example)}
    ragged = {name for name in inputs if isinstance(rows.get(name), Ragged)}
    served = loader.Served(task, model, list(inputs)).eval()
    refused: list[str] = []
    for name, write in (("torch.export", _write_exported), ("safetensors", _write_weights)):
        data, code = folder / "data" / "model", folder / "code"
        data.mkdir(parents=True)
        code.mkdir()
        shutil.copy(loader.__file__, code / f"{LOADER_MODULE}.py")
        if task.encoding:
            shutil.copy(table_encoding.__file__, code / f"{ENCODING_MODULE}.py")
        if tokenizer is not None:
            (data / TOKENIZER_FILE).write_bytes(tokenizer)
        _write_description(data, name, served, inputs, ragged)
        try:
            state = {name: values.detach().clone().contiguous() for name, values in model.state_dict().items()}
            (data / loader.WEIGHTS).write_bytes(safetensors.torch.save(state))
            libraries = write(served, inputs, data, code, ragged)
            outputs = compare_outputs(served, inputs, data)
        except Exception as error:
            # torch.export raises errors of any type.
            refused.append(f"{name}: {type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}")
            shutil.rmtree(folder / "data")
            shutil.rmtree(code)
            continue
        predicted = _example_outputs(served, inputs)
        input_shapes = {name: (-1, *_row_shape(name, values, ragged)) for name, values in inputs.items()}
        shapes = input_shapes, _output_shapes(served, inputs, predicted, ragged)
        takes_rows = task.encoding is not None
        return Files(folder, name, outputs, tuple(refused), libraries, inputs, predicted, *shapes, takes_rows)
    raise RegistryError(
        "The model cannot be stored without pickle:\n" + "\n".join(f"  - {reason}" for reason in refused)
    )


def read_fields(task: Task, model: nn.Module, example: dict[str, npt.NDArray]) -> list[str]:
    """Returns the decoded fields that `forward` needs, such as `image` but not `label`, in the order of the example."""
    whole = _example_batch(example, 2)
    batch, forward = _RecordingBatch(whole), partial(task.forward, model)
    model.eval()
    with torch.no_grad():
        expected = _seeded_outputs(forward, batch)
        names = [name for name in example if name in batch.read]
        try:
            actual = _seeded_outputs(forward, {name: whole[name] for name in names})
        except Exception:
            # `forward` reads further fields in a way that `_RecordingBatch` does not record.
            return list(example)
    outputs = [(name, values.dtype, values.tolist()) for name, values in expected]
    return names if outputs == [(name, values.dtype, values.tolist()) for name, values in actual] else list(example)


class _RecordingBatch(dict[str, Tensor]):
    """A batch that records the names of the fields that are read one by one."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        if isinstance(name, str) and super().__contains__(name):
            self.read.add(name)
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the field or the default, see `dict.get`."""
        self.read.add(name)
        return super().get(name, default)


def _example_batch(example: dict[str, npt.NDArray], rows: int) -> Batch:
    """Returns a number of rows of an example, repeating its rows where it has fewer."""
    return {
        name: torch.from_numpy(np.take(values, np.arange(rows), axis=0, mode="wrap"))
        for name, values in example.items()
    }


def _row_shape(field: str, values: npt.NDArray, ragged: set[str]) -> tuple[int, ...]:
    """Returns the shape of one row of a field; -1 is any length."""
    return (-1, *values.shape[2:]) if field in ragged else values.shape[1:]


def _write_description(
    data: Path, name: str, served: loader.Served, inputs: dict[str, npt.NDArray], ragged: set[str]
) -> None:
    described = {
        "format": name,
        "inputs": [
            {"name": field, "dtype": v.dtype.str, "shape": _row_shape(field, v, ragged)} for field, v in inputs.items()
        ],
        "params_digest": params_digest(served.model.state_dict()),
        "torch": torch.__version__,
        "classes": served.task.classes,
        "task": {"class_path": class_path(served.task), "settings": storable_settings(served.task)},
    }
    if served.task.encoding:
        described["encoding"] = {"module": ENCODING_MODULE, "settings": served.task.encoding}
    (data / loader.DESCRIPTION).write_text(to_json(described, indent=1))


def class_path(task: Task) -> str:
    """Returns the import path of a task's class."""
    return f"{type(task).__module__}.{type(task).__qualname__}"


def storable_settings(task: Task) -> dict[str, Any] | None:
    """Returns the settings of a prepared task; None if JSON does not preserve them, or one is a secret."""
    settings = vars(task)
    return settings if _is_json(settings) and redact_value(settings) == settings else None


def _write_exported(
    served: loader.Served, inputs: dict[str, npt.NDArray], data: Path, code: Path, ragged: set[str]
) -> set[str]:
    """Writes `model.pt2`; returns the libraries that loading it needs."""
    del code
    any_rows, any_length = {0: torch.export.Dim.DYNAMIC}, {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    shapes = tuple(any_length if name in ragged else any_rows for name in inputs)
    with torch.no_grad():
        exported = torch.export.export(
            served, tuple(_example_batch(inputs, 2).values()), dynamic_shapes={"fields": shapes}
        )
    # torch.export would pickle the example inputs.
    exported.example_inputs = None
    torch.export.save(exported, data / loader.EXPORTED)
    state = {name.removeprefix("model."): values for name, values in exported.state_dict.items()}
    if params_digest(state) != params_digest(served.model.state_dict()):
        raise RegistryError("the exported model has other parameters")
    return {"torch", "numpy"}


def _write_weights(
    served: loader.Served, inputs: dict[str, npt.NDArray], data: Path, code: Path, ragged: set[str]
) -> set[str]:
    """Writes `task.json` and the task's code; returns the libraries that loading them needs."""
    del inputs, ragged
    task_class = type(served.task)
    if "<locals>" in task_class.__qualname__ or task_class.__module__ == "__main__":
        raise RegistryError(
            f"the task's class {task_class.__module__}.{task_class.__qualname__} cannot be imported; define it at the"
            " top of a module"
        )
    for name, value in vars(served.task).items():
        if not _is_json(value):
            raise RegistryError(
                f"the task's attribute {name!r} is a {type(value).__name__} that JSON cannot store; keep numbers, text,"
                " lists and dictionaries of these, and create other objects when they are needed"
            )
        if redact_value(value, name) != value:
            raise RegistryError(
                f"the task's attribute {name!r} holds a secret, which no package may contain; read it from the"
                " environment"
            )
    sources = sources_of(task_class.__module__)
    for module, file in sources.files.items():
        target = code / Path(*module.split("."))
        target = target / "__init__.py" if file.name == "__init__.py" else target.with_suffix(".py")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    names = {"module": task_class.__module__, "class": task_class.__qualname__}
    description = names | {"settings": vars(served.task), "code": digest_sources(sources)}
    (data / loader.TASK).write_text(json.dumps(description, indent=1))
    return {"torch", "numpy", "safetensors"} | sources.libraries


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def compare_outputs(served: loader.Served, inputs: dict[str, npt.NDArray], data: Path) -> Literal["equal", "close"]:
    """Loads the written model as a user would, and compares its outputs with the trained model's."""
    loaded = loader.load(data, trust=True)
    equal = True
    for rows in (1, 2, 3):
        batch = tuple(_example_batch(inputs, rows).values())
        with torch.no_grad():
            ours, theirs = (_seeded_outputs(one, *batch) for one in (served, loaded))
        for (name, trained), (other, packaged) in zip(ours, theirs, strict=True):
            has_same_form = name == other and trained.shape == packaged.shape
            if not has_same_form or not torch.allclose(trained, packaged, equal_nan=True, **_TOLERANCES):
                raise RegistryError(f"loaded again, the model predicts other values for {rows} rows")
            equal = equal and torch.equal(trained, packaged)
    return "equal" if equal else "close"


def _seeded_outputs(module: Callable[..., Any], *batch: Any) -> list[tuple[str, Tensor]]:
    """Returns the outputs of a model by name, with seeded generators: a model such as a GAN may draw from them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return loader.name_outputs(module(*batch))


def _example_outputs(served: loader.Served, inputs: dict[str, npt.NDArray]) -> dict[str, npt.NDArray]:
    outputs = loader.Predictor(served, []).outputs(_example_batch(inputs, 2))
    arrays = loader.to_arrays(outputs)
    return arrays if isinstance(arrays, dict) else {"": arrays}


def _output_shapes(
    served: loader.Served, inputs: dict[str, npt.NDArray], predicted: dict[str, npt.NDArray], ragged: set[str]
) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each output; -1 is any number of rows, or a size that follows the length of ragged fields.

    Which sizes do so is found with twice the padding, which the model may have no capacity for; then all count as
    fixed.
    """
    longer = inputs | {name: np.concatenate([inputs[name], np.zeros_like(inputs[name])], 1) for name in ragged}
    try:
        others = _example_outputs(served, longer) if ragged else predicted
        return {
            name: (-1, *(a if a == b else -1 for a, b in zip(values.shape[1:], others[name].shape[1:], strict=True)))
            for name, values in predicted.items()
        }
    # The code of the user may raise an error of any type.
    except Exception:
        return {name: (-1, *values.shape[1:]) for name, values in predicted.items()}


def make_package(
    task: Task, model: nn.Module, example: Arrays, folder: Path, tokenizer: bytes | None = None
) -> Package:
    """Writes an MLflow model to a new folder, and checks what it predicts; see `write_files`."""
    with tempfile.TemporaryDirectory() as temporary:
        files = write_files(task, model, example, Path(temporary), tokenizer)
        _save_mlflow_model(folder, files)
    return replace(files, folder=folder)


def _save_mlflow_model(folder: Path, files: Files) -> None:
    """Makes an MLflow model of the files in a folder, without logging it to a server."""
    import mlflow.pyfunc
    from mlflow.models import ModelSignature

    inputs, outputs = files.example, files.predicted
    only = len(inputs) == 1
    with warnings.catch_warnings():
        # A package that takes raw rows has none.
        warnings.filterwarnings("ignore", ".*An input example was not provided", UserWarning)
        mlflow.pyfunc.save_model(
            path=str(folder),
            loader_module=LOADER_MODULE,
            data_path=str(files.data),
            code_paths=[str(path) for path in sorted(files.code.iterdir())],
            pip_requirements=[f"mlflow=={importlib.metadata.version('mlflow')}", *requirements(files.libraries)],
            signature=ModelSignature(
                # MLflow would refuse the raw rows of a table where its schema names the encoded ones.
                None if files.takes_rows else _mlflow_schema(inputs, files.input_shapes, only),
                _mlflow_schema(outputs, files.output_shapes, "" in outputs),
            ),
            input_example=None if files.takes_rows else next(iter(inputs.values())) if only else inputs,
        )


def _mlflow_schema(arrays: dict[str, npt.NDArray], shapes: dict[str, tuple[int, ...]], only: bool) -> Any:
    """Returns MLflow's schema of arrays of these shapes; an only array has no name."""
    from mlflow.types import Schema, TensorSpec

    return Schema([TensorSpec(v.dtype, shapes[name], None if only else name) for name, v in arrays.items()])
