"""The shipped configurations: they load, say how to run them, and their models, optimizers and schedules can be
made.
"""

import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from ray_app import load_config
from ray_app.config.config import SECTIONS, Config
from ray_app.config.import_paths import OptimizerSpec
from ray_app.config.sections import ClassSpec
from ray_app.driver.parsing import parse, parse_with_sections
from ray_app.errors import ConfigError
from ray_app.plan.manifest import ColumnFacts, DataFacts
from ray_app.preflight.prepare import make_run_name, make_task, prepare
from ray_app.retrain.options import RetrainSection
from ray_app.train.state.state import TrainingState
from tests.support.pages import blocks
from tests.support.places import ROOT

FILES = sorted((ROOT / "conf").glob("*.yaml"))
DIGITS = ROOT / "conf" / "digits.yaml"

FACTS = {
    "digits": DataFacts(
        "digits",
        1438,
        {"image": ColumnFacts("array", "|u1", (8, 8)), "label": ColumnFacts("integer", "int64", (), 0, 9, 0)},
    ),
    "mnist_dense": DataFacts(
        "mnist",
        60_000,
        {"image": ColumnFacts("array", "|u1", (28, 28)), "label": ColumnFacts("integer", "int64", (), 0, 9, 0)},
    ),
    "detection": DataFacts(
        "shapes", 256, {"image": ColumnFacts("bytes"), "boxes": ColumnFacts("list"), "labels": ColumnFacts("list")}
    ),
    "resnet50_imagenet": DataFacts(
        "imagenet", 1_281_167, {"image": ColumnFacts("bytes"), "label": ColumnFacts("integer", "int64", (), 0, 999, 0)}
    ),
}
FACTS["text"] = DataFacts(
    "texts", 3049, {"tokens": ColumnFacts("list", "list<int32>"), "label": ColumnFacts("integer", "int64", (), 0, 4, 0)}
)
FACTS["language_model"] = DataFacts("packed", 2721, {"tokens": ColumnFacts("list", "list<int32>", (), 1, 2047)})
FACTS["segmentation"] = DataFacts("masks", 256, {"image": ColumnFacts("bytes"), "mask": ColumnFacts("bytes")})
FACTS["retrain_digits"] = FACTS["digits"]
FACTS["mnist_cnn"] = FACTS["mnist_dense"]
MORE: dict[str, type] = {"retrain": RetrainSection}
PARAMETERS = {"digits": 21_482, "retrain_digits": 21_482, "mnist_dense": 269_322, "mnist_cnn": 2_770_634}
PARAMETERS |= {
    "resnet50_imagenet": 25_557_032,
    "detection": 18_959_754,
    "text": 268_549,
    "language_model": 675_328,
    "segmentation": 3_218_478,
}


def config_of(file: Path) -> Config:
    return parse_with_sections(["--config", str(file)], MORE, "any job", exit_on_error=False)[0]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_a_configuration_loads_and_its_parts_can_be_made(file: Path) -> None:
    config = config_of(file)
    task = make_task(config).prepare(FACTS[file.stem])
    state = TrainingState(config, task, torch.device("cpu"), 100)
    assert sum(p.numel() for p in state.model.parameters()) == PARAMETERS[file.stem]
    assert state.optimizer.defaults["lr"] == config.optimizer.init_args.get("lr", 0.001)
    assert (state.schedule is None) == (config.schedule is None)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_a_header_says_command_hardware_and_expectation(file: Path) -> None:
    header = [line for line in file.read_text().splitlines() if line.startswith("#")]
    for word in ("command:", "hardware:", "expected:"):
        assert any(word in line for line in header), word


def test_overrides_from_python_and_their_refusal() -> None:
    config = load_config(
        DIGITS,
        scaling__max_workers=4,
        train__epochs=3,
        data__eval_path=None,
        run__name="x",
        optimizer__init_args__lr=0.5,
    )
    assert (config.scaling.max_workers, config.train.epochs, config.data.eval_path, config.run.name) == (
        4,
        3,
        None,
        "x",
    )
    assert config.optimizer.init_args["lr"] == 0.5
    for field, value, expected in [
        ("train__epochz", 3, "epochz"),
        ("train__epochs", "many", "train.epochs"),
        ("optimizer__init_args__lrr", 1, "lrr"),
    ]:
        with pytest.raises(ConfigError, match=expected):
            load_config(DIGITS, **{field: value})


def test_a_nested_class_is_the_same_with_defaults_none_or_no_arguments(tmp_path: Path) -> None:
    flip = "{class_path: torchvision.transforms.v2.RandomHorizontalFlip}"
    text = (ROOT / "conf" / "detection.yaml").read_text()
    assert flip in text
    found = []
    for init_args in ("", ", init_args: {}", ", init_args: {p: 0.5}"):
        (tmp_path / "conf.yaml").write_text(text.replace(flip, flip.replace("}", init_args + "}", 1)))
        found.append(load_config(tmp_path / "conf.yaml").task)
    assert found == [found[0]] * 3


