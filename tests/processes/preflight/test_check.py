"""`check_task` and `ray-app check` find mistakes on a few rows that a run would show much later, in processes without
Ray.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from ray_app import check_task, load_config
from ray_app.cli.check import main
from tests.support.jobs import digits_config
from tests.support.paths import ROOT
from tests.support.task_checks import TOPICS

pytestmark = pytest.mark.rest


@pytest.fixture
def check_mistake(digits: Path, tmp_path: Path) -> Callable[[str], dict[str, tuple[str, str]]]:
    """Checks a task with one mistake; returns level and text by topic."""

    def check(mistake: str) -> dict[str, tuple[str, str]]:
        task = {"class_path": "tests.support.impure_tasks.Impure", "init_args": {"mistake": mistake}}
        outcome = check_task(digits_config(digits, tmp_path / "runs", task=task))
        assert outcome.ok == all(finding.level in ("ok", "warning") for finding in outcome.findings)
        return {finding.topic: (finding.level, finding.text) for finding in outcome.findings}

    return check


def test_the_digits_pass_every_check(
    digits: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "init", pytest.fail)
    arguments = [
        f"--data.path={digits}/train",
        f"--data.eval_path={digits}/eval",
        f"--run.storage_path={tmp_path}/runs",
    ]
    assert main([f"--config={ROOT}/conf/digits.yaml", *arguments]) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if not line.startswith(" ")]
    names = [
        "configuration",
        "environment",
        "data",
        "task",
        "plan",
        "code",
        "rows",
        "cache",
        "decoded again",
        "evaluation data",
        "model",
    ]
    names += [
        "one row",
        "kept state",
        "outputs",
        "normalization",
        "rare rows",
        "batches",
        "evaluation time",
        "metrics",
        "optimizer",
        "schedule",
        "data files",
    ]
    names += TOPICS[1:]
    assert [re.split(r"  +", line)[:2] for line in lines] == [["ok", name] for name in names]
    assert all(re.match(r"ok .*\d\.\d\d s  [A-Za-z0-9]", line) for line in lines), "a line lacks its duration"
    assert list(tmp_path.iterdir()) == [], "the check left files behind"


def test_independent_refusals_are_all_reported_and_dependent_checks_skipped(
    digits: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = ["--data.path=nowhere", "--train.init_from=nothing", f"--run.storage_path={tmp_path}/runs"]
    assert main([f"--config={ROOT}/conf/digits.yaml", *wrong]) == 2
    output = capfd.readouterr()
    assert [line.split()[:2] for line in output.out.splitlines()] == [
        *(["ok", "configuration"], ["ok", "environment"]),
        *(["refused", "initial"], ["refused", "data"], ["warning", "the"]),
    ]
    assert not output.err
    outcome = check_task(
        load_config(
            ROOT / "conf" / "digits.yaml",
            data__path=str(digits / "train"),
            data__eval_path=str(digits / "nowhere"),
            data__by_length="image",
            optimizer={"class_path": "tests.support.odd_optimizers.LockInGroups"},
        )
    )
    refused = [f.topic for f in outcome.findings if f.level == "refused"]
    assert refused == ["row lengths", "evaluation data", "optimizer", "schedule"]
    assert (outcome.ok, outcome.exit_code) == (False, 2)
    assert "model" in [f.topic for f in outcome.findings if f.level == "ok"]
    assert outcome.findings[-1].topic == "the rest"


@pytest.mark.parametrize(
    ("mistake", "topic", "expected"),
    [
        ("numpy", "randomness", "augment draws from NumPy's generator (numpy.random) (impure_tasks.py, line "),
        ("pid", "training", "6 steps on one worker, twice: different parameters ("),
        ("kept", "workers", "6 steps on one worker and on 4: different parameters ("),
        ("kept", "resume", "6 steps, and the same from step 3 on after a resume on 2 workers: different parameters ("),
        ("raises", "workers", "6 steps on one worker and on 4: KeyError: 'labels' (impure_tasks.py, line "),
        ("dies", "training", "The process of the check ended by exit status 9"),
    ],
)
def test_a_failed_check_names_the_mistake(
    mistake: str, topic: str, expected: str, check_mistake: Callable[[str], dict[str, tuple[str, str]]]
) -> None:
    findings = check_mistake(mistake)
    level, text = findings[topic]
    assert level == "failed"
    assert expected in text


def test_a_reducer_that_keeps_something_for_the_next_step_is_named(digits: Path, tmp_path: Path) -> None:
    config = digits_config(
        digits,
        tmp_path / "runs",
        train__reducer="tests.support.own_reducer.Warmup",
        # Without its fraction of the gradient, Adam would make the same step.
        optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
    )
    assert [f.topic for f in check_task(config).findings if f.level == "failed"] == ["resume"]


def test_an_error_in_the_task_fails_a_check_and_skips_the_rest(
    check_mistake: Callable[[str], dict[str, tuple[str, str]]],
) -> None:
    findings = check_mistake("mistake")
    assert [topic for topic, (level, _) in findings.items() if level != "ok"] == ["one row", "the rest"]
    level, text = findings["one row"]
    assert level == "failed"
    assert "KeyError: 'labels' (impure_tasks.py, line " in text
