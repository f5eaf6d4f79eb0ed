"""Decisions of the schedulers beside those of Ray Tune's schedulers, on the same curves and without a cluster.

Successive halving decides alike for numbers that `eta` divides; for others Ray Tune rounds up. The median rule decides
alike if trials train one after the other. ASHA is another algorithm there: it never continues a trial that it stopped.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.schedulers import AsyncHyperBandScheduler, MedianStoppingRule, TrialScheduler
from ray.tune.schedulers.hyperband import _Bracket

from ray_app.tune.scheduler import Promotion, Scheduler, rung_epochs

RUNGS = rung_epochs("halving", 3, 1, 27)
TRIALS = 27
FIELDS = {"time_attr": "epochs", "metric": "accuracy", "mode": "max"}


def _value(seed: int, trial: int, rung: int) -> float:
    """Returns a result on a curve that rises to the quality of the trial, with noise."""
    quality, noise = random.Random(f"{seed} {trial}").random(), random.Random(f"{seed} {trial} {rung}").random()
    return quality * (1 - 0.5 ** (rung + 1)) + 0.3 * noise


def _promotions(kind: str, seed: int) -> set[Promotion]:
    """Returns the promotions if each trial trains as far as it can before the next one begins."""
    scheduler, promotions = Scheduler(kind, 3, len(RUNGS), TRIALS, "max", is_fixed=True), set[Promotion]()
    while waiting := scheduler.waiting():
        promotions |= set(scheduler.put(*waiting[0], _value(seed, *waiting[0])))
    return promotions


def _continued(scheduler: TrialScheduler, seed: int) -> set[Promotion]:
    """Returns the rungs to which a scheduler of Ray Tune continues trials that train one after the other."""
    controller: Any = SimpleNamespace(get_live_trials=list)
    continued = set[Promotion]()
    for number in range(TRIALS):
        # The schedulers use a trial as a key, which a SimpleNamespace cannot be.
        trial: Any = type("Trial", (), {"trial_id": str(number)})()
        scheduler.on_trial_add(controller, trial)
        for rung, epochs in enumerate(RUNGS[:-1]):
            result = {"epochs": epochs, "accuracy": _value(seed, number, rung)}
            if scheduler.on_trial_result(controller, trial, result) != TrialScheduler.CONTINUE:
                break
            continued.add(Promotion(number, rung + 1))
    return continued


@pytest.mark.parametrize("seed", range(20))
def test_the_median_decides_as_in_ray_tune(seed: int) -> None:
    expected = _continued(MedianStoppingRule(**FIELDS, grace_period=1), seed)
    assert _promotions("median", seed) == expected
    assert 0 < len(expected) < 3 * TRIALS


@pytest.mark.parametrize("seed", range(20))
def test_halving_decides_as_a_bracket_of_ray_tune(seed: int) -> None:
    bracket: Any = _Bracket("epochs", TRIALS, 1, 27, 3, s=3)
    for trial in range(TRIALS):
        bracket.add_trial(trial)
    expected = set[Promotion]()
    for rung, epochs in enumerate(RUNGS[:-1]):
        for trial in bracket.current_trials():
            bracket.update_trial_stats(trial, {"epochs": epochs, "accuracy": _value(seed, trial, rung)})
        good, bad = bracket.successive_halving("accuracy", 1.0)
        expected |= {Promotion(trial, rung + 1) for trial in good}
        for trial in bad:
            bracket.cleanup_trial(trial)
    assert _promotions("halving", seed) == expected


def test_asha_promotes_the_best_which_ray_tune_may_have_stopped() -> None:
    lost = 0
    for seed in range(20):
        best = sorted(range(TRIALS), key=lambda trial: -_value(seed, trial, 0))[: TRIALS // 3]
        promoted = {trial for trial, rung in _promotions("asha", seed) if rung == 1}
        assert promoted >= set(best)
        fields = {**FIELDS, "grace_period": 1, "max_t": 27, "reduction_factor": 3}
        lost += len(
            set(best) - {trial for trial, rung in _continued(AsyncHyperBandScheduler(**fields), seed) if rung == 1}
        )
    assert lost > 0
