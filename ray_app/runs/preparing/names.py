"""Names of runs whose user gave none."""

from __future__ import annotations

import secrets
import time

_ADJECTIVES = (
    "amber",
    "bold",
    "brave",
    "bright",
    "calm",
    "clear",
    "crisp",
    "eager",
    "fair",
    "glad",
    "keen",
    "kind",
    "mild",
    "neat",
    "quiet",
)
_NOUNS = ("alder", "aspen", "beech", "birch", "cedar", "cliff", "coast", "creek", "delta", "elm", "fern", "fjord", "grove", "heath", "lake")


def new_run_name() -> str:
    """A readable name that sorts by time: `20261120-140512-calm-birch-3f9c02`, also of a thousand starts at once different."""
    words = f"{secrets.choice(_ADJECTIVES)}-{secrets.choice(_NOUNS)}"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{words}-{secrets.token_hex(3)}"
