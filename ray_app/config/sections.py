"""The sections of the configuration: frozen dataclasses, one each.

Fields that change the resulting parameters are made with `result(...)`; they are part of a run's digest.

The section `train` of the configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


def result_field(default: Any) -> Any:
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

    Args: name: Directory of the run below `storage_path` and its name in MLflow; starting the same name again resumes
        it. Made up when
            not given.
        storage_path: Folder that every node of the cluster sees under the same path, or `s3://bucket/prefix`. How S3 is
            reached comes from the usual `AWS_*` variables, on every node, or from the path:
            `?endpoint_override=host:port&scheme=http&region=...`.
        ray_address: Ray cluster to join (`auto` or an address). Not given: `RAY_ADDRESS` if that is set (as in a Ray
            job), otherwise a local cluster of this machine's own, stopped at the end.
        changed_code: What to do if the task's, optimizer's or schedule's source files, or versions of libraries that
            they import, are not as at the run's last start: `warn` says what changed and goes on, `refuse` does not
            start.
        changed_data: What to do if files of the training or evaluation data have another size or time (in a bucket
            another ETag) than at the run's last start: `warn` or `refuse`, as `describe_code_changes`.
    """

    name: str | None = None
    storage_path: str = "runs"
    ray_address: str | None = None
    changed_code: Literal["warn", "refuse"] = "warn"
    changed_data: Literal["warn", "refuse"] = "warn"


@dataclass(frozen=True)
class ScalingSection:
    """How many workers train, and with what.

    Args: min_workers: Fewest workers to train with; the run waits where there is no room for them. While lost ones are
        being replaced the
            others go on, but with `train.strategy: fsdp`, whose state needs the memory of so many.
        max_workers: Most workers; capped at what the cluster has. `all`: as many as it has room for at the first start,
            or what its autoscaler may make of it (if it tells, which that of KubeRay does not), and at most
            `logical_workers`; a run keeps that number.
        logical_workers: Data-parallel replicas that define the arithmetic (L). The same L gives the same parameters on
            any number of workers up to L. Not given: `max_workers` of the first start.
        threads_per_worker: CPU threads of the computation in each worker; part of the arithmetic.
        cpus_per_worker: Logical CPUs that each worker reserves.
        gpus_per_worker: GPUs that each worker reserves: 0 (it trains on the CPU), a share of one, or 1.
        label_selector: Labels of the nodes that workers may run on (`ray start --labels zone=a`), each with a value or
            one of Ray's conditions such as `in(a,b)` and `!a`; not given: any node. Reading goes anywhere, the
            evaluator and parameter servers where selectors of their own say.
        resize_interval_s: Seconds between two looks for more capacity.
        standby_workers: Processes beside the workers that have imported everything and opened their device, each in a
            slot that it reserves like a worker; one of them takes the place of a lost worker, or uses new room, at the
            next step boundary.
        evict_straggler_after_s: Seconds for which a worker must have kept the others waiting (event `slowed`) to be
            replaced by another one, on another node if there is one; where there is no room, it leaves if the rest is
            faster without it. Not given: it stays.
        load_balancing: `none`: workers play equally many logical workers. `speed`: logical workers move from workers
            that take longer to those that are done sooner, with the same bits; needs more logical workers than workers,
            `train.reduction: exact`, and the strategy `ddp` or `central_storage`.
    """

    min_workers: int = 1
    max_workers: int | Literal["all"] = 1
    logical_workers: int | None = result_field(None)
    threads_per_worker: int = result_field(1)
    cpus_per_worker: float = 1
    gpus_per_worker: float = result_field(0)
    label_selector: dict[str, str] | None = None
    resize_interval_s: float = 10.0
    standby_workers: int = 0
    evict_straggler_after_s: float | None = None
    load_balancing: Literal["none", "speed"] = "none"

    @property
    def worker_limit(self) -> int:
        """`max_workers`; `min_workers` as long as nobody has looked how many `all` are."""
        return self.max_workers if isinstance(self.max_workers, int) else self.min_workers


