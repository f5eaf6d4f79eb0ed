"""The list of checks: a start and `ray-app check` make the same ones, up to those that only the latter makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_app import load_config
from ray_app.config.config import Config
from ray_app.errors import ConfigError, DataError
from ray_app.preflight import prepare as prepare_module
from ray_app.preflight.checks import CHECKS, Check
from ray_app.preflight.context import CheckResult, PreflightContext
from ray_app.preflight.prepare import prepare
from tests.support.local_world import write_images

MAX_START_S = 4.0
START = tuple(check for check in CHECKS if check.at_start)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(
        task__class_path="ray_app.task.image.ImageClassification",
        data__path=str(write_images(tmp_path / "data", [[16]])),
        data__global_batch_size=8,
        run__storage_path=str(tmp_path / "runs"),
    )


def test_each_check_needs_checks_before_it_only() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    for i, check in enumerate(CHECKS):
        assert set(check.needs) <= set(names[:i]), check.name
        assert check.message.endswith("."), check.name


def test_a_start_makes_what_is_quick() -> None:
    assert [check.at_start for check in CHECKS] == sorted((check.at_start for check in CHECKS), reverse=True)
    assert sum(check.cost_s for check in START) <= MAX_START_S


def fail(context: PreflightContext) -> None:
    del context
    raise ConfigError("It is wrong.")


@pytest.mark.parametrize("at_start", [True, False])
def test_a_start_and_ray_app_check_make_the_same_list(
    at_start: bool, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = Check("later", 0.0, "It needs it.", lambda context: CheckResult("never"), ("added",), at_start=at_start)
    checks = (*START, Check("added", 0.0, "It is right.", fail, at_start=at_start), later)
    monkeypatch.setattr(prepare_module, "CHECKS", checks)
    if at_start:
        with pytest.raises(ConfigError, match="It is wrong"):
            prepare(config)
    else:
        assert prepare(config).job.plan.all_rows == 16
    findings = prepare_module.check_task(config).findings
    assert [(f.level, f.topic) for f in findings if f.level != "ok"] == [("refused", "added"), ("warning", "the rest")]
    assert "1 more" in findings[-1].text


def test_what_does_not_need_a_refused_check_is_made(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(prepare_module, "CHECKS", START)
    wrong = config.replace(
        data__eval_path=str(tmp_path / "nowhere"),
        data__by_length="image",
        schedule={"class_path": "torch.optim.lr_scheduler.ReduceLROnPlateau", "init_args": {}},
    )
    check = prepare_module.check_task(wrong)
    refused = {f.topic: f.text for f in check.findings if f.level == "refused"}
    assert list(refused) == ["row lengths", "evaluation data", "schedule"]
    assert check.exit_code == 2
    with pytest.raises((ConfigError, DataError)) as raised:
        prepare(wrong)
    assert str(raised.value) == refused["row lengths"], "a start ends with the first of them"
