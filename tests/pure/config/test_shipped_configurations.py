"""The shipped configurations load and state how to run them; their models, optimizers and schedules can be built."""

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
from ray_app.preflight.inputs import make_run_name, make_task
from ray_app.preflight.prepare import prepare
from ray_app.retrain.options import RetrainSection
from ray_app.train.state.state import TrainingState
from tests.support.jobs import digits_config
from tests.support.pages import blocks
from tests.support.paths import ROOT

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
EXTRA_SECTIONS: dict[str, type] = {"retrain": RetrainSection}
PARAMETERS = {"digits": 21_482, "retrain_digits": 21_482, "mnist_dense": 269_322, "mnist_cnn": 2_770_634}
PARAMETERS |= {
    "resnet50_imagenet": 25_557_032,
    "detection": 18_959_754,
    "text": 268_549,
    "language_model": 675_328,
    "segmentation": 3_218_478,
}


def load_shipped(file: Path) -> Config:
    return parse_with_sections(["--config", str(file)], EXTRA_SECTIONS, "any job", exit_on_error=False)[0]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_a_shipped_configuration_loads_and_its_parts_can_be_built(file: Path) -> None:
    config = load_shipped(file)
    task = make_task(config).prepare(FACTS[file.stem])
    state = TrainingState(config, task, torch.device("cpu"), 100)
    assert sum(p.numel() for p in state.model.parameters()) == PARAMETERS[file.stem]
    assert state.optimizer.defaults["lr"] == config.optimizer.init_args.get("lr", 0.001)
    assert (state.schedule is None) == (config.schedule is None)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_the_header_of_a_configuration_has_command_hardware_and_expectation(file: Path) -> None:
    header = [line for line in file.read_text().splitlines() if line.startswith("#")]
    for word in ("command:", "hardware:", "expected:"):
        assert any(word in line for line in header), word


def test_overrides_from_python_are_applied_or_refused() -> None:
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


def test_a_nested_class_is_equal_with_default_empty_or_no_arguments(tmp_path: Path) -> None:
    flip = "{class_path: torchvision.transforms.v2.RandomHorizontalFlip}"
    text = (ROOT / "conf" / "detection.yaml").read_text()
    assert flip in text
    tasks = []
    for init_args in ("", ", init_args: {}", ", init_args: {p: 0.5}"):
        (tmp_path / "conf.yaml").write_text(text.replace(flip, flip.replace("}", init_args + "}", 1)))
        tasks.append(load_config(tmp_path / "conf.yaml").task)
    assert tasks == [tasks[0]] * 3


