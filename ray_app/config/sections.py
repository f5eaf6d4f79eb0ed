"""The sections of the configuration, each a frozen dataclass.

The docstrings are the user's reference: `--help` and `docs/reference/configuration.md` show the text of each field. A
field that changes the resulting parameters is declared with `result_field(...)` and is part of the run's digest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from ray_app.config.rules import (
    FinitePositiveFloat,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    NumberRange,
    PositiveFloat,
    PositiveInt,
)
from ray_app.config.strategies import STRATEGIES, StrategyName, StrategyTraits


def result_field(default: Any) -> Any:
    """Returns a dataclass field that affects the result, so that its value is part of the run's digest."""
    return field(default=default, metadata={"affects_result": True})


@dataclass(frozen=True)
class ClassSpec:
    """A class and the arguments with which it is instantiated.

    Args:
        class_path: Import path, such as `torch.optim.AdamW`.
        init_args: Keyword arguments of the class.
    """

    class_path: str
    init_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunSection:
    """Where a run is stored and how it is resumed.

    Args:
        name: Name of the run's directory below `storage_path` and of its run in MLflow. A start with the name of an
            existing run resumes that run. Default: a name is generated.
        storage_path: Folder that every node of the cluster sees under the same path, or `s3://bucket/prefix`,
            `gs://bucket/prefix` or `az://container/prefix`, with `?endpoint_override=host:port&scheme=http` for other
            servers than the provider's. Each node needs the credentials, see the page on runs.
        ray_address: Address of the Ray cluster to connect to, or `auto`. Default: the value of `RAY_ADDRESS` if it is
            set (as in a Ray job), otherwise a local cluster that is stopped when the run ends.
        changed: Reaction to changed code or data when a run is resumed. Code: the source files of the task, optimizer
            or schedule, or versions of the libraries that they import, differ from those at the last start. Data: files
            differ in size or modification time (in a bucket: in ETag). `warn` names the changes and resumes; `refuse`
            does not start.
        branch_from: Checkpoint of another run from which this new run continues: the run's directory, also in a bucket,
            alone for its newest one, or with `@step-1200`, `@epoch-3` or `@best` behind it. Parameters, optimizer state
            and the position in the data continue; options of the optimizer and the schedule come from this run. The
            checkpoint is copied at the first start. Default: the run begins at its first step.
        branch_point: Step and SHA-256 of the parameters of that checkpoint, as `1200-SHA`. It decides the result; the
            path does not. Default: both of the checkpoint at the first start.
    """

    name: str | None = None
    storage_path: str = "runs"
    ray_address: str | None = None
    changed: Literal["warn", "refuse"] = "warn"
    branch_from: str | None = None
    branch_point: str | None = result_field(None)

    @property
    def first_step(self) -> int:
        """Returns the number of steps that were finished before the run began."""
        return int(self.branch_point.partition("-")[0]) if self.branch_point is not None else 0


