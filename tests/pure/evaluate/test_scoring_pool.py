"""Parts of an evaluation that several actors take: each is scored once, whatever happens to the actors."""

from __future__ import annotations

import threading

import pytest
import ray

from ray_app.errors import DataError
from ray_app.evaluate.evaluator import _OpenParts
from ray_app.task.metrics import Chunk


def chunk(part: int) -> Chunk:
    return Chunk(part, 1, 0.0, 1.0, {}, [])


def parts_of(chunks: list[Chunk]) -> list[int]:
    return sorted(one.low for one in chunks)


def test_the_part_of_a_lost_actor_is_scored_by_another() -> None:
    parts = _OpenParts(6)
    is_taken, is_lost = threading.Event(), threading.Event()

    def lose(part: int) -> list[Chunk]:
        is_taken.set()
        assert is_lost.wait(30)
        raise ray.exceptions.ActorDiedError

    lost = threading.Thread(target=parts.work, args=(lose,))
    lost.start()
    assert is_taken.wait(30)
    scored: list[int] = []

    def score(part: int) -> list[Chunk]:
        scored.append(part)
        if len(scored) == 5:
            # Only the part in progress is left when the actor is lost.
            is_lost.set()
        return [chunk(part)]

    parts.work(score)
    lost.join(30)
    assert parts_of(parts.result()) == [0, 1, 2, 3, 4, 5]


def test_an_error_of_user_code_ends_the_scoring_of_all() -> None:
    parts = _OpenParts(100)

    def refuse(part: int) -> list[Chunk]:
        raise DataError("row 7 is NaN")

    parts.work(refuse)
    scored: list[int] = []
    parts.work(lambda part: scored.append(part) or [chunk(part)])
    assert scored == []
    with pytest.raises(DataError, match="row 7 is NaN"):
        parts.result()


def test_scoring_fails_if_all_actors_are_lost() -> None:
    parts = _OpenParts(2)

    def lose(part: int) -> list[Chunk]:
        raise ray.exceptions.ActorDiedError

    parts.work(lose)
    parts.work(lose)
    with pytest.raises(ray.exceptions.RayError, match="all actors of the evaluation have failed"):
        parts.result()
