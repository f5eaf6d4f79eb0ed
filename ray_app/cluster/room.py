"""How many fit."""

from __future__ import annotations

import math


def room_for(free: float, each: float) -> float:
    """How many that need so much each fit into what is free, whole or infinite.

    5 of 0.2 fit into 1.0, which a division of floats rounds to 4.
    """
    return (free + 1e-6) // each if math.isfinite(free) else free
