"""The rules about settings: every range of every class of options, and every combination that is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from ray_app.cli.drill import DrillSection
from ray_app.config.checks import RULES, check_config
from ray_app.config.config import SECTIONS, Config
from ray_app.config.rules import NumberRange, Rule, check_fields, field_types
from ray_app.config.sections import ClassSpec
from ray_app.errors import ConfigError
from ray_app.ingest.options import IngestOptions
from ray_app.predict.predict import PredictSection
from ray_app.retrain.options import RetrainSection
from ray_app.submit.options import SubmitSection
from ray_app.tune.options import StudyBudget, StudyScheduler, TuneSection

VALID = Config(task=ClassSpec("my.Task")).replace(data__path="data", scaling__max_workers=4, scaling__logical_workers=4)
FSDP, SINGLE = {"train__strategy": "fsdp"}, {"train__strategy": "single"}
SERVERS, LOCAL = {"train__strategy": "parameter_server"}, {"train__strategy": "local_sgd", "train__local_steps": 4}
OVERLAPPED = {"train__reduction": "overlapped"}
GPU = {"scaling__gpus_per_worker": 1.0}
REDUCER, CAPTURE = {"train__reducer": "my.Reducer"}, {"train__capture": True} | GPU
ADAFACTOR = {"optimizer": {"class_path": "torch.optim.Adafactor"}}
SPEED = {"scaling__load_balancing": "speed"}
CPUS, NO_GPU = {"scaling__cpus_per_worker": 0.0}, {"scaling__gpus_per_worker": 0.0}

WEIGHTED = [{"path": "a", "weight": 3}, {"path": "b", "weight": 1}]
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("scaling.min_workers", {"scaling__max_workers": 2}, {"scaling__min_workers": 3}),
    ("scaling.min_workers", SINGLE, {"scaling__min_workers": 2}),
    ("scaling.max_workers", {}, {"scaling__max_workers": 5}),
    ("scaling.cpus_per_worker", SINGLE | CPUS | NO_GPU, {"train__strategy": "ddp"}),
    ("scaling.gpus_per_worker", {"scaling__gpus_per_worker": 0.5}, {"scaling__gpus_per_worker": 2}),
    ("scaling.gpus_per_worker", FSDP | GPU, {"scaling__gpus_per_worker": 0.5}),
    (
        "scaling.gpus_per_worker",
        FSDP | {"scaling__gpus_per_worker": 0.5, "scaling__max_workers": 1},
        {"scaling__max_workers": 2},
    ),
    ("scaling.label_selector", {"scaling__label_selector": {"zone": "a"}}, SINGLE),
    ("scaling.standby_workers", {"scaling__standby_workers": 1}, {"failure__recovery": "restart"}),
    ("scaling.standby_workers", SINGLE, {"scaling__standby_workers": 1}),
    ("scaling.evict_straggler_after_s", SINGLE, {"scaling__evict_straggler_after_s": 60.0}),
    ("scaling.load_balancing", SPEED, LOCAL),
    ("scaling.load_balancing", SPEED, OVERLAPPED),
    ("failure.sdc_check_rate", {"failure__sdc_check_rate": 0.5}, FSDP),
    ("failure.sdc_check_rate", {"failure__sdc_check_rate": 0.5}, OVERLAPPED),
    ("train.precision", {"train__precision": "fp16"}, LOCAL),
    ("train.precision", {"train__precision": "fp16"}, SERVERS),
    ("train.precision", {"train__precision": "fp16"}, FSDP),
    ("evaluate.where", {"evaluate__where": "workers"}, FSDP),
    ("evaluate.where", {"evaluate__where": "workers"}, SERVERS),
    ("data.on_bad_row", {"data__on_bad_row": "skip"}, SERVERS),
    ("train.backend", {"train__backend": "gloo"}, FSDP),
    ("train.bucket_mb", {"train__bucket_mb": 1.0}, FSDP),
    ("train.reducer", REDUCER, LOCAL),
    ("train.profile_steps", {"train__profile_steps": [1, 3]}, SERVERS),
    ("train.cpu_offload", FSDP | {"train__cpu_offload": True}, {"train__strategy": "ddp"}),
    ("train.cpu_offload", FSDP | GPU | {"train__cpu_offload": True}, NO_GPU),
    ("train.peer_replica", FSDP | {"train__peer_replica": True}, {"train__strategy": "ddp"}),
    ("train.local_steps", LOCAL, {"train__strategy": "ddp"}),
    ("train.outer_lr", LOCAL | {"train__outer_lr": 0.7}, {"train__strategy": "ddp"}),
    ("train.outer_momentum", LOCAL | {"train__outer_momentum": 0.9}, {"train__strategy": "ddp"}),
    ("train.servers", SERVERS | {"train__servers": 2}, {"train__strategy": "ddp"}),
    ("train.staleness", SERVERS | {"train__staleness": 1}, {"train__strategy": "ddp"}),
    ("checkpoint.every_steps", LOCAL | {"checkpoint__every_steps": 8}, {"checkpoint__every_steps": 9}),
    ("checkpoint.snapshot_every_steps", LOCAL, {"checkpoint__snapshot_every_steps": 6}),
    ("checkpoint.snapshot_every_steps", {"checkpoint__snapshot_every_steps": 6}, FSDP),
    ("optimizer.class_path", FSDP | ADAFACTOR | OVERLAPPED, {"train__reduction": "exact"}),
    ("train.bucket_mb", REDUCER, {"train__bucket_mb": 1.0}),
    ("train.capture", CAPTURE, REDUCER),
    ("failure.sdc_check_rate", REDUCER, {"failure__sdc_check_rate": 0.5}),
    ("train.capture", CAPTURE, NO_GPU),
    ("train.capture", CAPTURE, FSDP),
    ("train.capture", CAPTURE, {"train__compile": True}),
    ("train.capture", CAPTURE, OVERLAPPED),
    ("train.capture", CAPTURE, {"failure__sdc_check_rate": 0.1}),
    ("train.capture", CAPTURE, {"optimizers": {"a": {"class_path": "torch.optim.SGD", "parameters": ["*"]}}}),
    ("run.name", {"run__name": "a.b_c-1"}, {"run__name": "-a"}),
    ("train.profile_steps", {"train__profile_steps": [1, 1]}, {"train__profile_steps": [2, 1]}),
    ("train.profile_steps", {"train__profile_steps": [1, 3]}, {"train__profile_steps": [0, 3]}),
    ("train.profile_steps", {"train__profile_steps": [1, 3]}, {"train__profile_steps": [1, 2, 3]}),
    ("train.init_digest", {"train__init_from": "a", "train__init_digest": "0"}, {"train__init_from": None}),
    ("run.branch_from", {"run__branch_from": "a"}, {"train__init_from": "b"}),
    ("run.branch_point", {"run__branch_from": "a", "run__branch_point": f"5-{64 * '0'}"}, {"run__branch_from": None}),
    ("evaluate.patience", {"evaluate__patience": 2, "data__eval_path": "eval"}, {"data__eval_path": None}),
    ("evaluate.num_gpus", {"evaluate__num_gpus": 1.0}, {"evaluate__num_gpus": 2.0}),
    ("evaluate.workers", {"evaluate__workers": 2}, {"evaluate__where": "workers"}),
    ("tracking.registered_model", {"tracking__registered_model": "m"}, {"tracking__enabled": False}),
    ("tracking.registered_model", {"tracking__registered_model": "m"}, {"tracking__registered_model": "a/b"}),
    ("data.balance_by", {"data__balance_by": "label"}, {"data__shard": "file"}),
    ("data.shuffle", {"data__shuffle": False}, {"data__by_length": "tokens"}),
    ("data.path", {"data__path": WEIGHTED}, {"data__path": [{"path": "a", "weight": 0}]}),
    ("data.path", {"data__path": WEIGHTED}, {"data__path": ["a", "b"]}),
    ("data.path", {"data__path": WEIGHTED}, {"data__path": [{"path": "a"}]}),
    ("data.path", {"data__path": WEIGHTED}, {"data__shard": "off"}),
    ("data.path", {"data__path": WEIGHTED}, {"data__balance_by": "label"}),
    ("data.fold", {"data__fold": 1, "data__folds": 2}, {"data__fold": 2}),
    ("data.eval_path", {"data__eval_path": "d"}, {"data__fold": 0}),
    ("data.fold_by", {"data__fold_by": "patient"}, {"data__fold_by_class": "label"}),
    ("data.fold_by_class", {"data__fold_by_class": "label"}, {"data__fold_by_time": "date"}),
    ("data.cache_dir", {"data__cache": "disk", "data__cache_dir": "/scratch"}, {"data__cache": "none"}),
    ("data.reader_threads", {"data__reader_threads": 2}, {"data__cache": "memory"}),
]


def broken_rules(config: Config) -> set[Rule]:
    """Returns the rules that a configuration breaks."""
    return {rule for rule in RULES if rule.is_broken(config)}


@pytest.mark.parametrize(("field", "valid", "change"), REFUSED, ids=str)
def test_a_combination_is_refused_and_the_one_before_is_accepted(
    field: str, valid: dict[str, Any], change: dict[str, Any]
) -> None:
    assert not broken_rules(VALID.replace(**valid))
    with pytest.raises(ConfigError) as caught:
        check_config(VALID.replace(**valid | change))
    _, *lines = str(caught.value).splitlines()
    assert all(line.startswith("  - ") and line.endswith(".") and "{c." not in line for line in lines)
    assert any(line.startswith(f"  - {field} is ") for line in lines), lines


def test_each_rule_has_a_combination_that_breaks_it() -> None:
    assert set[Rule]().union(*(broken_rules(VALID.replace(**valid | change)) for _, valid, change in REFUSED)) == {
        *RULES
    }


SECTION_CLASSES = (
    *SECTIONS.values(),
    *(DrillSection, PredictSection, RetrainSection, SubmitSection),
    *(TuneSection, StudyBudget, StudyScheduler),
)
RANGES = [
    (settings, name, allowed.range)
    for settings in (*(section() for section in SECTION_CLASSES), IngestOptions("csv"))
    for name, allowed in field_types(type(settings)).items()
    if allowed.range is not None
]


@pytest.mark.parametrize(
    ("settings", "name", "limits"), RANGES, ids=[f"{type(settings).__name__}.{name}" for settings, name, _ in RANGES]
)
def test_a_number_out_of_its_range_is_refused(settings: Any, name: str, limits: NumberRange) -> None:
    refused = [math.nan, *(bound for bound in (limits.gt, limits.lt) if bound is not None)]
    refused += [limits.ge - 1] if limits.ge is not None else []
    refused += [limits.le + 1] if limits.le is not None else []
    for value in refused:
        problems = check_fields(replace(settings, **{name: value}), "s.")
        assert problems == [f"s.{name} is {value}; it must be {limits}."]
    for value in (bound for bound in (limits.ge, limits.le) if bound is not None):
        assert check_fields(replace(settings, **{name: value})) == []


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (NumberRange(ge=1), "at least 1"),
        (NumberRange(gt=0, lt=math.inf), "greater than 0 and finite"),
        (NumberRange(ge=0, le=0.5), "at least 0 and at most 0.5"),
        (NumberRange(ge=0, lt=1), "at least 0 and below 1"),
    ],
)
def test_a_range_in_words(limits: NumberRange, words: str) -> None:
    assert str(limits) == words


def test_a_value_that_is_no_choice_is_refused() -> None:
    section = VALID.replace(train__backend="mpi", scaling__max_workers="some")
    assert check_fields(section.train, "train.") == ["train.backend is 'mpi'; it must be one of auto, gloo."]
    assert check_fields(section.scaling) == ["max_workers is 'some'; it must be a number or one of all."]
