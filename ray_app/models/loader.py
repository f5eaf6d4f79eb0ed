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
import math
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

DESCRIPTION = "package.json"
EXPORTED = "model.pt2"
WEIGHTS = "model.safetensors"
TASK = "task.json"
UNTRUSTED = (
    "without model.pt2, loading runs the Python files and the functions that the package names. Pass trust=True if you"
    " trust its author."
)
_MAX_NAMED = 12

_PROGRAM, _SAMPLE_INPUTS = "models/model.json", "data/sample_inputs/model.pt"
_ALLOWED_MEMBER = re.compile(
    rf"archive_format|archive_version|byteorder|\.data/\w+|{re.escape(_PROGRAM)}|{re.escape(_SAMPLE_INPUTS)}|"
    r"data/(weights/weight_\d+|constants/tensor_\d+|weights/model_weights_config\.json|constants/model_constants_config\.json)",
    re.ASCII,
)
"""Members of an archive of `torch.export.save` that are not pickles: JSON, raw numbers, and notes of the zip writer.

The sample inputs would be a pickle; those of a package are empty.
"""
_FLAGS = 0x808
"""Flags of a member in an archive that torch writes: its sizes follow it, and its name is UTF-8."""
_MAX_IN_MEMORY = 2**26
_MAX_REPEATED = 2**24
"""Values of a tensor that repeats the bytes of its member, such as one of `expand`."""
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
_NAMES = ("name", "as_name", "forward_arg_names")
"""Names in a program that torch writes into Python code as they are; others it writes there in quotes."""
_NAME, _QUOTABLE = re.compile(r"[\w.]*"), re.compile(r"""[^"'\\\x00-\x1f]*""")
_OTHER_TEXTS = re.compile(
    "as_strings?|stack_trace|nn_module_stack|source_fn_stack|torch_fn|custom|from_node|"
    "expr_str|guards_code|target|as_operator|in_spec|out_spec"
)
"""Texts of a program that are no names: data, notes on the origin of a node, and those with a check of their own."""
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


class _RefusedError(Exception):
    """The reason why an archive is refused."""


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
                raise ValueError(f"The model has several inputs, but {type(data).__name__} has no names.")
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
                f"The column {missing[0]!r} is missing; the columns are {_join_names(data)}. {self.describe_allowed()}"
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
                f"Pass the columns {_join_names(columns)} by name: a table of pandas, Polars or Arrow, a dictionary of"
                " sequences, a list of rows as dictionaries, or a dictionary of one row."
            )
        form = "an array, or a dictionary with it" if len(self.inputs) == 1 else "a dictionary of arrays"
        return f"Pass {form}: {shapes}."


def _load_pyfunc(data_path: str) -> Predictor:
    """Loads a model; MLflow calls this function by its name."""
    described = describe(data_path)
    encoding = described.get("encoding")
    encode_rows = importlib.import_module(encoding["module"]).encode_raw_rows if encoding else None
    # MLflow has run code of the package already: this file.
    return Predictor(load(data_path, trust=True), described["inputs"], encoding and encoding["settings"], encode_rows)


def load(folder: str | Path, trust: bool = False) -> nn.Module:
    """Loads the module of a package in plain PyTorch, on the CPU and in evaluation mode.

    Args:
        folder: The folder with `package.json`, in an MLflow model `data/model`.
        trust: Whether code that the package names may run: that of a package without `model.pt2` is its Python files,
            and whatever its `task.json` names by import paths.

    Returns:
        A module that takes the inputs that `package.json` names as arguments, in that order.

    Raises:
        ValueError: The package holds pickled code, which is not run; or code, without `trust`; or other code than a
            module of the same name that is imported already.
    """
    folder = Path(folder)
    if describe(folder)["format"] == "torch.export":
        return load_exported(folder / EXPORTED).module()
    if not trust:
        raise ValueError(f"{folder} is refused: {UNTRUSTED}")
    return _restore_task_module(folder).eval().requires_grad_(False)


def describe(folder: str | Path) -> dict[str, Any]:
    """Returns the content of `package.json`; raises ValueError if it is damaged."""
    described = json.loads((Path(folder) / DESCRIPTION).read_text())
    check_inputs(described["inputs"])
    return described