RUN_SECTIONS = {*SECTIONS, "task", "optimizer", "schedule", "seed"}
DOCUMENTED = [
    pytest.param(block.text, id=f"{page.stem}-{number}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for number, block in enumerate(block for block in blocks(page) if block.language == "yaml")
    # test_pages trains with these files.
    if block.mark != "file" and set(yaml.safe_load(block.text)) <= RUN_SECTIONS
]


@pytest.mark.parametrize("block", DOCUMENTED)
def test_a_configuration_in_the_docs_loads(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task and a data set complete a partial configuration."""
    (tmp_path / "my_task.py").write_text(
        "from ray_app.task.tabular import TabularClassification\n\nclass MyTask(TabularClassification):\n    pass\n"
    )
    (tmp_path / "my_program.py").write_text("def get_compiled_model():\n    raise NotImplementedError\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "conf.yaml").write_text(block)
    values = yaml.safe_load(block)
    missing = {"task__class_path": "my_task.MyTask"} if "task" not in values else {}
    missing |= {f"data__{name}": name for name in ("path", "eval_path") if name not in values.get("data", {})}
    config = load_config(tmp_path / "conf.yaml", **missing)
    for section in SECTIONS.keys() & values.keys():
        assert {name: getattr(getattr(config, section), name) for name in values[section]} == values[section]


def test_the_tf_distribute_page_has_a_setting_for_each_strategy() -> None:
    page = (ROOT / "docs" / "from-tf-distribute.md").read_text()
    rows = re.findall(r"^\|[^|]*?`(\w+Strategy)\b[^|]*\| `train\.strategy: (\w+)`", page, re.MULTILINE)
    assert dict(rows) == {
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
def test_an_optimizer_given_by_its_class_has_the_defaults_of_that_class(name: str, tmp_path: Path) -> None:
    """The arguments of Adam, the default optimizer, do not apply to it."""
    shipped = load_config(DIGITS)
    file = tmp_path / "given.yaml"
    values = {
        "task": {"class_path": shipped.task.class_path},
        "data": {"path": "x"},
        "optimizer": {"class_path": f"torch.optim.{name}"},
    }
    file.write_text(yaml.safe_dump(values))
    assert load_config(file).optimizer == OptimizerSpec(f"torch.optim.{name}")
    replaced = load_config(DIGITS, optimizer=f"torch.optim.{name}").optimizer
    assert replaced.init_args.items() <= shipped.optimizer.init_args.items(), (
        "an argument is neither in the file nor a default"
    )


def test_an_optimizer_argument_without_a_class_is_one_of_the_default_optimizer() -> None:
    arguments = ["--task=ray_app.task.image.ImageClassification", "--data.path=x"]
    assert parse(arguments, exit_on_error=False).optimizer == Config().optimizer
    assert parse([*arguments, "--optimizer.init_args.lr=0.01"], exit_on_error=False).optimizer == OptimizerSpec(
        "torch.optim.Adam", {"lr": 0.01}
    )


WARM_UP = """{class_path: torch.optim.lr_scheduler.SequentialLR, init_args: {milestones: [100], schedulers: [
  {class_path: torch.optim.lr_scheduler.LinearLR, init_args: {start_factor: 0.01, total_iters: 100, end_factor: 1.0}},
  {class_path: torch.optim.lr_scheduler.CosineAnnealingLR, init_args: {T_max: 900}}]}}"""


def test_a_schedule_may_consist_of_other_schedules(tmp_path: Path) -> None:
    file = tmp_path / "given.yaml"
    template = "{task: {class_path: ray_app.task.image.ImageClassification}, data: {path: x}, schedule: %s}"
    file.write_text(template % WARM_UP)
    schedule = load_config(file).schedule
    assert schedule is not None
    warm_up, cosine = schedule.init_args["schedulers"]
    assert warm_up["init_args"] == {"start_factor": 0.01, "total_iters": 100}, "the stored arguments contain defaults"
    assert cosine["init_args"] == {"T_max": 900}
    file.write_text(load_config(file).to_yaml())
    assert load_config(file).schedule == schedule
    file.write_text(template % WARM_UP.replace("T_max", "T_min"))
    with pytest.raises(ConfigError, match=r"CosineAnnealingLR has no argument 'T_min'. Did you mean "):
        load_config(file)


def test_arguments_that_a_run_does_not_store_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open_task.py").write_text(
        "from ray_app.task.tabular import TabularClassification\n\nclass OpenTask(TabularClassification):\n"
        "    def __init__(self, **options):\n        super().__init__()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = ["--task=open_task.OpenTask", "--data.path=x"]
    assert parse(arguments, exit_on_error=False).task == ClassSpec("open_task.OpenTask")
    with pytest.raises(ConfigError, match=r"open_task.OpenTask has dict_kwargs \['depth'\]; .*in the signature"):
        parse([*arguments, "--task.dict_kwargs.depth=3"], exit_on_error=False)


def one_cycle(steps: int) -> dict[str, Any]:
    return {"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": 0.1, "total_steps": steps}}


def composite_schedule(kind: str, *schedulers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "schedule": {
            "class_path": f"torch.optim.lr_scheduler.{kind}",
            "init_args": {"schedulers": list(schedulers), **more},
        }
    }


STEADY = {"class_path": "torch.optim.lr_scheduler.ConstantLR", "init_args": {"factor": 1.0}}


def test_a_nested_schedule_needs_only_the_steps_of_its_phase(digits: Path, tmp_path: Path) -> None:
    config = digits_config(digits, tmp_path, data__eval_path=None, train__max_steps=20)
    for number, schedule in enumerate(
        [
            composite_schedule("SequentialLR", STEADY, one_cycle(12), milestones=[8]),
            composite_schedule("SequentialLR", one_cycle(8), STEADY, milestones=[8]),
            composite_schedule("ChainedScheduler", one_cycle(20), STEADY),
        ]
    ):
        job = prepare(config.replace(run__storage_path=str(tmp_path / str(number)), **schedule)).job
        state = TrainingState(job.config, job.task, torch.device("cpu"), job.total_steps)
        for _ in range(job.total_steps):
            state.optimizer.step()
            assert state.schedule is not None
            state.schedule.step()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": one_cycle(5)}, "OneCycleLR has total_steps 5, but"),
        (
            composite_schedule("SequentialLR", one_cycle(8), STEADY, milestones=[9]),
            "total_steps 8, but the run advances it 9 times",
        ),
        (composite_schedule("SequentialLR", STEADY, one_cycle(8), milestones=[9]), "total_steps 8, but"),
        (composite_schedule("ChainedScheduler", STEADY, one_cycle(8)), "total_steps 8, but"),
        ({"optimizer": {"class_path": "torch.optim.LBFGS"}, "schedule": None}, "torch.optim.LBFGS cannot make a"),
        ({"optimizer": {"class_path": "torch.optim.SparseAdam"}, "schedule": None}, "torch.optim.SparseAdam cannot"),
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
def test_an_optimizer_or_schedule_that_cannot_step_is_refused_before_the_start(
    digits: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    config = digits_config(digits, tmp_path, data__eval_path=None)
    with pytest.raises(ConfigError, match=message):
        prepare(config.replace(**fields))
    if "optimizer" in fields:
        with pytest.raises(ConfigError, match=message):
            prepare(config.replace(scaling__gpus_per_worker=1, **fields))


class Grouped(torch.optim.SGD):
    """An optimizer that applies weight decay to matrices only, by two groups of parameters."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        parameters = list(params)
        matrices = {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1}
        super().__init__([matrices, {"params": [p for p in parameters if p.ndim < 2]}], lr)


def test_an_optimizer_with_groups_is_refused_by_strategies_that_flatten_parameters(
    digits: Path, tmp_path: Path
) -> None:
    config = digits_config(digits, tmp_path, data__eval_path=None)
    optimizer = {"class_path": f"{__name__}.Grouped", "init_args": {}}
    config = config.replace(schedule=None, optimizer=optimizer)
    prepare(config)
    for strategy in ("local_sgd", "parameter_server"):
        with pytest.raises(
            ConfigError,
            match=rf"Grouped creates 2 parameter groups itself, which train.strategy {strategy} cannot",
        ):
            prepare(config.replace(train__strategy=strategy))


def test_an_optimizer_for_gpus_may_be_configured_on_a_machine_without_gpu(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = digits_config(digits, tmp_path, data__eval_path=None)
    config = config.replace(optimizer__init_args={"capturable": True})
    with pytest.raises(ConfigError, match=r"AdamW cannot make a step: .*capturable"):
        prepare(config)
    assert prepare(config.replace(scaling__gpus_per_worker=1)).job.config.optimizer.init_args["capturable"]


def test_generated_run_names_differ_and_begin_with_the_year() -> None:
    names = [make_run_name() for _ in range(200)]
    assert len(set(names)) == len(names)
    assert names[0].startswith(time.strftime("%Y"))
