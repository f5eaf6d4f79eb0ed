"""The configuration: frozen dataclasses, one per section, and their digest.

Fields that change the resulting parameters are made with `_result(...)`; the digest of a run covers those that differ from their
default, so a new field at its default never changes a digest.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from ray_app.errors import ConfigError, RunExistsError


def _result(default: Any) -> Any:
    """A field that affects the result, so that it is part of the run's digest."""
    return field(default=default, metadata={"affects_result": True})


@dataclass(frozen=True)
class ClassSpec:
    """A class and the arguments to make it with.

    Args:
        class_path: Import path, such as `torch.optim.AdamW`.
        init_args: Keyword arguments of the class.
    """

    class_path: str
    init_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunSection:
    """Where a run lives.

    Args:
        name: Directory of the run below `storage_path` and its name in MLflow; starting the same name again resumes it. Made up when
            not given.
        storage_path: Folder that every node of the cluster sees under the same path, or `s3://bucket/prefix`. How S3 is reached comes from
            the usual `AWS_*` variables, on every node, or from the path: `?endpoint_override=host:port&scheme=http&region=...`.
        ray_address: Ray cluster to join (`auto` or an address). Not given: `RAY_ADDRESS` if that is set (as in a Ray job), otherwise
            a local cluster of this machine's own, stopped at the end.
    """

    name: str | None = None
    storage_path: str = "runs"
    ray_address: str | None = None


@dataclass(frozen=True)
class ScalingSection:
    """How many workers train, and with what.

    Args:
        min_workers: Fewest workers to train with; below it the run waits.
        max_workers: Most workers; capped at what the cluster has.
        logical_workers: Data-parallel replicas that define the arithmetic (L). The same L gives the same parameters on any number of
            workers up to L. Not given: `max_workers` of the first start.
        threads_per_worker: CPU threads of the computation in each worker; part of the arithmetic.
        cpus_per_worker: Logical CPUs that each worker reserves.
        gpus_per_worker: GPUs that each worker reserves; 0 trains on the CPU.
        resize_check_s: Seconds between two looks for more capacity.
    """

    min_workers: int = 1
    max_workers: int = 1
    logical_workers: int | None = _result(None)
    threads_per_worker: int = _result(1)
    cpus_per_worker: float = 1
    gpus_per_worker: float = _result(0)
    resize_check_s: float = 10.0


@dataclass(frozen=True)
class DataSection:
    """What is read, and in which portions.

    Args:
        path: Folder (or file) of Parquet to train on.
        eval_path: Folder (or file) of Parquet to evaluate on; not given: no evaluation.
        global_batch_size: Rows of one optimizer step over all workers; divisible by the number of logical workers.
        shuffle_window_rows: Rows per logical worker that are shuffled together; a worker holds about this many decoded rows, times
            `prefetch_windows` + 1, for each logical worker that it plays.
        shard: What a logical worker gets, as tf.data's AutoShardPolicy: `row` (DATA) an equal share of the rows, another in every epoch;
            `file` (FILE) whole files, the same in every epoch, which it shuffles among themselves; `off` (OFF) every row.
        sampling: `none` uses every row once per epoch; `balanced` repeats rows of the smaller classes until all classes are used equally
            often. The driver then reads the column `balance_by` before the start, and every process holds 1 or 2 bytes per row.
        balance_by: Column of classes, integers or text, for `sampling: balanced`.
        last_batch: `keep` consumes every row, the last step of an epoch may be smaller; `drop` drops what does not fill a step.
        cache: `none` reads and decodes in every epoch; `memory` decodes once into Ray's object store, one copy per node; `disk` keeps what
            is decoded in the first epoch on the disks of the nodes whose workers use it, also for later runs with the same data and task.
        cache_dir: Folder of the disk caches on every node; not given: `ray_app/cache` in its temporary folder. It can be removed when no
            run is using it.
        cache_gb: Most gigabytes (10^9 bytes) of all disk caches of a node; rows for which there is no room are read in every epoch.
        prefetch_windows: Windows per logical worker that are read ahead.
        read_task_mb: Most decoded megabytes of one read task.
        on_bad_row: What to do about a row to train on that cannot be decoded: `fail` ends the run, `skip` goes on without it and lists it.
            A run that failed goes on where it was when started again with `skip`.
        max_bad_rows: With `skip`, bad rows above which the run ends nevertheless.
    """

    path: str = ""
    eval_path: str | None = None
    global_batch_size: int = _result(32)
    shuffle_window_rows: int = _result(10_000)
    shard: Literal["row", "file", "off"] = _result("row")
    sampling: Literal["none", "balanced"] = _result("none")
    balance_by: str = _result("label")
    last_batch: Literal["keep", "drop"] = _result("keep")
    cache: Literal["none", "memory", "disk"] = "none"
    cache_dir: str | None = None
    cache_gb: float = 50.0
    prefetch_windows: int = 1
    read_task_mb: float = 64.0
    on_bad_row: Literal["fail", "skip"] = "fail"
    max_bad_rows: int = 100


