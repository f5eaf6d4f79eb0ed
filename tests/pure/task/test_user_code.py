"""What the code of a task raises: told with the user's lines, the place and the rows."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ray_app.errors import DataError, TaskError
from ray_app.task.user_code import format_calls, user_code

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
    """A file of the user's."""
    path, made = tmp_path / "my_task.py", ModuleType("my_task")
    path.write_text(SOURCE)
    exec(compile(SOURCE, str(path), "exec"), vars(made))
    return made


def test_the_users_lines_are_shown_and_those_of_libraries_counted(module: ModuleType) -> None:
    with pytest.raises(TaskError) as caught, user_code(lambda: "logical worker 3", lambda: [5, 6]):
        module.loss(torch.tensor([11]))
    error = pickle.loads(pickle.dumps(caught.value))
    told = str(error).splitlines()
    assert told[0] == "IndexError: index out of range in self (my_task.py, line 9, in embedded)"
    assert told[1] == "  logical worker 3"
    shown = [line.strip() for line in told[2:]]
    user = [line for line in shown if line.startswith("File") and "my_task.py" in line]
    assert [line.rpartition(", ")[2] for line in user] == ["in loss", "in embedded"]
    assert "return embedded(labels)" in shown
    assert sum(line.startswith("File") for line in shown) == 4, (
        "of torch only the last call is shown; the first is of this test"
    )
    assert "... 3 calls in torch" in shown
    assert told[-1] == "IndexError: index out of range in self"
    assert error.positions == (5, 6)


def test_what_an_error_came_from_is_shown_first(module: ModuleType) -> None:
    with pytest.raises(ValueError, match="no labels") as caught:
        module.chained()
    told = format_calls(caught.value)
    assert told.index("KeyError: 'labels'") < told.index("which led to:") < told.index("ValueError: no labels")


def test_endless_calls_are_cut(module: ModuleType) -> None:
    with pytest.raises(RecursionError) as caught:
        module.endless()
    told = format_calls(caught.value).splitlines()
    assert len(told) < 70
    assert told[0].strip().startswith("...")


def test_the_applications_own_errors_pass() -> None:
    with pytest.raises(DataError, match="as it is"), user_code(lambda: "somewhere"):
        raise DataError("as it is")
    with pytest.raises(KeyboardInterrupt), user_code(lambda: "somewhere"):
        raise KeyboardInterrupt


def test_without_a_line_of_the_users_all_calls_are_shown() -> None:
    with pytest.raises(IndexError) as caught:
        torch.nn.functional.embedding(torch.tensor([11]), torch.zeros(10, 3))
    error = caught.value.with_traceback(caught.tb.tb_next)
    assert "functional.py" in format_calls(error)
    assert "..." not in format_calls(error)
