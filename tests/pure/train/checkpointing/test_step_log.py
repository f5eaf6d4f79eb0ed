"""Recursive doubling sums over many ranks, and records are sent by one rank each; the network is in this process."""

from random import Random

import pytest

from ray_app.reduction.transport import doubling_rounds
from ray_app.train.checkpointing.step_log import step_spans, steps_to_send


def run_rounds(size: int) -> tuple[list[set[int]], int]:
    """Returns the ranks in the sum of each rank, and the length of the longest chain of dependent messages."""
    remaining = {rank: doubling_rounds(rank, size) for rank in range(size)}
    sums, depth = [{rank} for rank in range(size)], [0] * size
    messages: dict[tuple[int, int], list[tuple[set[int], int]]] = {}
    sent = set[int]()
    while any(remaining.values()):
        progressed = False
        for rank, rounds in remaining.items():
            if not rounds:
                continue
            message_round = rounds[0]
            if message_round.sends and rank not in sent:
                messages.setdefault((rank, message_round.peer), []).append((set(sums[rank]), depth[rank]))
                sent.add(rank)
            if message_round.receives:
                if not messages.get((message_round.peer, rank)):
                    continue
                received, sender_depth = messages[message_round.peer, rank].pop(0)
                assert not message_round.adds or not received & sums[rank], "the values of a rank would count twice"
                sums[rank] = sums[rank] | received if message_round.adds else received
                depth[rank] = max(depth[rank], sender_depth) + 1
            sent.discard(rank)
            rounds.pop(0)
            progressed = True
        assert progressed, "a deadlock: all ranks wait for a message"
    assert not any(messages.values()), "a message was not received"
    return sums, max(depth)


@pytest.mark.parametrize("size", [*range(1, 40), 64, 100, 127, 255])
def test_each_rank_adds_the_values_of_all_ranks_once(size: int) -> None:
    sums, depth = run_rounds(size)
    assert sums == [set(range(size))] * size
    assert depth <= (size - 1).bit_length() + 1


def test_a_thousand_ranks_need_eleven_sequential_messages() -> None:
    """A ring would need 1,998."""
    _, depth = run_rounds(1000)
    assert depth <= 11


def test_step_spans_join_consecutive_steps() -> None:
    assert step_spans([]) == ()
    assert step_spans([3, 4, 5, 7, 9, 10]) == ((3, 5), (7, 7), (9, 10))


def test_records_that_all_ranks_have_are_not_sent() -> None:
    assert steps_to_send([((1, 500),)] * 1000) == {}
    assert steps_to_send([()] * 1000) == {}
    assert steps_to_send([((1, 500),)] * 999 + [((1, 501),)]) == {999: [501]}
    assert steps_to_send([()] * 2 + [((1, 3),)] * 998) == {2: [1, 2, 3]}


def test_all_ranks_get_all_records_and_each_record_is_sent_once() -> None:
    for seed in range(300):
        random = Random(seed)
        steps_of_ranks = [{step for step in range(8) if random.random() < 0.6} for _ in range(random.randint(1, 6))]
        sent = steps_to_send([step_spans(sorted(steps)) for steps in steps_of_ranks])
        steps = [step for sent_steps in sent.values() for step in sent_steps]
        assert len(steps) == len(set(steps))
        assert all(set(sent_steps) <= steps_of_ranks[rank] for rank, sent_steps in sent.items())
        assert all(rank_steps | set(steps) == set().union(*steps_of_ranks) for rank_steps in steps_of_ranks)