@dataclass(frozen=True)
class TrainSection:
    """How it is trained.

    Args:
        epochs: Passes over the training data; with `steps_per_epoch`, stretches of so many steps.
        steps_per_epoch: Optimizer steps of an epoch; not given: one pass over the data. Rows go on where the last epoch ended, so each
            is still used once per pass.
        max_steps: Most optimizer steps in all, whatever `epochs` says; not given: no limit.
        strategy: How workers share the model: `ddp` holds a copy in each and adds the gradients of every step. `local_sgd` lets every
            logical worker go `local_steps` steps of its own, then averages parameters and optimizer state. `parameter_server` keeps
            parameters and optimizer on `servers` actors; workers fetch the ones and send gradients, and do not wait for each other.
            `fsdp` shards parameters, gradients and optimizer state over the workers; its bits depend on their number. `central_storage`
            keeps parameters and optimizer state in the host memory of one worker, which makes all updates. `single` is `ddp` in the
            calling process, without workers, so that a breakpoint stops there.
        local_steps: Steps between two averages with `local_sgd` (H).
        outer_lr: What multiplies the averaged change of the parameters with `local_sgd`; 1 is the average itself.
        outer_momentum: Nesterov momentum of that change, as in DiLoCo (there 0.9, with `outer_lr` 0.7); 0: none.
        servers: Parameter servers (P), with `parameter_server`; may be another number when a run is continued.
        server_cpus: Logical CPUs that each of them reserves.
        min_shard_kb: A parameter is split over servers only into parts of at least so many kilobytes.
        staleness: Steps that a logical worker may be ahead of the slowest one, with `parameter_server`. 0: synchronous, the gradients of
            all logical workers are added in one fixed order and applied once. Above, each is applied when it arrives.
        cpu_offload: Keeps the shards of `fsdp` in host memory and makes the updates there; only what computes just now is on the GPU.
        reduction: `exact` adds the gradients of the logical workers in one fixed order: the same bits on any number of workers.
            `overlapped` lets the network add them while backward runs: the same rows and weights, not the same bits. With `fsdp` the
            network adds them in any case, and `exact` only asks for deterministic kernels.
        precision: `fp32`, or autocast of forward and loss to `bf16` or `fp16` (parameters and gradients stay fp32). With `fp16` the loss is
            scaled by a power of two that is found while training and is part of the checkpoint.
        grad_clip_norm: Largest global L2 norm of the gradient; not given: no clipping.
        ema_decay: Decay of an exponential moving average of the parameters, such as 0.999; it is what is evaluated, returned and
            registered. Not given: the parameters themselves.
        freeze: Names of parameters that are not trained, with `*` for any text (`features.*`); batch-norm layers that are frozen as a whole
            keep their statistics.
        compile: Compiles the model with `torch.compile`; needs a C++ compiler on the workers' nodes, and minutes for a big model.
        channels_last: Lays images out with the channels last, which convolutions on GPUs with tensor cores prefer.
        init_from: Safetensors file with the parameters (and persistent buffers) to begin with, which every node sees; not given: what the
            model's own initialization draws from the seed.
        init_digest: SHA-256 of these parameters, as `params_digest` in `summary.json`, which decides the result where the file's path does
            not; not given: that of the file at the run's first start.
    """

    epochs: int = _result(1)
    steps_per_epoch: int | None = _result(None)
    max_steps: int | None = _result(None)
    strategy: Literal["ddp", "single", "local_sgd", "parameter_server", "fsdp", "central_storage"] = _result("ddp")
    local_steps: int = _result(1)
    outer_lr: float = _result(1.0)
    outer_momentum: float = _result(0.0)
    servers: int = 1
    server_cpus: float = 1
    min_shard_kb: int = 256
    staleness: int = _result(0)
    cpu_offload: bool = _result(False)
    reduction: Literal["exact", "overlapped"] = _result("exact")
    precision: Literal["fp32", "bf16", "fp16"] = _result("fp32")
    grad_clip_norm: float | None = _result(None)
    ema_decay: float | None = _result(None)
    freeze: list[str] | None = _result(None)
    compile: bool = _result(False)
    channels_last: bool = _result(False)
    init_from: str | None = None
    init_digest: str | None = _result(None)


