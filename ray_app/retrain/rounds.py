"""The record of retrainings: a round's stages, each written once, and the audit of everything that was decided."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ray_app.record.files import folders, names, put_json, read_all_json, read_json, remove_tree
from ray_app.retrain.key import Inputs
from ray_app.retrain.paths import RetrainPaths
from ray_app.runs.outcome.registering import user

STAGES = ("decided", "validated", "trained", "registered", "judged", "concluded", "recorded")
"""In this order; data that is refused goes from `validated` to `concluded`."""


@dataclass(frozen=True)
class Round:
    """What was done for one key. Each stage is written once, after its effects, so that a stopped round goes on where it was.

    Args:
        paths: The model's retrainings.
        key: The round's key.
    """

    paths: RetrainPaths
    key: str

    def read(self, stage: str) -> dict[str, Any] | None:
        """What a stage came to; None if it is not done."""
        return read_json(self.paths.round(self.key) / f"{stage}.json")

    def put(self, stage: str, value: dict[str, Any]) -> dict[str, Any]:
        """Writes a stage with the time, unless it is there; returns what is there."""
        put_json(self.paths.round(self.key) / f"{stage}.json", {**value, "at": now()}, if_absent=True)
        return self.read(stage) or {}

    def clear(self) -> None:
        """Removes all stages, also those that a removal before left because it was interrupted.

        Raises:
            OSError: Some are still there; what is begun now would take them for its own.
        """
        folder = self.paths.round(self.key)
        remove_tree(folder)
        left = [stage for stage in STAGES if self.read(stage) is not None]
        if left:
            raise OSError(f"{folder} cannot be emptied: {', '.join(left)} are still there. Remove it by hand, then start again.")

    @property
    def inputs(self) -> Inputs:
        """What the round is about."""
        return Inputs(**(self.read("decided") or {})["inputs"])

    @property
    def is_done(self) -> bool:
        """Whether everything about it was decided and recorded."""
        return self.read("recorded") is not None


def open_rounds(paths: RetrainPaths) -> list[Round]:
    """Rounds that were stopped before their end, by key."""
    rounds = [Round(paths, key) for key in sorted(folders(paths.rounds))]
    return [one for one in rounds if not one.is_done and one.read("decided") is not None]


def audit(paths: RetrainPaths, id: str, what: str, why: str, details: dict[str, Any]) -> None:
    """Adds an entry to the audit record, unless one with this id is there; several may do so at once.

    Args:
        paths: The model's retrainings.
        id: What identifies the decision.
        what: `promoted`, `gate refused`, `data refused`, `superseded` or `rolled back`.
        why: The reason, with figures.
        details: All else.
    """
    entry = {"id": id, "when": now(), "who": who(), "what": what, "why": why, **details}
    while not any(known["id"] == id for known in entries(paths)):
        number = max((int(name.removesuffix(".json")) for name in names(paths.audit)), default=0) + 1
        put_json(paths.entry(number), entry, if_absent=True)  # if somebody was faster, under the next number


def entries(paths: RetrainPaths) -> list[dict[str, Any]]:
    """The audit record, oldest first."""
    return read_all_json(paths.audit / name for name in sorted(names(paths.audit)))


def who() -> str:
    """Who decides: the user, the machine and the process."""
    return f"{user()}@{platform.node()} (process {os.getpid()})"


def now() -> str:
    """The time, ISO 8601 (UTC)."""
    return datetime.now(UTC).isoformat(timespec="seconds")
