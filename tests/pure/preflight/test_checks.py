"""The list of checks: a start and `ray-app check` run the same ones, except those that only `ray-app check` runs."""

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


def test_each_check_depends_only_on_earlier_checks() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    for i, check in enumerate(CHECKS):
        assert set(check.needs) <= set(names[:i]), check.name
        assert check.message.endswith("."), check.name


def test_a_start_runs_only_quick_checks() -> None:
    assert [check.at_start for check in CHECKS] == sorted((check.at_start for check in CHECKS), reverse=True)
    assert sum(check.cost_s for check in START) <= MAX_START_S


def fail(context: PreflightContext) -> None:
    del context
    raise ConfigError("It is wrong.")


@pytest.mark.parametrize("at_start", [True, False])
def test_a_start_and_ray_app_check_run_the_same_checks(
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


def test_checks_that_do_not_depend_on_a_refused_check_run(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(prepare_module, "CHECKS", START)
    faulty_config = config.replace(
        data__eval_path=str(tmp_path / "nowhere"),
        data__by_length="image",
        schedule={"class_path": "torch.optim.lr_scheduler.ReduceLROnPlateau", "init_args": {}},
    )
    check = prepare_module.check_task(faulty_config)
    refused = {f.topic: f.text for f in check.findings if f.level == "refused"}
    assert list(refused) == ["row lengths", "evaluation data", "schedule"]
    assert check.exit_code == 2
    with pytest.raises((ConfigError, DataError)) as caught:
        prepare(faulty_config)
    assert str(caught.value) == refused["row lengths"], "a start raises the first refusal"
