"""Strategies end to end on real Ray: the same command, the same task, another `train.strategy`."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ray_app import load_config, run_training
from ray_app.config.config import Config
from ray_app.driver.finalize import newest_commit
from ray_app.driver.run import Faults
from ray_app.driver.single import train_in_process
from ray_app.preflight.prepare import claim, prepare
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from ray_app.train.job import Hooks
from ray_app.train.membership import SingleProcessMembership
from tests.support.cluster import record_of
from tests.support.injector import Kill
from tests.support.paths import ROOT

pytestmark = pytest.mark.usefixtures("ray_cluster")


@dataclass
class NotePids:
    """A hook that notes the process ids of the steps, and sends Ctrl-C after one of them."""

    interrupt_after: int | None = None

    def __post_init__(self) -> None:
        self.pids: set[int] = set()

    def __call__(self, rank: int, step: int) -> None:
        self.pids.add(os.getpid())
        if step == self.interrupt_after:
            os.kill(os.getpid(), signal.SIGINT)


def test_single_trains_in_the_calling_process_bit_identically(
    make_short_config: Callable[..., Config], reference_run: dict[str, Any], tmp_path: Path
) -> None:
    config = make_short_config(
        train__strategy="single", data__cache="memory", scaling__min_workers=1, scaling__max_workers=1
    )
    first_hook, second_hook = NotePids(interrupt_after=11), NotePids()
    first = run_training(config, faults=Faults(train=Hooks(after_step=first_hook)))
    assert (first.status, first.summary["steps"]) == ("interrupted", 12), "the stop flag is reduced with the next step"
    handler = signal.getsignal(signal.SIGINT)
    second = run_training(config.replace(data__cache="none"), faults=Faults(train=Hooks(after_step=second_hook)))
    assert signal.getsignal(signal.SIGINT) is handler
    assert second.status == "finished"
    assert first_hook.pids == second_hook.pids == {os.getpid()}
    assert second.summary["params_digest"] == reference_run["params_digest"]
    assert record_of(tmp_path / "runs" / "run") == reference_run["record"]


def test_workers_continue_a_run_of_the_calling_process(
    make_short_config: Callable[..., Config], reference_run: dict[str, Any]
) -> None:
    config = make_short_config(scaling__min_workers=1, scaling__max_workers=1)
    first_hook = NotePids(interrupt_after=5)
    assert (
        run_training(config.replace(train__strategy="single"), faults=Faults(train=Hooks(after_step=first_hook))).status
        == "interrupted"
    )
    assert run_training(config).summary["params_digest"] == reference_run["params_digest"]


def test_a_kill_in_a_local_sgd_round_keeps_the_result(make_short_config: Callable[..., Config], tmp_path: Path) -> None:
    """The survivor returns to the last average, even before a window that it left, and takes over the logical workers;
    the result is bit-identical to a run in one process.
    """
    fields: dict[str, Any] = {
        "train__strategy": "local_sgd",
        "train__local_steps": 4,
        "scaling__min_workers": 2,
        "scaling__max_workers": 2,
    }
    fields |= {"data__cache": "none", "data__shuffle_window_rows": 16}
    alone = claim(prepare(make_short_config(run__name="undisturbed", **fields)), 1).job
    assert 12 // alone.plan.steps_per_window < 13 // alone.plan.steps_per_window
    train_in_process(alone, SingleProcessMembership(4, lambda: False), Hooks())
    undisturbed = newest_commit(alone)
    kill = Kill(str(tmp_path / "killed"), step=14, rank=0)
    result = run_training(make_short_config(**fields), faults=Faults(train=Hooks(after_step=kill)))
    assert (kill.num_fired, kill.is_dead) == (1, True)
    events = read_events(RunPaths(result.path), "formed", "failed", "resumed")
    assert [(e.details["workers"], e.details["step"]) for e in events if e.kind == "formed"][:2] == [(2, 0), (1, 12)]
    resumed = [e.details["step"] for e in events if e.kind == "resumed"]
    assert set(resumed) <= {30}, "only a replacement that joined after the last step may resume from a checkpoint"
    [failed] = [e for e in events if e.kind == "failed"]
    assert "died" in next(iter(failed.details["errors"].values()))
    assert result.summary["redone_steps"] in (1, 2), "only steps of the round are redone"
    assert undisturbed is not None
    assert result.summary["params_digest"] == undisturbed.params_digest
    assert record_of(result.path) == record_of(tmp_path / "runs" / "undisturbed")


@pytest.mark.parametrize("strategy", [{"train__strategy": "local_sgd", "train__local_steps": 23}])
def test_local_sgd_learns_the_digits_although_a_worker_dies(
    digits: Path, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    config = load_config(ROOT / "conf" / "digits.yaml").replace(
        data__path=str(digits / "train"),
        data__eval_path=str(digits / "eval"),
        run__storage_path=str(tmp_path),
        run__name="learned",
        tracking__enabled=False,
        **strategy,
    )
    kill = Kill(str(tmp_path / "killed"), step=310, rank=1)
    result = run_training(config, faults=Faults(train=Hooks(after_step=kill)))
    assert kill.num_fired == 1
    assert result.summary["metrics"]["accuracy"] >= 0.97
    assert result.summary["rows"] == 30 * 1438
