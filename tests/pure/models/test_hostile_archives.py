"""Archives of models that two readers read differently, and programs that are code, run nothing: see SECURITY.md."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from ray_app.checkpoint.format import params_digest
from ray_app.errors import ConfigError
from ray_app.models import loader
from ray_app.models.package import make_package
from ray_app.predict.actor import Model
from ray_app.task.tabular import TabularClassification
from tests.support.mutations import Malicious
from tests.support.tabular_task import FIELDS, tabular_task

Members = dict[str, bytes]
"""The members of an archive by name, without its folder."""
CONFIG = "data/weights/model_weights_config.json"
PROGRAM = "models/model.json"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": torch.clamp(self.linear(x), min=0.0) + x.shape[0]}


@pytest.fixture(scope="module")
def members() -> Members:
    """Returns the members of an archive of `torch.export.save`, which is loaded after it was checked."""
    exported = torch.export.export(Net(), (torch.ones(2, 3),), dynamic_shapes={"x": {0: torch.export.Dim.DYNAMIC}})
    exported.example_inputs = None
    file = io.BytesIO()
    torch.export.save(exported, file)
    assert "scores" in loader.load_exported(file).module()(torch.ones(4, 3))
    with zipfile.ZipFile(file) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


@pytest.fixture
def executed_marker(tmp_path: Path) -> Path:
    return tmp_path / "it ran"


def pickled(members: Members, marker: Path) -> Members:
    """Returns members of which the first weight is a pickle that creates the marker."""
    config = json.loads(members[CONFIG])
    next(iter(config["config"].values()))["use_pickle"] = True
    return members | {CONFIG: json.dumps(config).encode(), "data/weights/weight_0": pickle.dumps(Malicious(marker))}


def pack(members: Members, file: io.BytesIO | None = None, **options: int) -> bytes:
    """Returns an archive with members, after what is in a file."""
    file = file or io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as archive:
        for name, data in members.items():
            archive.writestr(f"model/{name}", data)
    return file.getvalue()


def directory(archive: bytes) -> tuple[int, bytes]:
    """Returns the offset of the central directory of an archive, and the directory."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return opened.start_dir, archive[opened.start_dir : -22]


