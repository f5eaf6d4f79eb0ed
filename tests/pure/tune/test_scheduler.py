"""The decisions of a study: which trials go on, whatever the order in which results come."""

from __future__ import annotations

import random

import pytest

from ray_app.tune.scheduler import Promotion, Scheduler, rung_epochs


def _value(trial: int, rung: int, failing: frozenset[int] = frozenset()) -> float | None:
    """Returns the result of a simulated trial: good trials are good in every rung, with noise and ties."""
    return (
        None
        if trial in failing
        else round(random.Random(trial).random() + 0.1 * random.Random(f"{trial} {rung}").random(), 2)
    )


def _run(scheduler: Scheduler, slots: int, seed: int, failing: frozenset[int] = frozenset()) -> set[Promotion]:
    """Runs simulated trials in slots that end in a random order; returns all promotions."""
    order, promotions = random.Random(seed), set[Promotion]()
    running = list[Promotion]()
    while waiting := scheduler.waiting():
        running += [job for job in waiting if job not in running][: slots - len(running)]
        job = running.pop(order.randrange(len(running)))
        promotions |= set(scheduler.put(*job, _value(*job, failing)))
    return promotions


@pytest.mark.parametrize(
    ("kind", "eta", "min_epochs", "epochs", "expected"),
    [
        ("halving", 3, 1, 27, (1, 3, 9, 27)),
        ("halving", 3, 1, 30, (1, 3, 9, 30)),
        ("asha", 2, 2, 9, (2, 4, 9)),
        ("halving", 3, 1, 2, (2,)),
        ("none", 3, 1, 27, (27,)),
    ],
)
def test_rungs_end_with_the_last_epoch(
    kind: str, eta: int, min_epochs: int, epochs: int, expected: tuple[int, ...]
) -> None:
    assert rung_epochs(kind, eta, min_epochs, epochs) == expected


def test_halving_promotes_the_best_third_of_each_rung() -> None:
    scheduler = Scheduler("halving", 3, 4, 27, "max", is_fixed=True)
    promotions = _run(scheduler, 4, seed=0)
    best = sorted(range(27), key=lambda trial: (-(_value(trial, 0) or 0), trial))[:9]
    assert {job.trial for job in promotions if job.rung == 1} == set(best)
    assert [sum(job.rung == rung for job in promotions) for rung in (1, 2, 3)] == [9, 3, 1]
    winner = scheduler.winner()
    assert winner is not None
    assert winner.rung == 3


@pytest.mark.parametrize("kind", ["halving", "asha", "median"])
@pytest.mark.parametrize("failing", [frozenset[int](), frozenset({0, 7, 20})])
def test_decisions_do_not_depend_on_slots_or_on_the_order_of_results(kind: str, failing: frozenset[int]) -> None:
    outcomes = set()
    for slots in (1, 2, 4, 27):
        for seed in range(5):
            scheduler = Scheduler(kind, 3, 4, 27, "max", is_fixed=True)
            outcomes.add((frozenset(_run(scheduler, slots, seed, failing)), scheduler.winner()))
    assert len(outcomes) == 1
    [(promotions, winner)] = outcomes
    assert not {job.trial for job in promotions} & failing
    assert winner is not None
    assert winner.rung == 3


def test_asha_promotes_before_a_rung_is_complete() -> None:
    scheduler = Scheduler("asha", 3, 2, 9, "min", is_fixed=True)
    assert scheduler.put(1, 0, 0.5) == []
    assert scheduler.put(0, 0, 0.9) == []
    assert scheduler.put(2, 0, 0.7) == [Promotion(1, 1)]
    assert scheduler.waiting()[0] == Promotion(1, 1)


def test_asha_by_arrival_takes_results_as_they_come() -> None:
    scheduler = Scheduler("asha", 3, 2, 9, "min", is_fixed=False)
    promoted = [scheduler.put(trial, 0, value) for trial, value in ((8, 0.5), (7, 0.9), (3, 0.7))]
    assert promoted == [[], [], [Promotion(8, 1)]]


def test_a_failed_trial_is_the_worst_of_its_rung() -> None:
    scheduler = Scheduler("halving", 3, 2, 3, "max", is_fixed=True)
    assert scheduler.put(0, 0, None) == []
    assert scheduler.put(1, 0, float("nan")) == []
    assert scheduler.put(2, 0, -5.0) == [Promotion(2, 1)]
    scheduler.put(2, 1, None)
    assert scheduler.is_decided()
    assert scheduler.winner() == Promotion(2, 0)


def test_a_rung_closes_although_fewer_trials_come_than_expected() -> None:
    scheduler = Scheduler("halving", 2, 3, 8, "max", is_fixed=True)
    promotions = _run(scheduler, 2, 0, frozenset({0, 1, 2, 3, 4, 5}))
    assert {job for job in promotions if job.rung == 1} == {Promotion(6, 1), Promotion(7, 1)}
    assert sum(job.rung == 2 for job in promotions) == 1


def test_more_trials_later_give_the_winner_of_a_study_that_began_with_them() -> None:
    small = Scheduler("halving", 3, 3, 9, "max", is_fixed=True)
    results = [(*job, _value(*job)) for job in sorted({*(Promotion(t, 0) for t in range(9)), *_run(small, 2, 0)})]
    grown, straight = (Scheduler("halving", 3, 3, 18, "max", is_fixed=True) for _ in range(2))
    for result in results:
        grown.put(*result)
    _run(grown, 3, 1)
    _run(straight, 1, 0)
    assert grown.winner() == straight.winner()


def test_without_rungs_the_best_trial_wins() -> None:
    scheduler = Scheduler("none", 3, 1, 5, "min", is_fixed=True)
    assert _run(scheduler, 2, 0) == set()
    winner = scheduler.winner()
    assert winner is not None
    assert _value(winner.trial, 0) == min(_value(trial, 0) or 0 for trial in range(5))
