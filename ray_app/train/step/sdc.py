"""Which shares of a step are computed twice, and by whom, as a pure function: all ranks know it alike.

So that nobody waits for one who does more, each rank computes one share of another rank again in the same step, and
nobody in most others.

Shares of a step that another worker computes again, before the update: a worker whose hardware errs is found by the
bits that differ.

Hardware that computes wrongly without saying so is met at scale: Dixit et al., "Silent Data Corruptions at Scale",
2021; Hochschild et al., "Cores that don't count", 2021. Here a share of a step has the same bits wherever it is
computed, so a comparison is one of numbers.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ray_app.data.windows import MicroBatch
from ray_app.errors import IrreproducibleError, PeerLostError, WrongResultError
from ray_app.plan.hashing import key
from ray_app.reduction.base import GradientReducer, World, collective
from ray_app.reduction.bucketed import BucketedReducer
from ray_app.reduction.transport import P2PWork, receive, start_send, sum_over_ranks

_WHEN, _SHIFT, _WHOSE = 31, 32, 33  # salts: what a key is for


class RecomputedShare(NamedTuple):
    """A share that is computed again.

    Args:
        logical_worker: Whose.
        owner: The rank that plays it.
        by: The rank that computes it again.
    """

    logical_worker: int
    owner: int
    by: int


def draw_recomputed_shares(
    step: int, seed: int, rate: float, blocks: Sequence[range], groups: Sequence[Sequence[int]]
) -> list[RecomputedShare]:
    """What is computed again in a step.

    Args:
        step: Which, counted from 0 over the run.
        seed: Of the run.
        rate: The part of all shares.
        blocks: The logical workers of every rank.
        groups: Ranks whose bits can be compared; of one that is alone nothing is computed again.
    """
    most = max(map(len, blocks))
    found, rounds = list[RecomputedShare](), rate * most
    chance = key(_WHEN, seed, step) / 2**64  # not every n-th step, which might always be the same one of an epoch
    for number in range(math.floor(rounds) + (chance < rounds % 1)):
        for group in groups:
            shift = 1 + key(_SHIFT, seed, step, number) % max(1, len(group) - 1)
            for place, by in enumerate(group):
                owner = group[(place + shift) % len(group)]
                which = (key(_WHOSE, seed, step, owner) + number) % most
                if owner != by and which < len(blocks[owner]):
                    found.append(RecomputedShare(blocks[owner][which], owner, by))
    return found


def tie_breaking_ranks(again: RecomputedShare, groups: Sequence[Sequence[int]]) -> list[int]:
    """The ranks that compute a share once more, of which two results differ: a third one, or, where there are only two,
    both.
    """
    [group] = [group for group in groups if again.by in group]
    others = [rank for rank in group if rank not in (again.owner, again.by)]
    return others[:1] or [again.owner, again.by]


def corrupt_rank(again: RecomputedShare, bits: tuple[int, int], judged: Sequence[tuple[int, int]]) -> int | None:
    """The rank whose result was wrong; None if that cannot be told.

    Args:
        again: The share.
        bits: The results of its owner and of who computed it again, which differ.
        judged: Those of `tie_breaking_ranks`, each a rank and its result.
    """
    by_owner, by_other = bits
    if len(judged) == 1:
        return {by_owner: again.by, by_other: again.owner}.get(judged[0][1])
    [(_, owner_again), (_, other_again)] = judged
    if owner_again != other_again:
        return None
    return {by_owner: again.by, by_other: again.owner}.get(owner_again)


Compute = Callable[[MicroBatch], int]


@dataclass(frozen=True)
class WorkerDevice:
    """Where a worker computes.

    Args:
        name: The worker: its node and process.
        device: What computes.
        environment: What its bits depend on besides; only those of equal ones are compared.
    """

    name: str
    device: str
    environment: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class SdcFinding:
    """A worker has computed wrongly.

    Args:
        rank: Which.
        place: Where.
        step: In which step, counted from 0 over the run.
        logical_worker: Whose share.
        clean: The last step of which a share of that worker had been computed again, and was right; -1: none.
        told_by: The rank that is to tell.
    """

    rank: int
    place: WorkerDevice
    step: int
    logical_worker: int
    clean: int
    told_by: int


class SdcChecker:
    """See the module.

    Args:
        rate: The part of all shares.
        seed: Of the run.
        places: Where each rank computes.
        clean: For each worker's name the last step that was right; goes on from generation to generation.
        tell: Told of a wrong share on all ranks, before it is acted upon.
    """

    def __init__(
        self,
        rate: float,
        seed: int,
        places: Sequence[WorkerDevice],
        clean: dict[str, int],
        tell: Callable[[SdcFinding], None],
    ) -> None:
        self._rate, self._seed, self.places, self.clean, self.tell = rate, seed, places, clean, tell
        by_environment: dict[tuple[tuple[str, str], ...], list[int]] = {}
        for rank, place in enumerate(places):
            by_environment.setdefault(place.environment, []).append(rank)
        self.groups = list(by_environment.values())

    def begin(self, world: World) -> None:
        """From now on the workers play these shares."""
        self.world = world
        self._blocks = [world.assigned_to(rank) for rank in range(world.size)]

    def due(self, step: int, batches: Sequence[MicroBatch], reducer: GradientReducer) -> RecomputedShares | None:
        """What is computed twice in a step; a collective of those who do it.

        Args:
            step: Which, counted from 0 over the run.
            batches: The micro-batches of this rank.
            reducer: Reduces the gradients of this step.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        shares = draw_recomputed_shares(step, self._seed, self._rate, self._blocks, self.groups)
        assert isinstance(reducer, BucketedReducer), "checked with the configuration"
        return RecomputedShares(self, step, shares, batches, reducer) if shares else None