def with_locator(members: Members, marker: Path) -> bytes:
    """Puts a harmless directory where `zipfile` looks, and points to another one, as torch reads it."""
    harmless = pack(members)
    low, harmless_directory = directory(harmless)
    file = io.BytesIO()
    file.write(harmless[:low])
    data = pack(pickled(members, marker), file)
    start, evil_directory = directory(data)
    data, count = data[:-22], len(members)
    end = len(data)

    def end_record(size: int, offset: int) -> bytes:
        return struct.pack("<4sQHHLLQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, offset)

    data += end_record(len(evil_directory), start)
    data += harmless_directory + end_record(len(harmless_directory), len(data))
    data += struct.pack("<4sLQL", b"PK\6\7", 0, end, 1)
    return data + struct.pack("<4sHHHHLLH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)


def with_unicode_path(members: Members, marker: Path) -> bytes:
    """Gives the description of the weights another name in the field 0x7075, which newer versions of Python take."""
    members = pickled(members, marker)
    name, other = f"model/{CONFIG}".encode(), b"model/.data/notes"
    field = struct.pack("<HHBL", 0x7075, 5 + len(other), 1, zipfile.crc32(name)) + other  # type: ignore[attr-defined]
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for member, data in members.items():
            info = zipfile.ZipInfo(f"model/{member}")
            info.extra = field if member == CONFIG else b""
            archive.writestr(info, data)
    return file.getvalue()


def with_same_name(rename: Callable[[str], str]) -> Callable[[Members, Path], bytes]:
    """Returns a function that adds the pickled members before the harmless ones, under names that torch compares."""

    def write(members: Members, marker: Path) -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for number, some in enumerate((pickled(members, marker), members)):
                for name, data in some.items():
                    archive.writestr(f"model/{rename(name) if number else name}", data)
        return file.getvalue()

    return write


def with_second_end(members: Members, marker: Path) -> bytes:
    """Appends an archive as the comment of another one."""
    inner, outer = pack(members), pack(pickled(members, marker))
    return outer[:-2] + struct.pack("<H", len(inner)) + inner


def with_second_program(members: Members, marker: Path) -> bytes:
    """Adds a program that looks like a description of weights."""
    program = json.loads(members[PROGRAM]) | {"config": {}}
    code = f"__import__('pathlib').Path('{marker}').touch()"
    added = {
        name.replace("model", "x_config", 1) if name != PROGRAM else "models/x_config.json": data
        for name, data in members.items()
        if "model" in name
    }
    first = json.dumps(program).split('"expr_str": "')[1].split('"')[0]
    added["models/x_config.json"] = json.dumps(program).replace(first, code).encode()
    return pack(members | added)


def with_name(old: str, new: str) -> Callable[[Members, Path], bytes]:
    """Returns a function that replaces a name in the program."""

    def write(members: Members, marker: Path) -> bytes:
        name = json.dumps(new.format(marker=marker))[1:-1]
        assert f'"{old}"'.encode() in members[PROGRAM]
        program = members[PROGRAM].replace(f'"{old}"'.encode(), f'"{name}"'.encode())
        return pack(members | {PROGRAM: program})

    return write


HOSTILE: dict[str, Callable[[Members, Path], bytes]] = {
    "a locator of ZIP64": with_locator,
    "a second program": with_second_program,
    "a name of an input": with_name("x", "x=__import__('pathlib').Path('{marker}').touch()"),
    "a Unicode path": with_unicode_path,
    "a name twice": with_same_name(str),
    "a name in capitals": with_same_name(str.upper),
    "a second end record": with_second_end,
    "data before it": lambda members, marker: b"MZ" * 8 + pack(pickled(members, marker)),
    "another archive before it": lambda members, marker: pack(pickled(members, marker)) + pack(members),
    "two folders": lambda members, marker: pack(pickled(members, marker)).replace(b"model/data/we", b"other/data/we"),
    "pickled weights": lambda members, marker: pack(pickled(members, marker)),
    "a name of a parameter": with_name("linear.weight", 'linear.weight") or open("{marker}", "w") #'),
    "a name of an argument": with_name("min", "min=open('{marker}', 'w')"),
    "a compressed member": lambda members, marker: pack(members, compression=zipfile.ZIP_DEFLATED),
    "weights without bytes": lambda members, marker: pack(
        members
        | {"data/weights/weight_0": b"", CONFIG: members[CONFIG].replace(b'"as_int": 3', b'"as_int": 300000000000', 1)}
    ),
}
RUNS_IN_TORCH = ("a locator of ZIP64", "a second program", "a name of an input", "pickled weights")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_archive_runs_nothing(members: Members, tmp_path: Path, executed_marker: Path, kind: str) -> None:
    """What is loaded is what was checked: the program without a pickle, or an error."""
    data = HOSTILE[kind](members, executed_marker)
    (tmp_path / loader.EXPORTED).write_bytes(data)
    for load in (loader.load_exported, lambda file: loader.load_exported(io.BytesIO(file.read_bytes()))):
        try:
            load(tmp_path / loader.EXPORTED)
        except ValueError as error:
            assert "is refused: " in str(error)  # noqa: PT017 - an archive may also be loaded as it was checked
    with pytest.raises(ConfigError, match="is refused, and none of its code was executed"):
        Model(None, data, ["x"], "0" * 64).load(torch.device("cpu"))
    assert not executed_marker.exists()
    if kind in RUNS_IN_TORCH:
        with suppress(Exception):
            torch.export.load(tmp_path / loader.EXPORTED).module()
        assert executed_marker.exists(), "torch does not run this any more, so it is no attack"


@pytest.mark.parametrize("limit", [loader._MAX_IN_MEMORY, 100])
def test_members_are_written_anew(members: Members, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """The archive that torch gets has the content of the given one, also where it is a file on a disk."""
    monkeypatch.setattr(loader, "_MAX_IN_MEMORY", limit)
    with loader.rewrite_checked(io.BytesIO(pack(members))) as checked:
        with zipfile.ZipFile(checked) as archive:
            assert {name.partition("/")[2]: archive.read(name) for name in archive.namelist()} == members
            assert all(not member.extra for member in archive.infolist())
        checked.seek(0)
        assert loader.load_checked(checked).state_dict.keys() == {"linear.weight", "linear.bias"}


def test_the_digest_is_compared_before_the_program_is_loaded(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with other parameters is refused before torch or the code of the task gets it."""
    state = loader.load_exported(io.BytesIO(pack(members))).state_dict
    model = Model(None, pack(members), ["x"], params_digest(state))
    assert model.load(torch.device("cpu"))({"x": torch.ones(1, 3)})["scores"].shape == (1, 2)
    loaded: list[object] = []
    monkeypatch.setattr(loader, "load_checked", loaded.append)
    wrong = Model(None, pack(members), ["x"], "0" * 64)
    with pytest.raises(ConfigError, match="none of its code was executed: its parameters have the digest"):
        wrong.load(torch.device("cpu"))
    assert loaded == []


def test_an_archive_with_pickles_in_it_is_refused(tmp_path: Path) -> None:
    task, model = tabular_task(TabularClassification)
    good = make_package(task, model, FIELDS, tmp_path / "package").folder / "data" / "model" / loader.EXPORTED
    loader.load_exported(good)
    exported = torch.export.load(good)
    exported.example_inputs = ((torch.zeros(2, 3),), {})
    torch.export.save(exported, tmp_path / "inputs.pt2")
    with pytest.raises(ValueError, match=r"sample_inputs/model.pt may hold pickled code"):
        loader.load_exported(tmp_path / "inputs.pt2")
    with zipfile.ZipFile(good) as whole, zipfile.ZipFile(tmp_path / "weights.pt2", "w") as other:
        for member in whole.namelist():
            other.writestr(member, whole.read(member).replace(b'"use_pickle": false', b'"use_pickle": true', 1))
    with pytest.raises(ValueError, match="is pickled"):
        loader.load_exported(tmp_path / "weights.pt2")
