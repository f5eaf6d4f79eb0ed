"""A run that is extended is bit-identical to a run that was as long from the start, or the extension is refused with a
reason.
"""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ray_app import run_training
from ray_app.config.config import Config
from ray_app.driver.result import Result
from ray_app.errors import ConfigError, RunExistsError
from ray_app.preflight.prepare import claim, prepare
from ray_app.runlog.lease import acquire_lease
from tests.support.jobs import digits_config

STEPLR = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 5, "gamma": 0.5}}


def config_of(digits: Path, storage: Path, **fields: Any) -> Config:
    common = {"train__strategy": "single", "train__steps_per_epoch": 3, "train__ema_decay": 0.9, "schedule": STEPLR}
    paths = {"data__path": str(digits / "eval"), "data__eval_path": None}
    return digits_config(digits, storage, **(common | paths | fields))


def train(config: Config, **fields: Any) -> Result:
    result = run_training(config.replace(**fields), Console(file=StringIO()))
    assert result.status == "finished"
    return result


@pytest.mark.rest
def test_an_extended_run_equals_a_run_that_was_as_long_from_the_start(digits: Path, tmp_path: Path) -> None:
    """The run has one epoch, then two as in the guide's example of fault tolerance, then a third part bounded by
    `max_steps`.
    """
    config = config_of(digits, tmp_path)
    extended = [
        train(config, run__name="grown", train__epochs=epochs, train__max_steps=max_steps)
        for epochs, max_steps in ((1, None), (2, None), (5, 8))
    ]
    uninterrupted = [
        train(config, run__name=f"{n}", train__epochs=epochs, train__max_steps=max_steps)
        for n, epochs, max_steps in ((1, 2, None), (2, 5, 8))
    ]
    digests = [result.summary["params_digest"] for result in extended]
    assert digests[1:] == [result.summary["params_digest"] for result in uninterrupted]
    assert len(set(digests)) == 3
    assert [result.summary["steps"] for result in extended] == [3, 6, 8]
    assert [(r.step, r.loss, r.lr) for r in extended[-1].metrics()] == [
        (r.step, r.loss, r.lr) for r in uninterrupted[-1].metrics()
    ]
    assert train(config, run__name="grown", train__epochs=5, train__max_steps=8).summary["params_digest"] == digests[-1]


GROUPS = [{"norms_and_biases": True, "weight_decay": 0.0, "lr": 0.01}]
ADAM = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.003}, "groups": GROUPS}


DEFAULT = vars(Config().optimizer)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"optimizer": ADAM}, marks=pytest.mark.rest),
        {
            "optimizer": DEFAULT,
            "optimizers": {
                "bias": {**ADAM, "parameters": ["*bias"]},
                "weight": {**ADAM, "parameters": ["*weight"], "steps": 2, "schedule": STEPLR},
            },
        },
    ],
)
def test_optimizer_groups_and_schedules_are_restored_on_extension(
    digits: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    config = config_of(digits, tmp_path, schedule=None).replace(**fields)
    train(config, run__name="grown", train__epochs=1)
    extended, uninterrupted = (
        train(config, run__name=name, train__epochs=2).summary["params_digest"] for name in ("grown", "at-once")
    )
    assert extended == uninterrupted


@pytest.mark.parametrize(
    ("fields", "more", "message"),
    [
        ({"train__epochs": 3}, {"train__epochs": 2}, "longer, not shorter"),
        ({"train__epochs": 2, "train__max_steps": 5}, {"train__max_steps": 4}, "longer, not shorter"),
        (
            {"schedule": {"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": 0.1}}},
            {},
            "OneCycleLR depends on the total",
        ),
        (
            {
                "schedule": {
                    "class_path": "torch.optim.lr_scheduler.ChainedScheduler",
                    "init_args": {
                        "schedulers": [
                            STEPLR,
                            {"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": 0.1}},
                        ]
                    },
                }
            },
            {},
            "ChainedScheduler depends on the total",
        ),
        (
            {
                "schedule": {
                    "class_path": "torch.optim.lr_scheduler.OneCycleLR",
                    "init_args": {"max_lr": 0.1, "total_steps": 5},
                }
            },
            {},
            "OneCycleLR has total_steps 5",
        ),
        (
            {"train__strategy": "local_sgd", "train__local_steps": 2, "checkpoint__every_epochs": None},
            {},
            "in the middle of a round",
        ),
        (
            {
                "evaluate__patience": 2,
                "checkpoint__every_epochs": None,
                "checkpoint__every_steps": 2,
                "evaluate__where": "workers",
            },
            {},
            "plan none at that step",
        ),
        ({}, {"seed": 5}, "+ seed: 5"),
    ],
    ids=["epochs", "max_steps", "one cycle", "in a chain", "too short a cycle", "round", "patience", "seed too"],
)
def test_an_extension_that_changes_earlier_steps_is_refused(
    digits: Path, tmp_path: Path, fields: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with_data = {"data__eval_path": str(digits / "eval")} if "evaluate__patience" in fields else {}
    config = config_of(digits, tmp_path, run__name="run", **({"train__epochs": 1} | fields | with_data))
    prepared = prepare(config)
    with acquire_lease(prepared.job.paths) as lease:
        claim(prepared, lease.fence)
    with pytest.raises(ConfigError) as caught:
        prepare(config.replace(**(more or {"train__epochs": 2})))
    assert message in str(caught.value)
    assert isinstance(caught.value, RunExistsError) or "total_steps 5" in message


@pytest.mark.parametrize(
    ("schedule", "fields"),
    [
        ({"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": 0.1, "total_steps": 6}}, {}),
        ({"class_path": "torch.optim.lr_scheduler.CosineAnnealingLR", "init_args": {"T_max": 4}}, {"train__epochs": 2}),
        (None, {"train__epochs": 2, "train__max_steps": 4}),
    ],
)
def test_an_extension_that_keeps_earlier_steps_is_allowed(
    digits: Path, tmp_path: Path, schedule: dict[str, Any] | None, fields: dict[str, Any]
) -> None:
    config = config_of(digits, tmp_path, run__name="run", train__epochs=1, schedule=schedule)
    prepared = prepare(config)
    with acquire_lease(prepared.job.paths) as lease:
        claim(prepared, lease.fence)
    assert prepare(config.replace(**({"train__epochs": 2} | fields))).resumes
