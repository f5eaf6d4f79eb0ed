"""Loads a packaged model, for MLflow and for plain PyTorch; every package has a copy of this file as its code.

The module stands alone: it needs torch and NumPy, safetensors for a package with separate weights, and neither Ray nor
the rest of ray_app. It unpickles nothing and evaluates no expression of an archive except those of sizes; a package
that requires more is refused.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

DESCRIPTION = "package.json"
EXPORTED = "model.pt2"
WEIGHTS = "model.safetensors"
TASK = "task.json"

_ALLOWED_MEMBER = re.compile(
    r"[^/]+/(archive_format|archive_version|byteorder|\.data/\w+|models/\w+\.json|data/weights/weight_\d+|data/constants/tensor_\d+|"
    r"data/(weights|constants)/\w+_config\.json)"
)
"""Members of an archive of `torch.export.save` that are not pickles: JSON, raw numbers, and notes of the zip writer."""
_ALLOWED_OPERATOR = re.compile(
    r"torch\.ops\.(aten|prims|torchvision|higher_order)\.(?!(save|load|from_file)\b|__(?!and|or|xor|[lr]shift))\w+(\.(?!__)\w+)?|torch\.sym_\w+|math\.[a-z]\w*|"
    r"_operator\.(getitem|add|sub|mul|truediv|floordiv|mod|pow|neg|pos|abs|and_|or_|not_|invert|xor|lshift|rshift|eq|ne|lt|le|gt|ge)"
)
"""Operators that compute with tensors and sizes.

Others, such as `torch.hub.load` or `_operator.call`, can execute any code.
"""
_ALLOWED_CONTAINERS = ("builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict")
"""Containers that arguments and results may be nested in.

