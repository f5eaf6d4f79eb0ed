"""Drawing and shrinking programs of any grammar, for searches that compare `ray_app` with another tool."""

from __future__ import annotations

import random
from collections.abc import Callable, Container
from typing import Any
from unittest.mock import patch

from tests.support import generated_programs
from tests.support.generated_programs import Program, simplest_failing

Grammar = dict[str, list[Any]]


def draw_choices(grammar: Grammar, seed: int, rare: Container[str] = ()) -> Program:
    """Returns the choices of a seed; four of ten are the simplest, of `rare` keys eleven of twelve."""
    source = random.Random(seed)
    chances = {name: 11 / 12 if name in rare else 0.4 for name in grammar}
    choices = {
        name: options[0] if source.random() < chances[name] else source.choice(options)
        for name, options in grammar.items()
    }
    return choices | {"seed": seed}


def shrink(grammar: Grammar, program: Program, difference: Callable[[Program], str]) -> Program:
    """Returns the program with all choices replaced by the simplest ones that still differ."""
    with patch.dict(generated_programs.GRAMMAR, grammar, clear=True):
        return simplest_failing(program, lambda changed: bool(difference(changed)))