@dataclass(frozen=True)
class DataSection:
    """What is read, and in which portions.

    Args: path: Folder (or file) of Parquet to train on. eval_path: Folder (or file) of Parquet to evaluate on; not
        given: no evaluation. global_batch_size: Rows of one optimizer step over all workers; divisible by the number of
        logical workers. shuffle_window_rows: Rows per logical worker that are shuffled together; a worker holds about
        this many decoded rows, times
            `prefetch_windows` + 1, for each logical worker that it plays, and one window more. What no node can hold is
            refused before the start, unless `cache: memory` holds the rows.
        shard: What a logical worker gets, as tf.data's AutoShardPolicy: `row` (DATA) an equal share of the rows,
            another in every epoch; `file` (FILE) whole files, the same in every epoch, which it shuffles among
            themselves; `off` (OFF) every row.
        sampling: `none` uses every row once per epoch; `balanced` repeats rows of the smaller classes until all classes
            are used equally often. The driver then reads the column `balance_by` before the start, and every process
            holds 1 or 2 bytes per row.
        balance_by: Column of classes, integers or text, for `sampling: balanced`.
        by_length: A decoded field whose rows have different lengths, such as `tokens`: rows of a shuffle window that
            are about equally long are put into the same micro-batch, which is padded to its longest; not given: rows as
            they are shuffled.
        last_batch: `keep` consumes every row, the last step of an epoch may be smaller; `drop` drops what does not fill
            a step.
        cache: `none` reads and decodes in every epoch; `memory` decodes once into Ray's object store, one copy per
            node; `disk` keeps what is decoded in the first epoch on the disks of the nodes whose workers use it, also
            for later runs with the same data and task.
        cache_dir: Folder of the disk caches on every node; not given: `ray_app-UID/cache` in its temporary folder, for
            the UID of the user. It can be removed when no run is using it.
        cache_gb: Most gigabytes (10^9 bytes) of all disk caches of a node; rows for which there is no room are read in
            every epoch.
        prefetch_windows: Windows per logical worker that are read ahead.
        read_task_mb: Most decoded megabytes of one read task.
        reader_threads: Threads of each worker that read and decode what it trains on, which costs fewer CPU seconds
            than the tasks of Ray Data that do it on any CPU of the cluster with 0. Reserve a CPU for each
            (`scaling.cpus_per_worker`).
        on_bad_row: What to do about a row to train on that cannot be decoded: `fail` ends the run, `skip` goes on
            without it and lists it. A run that failed goes on where it was when started again with `skip`.
        max_bad_rows: With `skip`, bad rows above which the run ends nevertheless.
    """

    path: str = ""
    eval_path: str | None = None
    global_batch_size: int = result_field(32)
    shuffle_window_rows: int = result_field(10_000)
    shard: Literal["row", "file", "off"] = result_field("row")
    sampling: Literal["none", "balanced"] = result_field("none")
    balance_by: str = result_field("label")
    by_length: str | None = result_field(None)
    last_batch: Literal["keep", "drop"] = result_field("keep")
    cache: Literal["none", "memory", "disk"] = "none"
    cache_dir: str | None = None
    cache_gb: float = 50.0
    prefetch_windows: int = 1
    read_task_mb: float = 64.0
    reader_threads: int = 0
    on_bad_row: Literal["fail", "skip"] = "fail"
    max_bad_rows: int = 100


@dataclass(frozen=True)
class CheckpointSection:
    """When checkpoints are made and which are kept.

    Args: every_steps: Optimizer steps between two checkpoints; not given: none by steps. every_epochs: Epochs between
        two checkpoints; not given: none by epochs. The end of training always makes one. keep_last: Newest checkpoints
        to keep, at least 2. keep_best: Best checkpoints by `evaluate.metric` to keep besides. snapshot_every_steps:
        Optimizer steps between two copies of the state to memory outside the workers, from which a run goes on that
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

    Args: max_failures: Failures of workers before the run gives up; -1: any number. max_preemptions: Nodes taken away
        (announced or not) before it gives up; -1: any number. step_timeout_s: Seconds without a finished step after
        which the workers that hold it up are ended and replaced; not given: 50
            times the median step, at least 60 (600 before any step is known); with `train.compile` 600. The first step
            of each group of workers has five times as long.
        heartbeat_timeout_s: Seconds without a sign of life after which the others go on without a worker.
        recovery: `in_place`: the others keep their state and go on when a worker is lost, and a new one joins them.
            `restart`: all workers start again from the newest checkpoint, as in stock Ray Train.
        sdc_check_rate: The part of all shares of logical workers that another worker computes again, before the update,
            so that hardware that computes wrongly is found: 0.01 costs about 1 % of the computation. Needs
            `train.reduction: exact`, the strategy `ddp` or `central_storage`, and two workers of one kind.
        compare_params_every_steps: After each so many steps the workers compare their parameters; those of the majority
            go on, or the newest snapshot or checkpoint. Not given: only after a generation that broke. With the
            strategy `ddp`.
    """

    max_failures: int = 5
    max_preemptions: int = -1
    step_timeout_s: float | None = None
    heartbeat_timeout_s: float = 5.0
    recovery: Literal["in_place", "restart"] = "in_place"
    sdc_check_rate: float = 0.0
    compare_params_every_steps: int | None = None