@dataclass(frozen=True)
class ScalingSection:
    """How many workers train, and the resources of each.

    Args:
        min_workers: Smallest number of workers. The run waits until the cluster has the capacity for them. While lost
            workers are being replaced, the remaining ones continue with fewer; with `train.strategy: fsdp` they wait,
            because the sharded state needs the memory of this many workers.
        max_workers: Largest number of workers, limited by the capacity of the cluster. `all`: the capacity at the first
            start, or the capacity that the autoscaler can provide (if it reports this; KubeRay's does not), at most
            `logical_workers`. A run keeps the resolved number.
        logical_workers: Number of data-parallel replicas that define the arithmetic (L). The same L gives the same
            parameters on any number of workers up to L. Default: `max_workers` at the first start.
        threads_per_worker: CPU threads with which each worker computes. The number is part of the arithmetic.
        cpus_per_worker: Logical CPUs that each worker reserves.
        gpus_per_worker: GPUs that each worker reserves: 0 (the worker trains on the CPU), a fraction of one GPU, or 1.
            `auto`: 1 if the cluster has the GPUs for `min_workers` workers at the first start (without workers: if this
            machine has one), otherwise 0. A run keeps the resolved number.
        label_selector: Labels of the nodes on which workers may run (`ray start --labels zone=a`). Each label has a
            value or one of Ray's conditions, such as `in(a,b)` and `!a`. Default: any node. The evaluator and the
            parameter servers also run on these nodes, unless `evaluate.label_selector` and
            `train.server_label_selector` name others; tasks that read data run on any node.
        resize_interval_s: Minimum number of seconds between two changes by which the number of workers grows.
        standby_workers: Processes that have imported all libraries and opened their device, but do not train. Each
            reserves the resources of a worker. At the next step boundary a standby worker replaces a lost worker or
            takes up new capacity.
        evict_straggler_after_s: Seconds for which a worker has to delay the other workers (event `straggler_detected`)
            before it is evicted. It is replaced by a new worker, on another node if there is one. Without capacity for
            a replacement, it is evicted only if the remaining workers are faster without it. Default: never.
        load_balancing: `none`: every worker runs the same number of logical workers. `speed`: logical workers move from
            slower to faster workers; the result stays bit-identical. This needs more logical workers than workers,
            `train.reduction: exact`, and the strategy `ddp` or `central_storage`.
    """

    min_workers: PositiveInt = 1
    max_workers: PositiveInt | Literal["all"] = 1
    logical_workers: PositiveInt | None = result_field(None)
    threads_per_worker: PositiveInt = result_field(1)
    cpus_per_worker: NonNegativeFloat = 1
    gpus_per_worker: NonNegativeFloat | Literal["auto"] = result_field("auto")
    label_selector: dict[str, str] | None = None
    resize_interval_s: PositiveFloat = 10.0
    standby_workers: NonNegativeInt = 0
    evict_straggler_after_s: PositiveFloat | None = None
    load_balancing: Literal["none", "speed"] = "none"

    @property
    def worker_limit(self) -> int:
        """Returns `max_workers`, or `min_workers` as long as `all` is not yet resolved to a number."""
        return self.max_workers if isinstance(self.max_workers, int) else self.min_workers

    @property
    def worker_gpus(self) -> float:
        """Returns `gpus_per_worker`, or 0 as long as `auto` is not yet resolved to a number."""
        return 0 if isinstance(self.gpus_per_worker, str) else self.gpus_per_worker

    @property
    def worker_resources(self) -> dict[str, float]:
        """Returns what each worker reserves, by Ray's names, without zeros."""
        resources = {"CPU": self.cpus_per_worker, "GPU": self.worker_gpus}
        return {name: amount for name, amount in resources.items() if amount}


