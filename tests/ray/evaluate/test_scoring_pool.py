"""Parts of an evaluation that several actors score: each is scored once, whatever happens to the actors."""

import os
from typing import Any

import pytest
import ray

from ray_app.errors import DataError
from ray_app.evaluate.evaluator import score_parts
from ray_app.task.metrics import Chunk

pytestmark = pytest.mark.usefixtures("ray_cluster")


def score(part: int) -> list[Chunk]:
    return [Chunk(part, 1, 0.0, 1.0, {}, [])]


class Scorer:
    """Scores, and dies or raises an error at a part."""

    def score(self, part: int, lost: int = -1, refused: int = -1) -> list[Chunk]:
        if part == lost:
            os._exit(1)
        if part == refused:
            raise DataError("row 7 is NaN")
        return score(part)


def start_scorer() -> Any:
    return ray.remote(num_cpus=0)(Scorer).remote()


@pytest.mark.parametrize("scores_here", [True, False])
def test_the_part_of_a_lost_actor_is_scored_by_another(scores_here: bool) -> None:
    lost, other = start_scorer(), start_scorer()
    actors = [lambda part: lost.score.remote(part, lost=part), other.score.remote]
    chunks = score_parts(actors, 12, score if scores_here else None)
    assert sorted(one.low for one in chunks) == list(range(12))


def test_an_error_of_the_data_ends_the_scoring() -> None:
    actor = start_scorer()
    with pytest.raises(DataError, match="row 7 is NaN"):
        score_parts([lambda part: actor.score.remote(part, refused=3)], 8)


def test_scoring_fails_if_all_actors_are_lost_and_this_process_does_not_score() -> None:
    for score_part in (score, None):
        actor = start_scorer()
        actors = [lambda part, actor=actor: actor.score.remote(part, lost=part)]
        if score_part is not None:
            assert len(score_parts(actors, 2, score_part)) == 2
        else:
            with pytest.raises(ray.exceptions.RayError, match="all actors of the evaluation have failed"):
                score_parts(actors, 2)