@dataclass(frozen=True)
class EvaluateSection:
    """How checkpoints are evaluated.

    Args: where: Who evaluates the planned checkpoints, those of `checkpoint.every_steps`, `every_epochs` and of the
        end: `actor` an evaluator
            beside the training, which follows them; `workers` the training workers, which stop at each of them and
            evaluate together.
        every: `checkpoint` evaluates every committed checkpoint, `latest` only the newest whenever it is free.
        budget: Largest share of the cluster's CPUs (with GPUs: of its GPUs) that evaluations may take on average over
            time; the evaluator pauses in between. 1: no limit.
        max_pending: Checkpoints that are kept for an evaluator that lags behind; older ones go, recorded as skipped.
        patience: Planned checkpoints in a row without an improvement of `metric` after which training stops; the result
            is then the best checkpoint up to there, and all planned checkpoints are evaluated, whatever `max_pending`
            says. Not given: no early stop.
        min_delta: What counts as an improvement for `patience`: more than this.
        metric: Metric that says which checkpoint is best; not given: the task's own.
        mode: Whether more (`max`) or less (`min`) of it is better; not given: the task's own.
        batch_size: Rows of one forward pass.
        drain_timeout_s: Seconds that the end of a run waits for the evaluator to catch up.
        on_error: What becomes of the run if the evaluator gives up, because the task's metrics raise: `fail` counts it
            as failed, exit code 1, when training is over; `warn` only says so.
        num_cpus: Logical CPUs that the evaluator reserves.
        num_gpus: GPUs that the evaluator reserves: 0, a share of one, or 1.
        threads: CPU threads of its computation.
        label_selector: Labels of the nodes that the evaluator may run on, as `scaling.label_selector`; not given: any
            node.
    """

    where: Literal["actor", "workers"] = "actor"
    every: Literal["checkpoint", "latest"] = "checkpoint"
    budget: float = 1.0
    max_pending: int = 32
    patience: int | None = result_field(None)
    min_delta: float = 0.0
    metric: str | None = None
    mode: Literal["max", "min"] | None = None
    batch_size: int = 256
    drain_timeout_s: float = 600.0
    on_error: Literal["fail", "warn"] = "fail"
    num_cpus: float = 1
    num_gpus: float = 0
    threads: int = 1
    label_selector: dict[str, str] | None = None


@dataclass(frozen=True)
class TrackingSection:
    """Where the run is recorded besides its own directory.

    Args: enabled: Whether MLflow gets the record. uri: MLflow tracking URI; not given: a SQLite file `mlflow.db` in
        `run.storage_path`, which must then be a folder. experiment: Name of the MLflow experiment. every_steps:
        Optimizer steps that are combined into one point of each metric (the run's own record has every step).
        registered_model: Name in MLflow's model registry under which the best checkpoint of a finished run becomes a
        new version; not
            given: none does.
        system_metrics_s: Seconds between two samples of CPU, memory and GPU of every node; not given, or for a run
            without a cluster (`train.strategy: single`): none.
        tensorboard: Whether the driver also writes event files for TensorBoard, with or without MLflow, to
            `tensorboard` in the run's directory.
    """

    enabled: bool = True
    uri: str | None = None
    experiment: str = "ray_app"
    every_steps: int = 10
    registered_model: str | None = None
    system_metrics_s: float | None = 10.0
    tensorboard: bool = False