@dataclass(frozen=True)
class DataSection:
    """The data that a run reads, and how it is shuffled, batched and cached.

    Args:
        path: Folder (or file) of Parquet with the training data. Or several in a ratio, such as `[{path: a, weight: 3},
            {path: s3://bucket/b, weight: 1}]`: of 4 rows, 3 are of `a`. An epoch uses each row at least once, and
            repeats the rows of data sets that end before.
        eval_path: Folder (or file) of Parquet with the evaluation data. Default: no evaluation.
        fold: Fold of `path`, from 0, on which the run evaluates; it trains on the others, or with `fold_by_time` on the
            rows before. Default: none, and it trains on all rows.
        folds: Number of folds. Without a column they are equal ranges of the rows in the order of the files.
        fold_by: Column with groups (integers or text), such as `patient`, that stay together in one fold.
        fold_by_class: Column with classes (integers or text), such as `label`, of which each fold gets an equal share.
        fold_by_time: Column with dates, times or numbers; each fold is later than the rows that train for it.
        global_batch_size: Rows of one optimizer step over all workers; a multiple of the number of logical workers.
        shuffle_window_rows: Rows per logical worker that are shuffled together. A worker holds about this many decoded
            rows times `prefetch_windows` + 1 for each logical worker that it runs, and one window more. A size that no
            node can hold is refused before the start, unless the rows are in the object store (`cache: memory`).
        shuffle: `false`: every epoch has the rows in the order of the files, and with `shard: row` the first step has
            the first `global_batch_size` rows. `ray-app ingest` mixes rows as well, unless `--shuffle false` is given.
        shard: Rows of a logical worker, as in tf.data's AutoShardPolicy. `row` (DATA): an equal share of the rows, a
            different one in every epoch. `file` (FILE): whole files, the same in every epoch, shuffled among
            themselves. `off` (OFF): all rows.
        balance_by: Column with classes (integers or text), such as `label`. Rows of smaller classes are repeated until
            all classes are used equally often. The driver reads the column before the start, and every process holds 1
            or 2 bytes per row. Default: every row is used once per epoch.
        by_length: Decoded field with rows of different lengths, such as `tokens`. Rows of a shuffle window that have
            about the same length form a micro-batch, which is padded to its longest row. Default: rows in shuffled
            order.
        last_batch: `keep`: every row is used, so the last step of an epoch may have fewer rows. `drop`: rows that do
            not fill a step are left out.
        cache: `none`: rows are read and decoded in every epoch. `memory`: rows are decoded once into Ray's object
            store, one copy per node. `disk`: rows that are decoded in the first epoch are stored on the disks of the
            nodes with the workers that use them, also for later runs with the same data and task.
        cache_dir: Folder of the disk caches on every node. Default: `ray_app-UID/cache` in the temporary folder of
            the node, with the user's UID. The folder can be removed while no run uses it.
        cache_gb: Largest size of all disk caches of a node in gigabytes (10^9 bytes). Rows above this size are read in
            every epoch.
        prefetch_windows: Shuffle windows per logical worker that are read ahead.
        read_task_mb: Largest size of the decoded rows of one read task in megabytes.
        reader_threads: Threads of each worker that read and decode its rows. They need fewer CPU seconds than the tasks
            of Ray Data that do this on any CPU of the cluster (0). Reserve a CPU for each thread
            (`scaling.cpus_per_worker`).
        on_bad_row: Reaction to a training row that cannot be decoded. `fail` ends the run. `skip` continues without the
            row and lists it. A failed run continues from where it ended when it is started again with `skip`.
        max_bad_rows: Number of skipped rows above which the run ends despite `skip`.
    """

    path: str | list[Any] = ""
    eval_path: str | None = None
    fold: NonNegativeInt | None = result_field(None)
    folds: Annotated[int, NumberRange(ge=2)] = result_field(5)
    fold_by: str | None = result_field(None)
    fold_by_class: str | None = result_field(None)
    fold_by_time: str | None = result_field(None)
    global_batch_size: PositiveInt = result_field(32)
    shuffle_window_rows: PositiveInt = result_field(10_000)
    shuffle: bool = result_field(True)
    shard: Literal["row", "file", "off"] = result_field("row")
    balance_by: str | None = result_field(None)
    by_length: str | None = result_field(None)
    last_batch: Literal["keep", "drop"] = result_field("keep")
    cache: Literal["none", "memory", "disk"] = "none"
    cache_dir: str | None = None
    cache_gb: PositiveFloat = 50.0
    prefetch_windows: PositiveInt = 1
    read_task_mb: FinitePositiveFloat = 64.0
    reader_threads: NonNegativeInt = 0
    on_bad_row: Literal["fail", "skip"] = "fail"
    max_bad_rows: NonNegativeInt = 100

    @property
    def sources(self) -> list[str]:
        """Returns the paths of the training data."""
        return [self.path] if isinstance(self.path, str) else [source["path"] for source in self.path]

    @property
    def weights(self) -> list[int] | None:
        """Returns the weight of each of several data sets; None for a single one."""
        return None if isinstance(self.path, str) else [source["weight"] for source in self.path]

    @property
    def evaluation_path(self) -> str | None:
        """Returns the path of the data set with the rows to evaluate on: with a fold that of all rows."""
        return self.eval_path if self.fold is None else ", ".join(self.sources)

    @property
    def evaluation_name(self) -> str:
        """Returns what the rows to evaluate on are called in messages."""
        return f"data.eval_path {self.eval_path}" if self.fold is None else f"fold {self.fold} of data.path {self.path}"


@dataclass(frozen=True)
class CheckpointSection:
    """When checkpoints are written, and which are kept.

    Args:
        every_steps: Optimizer steps between two checkpoints. Default: none by steps.
        every_epochs: Epochs between two checkpoints. Default: none by epochs. The end of training always writes one.
        keep_last: Number of newest checkpoints to keep; the best one by `evaluate.metric` is kept in addition. With 1,
            a run starts from its first step if that checkpoint is damaged; a warning says so at the start.
        snapshot_every_steps: Optimizer steps between two snapshots: copies of the state in memory outside the workers.
            A run that loses all workers at once resumes from the newest snapshot. Default: no snapshots; such a run
            resumes from its newest checkpoint.
    """

    every_steps: PositiveInt | None = None
    every_epochs: PositiveInt | None = 1
    keep_last: PositiveInt = 2
    snapshot_every_steps: PositiveInt | None = None


