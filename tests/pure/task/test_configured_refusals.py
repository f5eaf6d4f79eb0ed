"""Mistakes in the configured arguments of tasks and optimizers are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ray_app import load_config
from ray_app.driver.parsing import parse
from ray_app.errors import ConfigError, DataError
from ray_app.preflight.prepare import prepare
from tests.support.pictures import table_data, write_pictures

V2, SCRIPTS = "torchvision.transforms.v2.", "tests.support.loop_scripts."
CROSS_ENTROPY, ADAM = {"class_path": "torch.nn.CrossEntropyLoss"}, {"class_path": "torch.optim.Adam"}
MODEL = {"class_path": "tests.support.untyped_models.NumericColumns", "init_args": {"width": 3, "outputs": 2}}


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    random = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("refusals") / "numbers"
    return table_data(folder, {"x": random.random(32), "label": random.integers(0, 2, 32)})


def module(**init_args: Any) -> dict[str, Any]:
    arguments = {"model": MODEL, "inputs": ["x"], "target": "label", "loss": CROSS_ENTROPY} | init_args
    return {"class_path": "ray_app.task.module.ModuleTask", "init_args": arguments}


def loop(**init_args: Any) -> dict[str, Any]:
    arguments = {
        "train": SCRIPTS + "train",
        "module": {"class_path": SCRIPTS + "net"},
        "rows": ["x", "label"],
        "target": "label",
    } | init_args
    return {"class_path": "ray_app.task.user_loop.LoopTask", "init_args": arguments}


def turns(**spec: Any) -> dict[str, Any]:
    return {"optimizers": {"one": ADAM | {"parameters": ["*"]} | spec}}


IN = "task.init_args."


@pytest.mark.parametrize(
    ("task", "fields", "message"),
    [
        (module(transforms=[{"class_path": V2 + "RandomResizeCrop"}]), {}, "has no 'RandomResizeCrop'. Did you mean"),
        (
            module(
                model={
                    "class_path": "transformers.BertModel",
                    "init_args": {"config": {"class_path": "transformers.BertConfg"}},
                }
            ),
            {},
            f"{IN}model.config.class_path is 'transformers.BertConfg', but transformers has no 'BertConfg'. Did you"
            f" mean",
        ),
        (module(model={"class_path": "torchvison.models.resnet18"}), {}, "but there is no module 'torchvison'"),
        (module(model="torchvision.models.resnet18"), {}, "got model = torchvision.models.resnet18; it must be"),
        (
            module(loss={"class": "torch.nn.CrossEntropyLoss"}),
            {},
            f"{IN}loss is {{'class': 'torch.nn.CrossEntropyLoss'}}; it must have",
        ),
        (module(loss={"class_path": "tests.support.untyped_models.MeanSquare"}), {}, "returns value.expand(rows)"),
        (module(loss={"class_path": "tests.support.untyped_models.WithParts"}), {}, "WithParts returned a tuple"),
        (module(metrics={"right": {"class": "x"}}), {}, f"{IN}metrics.right is {{'class': 'x'}}; it must have"),
        (module(metrics={"loss": CROSS_ENTROPY}), {}, f"{IN}metrics has 'loss', which every evaluation has already"),
        (module(metrics={"rows": CROSS_ENTROPY}), {}, f"{IN}metrics has 'rows', which every evaluation has"),
        (module(max_length=0), {}, f"{IN}max_length is 0; it must be at least 1, or null for no limit."),
        (module(pad_to=0), {}, f"{IN}pad_to is 0; it must be at"),
        (module(std=[0.0]), {}, f"{IN}std is [0.0]; images are divided by them, so each must be above 0."),
        (module(inputs=["x.mask"]), {}, f"{IN}inputs names x.mask, which marks the padding of lists"),
        (loop(train=SCRIPTS + "trian"), {}, f"{IN}train is '{SCRIPTS}trian', but tests.support.loop_scripts has no"),
        (loop(train="scripd.train"), {}, f"{IN}train is 'scripd.train', but there is no module 'scripd'"),
        (loop(evaluate=SCRIPTS + "loss_and_acuracy"), {}, f"has no 'loss_and_acuracy'. Did you mean {SCRIPTS}"),
        (module(), turns(parameters="critic.*"), "optimizers.one.parameters is 'critic.*'; it must be a list of"),
        (module(), turns(steps="two"), "optimizers.one.steps is 'two'; it must be a number of steps, at least 1."),
        (module(), {"optimizers": [ADAM]}, "optimizers has the wrong form. It must map names to optimizers, each"),
    ],
)
def test_a_mistake_in_the_arguments_is_refused(
    task: dict[str, Any], fields: dict[str, Any], message: str, numbers: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(
        yaml.safe_dump({"task": task, "data": numbers, "run": {"storage_path": str(tmp_path / "runs")}, **fields})
    )
    with pytest.raises((ConfigError, DataError)) as caught:
        prepare(load_config(file))
    assert message in str(caught.value)


def test_a_mean_with_another_number_of_channels_is_refused(tmp_path: Path) -> None:
    data = {f"data__{name}": value for name, value in write_pictures(tmp_path / "pictures").items()}
    resize = [{"class_path": V2 + "Resize", "init_args": {"size": [16, 16]}}]
    model = {"class_path": "tests.support.small_models.per_image", "init_args": {"outputs": 2}}
    task = module(model=model, inputs=["image"], target="large", evaluate_transforms=resize, mean=[0.5, 0.5])
    with pytest.raises(ConfigError, match=r"mean is \[0.5, 0.5\], 2 numbers; images of 'image' have 3 channels"):
        prepare(load_config(task=task, run__storage_path=str(tmp_path / "runs"), **data))


def test_parameter_groups_of_an_optimizer_are_read_from_every_source(tmp_path: Path) -> None:
    optimizer = ADAM | {"init_args": {"lr": 0.1}, "groups": [{"names": ["layers.0.*"], "lr": 0.5}]}
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump({"task": module(), "data": {"path": "data"}, "optimizer": optimizer}))
    from_file = load_config(file).optimizer
    assert from_file.groups == optimizer["groups"]
    assert load_config(task=module(), data__path="data", optimizer=optimizer).optimizer == from_file
    assert (
        parse(
            [f"--config={file}", f"--optimizer={yaml.safe_dump(optimizer, default_flow_style=True)}"], "train", False
        ).optimizer
        == from_file
    )
