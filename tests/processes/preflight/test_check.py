"""`check_task` and `ray-app check`: what a run would show much later is found on some rows, in processes
without Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from ray_app import check_task, load_config
from ray_app.cli.check import main
from tests.support.places import ROOT

pytestmark = pytest.mark.rest


@pytest.fixture
def checked(digits: Path, tmp_path: Path) -> Callable[[str], dict[str, tuple[str, str]]]:
    """Checks a task with one mistake; level and text by topic."""

    def check(what: str) -> dict[str, tuple[str, str]]:
        config = load_config(
            ROOT / "conf" / "digits.yaml",
            task={"class_path": "tests.support.impure_tasks.Impure", "init_args": {"what": what}},
            data__path=str(digits / "train"),
            data__eval_path=str(digits / "eval"),
            run__storage_path=str(tmp_path / "runs"),
        )
        found = check_task(config)
        assert found.ok == all(finding.level in ("ok", "warning") for finding in found.findings)
        return {finding.topic: (finding.level, finding.text) for finding in found.findings}

    return check


def test_nothing_is_wrong_with_the_digits(
    digits: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "init", pytest.fail)
    arguments = [
        f"--data.path={digits}/train",
        f"--data.eval_path={digits}/eval",
        f"--run.storage_path={tmp_path}/runs",
    ]
    assert main([f"--config={ROOT}/conf/digits.yaml", *arguments]) == 0
    shown = capfd.readouterr().out.splitlines()
    assert [line.split()[:2] for line in shown] == [
        ["ok", name] for name in ("data", "data", "one", "randomness", "workers", "resume", "evaluation", "export")
    ]
    assert list(tmp_path.iterdir()) == [], "something was left behind"
    assert main([f"--config={ROOT}/conf/digits.yaml", *arguments, "--data.path=nowhere"]) == 2


@pytest.mark.parametrize(
    ("what", "topic", "expected"),
    [
        ("numpy", "randomness", "augment draws from NumPy's generator (numpy.random) (impure_tasks.py, line "),
        ("pid", "training", "6 steps on one worker, twice, give other parameters each time"),
        ("kept", "workers", "6 steps on one worker and on 4: other parameters ("),
        ("kept", "resume", "6 steps, and the same from step 3 on after a resume on 2 workers: other parameters ("),
        ("raises", "workers", "6 steps on one worker and on 4: KeyError: 'labels' (impure_tasks.py, line "),
        ("dies", "training", "Its process ended by exit status 9"),
    ],
)
def test_what_is_wrong_is_said(
    what: str, topic: str, expected: str, checked: Callable[[str], dict[str, tuple[str, str]]]
) -> None:
    found = checked(what)
    level, text = found[topic]
    assert level == "failed"
    assert expected in text


def test_a_mistake_in_the_code_is_a_failed_check(checked: Callable[[str], dict[str, tuple[str, str]]]) -> None:
    [(topic, (level, text))] = checked("mistake").items()
    assert (topic, level) == ("one row", "failed")
    assert "KeyError: 'labels' (impure_tasks.py, line " in text