@dataclass(frozen=True)
class CheckpointSection:
    """When checkpoints are made and which are kept.

    Args:
        every_steps: Optimizer steps between two checkpoints; not given: none by steps.
        every_epochs: Epochs between two checkpoints; not given: none by epochs. The end of training always makes one.
        keep_last: Newest checkpoints to keep, at least 2.
        keep_best: Best checkpoints by `evaluate.metric` to keep besides.
        snapshot_every_steps: Optimizer steps between two copies of the state to memory outside the workers, from which a run goes on that
            loses all its workers at once; not given: none, such a run goes on from its newest checkpoint.
    """

    every_steps: int | None = None
    every_epochs: int | None = 1
    keep_last: int = 2
    keep_best: int = 1
    snapshot_every_steps: int | None = None


@dataclass(frozen=True)
class FailureSection:
    """How much may go wrong.

    Args:
        max_failures: Failures of workers before the run gives up; -1: any number.
        max_preemptions: Nodes taken away (announced or not) before it gives up; -1: any number.
        step_timeout_s: Seconds without a finished step after which the workers that hold it up are ended and replaced; not given: 50
            times the median step, at least 60; with `train.compile` 600.
        heartbeat_timeout_s: Seconds without a sign of life after which the others go on without a worker.
        recovery: `in_place`: the others keep their state and go on when a worker is lost, and a new one joins them. `restart`: all
            workers start again from the newest checkpoint, as in stock Ray Train.
    """

    max_failures: int = 5
    max_preemptions: int = -1
    step_timeout_s: float | None = None
    heartbeat_timeout_s: float = 5.0
    recovery: Literal["in_place", "restart"] = "in_place"


@dataclass(frozen=True)
class EvaluateSection:
    """How checkpoints are evaluated.

    Args:
        where: `actor`: an evaluator beside the training follows the checkpoints. `workers`: the training workers stop at the end of every
            epoch and evaluate together.
        every: `checkpoint` evaluates every committed checkpoint, `latest` only the newest whenever it is free.
        budget: Largest share of the cluster's CPUs (with GPUs: of its GPUs) that evaluations may take on average over time; the evaluator
            pauses in between. 1: no limit.
        most_waiting: Checkpoints that are kept for an evaluator that lags behind; older ones go, recorded as skipped.
        patience: Planned checkpoints in a row without an improvement of `metric` after which training stops; the result is then the best
            checkpoint up to there, and all planned checkpoints are evaluated, whatever `most_waiting` says. Not given: no early stop.
        min_delta: What counts as an improvement for `patience`: more than this.
        metric: Metric that says which checkpoint is best; not given: the task's own.
        mode: Whether more (`max`) or less (`min`) of it is better; not given: the task's own.
        batch_size: Rows of one forward pass.
        drain_timeout_s: Seconds that the end of a run waits for the evaluator to catch up.
        num_cpus: Logical CPUs that the evaluator reserves.
        num_gpus: GPUs that the evaluator reserves.
        threads: CPU threads of its computation.
    """

    where: Literal["actor", "workers"] = "actor"
    every: Literal["checkpoint", "latest"] = "checkpoint"
    budget: float = 1.0
    most_waiting: int = 32
    patience: int | None = _result(None)
    min_delta: float = 0.0
    metric: str | None = None
    mode: Literal["max", "min"] | None = None
    batch_size: int = 256
    drain_timeout_s: float = 600.0
    num_cpus: float = 1
    num_gpus: float = 0
    threads: int = 1


@dataclass(frozen=True)
class TrackingSection:
    """Where the run is recorded besides its own directory.

    Args:
        enabled: Whether MLflow gets the record.
        uri: MLflow tracking URI; not given: a SQLite file `mlflow.db` in `run.storage_path`, which must then be a folder.
        experiment: Name of the MLflow experiment.
        every_steps: Optimizer steps that are combined into one point of each metric (the run's own record has every step).
        registered_model: Name in MLflow's model registry under which the best checkpoint of a finished run becomes a new version; not
            given: none does.
        system_metrics_s: Seconds between two samples of CPU, memory and GPU of every node; not given: none.
    """

    enabled: bool = True
    uri: str | None = None
    experiment: str = "ray_app"
    every_steps: int = 10
    registered_model: str | None = None
    system_metrics_s: float | None = 10.0