def check_inputs(inputs: list[Any]) -> None:
    """Raises ValueError for inputs in `package.json` without a name, or of another type or shape than an array's."""
    for spec in inputs:
        try:
            is_input = isinstance(spec["name"], str) and np.dtype(spec["dtype"]).kind in "biuf"
            is_input = is_input and all(type(length) is int and length >= -1 for length in spec["shape"])
        except (LookupError, TypeError, ValueError, SyntaxError):
            is_input = False
        if not is_input:
            raise ValueError(f"the input {spec!r} is not a name, a dtype of numbers, and the shape of a row")


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


def load_exported(archive: Path | IO[bytes]) -> torch.export.ExportedProgram:
    """Loads an archive of `torch.export.save`; raises ValueError if it is damaged, or loading would execute code."""
    with rewrite_checked(archive) as checked:
        return load_checked(checked)


def load_checked(checked: IO[bytes]) -> torch.export.ExportedProgram:
    """Loads an archive that `rewrite_checked` returned; raises ValueError if torch cannot load it."""
    try:
        return torch.export.load(checked)
    except MemoryError:
        raise
    except Exception as error:
        # Torch raises errors of any type for a program that is damaged, or of another version.
        raise ValueError(f"{EXPORTED} is refused: torch cannot load it, {type(error).__name__}: {error}") from error


def rewrite_checked(archive: Path | IO[bytes]) -> IO[bytes]:
    """Returns a new archive with the members of one of `torch.export.save`, for torch to read.

    Torch and `zipfile` can read different members from the same bytes. The new archive, in which names and sizes occur
    only once, holds exactly what was checked. Above 64 MiB it is a file without a name in the temporary folder, which
    is removed when it is closed; numbers are copied in blocks, so the weights need no memory until torch loads them.

    Raises:
        ValueError: The archive has contents that `torch.export.load` would unpickle or evaluate, or is damaged.
    """
    called = archive if isinstance(archive, Path) else EXPORTED
    checked = cast(IO[bytes], tempfile.SpooledTemporaryFile(_MAX_IN_MEMORY))  # noqa: SIM115 - returned
    try:
        with zipfile.ZipFile(archive) as source, zipfile.ZipFile(checked, "w") as target:
            _copy_members(source, target)
    except _RefusedError as error:
        raise ValueError(f"{called} is refused: {error}.") from error
    except MemoryError:
        raise
    except Exception as error:
        # `zipfile` raises errors of many types for a damaged archive, and so does JSON with values of other types.
        reason = f"{type(error).__name__}: {str(error).rstrip('.')}"
        raise ValueError(f"{called} is refused, because it cannot be read: {reason}.") from error
    checked.seek(0)
    return checked


def _copy_members(source: zipfile.ZipFile, target: zipfile.ZipFile) -> None:
    """Copies the members of an archive to a new one; raises `_RefusedError` for one that is not as torch writes it."""
    members = source.infolist()
    sizes = {member.filename.partition("/")[2]: member.file_size for member in members}
    # Torch compares names without regard to case.
    if len(set(map(str.lower, sizes))) < len(members):
        raise _RefusedError("two of its members have the same name")
    if len({member.filename.partition("/")[0] for member in members}) != 1 or source.comment:
        raise _RefusedError("the archive has a comment, or several folders")
    if min(member.header_offset for member in members) or sum(sizes.values()) > source.start_dir:
        raise _RefusedError("other data precedes its first member, or its members overlap")
    for name, member in zip(sizes, members, strict=True):
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & ~_FLAGS or _has_foreign_field(member.extra):
            raise _RefusedError(f"{name} is compressed, encrypted, or has extra fields")
        if not _ALLOWED_MEMBER.fullmatch(name) or (name == _SAMPLE_INPUTS and member.file_size):
            raise _RefusedError(f"{name} may hold pickled code")
        written = zipfile.ZipInfo(f"model/{name}")
        written.file_size = member.file_size
        with source.open(member) as data, target.open(written, "w") as copy:
            if not name.endswith(".json"):
                shutil.copyfileobj(data, copy, 2**20)
                continue
            text = data.read().decode()
            if name == _PROGRAM:
                for problem in _find_code(json.loads(text)):
                    raise _RefusedError(f"{name} holds {problem}")
            else:
                _check_tensors(json.loads(text)["config"], f"{name.rpartition('/')[0]}/", sizes)
            copy.write(text.encode())


def _has_foreign_field(extra: bytes) -> bool:
    """Whether the extra fields of a member are others than its sizes and its place in ZIP64."""
    return bool(extra) and (extra[:2] != b"\1\0" or len(extra) != 4 + int.from_bytes(extra[2:4], "little"))


