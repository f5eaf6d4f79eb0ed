"""Records that some ranks have and others lack: only those travel, and each from one rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch.distributed as dist

from ray_app.exchange.exchange import World, collective, gather
from ray_app.record.progress.segments import StepRecord

Spans = tuple[tuple[int, int], ...]
"""First and last of each run of steps that follow each other."""


def spans(steps: Iterable[int]) -> Spans:
    """The spans of steps in their order."""
    runs = [[step for _, step in run] for _, run in groupby(enumerate(steps), key=lambda pair: pair[1] - pair[0])]
    return tuple((run[0], run[-1]) for run in runs)


def senders(held: Sequence[Spans]) -> dict[int, list[int]]:
    """The steps that each rank has to send: what somebody lacks, from the first who has it."""
    first: dict[Spans, int] = {}
    for rank, each in enumerate(held):
        first.setdefault(each, rank)
    kinds = {rank: {step for low, high in each for step in range(low, high + 1)} for each, rank in first.items()}
    known = set.intersection(*kinds.values())
    found: dict[int, list[int]] = {}
    for rank, steps in kinds.items():  # the first ranks first
        if new := sorted(steps - known):
            found[rank] = new
            known |= steps
    return found


def share_records(kept: Iterable[StepRecord], world: World) -> dict[int, StepRecord]:
    """The records that any rank has, by their steps; a collective.

    Raises:
        PeerLostError: A peer left meanwhile.
    """
    mine = {record.step: record for record in kept}
    for rank, steps in senders(gather(spans(sorted(mine)), world)).items():
        sent: list[Any] = [[mine[step] for step in steps] if rank == world.rank else None]
        with collective():
            dist.broadcast_object_list(sent, src=rank)
        mine = {record.step: record for record in sent[0]} | mine
    return dict(sorted(mine.items()))