@dataclass(frozen=True)
class Config:
    """The whole configuration of a run."""

    task: ClassSpec = _result(ClassSpec(""))
    optimizer: ClassSpec = _result(ClassSpec("torch.optim.Adam"))
    schedule: ClassSpec | None = _result(None)
    seed: int = _result(0)
    run: RunSection = RunSection()
    scaling: ScalingSection = ScalingSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    checkpoint: CheckpointSection = CheckpointSection()
    failure: FailureSection = FailureSection()
    evaluate: EvaluateSection = EvaluateSection()
    tracking: TrackingSection = TrackingSection()

    @property
    def logical_workers(self) -> int:
        """L: the number of data-parallel replicas of the arithmetic."""
        return self.scaling.logical_workers or self.scaling.max_workers

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries, as they stand in YAML."""
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        """The configuration as YAML that `load` and `--config` read."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    def replace(self, **fields: Any) -> Config:
        """A copy with other values; keys are dotted names, with `__` for the dot (`train__epochs=3`)."""
        values = self.to_dict()
        for name, value in fields.items():
            *section, last = name.split("__")
            target = values
            for part in section:
                target = target[part]
            target[last] = value
        return from_dict(values)


SECTIONS: dict[str, type] = {
    "run": RunSection,
    "scaling": ScalingSection,
    "data": DataSection,
    "train": TrainSection,
    "checkpoint": CheckpointSection,
    "failure": FailureSection,
    "evaluate": EvaluateSection,
    "tracking": TrackingSection,
}


def from_dict(values: dict[str, Any]) -> Config:
    """Builds a configuration from nested dictionaries with known names, without checking it."""
    made: dict[str, Any] = dict(values)
    for name, section in SECTIONS.items():
        if name in made:
            made[name] = section(**made[name])
    for name in ("task", "optimizer", "schedule"):
        if made.get(name) is not None:
            made[name] = ClassSpec(made[name]["class_path"], dict(made[name].get("init_args") or {}))
    return Config(**made)


def from_yaml(text: str) -> Config:
    """Reads what `Config.to_yaml` wrote."""
    return from_dict(yaml.safe_load(text))


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one level with dotted names; empty dictionaries vanish."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def result_fields(config: Config, manifest_digest: str) -> dict[str, Any]:
    """The fields that decide the result and differ from their default, with dotted names."""
    found: dict[str, Any] = {
        "manifest": manifest_digest,
        "scaling.logical_workers": config.logical_workers,
        "scaling.threads_per_worker": config.scaling.threads_per_worker,
    }
    if config.evaluate.patience is not None:  # then evaluations choose the result
        section, cadence = config.evaluate, config.checkpoint
        found |= {"evaluate.metric": section.metric, "evaluate.mode": section.mode, "evaluate.min_delta": section.min_delta}
        found |= {"evaluate.where": section.where, "evaluate.batch_size": section.batch_size}
        found |= {"checkpoint.every_steps": cadence.every_steps, "checkpoint.every_epochs": cadence.every_epochs}
    for owner, prefix in [(config, ""), *((getattr(config, name), f"{name}.") for name in SECTIONS)]:
        for item in dataclasses.fields(owner):
            value = getattr(owner, item.name)
            if prefix + item.name == "train.strategy" and value == "single":
                value = "ddp"  # the same bits, so one may be continued as the other
            if item.metadata.get("affects_result") and value != item.default:
                plain = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
                found[prefix + item.name] = plain
    return flatten(found)


def digest(config: Config, manifest_digest: str) -> str:
    """SHA-256 of the fields that decide the result."""
    return hashlib.sha256(json.dumps(result_fields(config, manifest_digest), sort_keys=True).encode()).hexdigest()


def refuse_other_config(name: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Refuses to resume a run with another configuration or other data.

    Args:
        name: The run's name.
        old: `result_fields` of the run as it is.
        new: `result_fields` of what was asked for.

    Raises:
        RunExistsError: They differ; the message is a diff.
    """
    if old == new:
        return
    before, after = ([f"{key}: {value}" for key, value in sorted(fields.items())] for fields in (old, new))
    diff = "\n".join(line for line in difflib.ndiff(before, after) if line[0] in "-+")
    raise RunExistsError(
        f"The run {name!r} exists with another configuration or other data:\n{diff}\n"
        "(-: of the run, +: asked for now). Nothing was changed. Give another run.name for a new run, or the run's own values to resume"
        " it; more epochs need a new run."
    )


def default_tracking_uri(config: Config) -> str:
    """The MLflow tracking URI of a run.

    Raises:
        ConfigError: None is given and the run is stored on S3, where no database can be.
    """
    if not config.tracking.uri and "://" in config.run.storage_path:
        raise ConfigError(
            f"run.storage_path is {config.run.storage_path!r}, where MLflow's SQLite file cannot be, and tracking.uri is not given. Set"
            " tracking.uri to an MLflow server (http://host:5000) or to a file of this machine (sqlite:////folder/mlflow.db), or set"
            " tracking.enabled to false."
        )
    return config.tracking.uri or f"sqlite:///{Path(config.run.storage_path).resolve() / 'mlflow.db'}"
