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
from collections.abc import Callable, Iterator, Mapping
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
_MAX_NAMED = 12

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
        self.module, self.inputs = module, inputs
        self._encoding, self._encode_rows = encoding, encode_rows

    def predict(self, data: Any, params: dict[str, Any] | None = None) -> Any:
        """Predicts a batch; MLflow's `params` are ignored.

        Args:
            data: One input: an array (rows, ...), or a table of numbers. Several: a dictionary, a list of dictionaries,
                or a table with an array in every cell. A model of a table with categories, dates or missing values
                takes its columns, with words and gaps (None, NaN) as they were trained on: a table of pandas, Polars or
                Arrow, a dictionary of sequences, a list of rows as dictionaries, or a dictionary of one row.

        Returns:
            The task's outputs as an array (rows, ...); a dictionary of arrays if there are several. They are empty for
            no rows.

        Warns:
            UserWarning: Categories have values that the training data lacks; they count as one category, other.

        Raises:
            ValueError: An array does not match the model's input, an input is missing, or a value cannot be encoded.
        """
        del params
        return to_arrays(self.outputs(self.tensors(data)))

    def tensors(self, data: Any) -> dict[str, Tensor]:
        """Returns the inputs of the module by name, of data as `predict` takes it."""
        columns = self._column_names()
        data = to_columns(data, [*columns, *(spec["name"] for spec in self.inputs)], bool(columns))
        # Raw rows that lack a column are an error of the encoding: other numbers of a table never take its place.
        if columns and is_by_name(data) and not self._is_encoded(data, columns):
            data = self._encode(data, columns)
        is_only = len(self.inputs) == 1
        try:
            if not (is_only or is_by_name(data) or hasattr(data, "columns")):
                raise ValueError(f"The model has several inputs, and {type(data).__name__} has no names.")
            return {spec["name"]: _input_tensor(_input_values(data, spec, is_only), spec) for spec in self.inputs}
        except ValueError as error:
            raise ValueError(f"{error} {self.describe_allowed()}") from error

    def outputs(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the outputs of the module by name, "" for a single one."""
        values = list(tensors.values())
        rows = len(values[0])
        if not rows:
            # Not every program of `torch.export` takes zero rows.
            values = [tensor.new_zeros([max(length, 1) for length in tensor.shape]) for tensor in values]
        with torch.no_grad():
            outputs = name_outputs(self.module(*values))
        return {name: output if rows else output[:0] for name, output in outputs}

    def _column_names(self) -> list[str]:
        """Returns the columns of raw rows; an empty list if the model takes arrays alone."""
        return [column["name"] for column in self._encoding["columns"]] if self._encoding and self._encode_rows else []

    def _is_encoded(self, data: Any, columns: list[str]) -> bool:
        """Whether data has the inputs of the model, and not the columns of raw rows."""
        return all(spec["name"] in data for spec in self.inputs) and not all(name in data for name in columns)

    def _encode(self, data: Any, columns: list[str]) -> dict[str, Any]:
        assert self._encoding is not None
        assert self._encode_rows is not None
        if missing := [name for name in columns if name not in data]:
            raise ValueError(
                f"The column {missing[0]!r} is missing; there are {_join_names(data)}. {self.describe_allowed()}"
            )
        rows = {name: data[name] for name in columns}
        if not any(map(len, rows.values())):
            return {
                spec["name"]: np.zeros((0, *(abs(length) for length in spec["shape"])), np.dtype(spec["dtype"]))
                for spec in self.inputs
            }
        return self._encode_rows(self._encoding, rows)

    def describe_allowed(self) -> str:
        """Returns what `predict` takes, as a sentence."""
        columns = self._column_names()
        shapes = ", ".join(
            f"{spec['name']!r} {np.dtype(spec['dtype'])} ({', '.join(map(str, ['rows', *spec['shape']]))})"
            for spec in self.inputs
        )
        if columns:
            return (
                f"Give the columns {_join_names(columns)} by name: a table of pandas, Polars or Arrow, a dictionary of"
                " sequences, a list of rows as dictionaries, or a dictionary of one row."
            )
        form = "an array, or a dictionary with it" if len(self.inputs) == 1 else "a dictionary of arrays"
        return f"Give {form}: {shapes}."


def _load_pyfunc(data_path: str) -> Predictor:
    """Loads a model; MLflow calls this function by its name."""
    described = describe(data_path)
    encoding = described.get("encoding")
    encode_rows = importlib.import_module(encoding["module"]).encode_raw_rows if encoding else None
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


def to_arrays(outputs: Mapping[str, Tensor]) -> Any:
    """Returns outputs as arrays by name; a single one as an array."""
    arrays = {
        name: values.float().numpy() if values.dtype == torch.bfloat16 else values.numpy()
        for name, values in outputs.items()
    }
    return arrays[""] if list(arrays) == [""] else arrays


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


def _join_names(names: Any) -> str:
    """Returns names in quotes, separated by commas; the first ones of many."""
    quoted = list(map(repr, names))
    return ", ".join(quoted[:_MAX_NAMED]) + (f", ... ({len(quoted)})" if len(quoted) > _MAX_NAMED else "")


def is_by_name(data: Any) -> bool:
    """Returns whether data has names: a dictionary, a row or a table of pandas."""
    return hasattr(data, "keys")


def is_single_value(values: Any) -> bool:
    """Returns whether the value of a column is one value, and not a sequence of values."""
    return isinstance(values, str | bytes) or not hasattr(values, "__len__") or getattr(values, "ndim", 1) == 0


def _to_list(values: Any) -> list[Any]:
    """Returns a column of Arrow or Polars as a list."""
    return list(values.to_pylist() if hasattr(values, "to_pylist") else values.to_list())


_TABLES = ("keys", "to_dict", "to_pydict")
"""Methods of the tables of pandas, Polars and Arrow, which have their rows in memory."""


def to_columns(data: Any, names: list[str], is_raw: bool) -> Any:
    """Returns rows as dictionaries, and a table without `keys`, as a dictionary of columns; other data unchanged.

    A table is one of Arrow, Polars or DuckDB, or a reader of such.

    Args:
        names: The columns and inputs that the model takes.
        is_raw: Whether the model takes raw rows by column; if not, a table may be one array.
    """
    if isinstance(data, list | tuple) and data and all(isinstance(row, Mapping) for row in data):
        keys = list(dict.fromkeys(name for row in data for name in row))
        for i, row in enumerate(data):
            if lacking := [name for name in names if name in keys and name not in row]:
                raise ValueError(
                    f"Row {i}, counted from 0, lacks {lacking[0]!r}, which other rows have; give None for a missing"
                    " value."
                )
        return {name: [row.get(name) for row in data] for name in keys}
    if hasattr(data, "__arrow_c_stream__") and not any(hasattr(data, name) for name in _TABLES):
        import pyarrow as pa

        # A reader of Arrow, or a relation of DuckDB: its query would be executed again for each column.
        data = pa.table(data)
    if hasattr(data, "collect"):
        raise ValueError(f"A {type(data).__name__} has no rows yet; call collect() of Polars or toPandas() of Spark.")
    table_names = getattr(data, "column_names", getattr(data, "columns", None))
    if not is_by_name(data) and table_names is not None and (is_raw or len(names) > 1):
        return {name: _to_list(data[name]) if name in names else [] for name in table_names}
    if is_by_name(data):
        present = [name for name in names if name in data]
        single = [name for name in present if is_single_value(data[name])]
        if single and len(single) < len(present):
            sequence = next(name for name in present if name not in single)
            raise ValueError(
                f"{single[0]!r} is one value, {data[single[0]]!r}, and {sequence!r} a sequence; give a sequence with a"
                " value for each row for all of them, or one value for each; a row that has an array is a list of one"
                " dictionary."
            )
        return {name: [data[name]] for name in present} if single else data
    return data


def _input_values(data: Any, spec: dict[str, Any], only: bool) -> Any:
    """Extracts the values of one input from the data of a caller."""
    name = spec["name"]
    if isinstance(data, dict) or (hasattr(data, "columns") and not only):
        if name not in data:
            raise ValueError(f"The input {name!r} is missing; there are {_join_names(data)}.")
        return data[name] if isinstance(data, dict) else np.stack(data[name].tolist())
    return data.to_numpy() if hasattr(data, "to_numpy") else data


def _input_tensor(values: Any, spec: dict[str, Any]) -> Tensor:
    try:
        raw = np.asarray(values)
        array: npt.NDArray = np.array(raw, dtype=np.dtype(spec["dtype"]), order="C", copy=True)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(
            f"The values given as the input {spec['name']!r} are not {np.dtype(spec['dtype'])}: {error}."
        ) from error
    if raw.dtype.kind not in "biufO":
        raise ValueError(
            f"The input {spec['name']!r} is of {spec['dtype']}; the values given are of {raw.dtype} and do not fit."
        )
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
