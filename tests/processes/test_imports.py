"""Starting a run imports no module that it does not need; each would cost every start, or every worker, one to five
seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

_PROCESS_S = 240
_DRIVER = """
import json, sys
from ray_app import load_config
from ray_app.preflight.prepare import prepare
import ray_app.driver.run
config = load_config("conf/digits.yaml", data__path=sys.argv[1], data__eval_path=None)
prepare(config)  # makes model, optimizer and schedule, and takes a step
print(json.dumps(list(sys.modules)))
"""
_JOINING_WORKER = """
import json, sys
import ray_app.cluster.controller.pending_workers
print(json.dumps(list(sys.modules)))
"""
_OPTIMIZER = """
import json, sys, torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from ray_app.torch_private import remove_compiler_hooks
from ray_app.task.environment import use_deterministic_algorithms

def trained(kind, hooks="none", steps=3):
    torch.manual_seed(0)
    model, hooked = torch.nn.Linear(5, 3), []
    optimizer = kind(model.parameters(), lr=0.1)
    if hooks == "own":
        optimizer.register_step_post_hook(lambda *_: hooked.append(torch.is_grad_enabled()))
    if hooks == "of all":
        of_all = register_optimizer_step_pre_hook(lambda *_: hooked.append(torch.is_grad_enabled()))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
    if hooks == "of all":
        of_all.remove()
    optimizer.load_state_dict(optimizer.state_dict())
    return [p.tolist() for p in model.parameters()], hooked

use_deterministic_algorithms(True)
kinds = torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad
results = {}
changed = [type(kind.__name__, (kind,), {}) for kind in kinds]
for kind in changed:
    remove_compiler_hooks(kind)
ways = "none", "own", "of all"
results["changed"] = [trained(kind, hooks) for kind in changed for hooks in ways]
results["compiler"] = "torch._dynamo" in sys.modules
results["as they are"] = [trained(kind, hooks) for kind in kinds for hooks in ways]
with torch.autograd.profiler.profile() as profile:
    trained(changed[0])
results["marks"] = sum(event.name == "Optimizer.step#Adam.step" for event in profile.function_events)
calls = []
optimizer = changed[1](torch.nn.Linear(5, 3).parameters(), lr=0.1, fused=True)
for p in optimizer.param_groups[0]["params"]:
    p.grad = torch.ones_like(p)
sys.setprofile(lambda frame, event, argument: calls.append(event) if event in ("call", "c_call") else None)
optimizer.step()
sys.setprofile(None)
results["calls"] = len(calls)
results["deterministic"] = torch.are_deterministic_algorithms_enabled()
import torch._inductor.config as compiling
results["compiler is told"] = compiling.deterministic
use_deterministic_algorithms(False)
results["and told again"] = [torch.are_deterministic_algorithms_enabled(), compiling.deterministic]
print(json.dumps(results))
"""


def last_output(code: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_PROCESS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.rest
def test_a_driver_imports_neither_metrics_nor_the_compiler(digits: Path) -> None:
    imported = set(last_output(_DRIVER, str(digits / "train")))
    assert {"torch", "ray", "ray_app.task.image"} <= imported
    assert (
        not {"torchmetrics", "torchvision", "scipy", "matplotlib", "mlflow", "torch._dynamo", "torch._inductor"}
        & imported
    )
    assert not {"ray.train", "ray.data"} & imported, "these must be imported later, while the cluster starts"


@pytest.mark.rest
def test_a_joining_worker_imports_no_torch_before_its_preparation() -> None:
    """The environment that Ray Train passes to its workers must be set first."""
    imported = set(last_output(_JOINING_WORKER))
    assert "ray.train.v2._internal.execution.worker_group.worker" in imported
    assert "torch" not in imported


@pytest.mark.rest
def test_an_optimizer_without_the_compiler_is_bit_identical() -> None:
    results = last_output(_OPTIMIZER)
    assert results["changed"] == results["as they are"]
    assert results["calls"] == 55, (
        "a step makes another number of calls; see test_step_cost.py, which imports the compiler"
    )
    assert results["marks"] == 3, "an active profiler must see the steps"
    assert not results["compiler"]
    assert (results["deterministic"], results["compiler is told"], results["and told again"]) == (
        True,
        True,
        [False, False],
    )


@pytest.mark.parametrize("text", ["ray_app.run_training", "if __name__ == '__main__':\n    ray_app.run_training"])
def test_a_program_with_the_name_of_a_library_is_named(tmp_path: Path, text: str) -> None:
    program = tmp_path / "torch.py"
    program.write_text(f"import ray_app\n{text}\n")
    command = [sys.executable, str(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_PROCESS_S, check=False)
    assert ended.returncode == 1
    assert f"ImportError: {program} hides a library" in ended.stderr