@dataclass(frozen=True)
class FailureSection:
    """How a run detects failures, and how many it tolerates.

    Args:
        max_failures: Worker failures that the run tolerates before it fails; -1: any number.
        step_timeout_s: Seconds without a finished step after which the step watchdog ends and replaces the workers that
            stall the group. Default: 50 times the median step time, at least 60 s (600 s before the first step is
            measured); 600 s with `train.compile`. The first step of each generation has five times as long.
        heartbeat_timeout_s: Seconds without a heartbeat after which the other workers continue without a worker.
        recovery: `in_place`: when a worker is lost, the others keep their state and continue, and a new worker joins
            them. `restart`: all workers restart from the newest checkpoint, as in stock Ray Train.
        sdc_check_rate: Share of the computation of logical workers that another worker recomputes before the update, to
            detect silent data corruption: 0.01 costs about 1 % of the computation. This needs
            `train.reduction: exact`, the strategy `ddp` or `central_storage`, and two workers on the same hardware.
            With `ddp` all workers also compare their parameters after every 1,000 steps. If they differ, the
            run continues with the parameters of the majority, or from the newest snapshot or checkpoint if there is
            none. With 0 they are compared only after a generation that failed.
    """

    max_failures: Annotated[int, NumberRange(ge=-1)] = 5
    step_timeout_s: PositiveFloat | None = None
    heartbeat_timeout_s: PositiveFloat = 5.0
    recovery: Literal["in_place", "restart"] = "in_place"
    sdc_check_rate: Fraction = 0.0


@dataclass(frozen=True)
class EvaluateSection:
    """How checkpoints are evaluated.

    Args:
        where: Process that evaluates the planned checkpoints: the checkpoints of `checkpoint.every_steps`, of
            `every_epochs` and of the end. `actor`: an evaluator that runs concurrently with training and follows its
            checkpoints. `workers`: the training workers, which pause at each planned checkpoint and evaluate it
            together. `auto`: `workers` if they train on GPUs and `num_gpus` and `workers` are at their defaults,
            otherwise `actor`. With a strategy that does not let workers evaluate, the actor gets a GPU if one is left
            by `max_workers`, or by `min_workers` with `max_workers: all`. A run keeps what was resolved.
        max_pending: Largest number of checkpoints that are kept for an evaluator that lags behind. Older ones are
            removed and recorded as skipped. With 1 only the newest waits.
        patience: Planned checkpoints in a row without an improvement of `metric` after which training stops. The result
            is then the best checkpoint up to that one, and all planned checkpoints are evaluated regardless of
            `max_pending`. Default: no early stopping.
        min_delta: Change of `metric` that must be exceeded to count as an improvement for `patience`.
        metric: Metric that selects the best checkpoint. Default: the one that the task declares.
        mode: Whether a higher (`max`) or a lower (`min`) value of `metric` is better. Default: as the task declares.
        batch_size: Rows of one forward pass: rows 0 to `batch_size` - 1, then the next `batch_size` rows, and so on.
        fixed_batches: Whether the evaluation depends on which rows are in a batch, for example with a loss that uses
            negatives from the batch. If so, loss and metrics are computed batch by batch, and `batch_size` cannot
            change during a run. `true` accepts this without a warning. Default: detected before the start.
        workers: Number of actors that evaluate a checkpoint together, each with its own reservation. The metrics are
            bit-identical for any number.
        max_rows: Largest number of rows to evaluate on. Of more rows in `data.eval_path` an equal share of each row
            group is used, always the same one. Default: all rows.
        half: Half of the rows to evaluate on, by a hash of their file's content and their position in it, as for the
            gate of `ray-app retrain`. `selection`: the half by which checkpoints and settings are chosen; `report`: the
            other one, for a score of what was chosen. Default: all rows.
        num_cpus: Logical CPUs that each actor reserves. It computes with as many CPU threads, at least one.
        num_gpus: GPUs that each actor reserves: 0, a fraction of one GPU, or 1.
        label_selector: Labels of the nodes on which actors run. Default: `scaling.label_selector`.
    """

    where: Literal["auto", "actor", "workers"] = "auto"
    max_pending: PositiveInt = 32
    patience: PositiveInt | None = result_field(None)
    min_delta: NonNegativeFloat = 0.0
    metric: str | None = None
    mode: Literal["max", "min"] | None = None
    batch_size: PositiveInt = 256
    fixed_batches: bool | None = None
    workers: PositiveInt = 1
    max_rows: PositiveInt | None = None
    half: Literal["selection", "report"] | None = None
    num_cpus: NonNegativeFloat = 1
    num_gpus: NonNegativeFloat = 0
    label_selector: dict[str, str] | None = None

    @property
    def threads(self) -> int:
        """Returns the number of CPU threads with which the evaluator computes."""
        return max(1, int(self.num_cpus))


