"""Sums over many ranks, and who sends which records, on a network in this process."""

from __future__ import annotations

from random import Random

import pytest

from ray_app.reduction.transport import doubling_rounds
from ray_app.train.checkpointing.step_log import step_spans, steps_to_send


def play(size: int) -> tuple[list[set[int]], int]:
    """Whose values are in each rank's sum, and the longest chain of messages that wait for each other."""
    todo = {rank: doubling_rounds(rank, size) for rank in range(size)}
    have, depth = [{rank} for rank in range(size)], [0] * size
    mail: dict[tuple[int, int], list[tuple[set[int], int]]] = {}
    sent = set[int]()
    while any(todo.values()):
        moved = False
        for rank, left in todo.items():
            if not left:
                continue
            each = left[0]
            if each.sends and rank not in sent:
                mail.setdefault((rank, each.peer), []).append((set(have[rank]), depth[rank]))
                sent.add(rank)
            if each.receives:
                if not mail.get((each.peer, rank)):
                    continue
                received, at = mail[each.peer, rank].pop(0)
                assert not each.adds or not received & have[rank], "somebody's values would count twice"
                have[rank] = have[rank] | received if each.adds else received
                depth[rank] = max(depth[rank], at) + 1
            sent.discard(rank)
            left.pop(0)
            moved = True
        assert moved, "all wait for each other"
    assert not any(mail.values()), "a message was not received"
    return have, max(depth)


@pytest.mark.parametrize("size", [*range(1, 40), 64, 100, 127, 255])
def test_each_rank_has_the_values_of_all_once(size: int) -> None:
    have, depth = play(size)
    assert have == [set(range(size))] * size
    assert depth <= (size - 1).bit_length() + 1


def test_a_thousand_ranks_need_eleven_messages_one_after_the_other() -> None:
    """A ring: 1,998."""
    _, depth = play(1000)
    assert depth <= 11


def test_spans_are_the_steps() -> None:
    assert step_spans([]) == ()
    assert step_spans([3, 4, 5, 7, 9, 10]) == ((3, 5), (7, 7), (9, 10))


def test_nobody_sends_what_all_have() -> None:
    assert steps_to_send([((1, 500),)] * 1000) == {}
    assert steps_to_send([()] * 1000) == {}
    assert steps_to_send([((1, 500),)] * 999 + [((1, 501),)]) == {999: [501]}
    assert steps_to_send([()] * 2 + [((1, 3),)] * 998) == {2: [1, 2, 3]}


def test_whatever_ranks_have_all_have_it_afterwards_and_each_record_is_sent_once() -> None:
    for seed in range(300):
        random = Random(seed)
        held = [{step for step in range(8) if random.random() < 0.6} for _ in range(random.randint(1, 6))]
        sent = steps_to_send([step_spans(sorted(steps)) for steps in held])
        steps = [step for each in sent.values() for step in each]
        assert len(steps) == len(set(steps))
        assert all(set(each) <= held[rank] for rank, each in sent.items())
        assert all(mine | set(steps) == set().union(*held) for mine in held)
