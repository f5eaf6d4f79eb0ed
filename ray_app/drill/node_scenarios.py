"""Scenarios in which nodes go away or come: possible only on a cluster that the drill has started itself.

The scenario of a cluster whose head is lost for a while: its GCS, which knows all nodes and actors and keeps that in a
database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from ray_app.drill.cluster import Nodes
from ray_app.drill.delays import Hold
from ray_app.drill.faults import Evidence, Kill, Several
from ray_app.drill.process_scenarios import died
from ray_app.drill.scenario import Scenario, ScenarioContext, ScenarioResult, is_gone
from ray_app.driver.run import Faults
from ray_app.runlog.journal import MetricsReader
from ray_app.runlog.lease import LeaseHolder
from ray_app.train.job import Hooks, Job

_DRAIN_S = 60
_NO_NODES = "the drill takes no nodes from, and adds none to, a cluster that it did not start"
_SAME_MACHINE = "nodes of this machine would share its GPUs"


@dataclass
class _OnHold:
    """Does something, once, to the node of the worker that waits for it; called in the driver while the run goes on."""

    proofs: Evidence
    act: Callable[[dict[str, Any]], None]
    done: bool = False

    def __call__(self, _: Any) -> None:
        if self.done or not (held := self.proofs.get("held")):
            return
        self.done = True
        try:
            self.act(held)
        except Exception as error:  # the scenario counts as failed; the run must go on
            self.proofs.put("trouble", error=f"{type(error).__name__}: {error}")
        self.proofs.put("released", step=held["step"])


def _held(
    ground: ScenarioContext, rank: int, sizes: range, act: Callable[[dict[str, Any]], None], **more: Any
) -> Scenario:
    """A scenario in which the driver does something to nodes while a rank waits; then one of these numbers of workers
    is awaited.
    """
    step = ground.step()
    after = Several((Hold(ground.proofs, "held", "released", step, rank), ground.pace(step + 1, sizes=sizes)))
    faults, observe = Faults(train=Hooks(after_step=after)), _OnHold(ground.proofs, act)
    return Scenario([step], faults=faults, observe=observe, changes={"scaling__min_workers": 1}, **more)


def _without_nodes(ground: ScenarioContext, least_workers: int) -> str | None:
    if ground.nodes is None:
        return _SAME_MACHINE if ground.config.scaling.gpus_per_worker else _NO_NODES
    return f"it needs {least_workers} workers, there are {ground.workers}" if ground.workers < least_workers else None


def _lose_node(ground: ScenarioContext, rank: int, add: bool) -> Scenario:
    def act(held: dict[str, Any]) -> None:
        assert ground.nodes is not None
        node, facts = held["node"], {"step": held["step"], "rank": held["rank"]}
        ground.nodes.check(node)
        ground.proofs.put("node_killed", **facts, node=node)
        ground.nodes.lose(node)
        ground.proofs.put("node_dead", **facts, node=node)
        if add:
            ground.proofs.put("node_added", **facts, node=ground.nodes.add(1)[0])

    def confirm(run: ScenarioResult) -> list[str]:
        fewer = [] if ground.workers == 1 or min(run.sizes) < ground.workers else ["the number of workers did not fall"]
        return fewer + ([] if is_gone(run.proofs["held"]) else ["the worker's process still lives"])

    expected = ["held", "node_killed", "node_dead", *(["node_added"] if add else [])]
    sizes = ground.enough if add else range(1, ground.workers)
    return _held(ground, rank, sizes, act, expected=expected, confirm=confirm, held={"held": "node_killed"})


def node(ground: ScenarioContext) -> Scenario | str:
    """A node with a worker, not the one of rank 0, is lost for good."""
    return _without_nodes(ground, 2) or _lose_node(ground, ground.workers - 1, add=False)


def node_rank0(ground: ScenarioContext) -> Scenario | str:
    """The node of rank 0 is lost, and another one comes."""
    return _without_nodes(ground, 1) or _lose_node(ground, 0, add=True)


def grow(ground: ScenarioContext) -> Scenario | str:
    """The run starts on one worker, then nodes for all of them are added."""
    impossible = _without_nodes(ground, 2)
    if impossible:
        return impossible

    def act(held: dict[str, Any]) -> None:
        assert ground.nodes is not None
        ground.proofs.put("node_added", step=held["step"], nodes=ground.nodes.add(ground.workers - 1))

    def confirm(run: ScenarioResult) -> list[str]:
        return (
            [] if run.sizes[0] == 1 < run.sizes[-1] in ground.enough else [f"the numbers of workers were {run.sizes}"]
        )

    expected, held = ["held", "node_added"], {"held": "node_added"}
    return _held(ground, 0, ground.enough, act, expected=expected, confirm=confirm, held=held, room=1)


def shrink(ground: ScenarioContext) -> Scenario | str:
    """A node is drained, as before a preemption: its worker has to leave it."""
    impossible = _without_nodes(ground, 2)
    if impossible:
        return impossible

    def act(held: dict[str, Any]) -> None:
        assert ground.nodes is not None
        ground.nodes.drain(held["node"], _DRAIN_S)
        ground.proofs.put("drained", step=held["step"], node=held["node"], rank=held["rank"], deadline_s=_DRAIN_S)

    def confirm(run: ScenarioResult) -> list[str]:
        missing = [] if run.events("preempted") else ["the run has no record of a preemption"]
        fewer = [] if run.sizes[-1] < ground.workers else ["the number of workers did not fall"]
        return missing + fewer + ([] if is_gone(run.proofs["held"]) else ["the worker is still on the node"])

    expected, held = ["held", "drained"], {"held": "drained"}
    return _held(ground, ground.rank(), range(1, ground.workers), act, expected=expected, confirm=confirm, held=held)


_STEPS_WITHOUT = 10


def head(ground: ScenarioContext) -> Scenario | str:
    """The head's GCS is killed for a while, its state on disk; once another one is there so many workers are killed
    that others come.
    """
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
    return Scenario(
        [step],
        ["held", "head_killed", "held_again", "head_back", *names],
        lambda run: without_head(run) + died(names)(run),
        Faults(train=Hooks(after_step=Several((*holds, kill, ground.pace(until + 2))))),
        observe,
        {"held": "head_killed", "held_again": "head_back"},
        around=around,
    )


def without_head(run: ScenarioResult) -> list[str]:
    """What speaks against it that steps were finished without a head, and that the next one brought new workers to the
    same run.
    """
    killed, back = run.proofs["head_killed"], run.proofs["head_back"]
    missing = [] if LeaseHolder(**killed["head"]).is_gone() else ["the head that was killed still lives"]
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
