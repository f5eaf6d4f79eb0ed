"""What a run says about itself before its first step, and what it warns of at its end."""

from __future__ import annotations

import ray

from ray_app.cluster.ray_private import Node, evaluator_gpus, labelled, ray_job
from ray_app.config.config import Config
from ray_app.preflight.prepare import Prepared
from ray_app.runlog.journal import read_events
from ray_app.runlog.redaction import redact
from ray_app.train.job import Job
from ray_app.watch.terminal import SafeConsole

_MIX = (
    "Warning: from step {step} on the environment is another, so the bits may differ from an undisturbed run: {before},"
    " now {now}."
)


def announce(console: SafeConsole, prepared: Prepared, max_workers: int) -> None:
    """Says what is about to run, and where.

    Args:
        console: Where to say it.
        prepared: The run.
        max_workers: As many as fit into the cluster.
    """
    job, config = prepared.job, prepared.job.config
    verb = "Continuing" if prepared.resumes else "Starting"
    console.print(redact(f"{verb} run {job.paths.name} in {job.paths.root}"))
    if (here := ray_job()) is not None and here["page"] is not None:
        named = f" ({here['submission_id']})" if here["submission_id"] else ""
        console.print(f"Ray job {here['job_id']}{named}: {here['page']}")
    if "_ray_pkg_" in str(job.paths.root):
        console.print(
            "Warning: this run is stored inside the job's own copy of the working directory, which Ray removes; set"
            " run.storage_path to a"
            " folder that all nodes share."
        )
    if prepared.changed:
        console.print(
            f"Warning: {job.paths.name} goes on with other code than at its last start: {', '.join(prepared.changed)}."
            f" Its result will"
            " be that of neither; run.changed_code: refuse does not start such a run.",
        )
    if prepared.changed_data:
        console.print(
            f"Warning: the data of {job.paths.name} was changed since its last start:"
            f" {'; '.join(prepared.changed_data)}. Its result and"
            " its evaluations will be of both; run.changed_data: refuse does not start such a run.",
        )
    for line in prepared.data:
        console.print(line)
    for doubt in prepared.doubts:
        console.print(f"Warning: {doubt}")
    passes = (
        f" (a pass over the data has {job.plan.steps_per_epoch:,})"
        if job.steps_per_epoch != job.plan.steps_per_epoch
        else ""
    )
    capped = (
        f" (of {config.scaling.max_workers} asked for, as many as fit now)"
        if max_workers < config.scaling.most_workers
        else ""
    )
    spares = f" and {config.scaling.standby_workers} spare" if config.scaling.standby_workers else ""
    where = "in this process" if config.train.strategy == "single" else f"up to {max_workers} workers{capped}{spares}"
    console.print(
        f"{job.plan.manifest.num_rows:,} rows, {job.steps_per_epoch:,} steps of {job.plan.global_batch_size} rows per"
        f" epoch{passes},"
        f" {config.train.epochs} epochs; {where}, arithmetic of {job.plan.logical_workers}",
    )
    if (classes := job.plan.classes) is not None:
        console.print(
            f"balanced: in each pass every one of {len(classes.totals)} classes is used {classes.totals.max():,} times"
        )
    nodes = ray.nodes() if ray.is_initialized() else []
    if idle := idle_gpus(config, max_workers, nodes):
        console.print(f"Warning: {idle}")
    if len({node["NodeManagerAddress"] for node in nodes if node["Alive"]}) > 1:
        console.print(
            "A host that is cut off counts as there for about a minute with Ray's defaults; docs/failures.md says how"
            " to shorten it."
        )


def idle_gpus(config: Config, workers: int, nodes: list[Node]) -> str | None:
    """What to say of GPUs of the cluster that neither these workers nor the evaluator use; None where there are
    none.
    """
    scaling = config.scaling
    has = sum(node["Resources"].get("GPU", 0.0) for node in labelled(nodes, scaling.label_selector))
    idle = int(has - (workers + scaling.standby_workers) * scaling.gpus_per_worker - evaluator_gpus(config))
    if idle < 1:
        return None
    advice = "Raise scaling.max_workers (all: as many as fit), or leave them to others."
    if not scaling.gpus_per_worker:
        advice = "This run computes on CPUs; set scaling.gpus_per_worker to 1 to train on GPUs."
    return f"{idle} of the {has:g} GPUs of the cluster are not used by this run. {advice}"


def say_changed_environment(console: SafeConsole, job: Job) -> None:
    """Warns of every change of the environment during this start."""
    for event in read_events(job.paths, "environment_changed"):
        if event.fence == job.fence:
            console.print(_MIX.format(**event.details))