class RecomputedShares:
    """The shares of one step that are computed twice.

    Args:
        replays: What goes on from step to step.
        step: Which.
        shares: They.
        batches, reducer: See `SdcChecker.due`.
    """

    def __init__(
        self,
        replays: SdcChecker,
        step: int,
        shares: Sequence[RecomputedShare],
        batches: Sequence[MicroBatch],
        reducer: BucketedReducer,
    ) -> None:
        self._replays, self._step, self.shares = replays, step, shares
        self._world, self._reducer = replays.world, reducer
        self._mine = {batch.logical_worker: batch for batch in batches}
        self._reducer.watch_checksums({each.logical_worker for each in shares if each.owner == self._world.rank})
        self._theirs = self._send(shares)
        self._own, self._bits = dict[int, int](), dict[int, int]()

    def _send(self, shares: Sequence[RecomputedShare]) -> list[MicroBatch]:
        """Gives those who compute again what they need; returns what this rank has to."""
        rank, sent, received = self._world.rank, list[P2PWork](), list[MicroBatch]()
        with collective():
            for each in shares:
                if rank == each.owner != each.by:
                    sent += [start_send(part, each.by) for part in _packed(self._mine[each.logical_worker])]
            for each in shares:
                if rank == each.by:
                    received.append(self._mine[each.logical_worker] if each.owner == rank else _received(each.owner))
            for transfer in sent:
                transfer.wait()
        return received

    def played(self, logical_worker: int, bits_of_buffers: Callable[[], int]) -> None:
        """A logical worker of this rank has been played, which has changed buffers."""
        if any(each.logical_worker == logical_worker for each in self.shares):
            self._own[logical_worker] = bits_of_buffers()

    def compute(self, compute: Compute) -> None:
        """Computes what this rank has to compute again.

        Args:
            compute: Leaves the gradient of a micro-batch in `.grad`, and no other trace; returns the bits of the
                buffers that come of it.
        """
        self._compute = compute
        self._bits = {batch.logical_worker: self._bits_of(batch) for batch in self._theirs}

    def _bits_of(self, batch: MicroBatch) -> int:
        with self._reducer.free_grads():
            of_buffers = self._compute(batch)
            return _signed(of_buffers + self._reducer.gradient_checksum())

    def compare(self) -> None:
        """Holds all that was computed twice against each other; a collective, by which all come to the same end.

        Raises:
            WrongResultError: This rank is wrong.
            PeerLostError: Another rank is wrong, and ends, or has left; nothing of the step may be kept.
            IrreproducibleError: Who is wrong cannot be told.
        """
        rank, gradients = self._world.rank, self._reducer.checksums()
        own = {v: _signed(bits + gradients.get(v, 0)) for v, bits in self._own.items()}
        self._reducer.watch_checksums(set())
        told = torch.zeros(len(self.shares), 2, dtype=torch.int64)
        for line, each in zip(told, self.shares, strict=True):
            line[0] = own[each.logical_worker] if each.owner == rank else 0
            line[1] = self._bits[each.logical_worker] if each.by == rank else 0
        for each, (first, second) in zip(self.shares, sum_over_ranks(told, self._world).tolist(), strict=True):
            if first != second:
                self._judge(each, (first, second))
        self._replays.clean.update({self._replays.places[each.owner].name: self._step for each in self.shares})

    def _judge(self, share: RecomputedShare, bits: tuple[int, int]) -> None:
        ranks, me = tie_breaking_ranks(share, self._replays.groups), self._world.rank
        once_more = self._send([share._replace(by=rank) for rank in ranks])
        told = torch.zeros(len(ranks), dtype=torch.int64)
        if me in ranks:
            told[ranks.index(me)] = self._bits_of(once_more[0])
        rank = corrupt_rank(share, bits, list(zip(ranks, sum_over_ranks(told, self._world).tolist(), strict=True)))
        if rank is None:
            raise IrreproducibleError(
                f"Step {self._step}: ranks {sorted({share.owner, share.by, *ranks})} computed the gradient of logical"
                f" worker"
                f" {share.logical_worker} and do not agree. Either the task draws random numbers that the seed does not"
                f" decide, or uses"
                " operations that are not deterministic (ray-app check finds both), or a device errs, and there are too"
                " few workers to tell"
                " which."
            )
        place = self._replays.places[rank]
        teller = next(r for r in range(self._world.size) if r != rank)
        self._replays.tell(
            SdcFinding(rank, place, self._step, share.logical_worker, self._replays.clean.get(place.name, -1), teller)
        )
        said = (
            f"rank {rank} on {place.name} ({place.device}) computed logical worker {share.logical_worker} of step"
            f" {self._step} wrongly"
        )
        if rank == me:
            raise WrongResultError(
                f"This worker, {said}: others agree on another result. It ends, so that nothing of it is kept."
            )
        raise PeerLostError(f"{said}, and ends")


def _signed(bits: int) -> int:
    """Modulo 2**64, as int64 has it."""
    return (bits + (1 << 63)) % (1 << 64) - (1 << 63)


def _packed(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """How many bytes, and these; of a part of a tensor pickle would send the whole."""
    held = batch._replace(
        fields={name: values.cpu().clone() for name, values in batch.fields.items()}, keys=batch.keys.clone()
    )
    data = torch.frombuffer(bytearray(pickle.dumps(held)), dtype=torch.uint8)
    return torch.tensor([len(data)]), data


def _received(owner: int) -> MicroBatch:
    size = torch.zeros(1, dtype=torch.int64)
    receive(size, owner)
    data = torch.zeros(int(size), dtype=torch.uint8)
    receive(data, owner)
    batch: MicroBatch = pickle.loads(data.numpy().tobytes())
    return batch
