"""Scenarios on the drill's own cluster: nodes are killed, drained or added, or the GCS is away for a while (`head`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from ray_app.drill.cluster import DrillCluster
from ray_app.drill.faults import ActOnWaits, WaitForEvidence
from ray_app.drill.process_scenarios import confirm_deaths, make_kill_for_replacement
from ray_app.drill.scenario import Scenario, ScenarioContext, ScenarioResult, is_gone, unmet
from ray_app.driver.run import Faults
from ray_app.runlog.journal import read_records
from ray_app.runlog.lease import LeaseHolder
from ray_app.train.job import Hooks, Job

_DRAIN_S = 60
_STEPS_WITHOUT_HEAD = 10
_NO_NODES = "the drill removes and adds nodes only in a cluster that it started"
_SAME_MACHINE = "nodes of this machine would share its GPUs"


def _make_scenario(
    context: ScenarioContext, rank: int, sizes: range, act: Callable[[dict[str, Any]], None], **fields: Any
) -> Scenario:
    """Returns a scenario in which the driver acts on nodes while a rank waits; pauses follow until a size in `sizes`.

    `act` gets the evidence of the wait, which names the node of the rank.
    """
    step = context.choose_step()
    wait = WaitForEvidence(context.evidence, "held", "released", step, rank)
    faults = Faults(train=Hooks(after_step=context.delayed(step, wait, sizes=sizes)))

    def act_on_wait(wait: dict[str, Any], _: Job) -> dict[str, Any]:
        act(wait)
        return {}

    observe = ActOnWaits(context.evidence, {"held": ("released", act_on_wait)})
    return Scenario([step], faults=faults, observe=observe, changes={"scaling__min_workers": 1}, **fields)


def _find_obstacle(context: ScenarioContext, min_workers: int) -> str | None:
    """Returns why this drill cannot change the nodes; None if it can."""
    if context.nodes is None:
        return _SAME_MACHINE if context.config.scaling.worker_gpus else _NO_NODES
    return f"{min_workers} workers are needed, of {context.workers}" if context.workers < min_workers else None


def _make_node_loss(context: ScenarioContext, rank: int, add: bool) -> Scenario:
    """Returns a scenario in which the node of a rank is killed and, if `add`, another one is added."""

    def act(wait: dict[str, Any]) -> None:
        assert context.nodes is not None
        node, facts = wait["node"], {"step": wait["step"], "rank": wait["rank"]}
        context.nodes.check_removable(node)
        context.evidence.put("node_killed", **facts, node=node)
        context.nodes.kill_node(node)
        context.evidence.put("node_dead", **facts, node=node)
        if add:
            context.evidence.put("node_added", **facts, node=context.nodes.add_nodes(1)[0])

    def confirm(run: ScenarioResult) -> list[str]:
        return unmet(
            (context.workers == 1 or min(run.sizes) < context.workers, "the number of workers did not fall"),
            (is_gone(run.evidence["held"]) is True, "the worker's process still lives"),
        )

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
    if obstacle := _find_obstacle(context, 2):
        return obstacle

    def act(wait: dict[str, Any]) -> None:
        assert context.nodes is not None
        context.evidence.put("node_added", step=wait["step"], nodes=context.nodes.add_nodes(context.workers - 1))

    def confirm(run: ScenarioResult) -> list[str]:
        has_grown = run.sizes[0] == 1 < run.sizes[-1] in context.sufficient_workers
        return unmet((has_grown, f"the numbers of workers were {run.sizes}"))

    expected, waits = ["held", "node_added"], {"held": "node_added"}
    sizes = context.sufficient_workers
    return _make_scenario(context, 0, sizes, act, expected=expected, confirm=confirm, waits=waits, initial_workers=1)


def shrink(context: ScenarioContext) -> Scenario | str:
    """A node is drained, as before a preemption: its worker has to leave it."""
    if obstacle := _find_obstacle(context, 2):
        return obstacle

    def act(wait: dict[str, Any]) -> None:
        assert context.nodes is not None
        context.nodes.drain_node(wait["node"], _DRAIN_S)
        context.evidence.put("drained", step=wait["step"], node=wait["node"], rank=wait["rank"], deadline_s=_DRAIN_S)

    def confirm(run: ScenarioResult) -> list[str]:
        return unmet(
            (bool(run.events("preempted")), "the run has no record of a preemption"),
            (run.sizes[-1] < context.workers, "the number of workers did not fall"),
            (is_gone(run.evidence["held"]) is True, "the worker is still on the node"),
        )

    expected, waits = ["held", "drained"], {"held": "drained"}
    sizes = range(1, context.workers)
    return _make_scenario(context, context.choose_rank(), sizes, act, expected=expected, confirm=confirm, waits=waits)


def head(context: ScenarioContext) -> Scenario | str:
    """The head's GCS is killed and later restarted from disk; then so many workers are killed that others join."""
    if context.nodes is None:
        return "the drill kills the head only of a cluster that it started"
    drill_cluster, evidence = context.nodes, context.evidence
    step = context.choose_step()
    until = step + _STEPS_WITHOUT_HEAD
    durable_clusters: list[DrillCluster] = []

    @contextmanager
    def setup() -> Iterator[dict[str, Any]]:
        with drill_cluster.with_storage() as durable_cluster:
            durable_clusters.append(durable_cluster)
            yield {}

    acts = {
        "held": ("head_killed", lambda *_: {"head": asdict(durable_clusters[0].kill_gcs())}),
        "held_again": ("head_back", lambda *_: {"head": asdict(durable_clusters[0].start_gcs())}),
    }
    waits = (
        WaitForEvidence(evidence, "held", "head_killed", step, 0),
        WaitForEvidence(evidence, "held_again", "head_back", until, 0),
    )
    kill = make_kill_for_replacement(context, until + 1)
    return Scenario(
        [step],
        ["held", "head_killed", "held_again", "head_back", *kill.names],
        lambda run: confirm_head_loss(run) + confirm_deaths(kill.names)(run),
        Faults(train=Hooks(after_step=context.delayed(until + 1, *waits, kill))),
        ActOnWaits(evidence, acts),
        {"held": "head_killed", "held_again": "head_back"},
        setup=setup,
    )


def confirm_head_loss(run: ScenarioResult) -> list[str]:
    """Confirms that one start finished all steps of the outage without a head, and got workers afterwards.

    It returns what is missing.
    """
    killed, back = run.evidence["head_killed"], run.evidence["head_back"]
    outage_steps = {n for n, r in read_records(run.paths)[0].items() if killed["time_s"] < r.time_s < back["time_s"]}
    is_grown = any(e.time_s > back["time_s"] for kind in ("replaced", "resized", "workers") for e in run.events(kind))
    starts = len(run.events("started"))
    return unmet(
        (LeaseHolder(**killed["head"]).is_gone(), "the killed head still lives"),
        (killed["head"] != back["head"], "the head is the same as before"),
        (
            set(range(killed["step"] + 1, back["step"] + 1)) <= outage_steps,
            f"only the steps {sorted(outage_steps)} were finished without a head",
        ),
        (is_grown, "no worker joined after the head was back"),
        (starts == 1, f"the run was started {starts} times"),
    )
