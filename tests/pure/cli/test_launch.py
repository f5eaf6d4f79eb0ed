"""The machines that `ray-app launch` reads from the variables of schedulers."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from ray_app.cli import train
from ray_app.cli.launch import Machines, expand_hosts, main, read_machines
from ray_app.errors import ConfigError
from tests.support.paths import ROOT


def tf_config(kind: str = "worker", index: Any = 1, **cluster: list[str]) -> dict[str, str]:
    spec = {"cluster": cluster or {"worker": ["a:1234", "b:1234"]}, "task": {"type": kind, "index": index}}
    return {"TF_CONFIG": json.dumps(spec)}


TORCH = {"MASTER_ADDR": "a", "MASTER_PORT": "29400", "RANK": "1", "WORLD_SIZE": "4"}
SLURM = {"SLURM_JOB_ID": "6001", "SLURM_JOB_NODELIST": "n[1-3]"}
PET = {"PET_MASTER_ADDR": "a", "PET_NODE_RANK": "1", "PET_NNODES": "2"}
OMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
HOST = socket.gethostname()
STEP = SLURM | {"SLURM_STEP_NODELIST": "n[2-3]", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}


@pytest.mark.parametrize(
    ("variables", "machines"),
    [
        (tf_config(), Machines("a", 1234, 1, 2, ("worker 0 (a:1234)", "worker 1 (b:1234)"), 2)),
        (
            tf_config(worker=["b:1", "c:1"], chief=["a:5"], ps=["d:1"]),
            Machines("a", 5, 2, 4, ("chief 0 (a:5)", "worker 0 (b:1)", "worker 1 (c:1)", "ps 0 (d:1)"), 4),
        ),
        (
            tf_config(worker=["a:1", "a:2"]),
            Machines("a", 1, 1, 2, ("worker 0 (a:1)", "worker 1 (a:2)"), nodes=0, starts_node=False),
        ),
        (
            tf_config(index=2, worker=["a:1", "b:1", "b:2"]),
            Machines("a", 1, 2, 3, ("worker 0 (a:1)", "worker 1 (b:1)", "worker 2 (b:2)"), nodes=2, starts_node=False),
        ),
        (TORCH, Machines("a", 29400, 1, 4)),
        (TORCH | {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0"}, Machines("a", 29401, 1, 4)),
        (STEP, Machines("n2", 20_002, 1, 2)),
        (STEP | TORCH, Machines("a", 29400, 1, 4)),
        (SLURM | {"SLURM_JOB_NODELIST": "n7"}, Machines("n7", 20_002, 0, 1)),
        (PET, Machines("a", 29_400, 1, 2)),
        (PET | {"PET_MASTER_PORT": "7", "PET_NPROC_PER_NODE": "8"}, Machines("a", 7, 1, 2)),
        (OMPI | {"MASTER_ADDR": "a"}, Machines("a", 29_500, 1, 2)),
        (OMPI | {"LSB_MCPU_HOSTS": "n1 4 n2 4", "LSB_JOBID": "6001"}, Machines("n1", 20_002, 1, 2)),
        (OMPI | SLURM, Machines("n1", 20_002, 1, 2)),
        (STEP | {"PMI_RANK": "0", "PMI_SIZE": "9"}, Machines("n2", 20_002, 1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "5"}, Machines("a", 5, 1, 2)),
        ({"LSB_HOSTS": f"n1 n1 {HOST}.x {HOST}.x", "LSB_JOBID": "6001"}, Machines("n1", 20_002, 1, 2)),
        ({"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}, Machines("algo-1", 29_500, 1, 2)),
    ],
)
def test_the_machines_are_those_of_the_scheduler(variables: dict[str, str], machines: Machines) -> None:
    assert read_machines(variables) == machines


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "No environment variable lists the machines"),
        ({"TF_CONFIG": "worker"}, "TF_CONFIG is 'worker', which names no machines: JSONDecodeError"),
        (tf_config(index=2), "which names no machines: ValueError"),
        (tf_config(worker=["a", "b"]), "which names no machines: ValueError"),
        (tf_config(gpu=["a:1"]), "which names no machines: ValueError"),
        (TORCH | {"LOCAL_WORLD_SIZE": "2"}, "--nproc-per-node=1"),
        (TORCH | {"RANK": "first"}, "RANK is 'first'; it must be a number"),
        (PET | {"PET_NNODES": "1:2"}, "PET_NNODES is '1:2'; it must be a number"),
        (OMPI, "Set MASTER_ADDR to its name: mpirun -x MASTER_ADDR=HOST"),
        (OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "This machine has several processes"),
        ({"LSB_HOSTS": "n1 n2"}, f"The job has the machines n1, n2, but this machine is {HOST}"),
        ({"PBS_NODEFILE": "/nowhere"}, "PBS_NODEFILE is '/nowhere', which cannot be read"),
        (SLURM, "The job has 3 nodes, but its batch script"),
        (STEP | {"SLURM_STEP_NUM_TASKS": "4"}, "srun starts 4 tasks on 2 nodes"),
        (SLURM | {"SLURM_JOB_NODELIST": ""}, "which names no nodes"),
        (SLURM | {"SLURM_JOB_NODELIST": "n[a-b]"}, "SLURM_JOB_NODELIST has [a-b]"),
    ],
)
def test_variables_without_machines_are_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_machines(variables)


def test_the_machines_of_pbs_are_those_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text(f"n1\nn1\n{HOST}\n")
    variables = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_JOBID": "6001[2].server"}
    assert read_machines(variables) == Machines("n1", 20_002, 1, 2)


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("gpu[01-03,07],login", ["gpu01", "gpu02", "gpu03", "gpu07", "login"]),
        ("r[1-2]n[8-10]", ["r1n8", "r1n9", "r1n10", "r2n8", "r2n9", "r2n10"]),
        ("a.example.org", ["a.example.org"]),
    ],
)
def test_node_lists_of_slurm_are_expanded(nodes: str, hosts: list[str]) -> None:
    assert expand_hosts(nodes) == hosts


def test_the_run_gets_no_variables_that_count_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (TORCH | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "SLURM_JOB_ID": "7"}).items():
        monkeypatch.setenv(name, value)
    environment = dict[str, str]()
    monkeypatch.setattr(train, "main", lambda *_: environment.update(os.environ) or 0)
    assert main(["--config", str(ROOT / "conf/digits.yaml")]) == 0
    assert environment["SLURM_JOB_ID"] == "7"
    assert not environment.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
