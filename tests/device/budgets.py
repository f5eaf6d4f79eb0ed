"""The budget of a step and of a re-forming on simulated devices: launches, waits, copies and bytes, counted, not timed.

The numbers are upper bounds for the small model of `tests/device/strategies.py`. A change that needs more than a budget
raises it here and gives the reason; one that needs less lowers it. The uploads of rows are not counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from tests.device.strategies import CENTRAL, FSDP, LOCAL, OVERLAPPED, SMALL_BUCKETS, Fields
from tests.support.recorded_graph import RecordedGraphs

GLOO: Fields = {"train__backend": "gloo"}
CAPTURE: Fields = GLOO | {"train__capture": True, "scaling__gpus_per_worker": 1.0}
NO_CHECKPOINTS: Fields = {"checkpoint__every_steps": None, "checkpoint__snapshot_every_steps": None}
EIGHT: Fields = {"logical_workers": 8}
BUCKETS = 3
"""Number of buckets with `SMALL_BUCKETS`."""
LOCKED = 4096
"""Bytes of page-locked memory for rows on their way to a device; no state is page-locked in a step."""


class Budget(NamedTuple):
    """The budget of one step on the rank that needs most.

    Args:
        workers: Number of workers, each with a device.
        fields: The configuration.
        counts: What a step may need, by the names in `simulated.cpp`; what is not named, it must not need. Copies are
            those of sums and norms, of buckets, buffers and parameters, and of the table of statistics. Page-locked
            memory is that in use after the step.
    """

    workers: int
    fields: Fields
    counts: Mapping[str, int]


STEPS: dict[str, Budget] = {
    "one worker": Budget(1, SMALL_BUCKETS, {"launches": 171, "waits": 1, "pageable": 1}),
    "one worker, captured": Budget(1, SMALL_BUCKETS | CAPTURE, {"launches": 59, "waits": 1, "pageable": 1}),
    "exact": Budget(4, SMALL_BUCKETS, {"launches": 61, "waits": 1, "locked": 2, "collectives": 2 * BUCKETS + 2}),
    "overlapped": Budget(
        4, SMALL_BUCKETS | OVERLAPPED, {"launches": 55, "waits": 1, "locked": 2, "collectives": BUCKETS + 2}
    ),
    "fsdp": Budget(4, FSDP, {"launches": 185, "waits": 1, "locked": 2, "collectives": 15}),
    "fsdp, overlapped": Budget(4, FSDP | OVERLAPPED, {"launches": 175, "waits": 1, "locked": 2, "collectives": 14}),
    "exact, 8 workers": Budget(
        8, SMALL_BUCKETS | EIGHT, {"launches": 64, "waits": 1, "locked": 2, "collectives": 2 * BUCKETS + 2}
    ),
    "overlapped, 8 workers": Budget(
        8, SMALL_BUCKETS | OVERLAPPED | EIGHT, {"launches": 55, "waits": 1, "locked": 2, "collectives": BUCKETS + 2}
    ),
    "fsdp, 8 workers": Budget(8, FSDP | EIGHT, {"launches": 207, "waits": 1, "locked": 2, "collectives": 15}),
    "a shared device": Budget(
        4,
        SMALL_BUCKETS | GLOO,
        {
            "launches": 60,
            "waits": 7,
            "pageable": 2,
            "locked": 2 * BUCKETS + 2,
            "gloo bytes": 9700,
            "locked bytes": 5 * LOCKED,
        },
    ),
    "a shared device, captured": Budget(
        2,
        SMALL_BUCKETS | CAPTURE,
        {
            "launches": 36,
            "waits": 7,
            "pageable": 2,
            "locked": 3 * BUCKETS + 2,
            "gloo bytes": 6112,
            "locked bytes": 5 * LOCKED,
        },
    ),
    "central storage": Budget(
        2, CENTRAL, {"launches": 83, "waits": 2, "locked": 18, "collectives": 12, "locked bytes": 2 * LOCKED}
    ),
    "local SGD": Budget(
        2, LOCAL | {"train__local_steps": 20}, {"launches": 84, "waits": 1, "pageable": 1, "gloo bytes": 352}
    ),
}
"""The budget of a step by its name."""


class FormingBudget(NamedTuple):
    """The budget of forming a generation, on the rank that needs most.

    Args:
        groups: The workers of each generation.
        reforms: The number of steps after which a generation forms the next; else rank 2 is killed after step 5.
        step: The step at which the counted generation forms.
        counts: See `Budget`.
    """

    groups: list[list[int]]
    reforms: tuple[int, ...]
    step: int
    counts: Mapping[str, int]


FORMINGS: dict[str, FormingBudget] = {
    "a first start": FormingBudget([[0, 1]], (), 0, {"launches": 48, "waits": 1, "pageable": 1, "gloo bytes": 1500}),
    "after a loss": FormingBudget(
        [[0, 1, 2], [0, 1]], (), 5, {"launches": 48, "waits": 1, "pageable": 1, "gloo bytes": 1500}
    ),
    "with a joining worker": FormingBudget(
        [[0, 1], [0, 1, 2]], (5,), 5, {"launches": 19, "waits": 1, "collectives": 1, "gloo bytes": 4300}
    ),
}
"""The budget of forming a generation by its name; its ranks have collectives of the device."""


@dataclass
class CountSteps:
    """Hooks that count what each rank needs for a step, and for forming each generation.

    Args:
        folder: The folder for the counts of each rank.
        first, last: The steps between which the minimum for a step is counted; later and earlier ones may do more, such
            as allocate memory.
    """

    folder: Path
    first: int = 4
    last: int = 7
    _steps: list[dict[str, int]] = field(default_factory=list)
    _before: dict[str, int] | None = None
    _locked_before: int = 0

    def build(self, model: Any) -> None:
        """Begins to count in this process."""
        del model
        from tests.device.sim import SIM

        prepare_process()
        SIM.start_counting()
        self._locked_before = SIM.locked_bytes()

    def after_step(self, rank: int, step: int) -> None:
        """Counts a step."""
        from tests.device.sim import SIM

        if self.first <= step <= self.last:
            self._steps.append(SIM.counts())
        if step == self.last:
            steps = [difference(after, before) for before, after in zip(self._steps, self._steps[1:], strict=False)]
            names = {name for counts in steps for name in counts}
            self._write(f"step-{rank}", {name: min(counts.get(name, 0) for counts in steps) for name in names})

    def enter(self, phase: str, rank: int, step: int) -> None:
        """Counts the forming of a generation, up to its first step."""
        from tests.device.sim import SIM

        if phase == "forming":
            self._before = SIM.counts()
        elif self._before is not None:
            self._write(f"forming-{step}-{rank}", difference(SIM.counts(), self._before))
            self._before = None

    def _write(self, name: str, counts: dict[str, int]) -> None:
        from tests.device.sim import SIM

        self.folder.mkdir(exist_ok=True)
        locked = max(0, SIM.locked_bytes() - self._locked_before)
        (self.folder / f"{name}.json").write_text(json.dumps(counts | {"locked bytes": locked}))

    def read(self, name: str) -> dict[str, int]:
        """Returns the highest counts of any rank."""
        all_counts = [json.loads(file.read_text()) for file in self.folder.glob(f"{name}-*.json")]
        return {key: max(counts.get(key, 0) for counts in all_counts) for counts in all_counts for key in counts}


@cache
def prepare_process() -> None:
    """Makes graphs and hashes countable in this process, and leaves uploads out."""
    from ray_app.data.feed import Upload

    patch("ray_app.train.build.make_graph_backend", lambda device: CountedGraphs()).start()
    patch.object(Upload, "send", not_counted(Upload.send)).start()
    patch("ray_app.checkpoint.format._bytes_of", count_hashed).start()


def difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """Returns what was counted between two counts."""
    return {name: number - before.get(name, 0) for name, number in after.items() if number > before.get(name, 0)}


def not_counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that does the same without being counted."""

    def call(*arguments: Any) -> Any:
        from tests.device.sim import SIM

        was_counted = SIM.set_counted(False)
        try:
            return function(*arguments)
        finally:
            SIM.set_counted(was_counted)

    return call


def count_hashed(tensor: torch.Tensor) -> memoryview:
    """Counts the bytes of a tensor that goes into a SHA-256, and returns them."""
    from tests.device.sim import SIM

    SIM.count("hashed bytes", tensor.nbytes)
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


class CountedGraphs(RecordedGraphs):
    """Recorded graphs of which each replay counts as one launch."""

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        """See `GraphBackend.capture`."""
        from tests.device.sim import SIM

        run_again = not_counted(super().capture(work))

        def count_and_run() -> None:
            SIM.count("launches")
            run_again()

        return count_and_run
