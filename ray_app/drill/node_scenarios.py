"""Scenarios in which nodes are killed, drained or added, and `head`, in which the cluster's GCS is away for a while.

They are possible only on a cluster that the drill has started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from ray_app.drill.cluster import DrillCluster
from ray_app.drill.delays import WaitForEvidence
from ray_app.drill.faults import Evidence, HookChain, Kill
from ray_app.drill.process_scenarios import confirm_deaths
from ray_app.drill.scenario import Scenario, ScenarioContext, ScenarioResult, is_gone
from ray_app.driver.run import Faults
from ray_app.runlog.journal import MetricsReader
from ray_app.runlog.lease import LeaseHolder
from ray_app.train.job import Hooks, Job

_DRAIN_S = 60
_NO_NODES = "the drill takes no nodes from, and adds none to, a cluster that it did not start"
_SAME_MACHINE = "nodes of this machine would share its GPUs"


@dataclass
class _ActOnWait:
    """Acts once on the cluster while a worker waits; called in the driver while the run goes on.

    `act` gets the evidence of the wait, which names the worker's node.
    """

    evidence: Evidence
    act: Callable[[dict[str, Any]], None]
    has_acted: bool = False

    def __call__(self, _: Any) -> None:
        if self.has_acted or not (wait := self.evidence.get("held")):
            return
        self.has_acted = True
        # On an error the scenario counts as failed, but the run must go on: `released` ends the wait.
        try:
            self.act(wait)
        except Exception as error:
            self.evidence.put("trouble", error=f"{type(error).__name__}: {error}")
        self.evidence.put("released", step=wait["step"])


def _make_scenario(
    context: ScenarioContext, rank: int, sizes: range, act: Callable[[dict[str, Any]], None], **fields: Any
) -> Scenario:
    """Returns a scenario in which the driver acts on nodes while a rank waits.

    Args:
        rank: The rank that waits.
        sizes: World sizes at which the pauses after the wait end.
        act: Called with the evidence of the wait.
        **fields: More fields of `Scenario`.
    """
    step = context.choose_step()
    wait = WaitForEvidence(context.evidence, "held", "released", step, rank)
    after = HookChain((wait, context.make_delay_plan(step + 1, sizes=sizes)))
    faults, observe = Faults(train=Hooks(after_step=after)), _ActOnWait(context.evidence, act)
    return Scenario([step], faults=faults, observe=observe, changes={"scaling__min_workers": 1}, **fields)


def _find_obstacle(context: ScenarioContext, min_workers: int) -> str | None:
    """Returns why this drill cannot change the nodes; None if it can."""
    if context.nodes is None:
        return _SAME_MACHINE if context.config.scaling.gpus_per_worker else _NO_NODES
    return f"it needs {min_workers} workers, there are {context.workers}" if context.workers < min_workers else None


def _make_node_loss(context: ScenarioContext, rank: int, add: bool) -> Scenario:
    """Returns a scenario in which the node of a rank is killed and, if `add`, another one is added."""

    def act(wait: dict[str, Any]) -> None:
        assert context.nodes is not None
        node = wait["node"]
        facts = {"step": wait["step"], "rank": wait["rank"]}
        context.nodes.check_removable(node)
        context.evidence.put("node_killed", **facts, node=node)
        context.nodes.kill_node(node)
        context.evidence.put("node_dead", **facts, node=node)
        if add:
            context.evidence.put("node_added", **facts, node=context.nodes.add_nodes(1)[0])

    def confirm(run: ScenarioResult) -> list[str]:
        fewer = (
            [] if context.workers == 1 or min(run.sizes) < context.workers else ["the number of workers did not fall"]
        )
        return fewer + ([] if is_gone(run.evidence["held"]) else ["the worker's process still lives"])

    expected = ["held", "node_killed", "node_dead", *(["node_added"] if add else [])]
    sizes = context.sufficient_workers if add else range(1, context.workers)
    return _make_scenario(context, rank, sizes, act, expected=expected, confirm=confirm, waits={"held": "node_killed"})


def node(context: ScenarioContext) -> Scenario | str:
    """A node with a worker, not the one of rank 0, is lost for good."""
    return _find_obstacle(context, 2) or _make_node_loss(context, context.workers - 1, add=False)


def node_rank0(context: ScenarioContext) -> Scenario | str:
    """The node of rank 0 is lost, and another one comes."""
    return _find_obstacle(context, 1) or _make_node_loss(context, 0, add=True)


def grow(context: ScenarioContext) -> Scenario | str:
    """The run starts on one worker, then nodes for all of them are added."""
    impossible = _find_obstacle(context, 2)
    if impossible:
        return impossible

    def act(wait: dict[str, Any]) -> None:
        assert context.nodes is not None
        context.evidence.put("node_added", step=wait["step"], nodes=context.nodes.add_nodes(context.workers - 1))

    def confirm(run: ScenarioResult) -> list[str]:
        has_grown = run.sizes[0] == 1 < run.sizes[-1] in context.sufficient_workers
        return [] if has_grown else [f"the numbers of workers were {run.sizes}"]

    expected, waits = ["held", "node_added"], {"held": "node_added"}
    sizes = context.sufficient_workers
    return _make_scenario(context, 0, sizes, act, expected=expected, confirm=confirm, waits=waits, initial_workers=1)


def shrink(context: ScenarioContext) -> Scenario | str:
    """A node is drained, as before a preemption: its worker has to leave it."""
    impossible = _find_obstacle(context, 2)
    if impossible:
        return impossible

    def act(wait: dict[str, Any]) -> None:
        assert context.nodes is not None
        context.nodes.drain_node(wait["node"], _DRAIN_S)
        context.evidence.put("drained", step=wait["step"], node=wait["node"], rank=wait["rank"], deadline_s=_DRAIN_S)

    def confirm(run: ScenarioResult) -> list[str]:
        missing = [] if run.events("preempted") else ["the run has no record of a preemption"]
        fewer = [] if run.sizes[-1] < context.workers else ["the number of workers did not fall"]
        return missing + fewer + ([] if is_gone(run.evidence["held"]) else ["the worker is still on the node"])

    expected, waits = ["held", "drained"], {"held": "drained"}
    sizes = range(1, context.workers)
    return _make_scenario(context, context.choose_rank(), sizes, act, expected=expected, confirm=confirm, waits=waits)


_STEPS_WITHOUT_HEAD = 10


def head(context: ScenarioContext) -> Scenario | str:
    """The head's GCS is killed and later restarted from disk; then so many workers are killed that others join."""
    if context.nodes is None:
        return "the drill takes no head from a cluster that it did not start"
    drill_cluster, evidence = context.nodes, context.evidence
    step = context.choose_step()
    until = step + _STEPS_WITHOUT_HEAD
    durable_clusters: list[DrillCluster] = []

    @contextmanager
    def setup() -> Iterator[dict[str, Any]]:
        with drill_cluster.with_storage() as durable_cluster:
            durable_clusters.append(durable_cluster)
            yield {}

    def observe(job: Job) -> None:
        # On an error the scenario counts as failed, but the run must go on: `head_back` ends the wait.
        try:
            if evidence.has("held") and not evidence.has("head_killed"):
                evidence.put("head_killed", step=step, head=asdict(durable_clusters[0].kill_gcs()))
            elif evidence.has("held_again") and not evidence.has("head_back"):
                evidence.put("head_back", step=until, head=asdict(durable_clusters[0].start_gcs()))
        except Exception as error:
            evidence.put("trouble", error=f"{type(error).__name__}: {error}")
            evidence.put("head_back", step=until)

    waits = (
        WaitForEvidence(evidence, "held", "head_killed", step, 0),
        WaitForEvidence(evidence, "held_again", "head_back", until, 0),
    )
    victims = context.random.sample(range(context.workers), context.workers - context.sufficient_workers.start + 1)
    names = [f"killed-{i}" for i in range(len(victims))]
    kill = Kill(evidence, names, until + 1, victims)
    return Scenario(
        [step],
        ["held", "head_killed", "held_again", "head_back", *names],
        lambda run: confirm_head_loss(run) + confirm_deaths(names)(run),
        Faults(train=Hooks(after_step=HookChain((*waits, kill, context.make_delay_plan(until + 2))))),
        observe,
        {"held": "head_killed", "held_again": "head_back"},
        setup=setup,
    )


def confirm_head_loss(run: ScenarioResult) -> list[str]:
    """Confirms that the run trained without a head and got workers after it was back; returns what is missing.

    The run must have finished all steps of the outage while there was no head, and must not have been started again.
    """
    killed, back = run.evidence["head_killed"], run.evidence["head_back"]
    missing = [] if LeaseHolder(**killed["head"]).is_gone() else ["the head that was killed still lives"]
    missing += [] if killed["head"] != back["head"] else ["it is the same head as before"]
    reader = MetricsReader(run.paths)
    reader.poll()
    outage_steps = {n for n, r in reader.records.items() if killed["time_s"] < r.time_s < back["time_s"]}
    if not set(range(killed["step"] + 1, back["step"] + 1)) <= outage_steps:
        missing.append(f"only the steps {sorted(outage_steps)} were finished while there was no head")
    if not any(e.time_s > back["time_s"] for kind in ("replaced", "resized", "workers") for e in run.events(kind)):
        missing.append("no worker came after there was a head again")
    starts = len(run.events("started"))
    return missing if starts == 1 else [*missing, f"the run was started {starts} times"]
