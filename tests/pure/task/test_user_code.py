"""Errors that the code of a task raises: reported with the lines of the user, the location and the rows."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ray_app.data import disk_cache
from ray_app.errors import DataError, TaskError
from ray_app.task.user_code import MACHINERY, format_calls, user_code

SOURCE = """
import torch

def loss(labels):
    return embedded(labels)

def embedded(labels):
    table = torch.nn.Embedding(10, 3)
    return table(labels)

def chained():
    try:
        {}["labels"]
    except KeyError as error:
        raise ValueError("no labels") from error

def endless():
    return endless()
"""


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    """A module of the user, compiled from a file."""
    path, user_module = tmp_path / "my_task.py", ModuleType("my_task")
    path.write_text(SOURCE)
    exec(compile(SOURCE, str(path), "exec"), vars(user_module))
    return user_module


def test_the_lines_of_the_user_are_shown_and_library_calls_are_counted(module: ModuleType) -> None:
    with pytest.raises(TaskError) as caught, user_code(lambda: "logical worker 3", lambda: [5, 6]):
        module.loss(torch.tensor([11]))
    error = pickle.loads(pickle.dumps(caught.value))
    lines = str(error).splitlines()
    assert lines[0] == "IndexError: index out of range in self (my_task.py, line 9, in embedded)"
    assert lines[1] == "  logical worker 3"
    call_lines = [line.strip() for line in lines[2:]]
    user_calls = [line for line in call_lines if line.startswith("File") and "my_task.py" in line]
    assert [line.rpartition(", ")[2] for line in user_calls] == ["in loss", "in embedded"]
    assert "return embedded(labels)" in call_lines
    assert sum(line.startswith("File") for line in call_lines) == 4, (
        "one call of this test, two of the user and the last one in torch are shown"
    )
    assert "... 3 calls in torch" in call_lines
    assert lines[-1] == "IndexError: index out of range in self"
    assert error.positions == (5, 6)


def test_the_cause_of_a_chained_error_is_shown_first(module: ModuleType) -> None:
    with pytest.raises(ValueError, match="no labels") as caught:
        module.chained()
    text = format_calls(caught.value)
    assert text.index("KeyError: 'labels'") < text.index("which led to:") < text.index("ValueError: no labels")


def test_a_recursion_error_shows_a_limited_number_of_calls(module: ModuleType) -> None:
    with pytest.raises(RecursionError) as caught:
        module.endless()
    lines = format_calls(caught.value).splitlines()
    assert len(lines) < 70
    assert lines[0].strip().startswith("...")


def test_errors_of_the_application_pass_unchanged() -> None:
    with pytest.raises(DataError, match="as it is"), user_code(lambda: "somewhere"):
        raise DataError("as it is")
    with pytest.raises(KeyboardInterrupt), user_code(lambda: "somewhere"):
        raise KeyboardInterrupt


def test_without_a_line_of_the_user_all_calls_are_shown() -> None:
    with pytest.raises(IndexError) as caught:
        torch.nn.functional.embedding(torch.tensor([11]), torch.zeros(10, 3))
    error = caught.value.with_traceback(caught.tb.tb_next)
    assert "functional.py" in format_calls(error)
    assert "..." not in format_calls(error)


def test_the_files_of_the_application_that_are_named_by_pattern_exist() -> None:
    """A file that is moved would otherwise leave the digest of decoded rows, or be taken for the code of a user."""
    empty = [pattern for pattern in disk_cache._DECODING_CODE if not list(disk_cache._APPLICATION.glob(pattern))]
    assert empty == []
    assert [file for file in MACHINERY if not file.is_file()] == []
