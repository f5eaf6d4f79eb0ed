"""The scenario of a cluster whose head is lost for a while: its GCS, which knows all nodes and actors and keeps that in a database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from ray_app.drill.cluster import Nodes
from ray_app.drill.delays import Hold
from ray_app.drill.faults import Kill, Several
from ray_app.drill.ground import Disturbance, Ended, Ground
from ray_app.drill.processes import died
from ray_app.record.holder import Holder
from ray_app.record.progress.journal import MetricsReader
from ray_app.runs.faults import Faults
from ray_app.train.hooks import Hooks
from ray_app.train.job import Job

_STEPS_WITHOUT = 10


def head(ground: Ground) -> Disturbance | str:
    """The head's GCS is killed for a while, its state on disk; once another one is there so many workers are killed that others come."""
    if ground.nodes is None:
        return "the drill takes no head from a cluster that it did not start"
    step, first, proofs = ground.step(), ground.nodes, ground.proofs
    until = step + _STEPS_WITHOUT
    there: list[Nodes] = []

    @contextmanager
    def around() -> Iterator[dict[str, Any]]:
        with first.with_storage() as nodes:
            there.append(nodes)
            yield {}

    def observe(job: Job) -> None:
        try:
            if proofs.has("held") and not proofs.has("head_killed"):
                proofs.put("head_killed", step=step, head=asdict(there[0].lose_gcs()))
            elif proofs.has("held_again") and not proofs.has("head_back"):
                proofs.put("head_back", step=until, head=asdict(there[0].start_gcs()))
        except Exception as error:  # the scenario counts as failed; the run must go on
            proofs.put("trouble", error=f"{type(error).__name__}: {error}")
            proofs.put("head_back", step=until)

    holds = Hold(proofs, "held", "head_killed", step, 0), Hold(proofs, "held_again", "head_back", until, 0)
    victims = ground.random.sample(range(ground.workers), ground.workers - ground.enough.start + 1)
    names = [f"killed-{i}" for i in range(len(victims))]
    kill = Kill(proofs, names, until + 1, victims)
    return Disturbance(
        [step],
        ["held", "head_killed", "held_again", "head_back", *names],
        lambda run: without_head(run) + died(names)(run),
        Faults(train=Hooks(after_step=Several((*holds, kill, ground.pace(until + 2))))),
        observe,
        {"held": "head_killed", "held_again": "head_back"},
        around=around,
    )


def without_head(run: Ended) -> list[str]:
    """What speaks against it that steps were finished without a head, and that the next one brought new workers to the same run."""
    killed, back = run.proofs["head_killed"], run.proofs["head_back"]
    missing = [] if Holder(**killed["head"]).is_gone() else ["the head that was killed still lives"]
    missing += [] if killed["head"] != back["head"] else ["it is the same head as before"]
    reader = MetricsReader(run.paths)
    reader.poll()
    meanwhile = {n for n, r in reader.records.items() if killed["time_s"] < r.time_s < back["time_s"]}
    if not set(range(killed["step"] + 1, back["step"] + 1)) <= meanwhile:
        missing.append(f"only the steps {sorted(meanwhile)} were finished while there was no head")
    if not any(e.time_s > back["time_s"] for kind in ("replaced", "resized", "workers") for e in run.events(kind)):
        missing.append("no worker came after there was a head again")
    starts = len(run.events("started"))
    return missing if starts == 1 else [*missing, f"the run was started {starts} times"]
