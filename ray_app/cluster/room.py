"""How many fit."""

from __future__ import annotations

import math

from ray_app.config.config import Config


def room_for(free: float, each: float) -> float:
    """How many that need so much each fit into what is free, whole or infinite.

    5 of 0.2 fit into 1.0, which a division of floats rounds to 4.
    """
    return (free + 1e-6) // each if math.isfinite(free) else free


def room_on_gpus(free: float, each: float) -> float:
    """Returns how many workers that need `each` of a GPU fit into `free` GPUs, whole or infinite.

    Ray places a part of a GPU on one GPU, so two GPUs have room for two workers of 0.6, not for three.
    """
    if each >= 1 or not math.isfinite(free):
        return room_for(free, each)
    whole = math.floor(free + 1e-6)
    return whole * room_for(1, each) + room_for(max(0.0, free - whole), each)


def has_evaluator(config: Config) -> bool:
    """Whether an actor of its own evaluates."""
    return config.data.eval_path is not None and config.evaluate.where == "actor"


def evaluator_gpus(config: Config) -> float:
    """GPUs that are not for training workers: the evaluator's."""
    return config.evaluate.num_gpus if has_evaluator(config) else 0.0
