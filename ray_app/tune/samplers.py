"""The settings of each trial of a study, as a pure function of (space, seed, number of the trial, earlier results).

Trial n of `random` and `grid` never depends on other trials. With Optuna's samplers it depends on the results that are
passed, since a sampler is built anew for each trial, seeded by (seed, number).
"""

from __future__ import annotations

import hashlib
import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ray_app.config.import_paths import require
from ray_app.tune.space import Dimension

Settings = Mapping[str, Any]


class Observed(NamedTuple):
    """The settings of an earlier trial, and its result; None for a trial that failed."""

    settings: Settings
    value: float | None


def count_trials(space: Sequence[Dimension], sampler: str, trials: int) -> int:
    """Returns the number of trials: a grid has at most as many as combinations."""
    return min(trials, math.prod(dimension.count or 1 for dimension in space)) if sampler == "grid" else trials


def sample(space: Sequence[Dimension], sampler: str, seed: int, number: int) -> dict[str, Any]:
    """Returns the settings of trial `number` with `random` or `grid`."""
    if sampler == "random":
        return {one.name: one.at(_draw(seed, number, one.name)) for one in space}
    settings, rest = dict[str, Any](), number
    # The last dimension changes first.
    for dimension in reversed(space):
        rest, index = divmod(rest, dimension.count or 1)
        settings[dimension.name] = dimension.pick(index)
    return {dimension.name: settings[dimension.name] for dimension in space}


def _draw(seed: int, number: int, name: str) -> float:
    """Returns a number from 0 to below 1, by the seed, the trial and the setting."""
    key = hashlib.sha256(f"{seed} {number} {name}".encode()).digest()
    return (int.from_bytes(key[:8], "big") >> 11) / 2**53


def check_optuna() -> None:
    """Raises ConfigError if Optuna is not installed."""
    require("optuna", "tune.sampler: tpe or gp", "use random or grid")


def propose(
    space: Sequence[Dimension], sampler: str, seed: int, number: int, observed: Sequence[Observed], mode: str
) -> dict[str, Any]:
    """Returns the settings of trial `number` that Optuna's `tpe` or `gp` proposes.

    Args:
        observed: The earlier trials, in the order of their numbers.
        mode: Whether a higher (`max`) or a lower (`min`) result is better.
    """
    import optuna

    optuna.logging.set_verbosity(logging.WARNING)
    distributions = {dimension.name: _distribution(dimension) for dimension in space}
    key = int(_draw(seed, number, sampler) * 2**32)
    with warnings.catch_warnings():
        # Samplers of Optuna are marked as experimental for years.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        chosen = {"tpe": optuna.samplers.TPESampler, "gp": optuna.samplers.GPSampler}[sampler](seed=key)
    study = optuna.create_study(sampler=chosen, direction="maximize" if mode == "max" else "minimize")
    for one in observed:
        if one.value is None or math.isnan(one.value):
            continue
        # A choice is known by its number, since Optuna takes texts and numbers only.
        params = {
            d.name: d.values.index(one.settings[d.name]) if d.kind == "choice" else one.settings[d.name] for d in space
        }
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=one.value))
    params = study.ask(distributions).params
    return {d.name: d.pick(params[d.name]) if d.kind == "choice" else params[d.name] for d in space}


def _distribution(dimension: Dimension) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if dimension.kind == "choice":
        return CategoricalDistribution(list(range(len(dimension.values))))
    low, high = dimension.values
    if dimension.kind == "int_uniform":
        return IntDistribution(low, high)
    return FloatDistribution(low, high, log=dimension.kind == "log_uniform")