SECTIONS_OF_A_RUN = {*SECTIONS, "task", "optimizer", "schedule", "seed"}
IN_DOCS = [
    pytest.param(block.text, id=f"{page.stem}-{number}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for number, block in enumerate(each for each in blocks(page) if each.language == "yaml")
    if page.stem != "own-task"
    and block.mark != "file"  # which test_init and test_pages train
    and set(yaml.safe_load(block.text)) <= SECTIONS_OF_A_RUN
]


@pytest.mark.parametrize("block", IN_DOCS)
def test_a_configuration_in_the_docs_loads(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of one is completed by a task and a data set."""
    (tmp_path / "my_task.py").write_text(
        "from ray_app.task.tabular import TabularClassification\n\nclass MyTask(TabularClassification):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "conf.yaml").write_text(block)
    said = yaml.safe_load(block)
    rest = {"task__class_path": "my_task.MyTask"} if "task" not in said else {}
    rest |= {f"data__{name}": name for name in ("path", "eval_path") if name not in said.get("data", {})}
    config = load_config(tmp_path / "conf.yaml", **rest)
    for section in SECTIONS.keys() & said.keys():
        assert {name: getattr(getattr(config, section), name) for name in said[section]} == said[section]


def test_the_tf_distribute_page_has_a_configuration_for_each_strategy() -> None:
    page = (ROOT / "docs" / "from-tf-distribute.md").read_text()
    theirs = re.findall(
        r"```python\n.*?tf\.distribute\.(?:experimental\.)?(\w+Strategy)\(.*?```\n\n```yaml\n(.*?)```", page, re.DOTALL
    )
    assert {name: yaml.safe_load(ours).get("train", {}).get("strategy", "ddp") for name, ours in theirs} == {
        "MultiWorkerMirroredStrategy": "ddp",
        "MirroredStrategy": "ddp",
        "OneDeviceStrategy": "single",
        "CentralStorageStrategy": "central_storage",
        "ParameterServerStrategy": "parameter_server",
    }


OPTIMIZERS = [
    kind.__name__ for kind in vars(torch.optim).values() if isinstance(kind, type) and kind is not torch.optim.Optimizer
]


@pytest.mark.rest
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_by_its_class_alone_has_its_own_defaults(name: str, tmp_path: Path) -> None:
    """None of those of Adam, which stands where no optimizer is named."""
    shipped = load_config(DIGITS)
    file = tmp_path / "given.yaml"
    values = {
        "task": {"class_path": shipped.task.class_path},
        "data": {"path": "x"},
        "optimizer": {"class_path": f"torch.optim.{name}"},
    }
    file.write_text(yaml.safe_dump(values))
    assert load_config(file).optimizer == OptimizerSpec(f"torch.optim.{name}")
    over = load_config(DIGITS, optimizer=f"torch.optim.{name}").optimizer
    assert over.init_args.items() <= shipped.optimizer.init_args.items(), "what the file gives may stay"


def test_an_argument_alone_is_that_of_the_default_optimizer() -> None:
    given = ["--task=ray_app.task.image.ImageClassification", "--data.path=x"]
    assert parse(given, exit_on_error=False).optimizer == Config().optimizer
    assert parse([*given, "--optimizer.init_args.lr=0.01"], exit_on_error=False).optimizer == OptimizerSpec(
        "torch.optim.Adam", {"lr": 0.01}
    )


WARM_UP = """{class_path: torch.optim.lr_scheduler.SequentialLR, init_args: {milestones: [100], schedulers: [
  {class_path: torch.optim.lr_scheduler.LinearLR, init_args: {start_factor: 0.01, total_iters: 100, end_factor: 1.0}},
  {class_path: torch.optim.lr_scheduler.CosineAnnealingLR, init_args: {T_max: 900}}]}}"""


def test_a_schedule_may_be_made_of_others(tmp_path: Path) -> None:
    file = tmp_path / "given.yaml"
    rest = "{task: {class_path: ray_app.task.image.ImageClassification}, data: {path: x}, schedule: %s}"
    file.write_text(rest % WARM_UP)
    found = load_config(file).schedule
    assert found is not None
    warm_up, cosine = found.init_args["schedulers"]
    assert warm_up["init_args"] == {"start_factor": 0.01, "total_iters": 100}, "without what is the default in any case"
    assert cosine["init_args"] == {"T_max": 900}
    file.write_text(load_config(file).to_yaml())
    assert load_config(file).schedule == found
    file.write_text(rest % WARM_UP.replace("T_max", "T_min"))
    with pytest.raises(ConfigError, match=r"CosineAnnealingLR has no argument 'T_min'. Did you mean "):
        load_config(file)


def test_arguments_that_a_run_does_not_keep_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open_task.py").write_text(
        "from ray_app.task.tabular import TabularClassification\n\nclass OpenTask(TabularClassification):\n"
        "    def __init__(self, **options):\n        super().__init__()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    given = ["--task=open_task.OpenTask", "--data.path=x"]
    assert parse(given, exit_on_error=False).task == ClassSpec("open_task.OpenTask")
    with pytest.raises(ConfigError, match=r"open_task.OpenTask has dict_kwargs \['depth'\]; .*in the signature"):
        parse([*given, "--task.dict_kwargs.depth=3"], exit_on_error=False)


def one_cycle(steps: int) -> dict[str, Any]:
    return {"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": 0.1, "total_steps": steps}}


def made_of(kind: str, *schedulers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "schedule": {
            "class_path": f"torch.optim.lr_scheduler.{kind}",
            "init_args": {"schedulers": list(schedulers), **more},
        }
    }


STEADY = {"class_path": "torch.optim.lr_scheduler.ConstantLR", "init_args": {"factor": 1.0}}


def test_a_schedule_in_another_needs_the_steps_of_its_phase_only(digits: Path, tmp_path: Path) -> None:
    config = load_config(
        ROOT / "conf" / "digits.yaml", data__path=str(digits / "train"), data__eval_path=None, train__max_steps=20
    )
    for number, schedule in enumerate(
        [
            made_of("SequentialLR", STEADY, one_cycle(12), milestones=[8]),
            made_of("SequentialLR", one_cycle(8), STEADY, milestones=[8]),
            made_of("ChainedScheduler", one_cycle(20), STEADY),
        ]
    ):
        job = prepare(
            config.replace(run__storage_path=str(tmp_path / str(number)), tracking__enabled=False, **schedule)
        ).job
        state = TrainingState(job.config, job.task, torch.device("cpu"), job.total_steps)
        for _ in range(job.total_steps):
            state.optimizer.step()
            assert state.schedule is not None
            state.schedule.step()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"schedule": one_cycle(5)}, "OneCycleLR has total_steps 5, but is moved at"),
        (made_of("SequentialLR", one_cycle(8), STEADY, milestones=[9]), "total_steps 8, but is moved at 9 steps"),
        (made_of("SequentialLR", STEADY, one_cycle(8), milestones=[9]), "total_steps 8, but is moved at"),
        (made_of("ChainedScheduler", STEADY, one_cycle(8)), "total_steps 8, but is moved at"),
        (
            {"optimizer": {"class_path": "torch.optim.LBFGS"}, "schedule": None},
            r"torch.optim.LBFGS cannot make a step: .*closure",
        ),
        (
            {"optimizer": {"class_path": "torch.optim.SparseAdam"}, "schedule": None},
            r"torch.optim.SparseAdam cannot make a step: .*dense",
        ),
        (
            {"schedule": {"class_path": "torch.optim.lr_scheduler.ReduceLROnPlateau"}},
            "needs an evaluation at each step",
        ),
    ],
    ids=[
        "too short",
        "too short at first",
        "too short afterwards",
        "too short in a chain",
        "closure",
        "sparse gradients",
        "a metric",
    ],
)
def test_what_cannot_make_a_step_is_refused_before_the_start(
    digits: Path, tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    config = load_config(ROOT / "conf" / "digits.yaml", data__path=str(digits / "train"), data__eval_path=None)
    with pytest.raises(ConfigError, match=said):
        prepare(config.replace(run__storage_path=str(tmp_path), tracking__enabled=False, **fields))
    if "optimizer" in fields:
        with pytest.raises(ConfigError, match=said):
            prepare(
                config.replace(
                    run__storage_path=str(tmp_path), tracking__enabled=False, scaling__gpus_per_worker=1, **fields
                )
            )


class Grouped(torch.optim.SGD):
    """Weight decay for matrices alone."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        given = list(params)
        matrices = {"params": [p for p in given if p.ndim > 1], "weight_decay": 0.1}
        super().__init__([matrices, {"params": [p for p in given if p.ndim < 2]}], lr)


def test_groups_of_parameters_are_refused_where_they_would_be_mixed_up(digits: Path, tmp_path: Path) -> None:
    config = load_config(ROOT / "conf" / "digits.yaml", data__path=str(digits / "train"), data__eval_path=None)
    optimizer = {"class_path": f"{__name__}.Grouped", "init_args": {}}
    config = config.replace(
        run__storage_path=str(tmp_path), tracking__enabled=False, schedule=None, optimizer=optimizer
    )
    prepare(config)
    for strategy in ("local_sgd", "parameter_server"):
        with pytest.raises(
            ConfigError,
            match=rf"Grouped makes 2 groups of parameters by itself, which train.strategy {strategy} cannot",
        ):
            prepare(config.replace(train__strategy=strategy))


def test_an_optimizer_that_needs_a_gpu_may_be_configured_where_there_is_none(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = load_config(ROOT / "conf" / "digits.yaml", data__path=str(digits / "train"), data__eval_path=None)
    config = config.replace(
        run__storage_path=str(tmp_path), tracking__enabled=False, optimizer__init_args={"capturable": True}
    )
    with pytest.raises(ConfigError, match=r"AdamW cannot make a step: .*capturable"):
        prepare(config)
    assert prepare(config.replace(scaling__gpus_per_worker=1)).job.config.optimizer.init_args["capturable"]


def test_made_up_names_of_runs_that_start_at_once_differ_and_tell_the_year() -> None:
    made = [make_run_name() for _ in range(200)]
    assert len(set(made)) == len(made)
    assert made[0].startswith(time.strftime("%Y"))