def _check_tensors(config: dict[str, Any], folder: str, sizes: dict[str, int]) -> None:
    """Raises `_RefusedError` for tensors that are pickled, or that are much larger than their members."""
    for name, payload in config.items():
        if payload["use_pickle"] is not False or not re.fullmatch(r"(weight|tensor)_\d+", payload["path_name"]):
            raise _RefusedError(f"{name} is pickled")
        values = math.prod(size["as_int"] for size in payload["tensor_meta"]["sizes"])
        if values > max(sizes[folder + payload["path_name"]], _MAX_REPEATED):
            raise _RefusedError(f"{name} has {values} values, but fewer bytes")


def _find_code(value: Any, key: str = "") -> Iterator[str]:
    """Yields what torch would execute of a program in JSON besides operators on tensors and sizes."""
    if isinstance(value, dict):
        if key == "range_constraints":
            yield from (f"the size {name[:80]!r}" for name in value if not is_size(name))
        else:
            yield from (f"the name {name[:80]!r}" for name in value if not _QUOTABLE.fullmatch(name))
        for name, inner in value.items():
            yield from _find_code(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _find_code(inner, key)
    elif isinstance(value, str):
        if key == "expr_str" and not is_size(value):
            yield f"the size {value[:80]!r}"
        elif key == "guards_code" and not is_size(
            re.sub(r"L\['\w+'\](\[('\w+'|\d+)\])*\.size\(\)\[\d+\]", "s0", value)
        ):
            yield f"the check {value[:80]!r}"
        elif key in ("target", "as_operator") and not _ALLOWED_OPERATOR.fullmatch(value):
            yield f"the operator {value[:80]!r}"
        elif key in ("in_spec", "out_spec") and not is_nesting(value):
            yield f"the structure {value[:80]!r}"
        elif not _OTHER_TEXTS.fullmatch(key) and not (_NAME if key in _NAMES else _QUOTABLE).fullmatch(value):
            yield f"the name {value[:80]!r}"


def is_nesting(text: str) -> bool:
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
                isinstance(names, list)
                and all(isinstance(name, str | int | float | None) and _QUOTABLE.fullmatch(str(name)) for name in names)
            )
            if not is_plain or (kind is None and children) or (kind is not None and kind not in _ALLOWED_CONTAINERS):
                return False
            todo += children
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
    return True


def is_size(text: str) -> bool:
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
                f"{folder} needs its own module {name}, but another module of this name is imported ({source}). Load"
                " the model in a separate process."
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
                    f"Row {i}, counted from 0, lacks {lacking[0]!r}, which other rows have; pass None for a missing"
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
                f"{single[0]!r} is one value, {data[single[0]]!r}, and {sequence!r} a sequence; pass a sequence with"
                " one value per row for all of them, or one value for each; pass a row with an array as a list of one"
                " dictionary."
            )
        return {name: [data[name]] for name in present} if single else data
    return data


def _input_values(data: Any, spec: dict[str, Any], only: bool) -> Any:
    """Extracts the values of one input from the data of a caller."""
    name = spec["name"]
    if isinstance(data, dict) or (hasattr(data, "columns") and not only):
        if name not in data:
            raise ValueError(f"The input {name!r} is missing; the inputs are {_join_names(data)}.")
        return data[name] if isinstance(data, dict) else np.stack(data[name].tolist())
    return data.to_numpy() if hasattr(data, "to_numpy") else data


def _input_tensor(values: Any, spec: dict[str, Any]) -> Tensor:
    try:
        raw = np.asarray(values)
        array: npt.NDArray = np.array(raw, dtype=np.dtype(spec["dtype"]), order="C", copy=True)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(
            f"The values of the input {spec['name']!r} are not {np.dtype(spec['dtype'])}: {error}."
        ) from error
    if raw.dtype.kind not in "biufO":
        raise ValueError(f"The input {spec['name']!r} has the type {spec['dtype']}, but its values are {raw.dtype}.")
    if not np.can_cast(raw.dtype, array.dtype, "same_kind") and not np.array_equal(array, raw):
        raise ValueError(f"The input {spec['name']!r} has the type {array.dtype}, but its values are {raw.dtype}.")
    if array.ndim != len(spec["shape"]) + 1 or any(
        length not in (-1, actual) for length, actual in zip(spec["shape"], array.shape[1:], strict=True)
    ):
        raise ValueError(
            f"The input {spec['name']!r} has the shape (rows, {str(spec['shape'])[1:-1]}), but its array {array.shape}."
        )
    return torch.from_numpy(array)
