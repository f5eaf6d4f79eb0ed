"""Spaces of studies: what is refused, and the settings that samplers draw."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from ray_app.errors import ConfigError
from ray_app.tune.samplers import Observed, check_optuna, count_trials, propose, sample
from ray_app.tune.space import parse_space

SPACE = {
    "optimizer.init_args.lr": {"log_uniform": [1.0e-4, 1.0e-1]},
    "task.init_args.model": {"choice": ["small_cnn", "mlp"]},
    "data.global_batch_size": {"int_uniform": [1, 3]},
}


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        ({}, "tune.space is empty"),
        ({"a.b": {"choose": [1]}}, "a.b with {'choose': [1]}; it must be one of choice, uniform"),
        ({"a.b": [1, 2]}, "it must be one of choice"),
        ({"a.b": {"choice": 3}}, "choice: 3; it must be a list"),
        ({"a.b": {"uniform": [2, 1]}}, "the first number must be below the second"),
        ({"a.b": {"uniform": [1, 2, 3]}}, "it must be [LOW, HIGH], two numbers"),
        ({"a.b": {"uniform": ["1e-4", 1]}}, "write 1.0e-4"),
        ({"a.b": {"int_uniform": [1.5, 3]}}, "two integers"),
        ({"a.b": {"log_uniform": [0, 1]}}, "both numbers must be above 0"),
        ({"train.epochs": {"choice": [1, 2]}}, "train.epochs, which all trials have in common"),
        ({"scaling.max_workers": {"choice": [1, 2]}}, "which all trials have in common"),
    ],
)
def test_a_space_is_refused_with_what_is_wrong(space: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_space(space)
    assert expected in str(refusal.value)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_space({"a.b": {"choice": []}, "c.d": {"uniform": [0, 1]}}, is_grid=True)
    assert "a.b" in str(refusal.value)
    assert "c.d with uniform, of which a grid has no values" in str(refusal.value)


def test_a_random_trial_depends_on_seed_number_and_name_only() -> None:
    space = parse_space(SPACE)
    settings = sample(space, "random", 0, 5)
    assert settings == sample(space, "random", 0, 5)
    assert settings != sample(space, "random", 1, 5)
    assert settings != sample(space, "random", 0, 6)
    alone = sample(parse_space({"optimizer.init_args.lr": SPACE["optimizer.init_args.lr"]}), "random", 0, 5)
    assert alone["optimizer.init_args.lr"] == settings["optimizer.init_args.lr"]
    # The numbers of this version, so that a study goes on with a later one.
    assert settings == {
        "optimizer.init_args.lr": 0.00668013,
        "task.init_args.model": "small_cnn",
        "data.global_batch_size": 1,
    }


def test_draws_fill_the_range() -> None:
    space = parse_space({**SPACE, "x.y": {"uniform": [-1, 1]}})
    trials = [sample(space, "random", 0, number) for number in range(300)]
    rates = [trial["optimizer.init_args.lr"] for trial in trials]
    assert 1e-4 <= min(rates) < 2e-4
    assert 5e-2 < max(rates) <= 1e-1
    assert 0.4 < sum(rate < 10**-2.5 for rate in rates) / 300 < 0.6
    assert {trial["data.global_batch_size"] for trial in trials} == {1, 2, 3}
    assert {type(trial["x.y"]) for trial in trials} == {float}


def test_a_grid_has_every_combination_once() -> None:
    space = parse_space({name: SPACE[name] for name in ("task.init_args.model", "data.global_batch_size")}, True)
    assert count_trials(space, "grid", 100) == 6
    assert count_trials(space, "grid", 4) == 4
    trials = [tuple(sample(space, "grid", 0, number).values()) for number in range(6)]
    assert trials[:2] == [("small_cnn", 1), ("small_cnn", 2)]
    assert len(set(trials)) == 6


def test_without_optuna_its_samplers_are_refused_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs optuna, which is not installed: .*\[tune\]"):
        check_optuna()


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_optuna_proposes_the_same_for_the_same_results(sampler: str) -> None:
    pytest.importorskip("optuna")
    space = parse_space(SPACE)
    observed = [Observed(sample(space, "random", 0, n), abs(n - 6.0)) for n in range(12)] + [
        Observed(sample(space, "random", 0, 12), None)
    ]
    proposed = propose(space, sampler, 0, 13, observed, "min")
    assert proposed == propose(space, sampler, 0, 13, observed, "min")
    # Without enough results both draw.
    assert propose(space, sampler, 0, 13, [], "min") != propose(space, sampler, 0, 14, [], "min")
    assert proposed.keys() == SPACE.keys()
    assert proposed["task.init_args.model"] in ("small_cnn", "mlp")