@dataclass(frozen=True)
class TrainSection:
    """How it is trained.

    Args: epochs: Passes over the training data; with `steps_per_epoch`, stretches of so many steps. More than at the
        last start make a run
            go on from its end, also one that has finished, with the bits of a run that was as long from the beginning;
            a schedule that spreads over the whole run (`OneCycleLR` without `total_steps`) is refused then.
        steps_per_epoch: Optimizer steps of an epoch; not given: one pass over the data. Rows go on where the last epoch
            ended, so each is still used once per pass.
        max_steps: Most optimizer steps in all, whatever `epochs` says; not given: no limit. May grow as `epochs`.
        strategy: How workers share the model: `ddp` holds a copy in each and adds the gradients of every step.
            `local_sgd` lets every logical worker go `local_steps` steps of its own, then averages parameters and
            optimizer state. `parameter_server` keeps parameters and optimizer on `servers` actors; workers fetch the
            ones and send gradients, and do not wait for each other. `fsdp` shards parameters, gradients and optimizer
            state over the workers. `central_storage` keeps parameters and optimizer state in the host memory of one
            worker, which makes all updates. `single` is `ddp` in the calling process, without workers, so that a
            breakpoint stops there.
        local_steps: Steps between two averages with `local_sgd` (H).
        outer_lr: What multiplies the averaged change of the parameters with `local_sgd`; 1 is the average itself.
        outer_momentum: Nesterov momentum of that change, as in DiLoCo (there 0.9, with `outer_lr` 0.7); 0: none.
        servers: Parameter servers (P), with `parameter_server`; may be another number when a run is continued.
        server_cpus: Logical CPUs that each of them reserves.
        server_label_selector: Labels of the nodes that they may run on, as `scaling.label_selector`; not given: any
            node.
        min_shard_kb: A parameter is split over servers only into parts of at least so many kilobytes.
        staleness: Steps that a logical worker may be ahead of the slowest one, with `parameter_server`. 0: synchronous,
            the gradients of all logical workers are added in one fixed order and applied once. Above, each is applied
            when it arrives.
        peer_replica: Sends what a worker alone has of the state (its shards with `fsdp`, everything of rank 0 with
            `central_storage`) to the host memory of the next worker after every step, so that a killed worker makes no
            step be done again.
        cpu_offload: Keeps the shards of `fsdp` in host memory and makes the updates there; only what computes just now
            is on the GPU.
        reduction: `exact` adds the gradients of the logical workers in one fixed order: the same bits on any number of
            workers. `overlapped` lets the network add them while backward runs: the same rows and weights, not the same
            bits.
        backend: What moves gradients between workers: `auto` is NCCL between GPUs and gloo between CPUs; `gloo` moves
            those of GPUs through host memory, where NCCL cannot be used.
        bucket_mb: Mebibytes of gradients that travel together while backward still runs, as DDP's `bucket_cap_mb`.
        gradient_compression: `bf16` halves what travels with `reduction: overlapped`: sums of gradients are rounded to
            bfloat16 for it.
        precision: `fp32`, or autocast of forward and loss to `bf16` or `fp16` (parameters and gradients stay fp32).
            With `fp16` the loss is scaled by a power of two that is found while training and is part of the checkpoint.
        grad_clip_norm: Largest global L2 norm of the gradient; not given: no clipping.
        ema_decay: Decay of an exponential moving average of the parameters, such as 0.999; it is what is evaluated,
            returned and registered. Not given: the parameters themselves.
        freeze: Names of parameters that are not trained, with `*` for any text (`features.*`); batch-norm layers that
            are frozen as a whole keep their statistics.
        compile: Compiles the model with `torch.compile`; needs a C++ compiler on the workers' nodes, and minutes for a
            big model.
        capture: Captures forward and backward of a micro-batch as a CUDA graph, for small steps in which a GPU waits to
            be told what to do next; the same bits. Refused where the forward depends on the host.
        channels_last: Lays images out with the channels last, which convolutions on GPUs with tensor cores prefer.
        init_from: Parameters (and persistent buffers) to begin with: a safetensors file, the folder of an export, or a
            registered model (`models:/NAME@ALIAS`, `models:/NAME/VERSION`). They are read at the run's first start and
            kept with it; not given: what the model's own initialization draws from the seed.
        profile_steps: Steps that rank 0 traces with `torch.profiler`, to `profile/` in the run's directory: the first
            and the last, counted from 1 over the run, or how many after three steps of each start. Not given: none.
        init_digest: SHA-256 of these parameters, as `params_digest` in `summary.json`, which decides the result where
            their place does not; not given: that of those at the run's first start.
    """

    epochs: int = result_field(1)
    steps_per_epoch: int | None = result_field(None)
    max_steps: int | None = result_field(None)
    strategy: Literal["ddp", "single", "local_sgd", "parameter_server", "fsdp", "central_storage"] = result_field("ddp")
    local_steps: int = result_field(1)
    outer_lr: float = result_field(1.0)
    outer_momentum: float = result_field(0.0)
    servers: int = 1
    server_cpus: float = 1
    server_label_selector: dict[str, str] | None = None
    min_shard_kb: int = 256
    staleness: int = result_field(0)
    peer_replica: bool = False
    cpu_offload: bool = result_field(False)
    reduction: Literal["exact", "overlapped"] = result_field("exact")
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    bucket_mb: float = 8.0
    gradient_compression: Literal["none", "bf16"] = result_field("none")
    precision: Literal["fp32", "bf16", "fp16"] = result_field("fp32")
    grad_clip_norm: float | None = result_field(None)
    ema_decay: float | None = result_field(None)
    freeze: list[str] | None = result_field(None)
    compile: bool = result_field(False)
    capture: bool = False
    channels_last: bool = result_field(False)
    init_from: str | None = None
    profile_steps: list[int] | int | None = None
    init_digest: str | None = result_field(None)

    def total_steps(self, pass_steps: int) -> int:
        """Steps of the whole run, given those of a pass over the data."""
        steps = self.epochs * (self.steps_per_epoch or pass_steps)
        return min(steps, self.max_steps or steps)