@dataclass(frozen=True)
class TrackingSection:
    """Where the run is recorded in addition to its own directory.

    Args:
        enabled: Whether the run is recorded in MLflow.
        uri: MLflow tracking URI. Default: `MLFLOW_TRACKING_URI` of the environment, the address of the run's last
            start, or the SQLite file `mlflow.db` in `run.storage_path`, which must then be a folder.
        experiment: Name of the MLflow experiment. Default: `MLFLOW_EXPERIMENT_NAME` or `MLFLOW_EXPERIMENT_ID` of the
            environment, the experiment of the run's last start, or `ray_app`.
        every_steps: Optimizer steps that are combined into one point of each metric. The run's own record has every
            step.
        registered_model: Name in MLflow's model registry under which the best checkpoint of a finished run becomes a
            new version. Default: the model is not registered.
        tensorboard: Whether the driver also writes event files for TensorBoard to `tensorboard` in the run's directory,
            with or without MLflow.
    """

    enabled: bool = True
    uri: str | None = None
    experiment: str | None = None
    every_steps: PositiveInt = 10
    registered_model: str | None = None
    tensorboard: bool = False


@dataclass(frozen=True)
class TrainSection:
    """How the model is trained.

    Args:
        epochs: Passes over the training data; with `steps_per_epoch`, stretches of that many steps. A higher number
            than at the last start continues a run, even a finished one; the result is bit-identical to a run with the
            higher number from the start. A schedule that depends on the total number of steps (`OneCycleLR` without
            `total_steps`) is then refused.
        steps_per_epoch: Optimizer steps of an epoch. Default: one pass over the data. Each epoch continues after the
            rows of the last one, so every row is still used once per pass.
        max_steps: Largest number of optimizer steps, regardless of `epochs`. Default: no limit. It may be raised
            later in the same way as `epochs`.
        strategy: How workers share the model. `ddp`: every worker has a copy; the gradients are added in every step.
            `local_sgd`: every logical worker makes `local_steps` steps alone, then parameters and optimizer state are
            averaged. `parameter_server`: `servers` actors hold parameters and optimizer state; workers fetch parameters
            and send gradients without waiting for each other. `fsdp`: parameters, gradients and optimizer state are
            sharded over the workers. `central_storage`: parameters and optimizer state are in the host memory of one
            worker, which makes all updates. `single`: `ddp` in the calling process, without workers, so that
            breakpoints work.
        local_steps: Steps between two averages with `local_sgd` (H).
        outer_lr: Factor of the averaged change of the parameters with `local_sgd`; 1 is the average itself.
        outer_momentum: Nesterov momentum of the averaged change, as in DiLoCo (which uses 0.9, with `outer_lr` 0.7);
            0: none.
        servers: Number of parameter servers (P) with `parameter_server`; each reserves a CPU. It may change when a run
            is resumed.
        server_label_selector: Labels of the nodes on which parameter servers run. Default: `scaling.label_selector`.
        staleness: Steps by which a logical worker may be ahead of the slowest one with `parameter_server`. 0:
            synchronous; the gradients of all logical workers are added in one fixed order and applied once. Above 0,
            each gradient is applied when it arrives.
        peer_replica: After every step, each worker sends the state that only it has (its shards with `fsdp`, the
            complete state of rank 0 with `central_storage`) to the host memory of the next worker, so that no step has
            to be repeated after a worker is lost.
        cpu_offload: Keeps the shards of `fsdp` in host memory and makes the updates there. Only the parameters of the
            current computation are on the GPU.
        reduction: `exact`: the gradients of the logical workers are added in one fixed order, so that the result is
            bit-identical on any number of workers. `overlapped`: the network adds them during backward; rows and
            weights are the same, but the result is not bit-identical.
        reducer: Import path of your class that adds the gradients instead of `reduction`, see the page on strategies.
            With `reduction: exact`, kernels stay deterministic, and the class must add the gradients independently of
            the number of workers. Default: the application's reducers.
        backend: Communication backend of the gradients. `auto`: NCCL between GPUs; gloo between CPUs, and if workers
            share a GPU, which NCCL refuses. `gloo`: always gloo, through host memory, if NCCL does not work.
        bucket_mb: Size of the gradient buckets in mebibytes, which are reduced while backward runs, as in DDP's
            `bucket_cap_mb`. Default: 64 if GPUs add them (the first one 8), 8 if the host does.
        precision: `fp32`, or autocast of forward and loss to `bf16` or `fp16` (parameters and gradients stay fp32).
            With `fp16` the loss is scaled by a power of two that is adapted during training and stored in checkpoints.
        grad_clip_norm: Largest global L2 norm of the gradient. Default: no clipping.
        ema_decay: Decay of an exponential moving average of the parameters, such as 0.999. The average is evaluated,
            returned and registered. Default: the parameters themselves are used.
        freeze: Names of parameters that are not trained; `*` matches any text (`features.*`). Batch-norm layers
            keep their statistics if all their parameters are frozen.
        compile: Compiles the model with `torch.compile`. This needs a C++ compiler on the nodes of the workers, and
            takes minutes for a big model.
        capture: Captures forward and backward of a micro-batch as a CUDA graph, for small steps in which the GPU waits
            for kernel launches; the result is bit-identical. Refused if the forward depends on values on the host.
        channels_last: Stores images in the channels-last memory format, which is faster for convolutions on GPUs with
            tensor cores.
        init_from: Initial parameters and persistent buffers: the directory of a run (its best checkpoint when it has
            ended, otherwise its newest), the folder of a checkpoint or an export, a file of safetensors, a state dict
            or a checkpoint of Lightning by `torch.save`, or a registered model (`models:/NAME@ALIAS`,
            `models:/NAME/VERSION`). They are read at the first start and stored with the run. Default: the model's own
            initialization, which draws from the seed.
        profile_steps: Steps that rank 0 traces with `torch.profiler` to `profile/` in the run's directory: the first
            and the last step, counted from 1 over the run. Default: none.
        init_digest: SHA-256 of the parameters of `init_from`, as `params_digest` in `summary.json`. The digest decides
            the result; the path of the file does not. Default: the digest of the parameters at the first start.
    """

    epochs: PositiveInt = result_field(1)
    steps_per_epoch: PositiveInt | None = result_field(None)
    max_steps: PositiveInt | None = result_field(None)
    strategy: StrategyName = result_field("ddp")
    local_steps: PositiveInt = result_field(1)
    outer_lr: PositiveFloat = result_field(1.0)
    outer_momentum: NonNegativeFloat = result_field(0.0)
    servers: PositiveInt = 1
    server_label_selector: dict[str, str] | None = None
    staleness: NonNegativeInt = result_field(0)
    peer_replica: bool = False
    cpu_offload: bool = result_field(False)
    reduction: Literal["exact", "overlapped"] = result_field("exact")
    reducer: str | None = result_field(None)
    backend: Literal["auto", "gloo"] = "auto"
    bucket_mb: FinitePositiveFloat | None = None
    precision: Literal["fp32", "bf16", "fp16"] = result_field("fp32")
    grad_clip_norm: PositiveFloat | None = result_field(None)
    ema_decay: Annotated[float, NumberRange(ge=0, lt=1)] | None = result_field(None)
    freeze: list[str] | None = result_field(None)
    compile: bool = result_field(False)
    capture: bool = False
    channels_last: bool = result_field(False)
    init_from: str | None = None
    profile_steps: list[int] | None = None
    init_digest: str | None = result_field(None)

    @property
    def strategy_traits(self) -> StrategyTraits:
        """The traits of the strategy, which must be a known one, see `check_config`."""
        return STRATEGIES[self.strategy]

    def total_steps(self, pass_steps: int) -> int:
        """Steps of the whole run, given those of a pass over the data."""
        steps = self.epochs * (self.steps_per_epoch or pass_steps)
        return min(steps, self.max_steps or steps)
