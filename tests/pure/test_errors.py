"""The exceptions: each one survives pickling."""

import pickle

import pytest

from ray_app import errors

ALL = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.RayAppError)]
ARGUMENTS = {
    errors.BadRowError: ("a/part-0.parquet", 3, 17, "not an image"),
    errors.DeviceFaultError: ("CUDA error: uncorrectable ECC error", "cuda NVIDIA H200, 5fd4", "node-7"),
    errors.TaskError: (
        "KeyError: 'labels' (my_task.py, line 3, in loss)",
        "KeyError: 'labels'",
        "logical worker 1",
        (5, 6),
    ),
}


@pytest.mark.parametrize("kind", ALL)
def test_pickle_keeps_the_message_and_the_fields(kind: type[errors.RayAppError]) -> None:
    error = kind(*ARGUMENTS.get(kind, ("what was given, what is allowed, what to do",)))
    unpickled = pickle.loads(pickle.dumps(error))
    assert type(unpickled) is kind
    assert str(unpickled) == str(error) != ""
    assert vars(unpickled) == vars(error)
    assert unpickled.retryable == error.retryable


def test_the_message_of_a_bad_row_has_its_file_row_group_and_row() -> None:
    error = errors.BadRowError("a/part-0.parquet", 3, 17, "not an image")
    assert str(error) == "a/part-0.parquet, row group 3, row 17: not an image"
    assert (error.path, error.row_group, error.row, error.reason) == error.args


def test_only_errors_that_a_restart_can_fix_are_retryable() -> None:
    names = (
        "StorageError",
        "TaskError",
        "PeerLostError",
        "ForgedMessageError",
        "DeviceFaultError",
        "WrongResultError",
        "PreemptedError",
        "BudgetSpentError",
        "SilentActorError",
    )
    retryable = [getattr(errors, name) for name in names]
    assert [kind for kind in ALL if kind.retryable] == retryable


def test_the_tree_in_the_docstring_names_every_exception() -> None:
    assert errors.__doc__ is not None
    assert [kind.__name__ for kind in ALL if kind.__name__ not in errors.__doc__] == []
