"""Workers import from the folders on the driver's `PYTHONPATH`, on its own cluster and on one that it joins."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from tests.support.paths import ROOT

_PROCESS_S = 240
_DRIVER = """
import sys
import ray
from ray_app import load_config
from ray_app.cluster.resources import cluster

config = load_config("conf/digits.yaml", data__eval_path=None, scaling__max_workers=1, scaling__logical_workers=4)
with cluster(config) as own:
    print(own, *ray.get(ray.remote(lambda: [__import__("mine").__file__, __import__("ray_app").__file__]).remote()))
"""


@pytest.mark.parametrize("joins", [False, True], ids=["own", "joined"])
def test_workers_import_from_the_search_path_of_the_driver(ray_cluster: None, tmp_path: Path, joins: bool) -> None:
    libraries = tmp_path / "of-another" / "site-packages"
    libraries.mkdir(parents=True)
    (libraries / "mine.py").touch()
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(libraries)])}
    environment |= {"RAY_ADDRESS": ray.get_runtime_context().gcs_address} if joins else {}
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_PROCESS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{not joins} {libraries / 'mine.py'} {ROOT / 'ray_app' / '__init__.py'}"
