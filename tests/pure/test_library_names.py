"""Every name of a library that the code uses exists in the installed version, also in code that runs only on a GPU or
a cluster.

A missing attribute raises only when its line runs, and many lines run only on a GPU: a call of a function that exists
in no version of PyTorch once ended every run on a GPU at its first worker.
"""

import pytest

from ray_app.cluster import ray_private
from ray_app.cluster.ray_private import PrivateName
from tests.support.library_names import LIBRARIES, missing, names


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_name_of_a_library_that_the_code_uses_exists(library: str) -> None:
    used = {name: location for name, location in names().items() if name.split(".")[0] == library}
    assert (
        len(used) >= {"torch": 200, "ray": 50, "mlflow": 15, "pyarrow": 30, "torchvision": 5, "keras": 15}[library]
    ), "fewer names were found than the code uses"
    assert missing(used) == {}


def test_every_private_name_of_ray_that_is_looked_up_exists(caplog: pytest.LogCaptureFixture) -> None:
    private = [value for value in vars(ray_private).values() if isinstance(value, PrivateName)]
    assert len(private) >= 10
    # The node of the driver is None until there is a cluster.
    missing_names = [name.path for name in private if name.find() is None and name is not ray_private.DRIVER_NODE]
    assert missing_names == []
    assert not caplog.records


def test_a_missing_private_name_of_ray_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    moved = PrivateName("ray._private.moved:somewhere_else", "nothing is known")
    assert (moved.find(), moved.find()) == (None, None)
    [warning] = caplog.records
    assert "has no ray._private.moved:somewhere_else" in warning.getMessage()
    assert warning.getMessage().endswith(": nothing is known.")
