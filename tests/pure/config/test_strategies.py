"""The traits of the strategies: every strategy has a record, and code asks for traits instead of comparing names."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import get_args

import docstring_parser
import pytest

from ray_app.config.config import Config, digest, flatten
from ray_app.config.sections import TrainSection
from ray_app.config.strategies import STRATEGIES, StrategyName, StrategyTraits, list_strategies, strategy_with_workers
from ray_app.preflight.prepare import check_task
from tests.support.paths import ROOT

COMPARISON = re.compile(r"strategy (?:==|!=|in|not in) [\"(\[{]")


def test_each_strategy_has_a_record() -> None:
    assert tuple(STRATEGIES) == get_args(StrategyName)
    for name in STRATEGIES:
        assert f"`{name}`: " in (TrainSection.__doc__ or "")


def test_each_trait_is_described() -> None:
    parsed = docstring_parser.parse(StrategyTraits.__doc__ or "", docstring_parser.DocstringStyle.GOOGLE)
    assert [param.arg_name for param in parsed.params] == [field.name for field in fields(StrategyTraits)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_records_name_fields_of_the_configuration(name: str) -> None:
    traits, values = STRATEGIES[name], flatten(Config().to_dict())
    assert traits.train_fields <= {field.name for field in fields(TrainSection)}
    assert {refused.field for refused in traits.refused_values} <= values.keys()


def test_only_factories_compare_names_of_strategies() -> None:
    package = ROOT / "ray_app"
    comparing = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if COMPARISON.search(" ".join(path.read_text().split()))
    }
    assert comparing == {"train/build.py"}


def test_names_of_strategies_are_listed_as_text() -> None:
    assert list_strategies(lambda traits: traits.can_move_shares) == "ddp or central_storage"
    assert list_strategies(lambda traits: traits.can_use_task_optimizer) == "ddp, single or central_storage"
    assert list_strategies(lambda traits: traits.has_servers) == "parameter_server"


def test_a_strategy_without_workers_has_the_digest_of_the_one_with_workers() -> None:
    assert [name for name, traits in STRATEGIES.items() if not traits.has_workers] == ["single"]
    assert [strategy_with_workers(name) for name in ("single", "ddp", "fsdp", "other")] == [
        "ddp",
        "ddp",
        "fsdp",
        "other",
    ]
    digests = {name: digest(Config().replace(train__strategy=name), "") for name in STRATEGIES}
    assert digests["single"] == digests["ddp"] == digest(Config(), "")
    assert len(set(digests.values())) == len(STRATEGIES) - 1


def test_an_unknown_strategy_is_refused() -> None:
    config = Config().replace(train__strategy="sign", task__class_path="a.B", data__path="data")
    check = check_task(config)
    [refused] = [finding for finding in check.findings if finding.level == "refused"]
    assert "train.strategy is 'sign'; it must be one of ddp, single, " in refused.text