For others, such as `collections.defaultdict`, torch imports a module that the archive names.
"""
_FUNCTION, _SYMBOL = re.compile(r"[A-Z][A-Za-z]*|floor|ceiling"), re.compile(r"[a-z]+\d+")
_ALLOWED_SIZE_NODES = (
    ast.Expression,
    ast.Call,
    ast.Name,
    ast.Load,
    ast.Constant,
    ast.keyword,
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
)
_ALLOWED_SIZE_NODES += (ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop)  # type: ignore[assignment]


class Served(nn.Module):
    """A task's `forward` as a module of tensors, which are the decoded fields of these names."""

    def __init__(self, task: Any, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.task = task
        self.model = model
        self.names = names

    def forward(self, *fields: Tensor) -> Any:
        """Returns the task's outputs for the fields of a batch, each of shape (rows, ...)."""
        return self.task.forward(self.model, dict(zip(self.names, fields, strict=True)))


class Predictor:
    """Predicts from arrays to arrays; an input has name, dtype and shape of one row. MLflow calls it.

    Args:
        module: Takes the inputs.
        inputs: Name, dtype and shape of one row of each input.
        encoding: The encoding of raw rows of a table, if the task of the model has one.
        encode_rows: Makes the inputs of an encoding and raw rows.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: list[dict[str, Any]],
        encoding: dict[str, Any] | None = None,
        encode_rows: Callable[[Any, Any], dict[str, Any]] | None = None,
    ) -> None:
        self.module, self._inputs = module, inputs
        self._encoding, self._encode_rows = encoding, encode_rows

    def predict(self, data: Any, params: dict[str, Any] | None = None) -> Any:
        """Predicts a batch; MLflow's `params` are ignored.

        Args:
            data: One input: an array (rows, ...), or a table of numbers. Several: a dictionary, or a table with an
                array in every cell. A model of a table with categories, dates or missing values takes its columns: a
                dictionary of sequences, or a table, with words and gaps (None, NaN) as they were trained on.

        Returns:
            The task's outputs as an array (rows, ...); a dictionary of arrays if there are several.

        Raises:
            ValueError: An array does not match the model's input, or an input is missing.
        """
        del params
        if self._encoding and self._encode_rows and hasattr(data, "keys"):
            names = [column["name"] for column in self._encoding["columns"]]
            # Raw rows that lack a column are an error of the encoding: other numbers of a table never take its place.
            if all(name in data for name in names) or not all(spec["name"] in data for spec in self._inputs):
                data = self._encode_rows(self._encoding, {name: data[name] for name in names if name in data})
        with torch.no_grad():
            outputs = self.module(
                *(_input_tensor(_input_values(data, spec, len(self._inputs) == 1), spec) for spec in self._inputs)
            )
        arrays = {
            name: values.float().numpy() if values.dtype == torch.bfloat16 else values.numpy()
            for name, values in name_outputs(outputs)
        }
        return arrays[""] if list(arrays) == [""] else arrays


def _load_pyfunc(data_path: str) -> Predictor:
    """Loads a model; MLflow calls this function by its name."""
    described = describe(data_path)
    encoding = described.get("encoding")
    encode_rows = importlib.import_module(encoding["module"]).encode_rows if encoding else None
    return Predictor(load(data_path), described["inputs"], encoding and encoding["settings"], encode_rows)


def load(folder: str | Path) -> nn.Module:
    """Loads the module of a package in plain PyTorch, on the CPU and in evaluation mode.

    Args:
        folder: The folder with `package.json`, in an MLflow model `data/model`.

    Returns:
        A module that takes the inputs that `package.json` names as arguments, in that order.

    Raises:
        ValueError: The package holds pickled code, which is not run, or other code than a module of the same name that
            is imported already.
    """
    folder = Path(folder)
    if describe(folder)["format"] == "torch.export":
        return load_exported(folder / EXPORTED).module()
    return _restore_task_module(folder).eval().requires_grad_(False)


def describe(folder: str | Path) -> dict[str, Any]:
    """Returns the content of `package.json`."""
    return json.loads((Path(folder) / DESCRIPTION).read_text())


def name_outputs(outputs: Any) -> list[tuple[str, Tensor]]:
    """Returns tensors with their names, "" for a single one; raises ValueError for other outputs."""
    if isinstance(outputs, Tensor):
        return [("", outputs)]
    pairs = list(outputs.items()) if isinstance(outputs, dict) else []
    if isinstance(outputs, (tuple, list)):
        pairs = [(f"output_{i}", values) for i, values in enumerate(outputs)]
    if not pairs or not all(isinstance(name, str) and isinstance(values, Tensor) for name, values in pairs):
        raise ValueError(
            f"forward returned {type(outputs).__name__}; a packaged model returns a tensor, or a dict or tuple of"
            " tensors."
        )
    return pairs


def load_exported(archive: Path) -> torch.export.ExportedProgram:
    """Loads an archive of `torch.export.save`; raises ValueError if loading would execute something in it."""
    refuse_code(archive)
    return torch.export.load(archive)


def refuse_code(archive: Path) -> None:
    """Raises ValueError for an archive with contents that `torch.export.load` would unpickle or evaluate."""
    try:
        file = zipfile.ZipFile(archive)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{archive} is refused: it is not an archive of torch.export.save.") from error
    with file:
        for member in file.infolist():
            if re.fullmatch(r"[^/]+/data/sample_inputs/\w+\.pt", member.filename) and not member.file_size:
                continue
            if not _ALLOWED_MEMBER.fullmatch(member.filename):
                raise ValueError(f"{archive} is refused: {member.filename} may hold pickled code.")
            if member.filename.endswith("_config.json"):
                payloads = json.loads(file.read(member))["config"]
                for name, payload in payloads.items():
                    if payload["use_pickle"]:
                        raise ValueError(f"{archive} is refused: {name} is pickled.")
            elif member.filename.endswith(".json"):
                for problem in _find_code(json.loads(file.read(member))):
                    raise ValueError(f"{archive} is refused: {member.filename} holds {problem}.")


def _find_code(value: Any, key: str = "") -> Iterator[str]:
    """Yields what torch would execute of a program in JSON besides operators on tensors and sizes."""
    if isinstance(value, dict):
        if key == "range_constraints":
            yield from (f"the size {name[:80]!r}" for name in value if not _is_size(name))
        for name, inner in value.items():
            yield from _find_code(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _find_code(inner, key)
    elif isinstance(value, str):
        if key == "expr_str" and not _is_size(value):
            yield f"the size {value[:80]!r}"
        elif key == "guards_code" and not _is_size(
            re.sub(r"L\['\w+'\](\[('\w+'|\d+)\])*\.size\(\)\[\d+\]", "s0", value)
        ):
            yield f"the check {value[:80]!r}"
        elif key in ("target", "as_operator") and not _ALLOWED_OPERATOR.fullmatch(value):
            yield f"the operator {value[:80]!r}"
        elif key in ("in_spec", "out_spec") and not _is_nesting(value):
            yield f"the structure {value[:80]!r}"


def _is_nesting(text: str) -> bool:
    """Whether a text describes only a nesting of arguments or results in plain containers, with plain names."""
    try:
        _, root = json.loads(text)
        todo = [root]
        for node in todo:
            kind = node["type"]
            context = node["context"]
            children = node["children_spec"]
            names = json.loads(context) if kind is not None else context
            is_plain = names is None or (
                isinstance(names, list) and all(isinstance(name, str | int | float | None) for name in names)
            )
            if not is_plain or (kind is None and children) or (kind is not None and kind not in _ALLOWED_CONTAINERS):
                return False
            todo += children
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
    return True


def _is_size(text: str) -> bool:
    """Whether a text is only an expression of sizes, such as `Mul(Integer(2), Symbol('s0', positive=True))`."""
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    calls = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    return all(
        isinstance(node, _ALLOWED_SIZE_NODES)
        and (not isinstance(node, ast.Constant) or not isinstance(node.value, str) or node.value.isidentifier())
        and (not isinstance(node, ast.Call) or isinstance(node.func, ast.Name))
        and (not isinstance(node, ast.Name) or (_FUNCTION if id(node) in calls else _SYMBOL).fullmatch(node.id))
        for node in nodes
    )


def _restore_task_module(folder: Path) -> nn.Module:
    """Restores the task from its settings and the packaged code, and loads the weights into its model."""
    import safetensors.torch

    stored = json.loads((folder / TASK).read_text())
    task_class: Any = importlib.import_module(stored["module"])
    for name, digest in stored["code"].items():
        source = inspect.getsourcefile(importlib.import_module(name))
        if source is None or hashlib.sha256(Path(source).read_bytes()).hexdigest() != digest:
            raise ValueError(
                f"{folder} needs the module {name} that it brings along, but another one of that name is imported"
                f" ({source}). Load the model in a process of its own."
            )
    for part in stored["class"].split("."):
        task_class = getattr(task_class, part)
    task = task_class.__new__(task_class)
    task.__dict__.update(stored["settings"])
    model = task.build_model()
    model.load_state_dict(safetensors.torch.load_file(folder / WEIGHTS))
    return Served(task, model, [spec["name"] for spec in describe(folder)["inputs"]])


def _input_values(data: Any, spec: dict[str, Any], only: bool) -> Any:
    """Extracts the values of one input from the data of a caller."""
    name = spec["name"]
    if isinstance(data, dict) or (hasattr(data, "columns") and not only):
        if name not in data:
            raise ValueError(f"The input {name!r} is missing; there are {', '.join(map(repr, data))}.")
        return data[name] if isinstance(data, dict) else np.stack(data[name].tolist())
    return data.to_numpy() if hasattr(data, "to_numpy") else data


def _input_tensor(values: Any, spec: dict[str, Any]) -> Tensor:
    raw = np.asarray(values)
    if raw.dtype.kind not in "biufO":
        raise ValueError(
            f"The input {spec['name']!r} is of {spec['dtype']}; the values given are of {raw.dtype} and do not fit."
        )
    array: npt.NDArray = np.array(raw, dtype=np.dtype(spec["dtype"]), order="C", copy=True)
    if not np.can_cast(raw.dtype, array.dtype, "same_kind") and not np.array_equal(array, raw):
        raise ValueError(
            f"The input {spec['name']!r} is of {array.dtype}; the values given are of {raw.dtype} and do not fit."
        )
    if array.ndim != len(spec["shape"]) + 1 or any(
        length not in (-1, actual) for length, actual in zip(spec["shape"], array.shape[1:], strict=True)
    ):
        raise ValueError(
            f"The input {spec['name']!r} is of shape (rows, {str(spec['shape'])[1:-1]}); {array.shape} was given."
        )
    return torch.from_numpy(array)
