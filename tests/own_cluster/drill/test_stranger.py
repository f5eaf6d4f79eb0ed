"""A stranger attacks the ports of a run on each strategy; the run ends with the parameters of an undisturbed one."""

import json
from pathlib import Path

import pytest

from tests.support.drill_scenarios import drill_arguments, run_drill

STRATEGIES = {
    "ddp": {},
    "fsdp": {"train.strategy": "fsdp"},
    "central_storage": {"train.strategy": "central_storage"},
    "parameter_server": {"train.strategy": "parameter_server", "train.servers": 1, "scaling.max_workers": 3},
    "local_sgd": {"train.strategy": "local_sgd", "train.local_steps": 5, "train.steps_per_epoch": 20},
}


@pytest.mark.parametrize("fields", STRATEGIES.values(), ids=STRATEGIES)
def test_a_stranger_changes_nothing_in_a_run(digits: Path, tmp_path: Path, fields: dict[str, object]) -> None:
    more = [f"--{name}={value}" for name, value in fields.items()]
    out = tmp_path / "out"
    done = run_drill(*drill_arguments(digits, out, scenarios="stranger", max_steps=40), *more)
    assert done.returncode == 0, done.stdout + done.stderr
    [scenario] = json.loads((out / "certificate.json").read_text())["scenarios"]
    assert scenario["outcome"] == "equal"
    attack = scenario["evidence"]["stranger-0"]
    assert attack["connections"] > 100
    assert not attack["executed"]
    # The cluster is this machine alone: nothing of the workers, the rendezvous and the servers is open to others.
    assert not {"0.0.0.0", "::"}.intersection(attack["hosts"])
