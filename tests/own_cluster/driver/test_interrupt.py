"""A cell is interrupted, or a notebook closed, while a run trains: in a real kernel, on its own cluster and on a shared
one.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from ray_app import run_training
from ray_app.checkpoint.store import CheckpointStore
from ray_app.config.config import Config
from ray_app.drill.faults import Evidence
from ray_app.runlog.paths import RunPaths
from tests.support.kernel import Kernel
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

_CELL_S = 400
_BEGIN = """
import signal, sys
sys.path.insert(0, {root!r})
from ray_app import run_training, start_training
from ray_app.config.config import from_yaml
from ray_app.drill.faults import DelayPlan, WaitForEvidence
from ray_app.drill.faults import Evidence, HookChain
from ray_app.driver.run import Faults
from ray_app.train.job import Hooks

before = signal.getsignal(signal.SIGINT)
config = from_yaml(open({config!r}).read())
evidence = Evidence({evidence!r})
wait = WaitForEvidence(evidence, "reached", "open", 10, 0)
held = HookChain((wait, DelayPlan(evidence, 11, 29, range(99, 100), 20.0)))
"""
_TRAIN = "result = run_training(config, faults=Faults(train=Hooks(after_step=held)))"


def paths_of(config: Config) -> RunPaths:
    return RunPaths(Path(config.run.storage_path) / str(config.run.name))


def summary_of(config: Config) -> dict[str, Any]:
    return json.loads(paths_of(config).summary.read_text())


def begin(kernel: Kernel, config: Config, folder: Path) -> Evidence:
    """Runs the first cell; the run that it prepares waits after step 10 until the test lets it continue."""
    (folder / "config.yaml").write_text(config.to_yaml())
    kernel.run(
        _BEGIN.format(root=str(ROOT), config=str(folder / "config.yaml"), evidence=str(folder / "evidence")), _CELL_S
    )
    return Evidence(str(folder / "evidence"))


def interrupt_training(kernel: Kernel, evidence: Evidence) -> None:
    """Interrupts the training cell at step 10; the cell ends without an error."""
    kernel.start(_TRAIN)
    kernel.wait_until(lambda: evidence.has("reached"), _CELL_S)
    kernel.interrupt()
    kernel.wait_until(lambda: "Stopping after this step" in kernel.output, _CELL_S)
    evidence.put("open")
    kernel.end(_CELL_S)


def assert_stopped(config: Config) -> None:
    """Asserts that the run stopped midway, with a checkpoint at its last step."""
    summary = summary_of(config)
    assert summary["status"] == "interrupted"
    assert 10 < summary["steps"] < 30
    newest = CheckpointStore(paths_of(config)).commits()[-1]
    assert (newest.step, newest.why) == (summary["steps"], "extra")


@pytest.mark.timeout(900)
def test_an_interrupted_cell_frees_the_resources_of_a_shared_cluster(
    ray_cluster: None, make_short_config: Callable[..., Config], reference_run: dict[str, Any], tmp_path: Path
) -> None:
    cpus = ray.cluster_resources()["CPU"]
    address = ray.get_runtime_context().gcs_address
    config = make_short_config(run__ray_address=address)
    with Kernel(tmp_path / "kernel", ROOT, RAY_AUTH_MODE="token") as kernel:
        evidence = begin(kernel, config, tmp_path)
        interrupt_training(kernel, evidence)
        assert_stopped(config)
        assert "True" in kernel.run("signal.getsignal(signal.SIGINT) == before", _CELL_S)
        wait_until(lambda: ray.available_resources().get("CPU") == cpus, "the workers' CPUs were not given back")
        assert all(group["state"] == "REMOVED" for group in ray.util.placement_group_table().values())
        assert not [
            actor for actor in ray.util.list_named_actors(all_namespaces=True) if config.run.name in actor["name"]
        ]

        kernel.run("result = run_training(config)", _CELL_S)
        assert "finished" in kernel.run("result.status", _CELL_S)
    assert summary_of(config)["params_digest"] == reference_run["params_digest"]
    assert summary_of(config)["redone_steps"] == 0


@pytest.mark.timeout(900)
def test_a_background_run_leaves_no_process_behind(
    ray_cluster: None, make_short_config: Callable[..., Config], reference_run: dict[str, Any], tmp_path: Path
) -> None:
    config = make_short_config()
    with Kernel(tmp_path / "kernel", ROOT) as kernel:
        begin(kernel, config, tmp_path)
        kernel.run("training = start_training(config, pause_s=0.5)\ntraining.watch(step=3)", _CELL_S)
        assert "interrupted" in kernel.run("training.stop().status", _CELL_S)
        stopped = summary_of(config)["steps"]
        assert 3 <= stopped < 30

        kernel.run(f"training = start_training(config, pause_s=0.5)\ntraining.watch(step={stopped + 1})", _CELL_S)
        assert kernel.shutdown() == []
    # Closing the notebook interrupted the run, so it continues here.
    result = run_training(config)
    assert result.summary["params_digest"] == reference_run["params_digest"]
    assert result.summary["restarts"]["driver"] == 2


@pytest.mark.timeout(900)
def test_an_interrupted_cell_ends_its_own_cluster(make_short_config: Callable[..., Config], tmp_path: Path) -> None:
    config = make_short_config()
    with Kernel(tmp_path / "kernel", ROOT) as kernel:
        interrupt_training(kernel, begin(kernel, config, tmp_path))
        assert_stopped(config)
        assert "True" in kernel.run("signal.getsignal(signal.SIGINT) == before", _CELL_S)
        assert "False" in kernel.run("import ray; ray.is_initialized()", _CELL_S)
        assert kernel.shutdown() == []
