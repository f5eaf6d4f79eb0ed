"""Settings that are incompatible with a user loop or a Lightning module are refused before the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_app import load_config
from ray_app.errors import ConfigError
from ray_app.preflight.prepare import prepare
from tests.support.local_world import write_images

SCRIPTS, MODULES = "tests.support.loop_scripts.", "tests.support.lightning_modules."
LOOP = {
    "class_path": "ray_app.task.user_loop.LoopTask",
    "init_args": {
        "train": SCRIPTS + "train",
        "evaluate": SCRIPTS + "loss_and_accuracy",
        "module": {"class_path": SCRIPTS + "net"},
        "rows": ["image", "label"],
        "target": "label",
    },
}
LIGHTNING = {
    "class_path": "ray_app.task.lightning.LightningTask",
    "init_args": {"module": {"class_path": MODULES + "Good"}, "batch": ["image", "label"], "target": "label"},
}
ADAM = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}}
SCHEDULE = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 3}}
GPU = {"scaling__gpus_per_worker": 1.0}
OPTIMIZER_OF_SCRIPT = "The script creates its optimizer (loop.keep); leave optimizer and optimizers out."


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("validate") / "data", [[50, 1], [46]])


@pytest.mark.parametrize(
    ("task", "fields", "message"),
    [
        (LOOP, {"optimizer": ADAM}, OPTIMIZER_OF_SCRIPT),
        (LOOP, {"optimizers": {"one": {**ADAM, "parameters": ["*"]}}}, OPTIMIZER_OF_SCRIPT),
        (LOOP, {"train__compile": True}, "train.compile compiles the model of a task; compile the model"),
        (LOOP, GPU | {"train__capture": True}, "train.capture needs identical steps, but the steps of a script"),
        (LIGHTNING, GPU | {"train__capture": True, "optimizer": ADAM}, "train.capture needs identical steps"),
        (LOOP, {"train__strategy": "central_storage"}, "train.strategy is central_storage, which needs control"),
        (LOOP, {"train__strategy": "fsdp"}, "script's loop; use ddp or single."),
        (LOOP, {"schedule": SCHEDULE}, "but the task returns a StepLR with its optimizer"),
        (LIGHTNING, {"schedule": SCHEDULE}, "but the task returns a StepLR with its optimizer"),
        (LIGHTNING, {"train__strategy": "fsdp", "optimizer": ADAM}, "train.strategy is fsdp, which gathers "),
        (LIGHTNING, {"train__strategy": "fsdp"}, "Use ddp, single, local_sgd, parameter_server or central_storage."),
        (LIGHTNING, {"train__compile": True, "optimizer": ADAM}, "train.compile compiles calls of the module, and"),
    ],
)
def test_settings_that_a_user_loop_or_module_rules_out_are_refused(
    task: dict[str, Any], fields: dict[str, Any], message: str, images: Path, tmp_path: Path
) -> None:
    paths: dict[str, Any] = {
        "data__path": str(images),
        "data__eval_path": str(images),
        "run__storage_path": str(tmp_path / "runs"),
    }
    with pytest.raises(ConfigError) as caught:
        prepare(load_config(task=task, **paths, **fields))
    assert message in str(caught.value)
