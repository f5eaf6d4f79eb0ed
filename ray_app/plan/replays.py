"""Which shares of a step are computed twice, and by whom, as a pure function: all ranks know it alike.

So that nobody waits for one who does more, each rank computes one share of another rank again in the same step, and nobody in most others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ray_app.plan.keyed import key

_WHEN, _SHIFT, _WHOSE = 31, 32, 33  # salts: what a key is for


class Again(NamedTuple):
    """A share that is computed again.

    Args:
        logical_worker: Whose.
        owner: The rank that plays it.
        by: The rank that computes it again.
    """

    logical_worker: int
    owner: int
    by: int


def due(step: int, seed: int, rate: float, blocks: Sequence[range], groups: Sequence[Sequence[int]]) -> list[Again]:
    """What is computed again in a step.

    Args:
        step: Which, counted from 0 over the run.
        seed: Of the run.
        rate: The part of all shares.
        blocks: The logical workers of every rank.
        groups: Ranks whose bits can be compared; of one that is alone nothing is computed again.
    """
    most = max(map(len, blocks))
    found, rounds = list[Again](), rate * most
    chance = key(_WHEN, seed, step) / 2**64  # not every n-th step, which might always be the same one of an epoch
    for number in range(math.floor(rounds) + (chance < rounds % 1)):
        for group in groups:
            shift = 1 + key(_SHIFT, seed, step, number) % max(1, len(group) - 1)
            for place, by in enumerate(group):
                owner = group[(place + shift) % len(group)]
                which = (key(_WHOSE, seed, step, owner) + number) % most
                if owner != by and which < len(blocks[owner]):
                    found.append(Again(blocks[owner][which], owner, by))
    return found


def judges(again: Again, groups: Sequence[Sequence[int]]) -> list[int]:
    """The ranks that compute a share once more, of which two results differ: a third one, or, where there are only two, both."""
    [group] = [group for group in groups if again.by in group]
    others = [rank for rank in group if rank not in (again.owner, again.by)]
    return others[:1] or [again.owner, again.by]


def guilty(again: Again, bits: tuple[int, int], judged: Sequence[tuple[int, int]]) -> int | None:
    """The rank whose result was wrong; None if that cannot be told.

    Args:
        again: The share.
        bits: The results of its owner and of who computed it again, which differ.
        judged: Those of `judges`, each a rank and its result.
    """
    by_owner, by_other = bits
    if len(judged) == 1:
        return {by_owner: again.by, by_other: again.owner}.get(judged[0][1])
    [(_, owner_again), (_, other_again)] = judged
    if owner_again != other_again:
        return None
    return {by_owner: again.by, by_other: again.owner}.get(owner_again)
