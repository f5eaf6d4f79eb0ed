"""Checks of a configuration before anything else uses it: ranges and choices of single fields, and combinations.

Each check returns a list of problems, so that `check_config` refuses a configuration with all of its problems at once.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ray_app.config.config import SECTIONS, Config, flatten
from ray_app.config.import_paths import TASK_OPTIMIZER, OptimizerSpec
from ray_app.config.sections import TrainSection
from ray_app.config.strategies import STRATEGIES, list_strategies
from ray_app.errors import ConfigError

_NUMERIC_ARGUMENTS = ("lr", "weight_decay", "momentum", "dampening", "eps", "alpha")
_NON_NEGATIVE_ARGUMENTS = ("lr", "weight_decay", "momentum", "eps")


def check_optimizers(config: Config) -> list[str]:
    """Returns the problems of the optimizers and schedules, alone and together with other fields."""
    problems: list[str] = []
    traits = config.train.strategy_traits
    if config.optimizer.class_path == TASK_OPTIMIZER and not traits.can_use_task_optimizer:
        allowed = list_strategies(lambda t: t.can_use_task_optimizer)
        problems.append(
            f"The task makes the optimizer (configure_optimizers, or Task.configure_optimizers), and train.strategy"
            f" {config.train.strategy} makes several. Name it in optimizer, or use {allowed}."
        )
    problems += _check_spec("optimizer", config.optimizer)
    for name, spec in (config.optimizers or {}).items():
        problems += _check_spec(f"optimizers.{name}", spec)
    schedules = {"schedule": config.schedule} | {
        f"optimizers.{name}.schedule": spec.schedule for name, spec in (config.optimizers or {}).items()
    }
    for field, schedule in schedules.items():
        if schedule is not None:
            problems += _check_numbers(f"{field}.init_args", schedule.class_path, schedule.init_args)
    if not config.optimizers:
        return problems if config.optimizers is None else ["optimizers is empty; name an optimizer, or leave it out."]
    if config.optimizer != Config.optimizer:
        problems.append("optimizer and optimizers are both given; leave one of them out.")
    if config.schedule is not None:
        problems.append("schedule is given with optimizers, of which each has its own: optimizers.NAME.schedule.")
    if not traits.can_alternate_optimizers:
        problems.append(
            f"optimizers are given with train.strategy {config.train.strategy}, whose state belongs to one optimizer"
            f" that moves all parameters in each step. Use {list_strategies(lambda t: t.can_alternate_optimizers)}."
        )
    for name, spec in config.optimizers.items():
        if spec.steps < 1:
            problems.append(f"optimizers.{name}.steps is {spec.steps}; it must be at least 1.")
        if not spec.parameters:
            problems.append(
                f"optimizers.{name}.parameters is missing; name the parameters that it moves, with * for any text."
            )
    return problems


def _check_spec(field: str, spec: OptimizerSpec) -> list[str]:
    """Returns the problems of the numbers among the arguments of an optimizer and its groups."""
    problems = _check_numbers(f"{field}.init_args", spec.class_path, spec.init_args)
    for i, group in enumerate(spec.groups or []):
        # jsonargparse does not know the types of a group, and an optimizer accepts true as 1.
        numeric = [name for name in _NUMERIC_ARGUMENTS if name in group]
        wrong = [n for n in numeric if isinstance(group[n], bool) or not isinstance(group[n], int | float)]
        problems += [f"{field}.groups has {name} = {group[name]!r}; it must be a number." for name in wrong]
        problems += _check_numbers(f"{field}.groups[{i}]", spec.class_path, group)
    return problems


def _check_numbers(field: str, class_path: str, arguments: Mapping[str, Any]) -> list[str]:
    """Returns the problems of numeric arguments: NaN, and for PyTorch's classes infinity and negative learning rates.

    A user's class may accept infinity as "no limit", and a negative rate.
    """
    problems = list[str]()
    is_torch = class_path.startswith("torch.")
    for name, argument in arguments.items():
        for number in _numbers_in(argument):
            if math.isnan(number) or (math.isinf(number) and (is_torch or name in _NUMERIC_ARGUMENTS)):
                problems.append(f"{field}.{name} is {argument}; it must be finite.")
            elif number < 0 and is_torch and name in _NON_NEGATIVE_ARGUMENTS:
                problems.append(f"{field}.{name} is {argument}; it must be at least 0.")
    return problems


def _numbers_in(value: Any) -> Iterator[float]:
    """Yields the numbers in a value of a configuration, also inside lists and mappings."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers_in(part)


MIN_VALUES: dict[str, float] = {
    "scaling.min_workers": 1,
    "scaling.max_workers": 1,
    "scaling.logical_workers": 1,
    "scaling.threads_per_worker": 1,
    "scaling.cpus_per_worker": 0,
    "scaling.gpus_per_worker": 0,
    "scaling.tpus_per_worker": 0,
    "scaling.standby_workers": 0,
    "data.global_batch_size": 1,
    "data.shuffle_window_rows": 1,
    "data.prefetch_windows": 1,
    "data.max_bad_rows": 0,
    "data.reader_threads": 0,
    "train.epochs": 1,
    "train.max_steps": 1,
    "train.steps_per_epoch": 1,
    "train.local_steps": 1,
    "train.outer_momentum": 0,
    "train.servers": 1,
    "train.server_cpus": 0,
    "train.staleness": 0,
    "train.ema_decay": 0,
    "checkpoint.every_steps": 1,
    "checkpoint.every_epochs": 1,
    "checkpoint.keep_last": 1,
    "checkpoint.snapshot_every_steps": 1,
    "checkpoint.keep_best": 0,
    "failure.compare_params_every_steps": 1,
    "failure.max_failures": -1,
    "failure.max_preemptions": -1,
    "evaluate.max_pending": 1,
    "evaluate.patience": 1,
    "evaluate.min_delta": 0,
    "evaluate.batch_size": 1,
    "evaluate.workers": 1,
    "evaluate.max_rows": 1,
    "evaluate.num_cpus": 0,
    "evaluate.num_gpus": 0,
    "evaluate.drain_timeout_s": 0,
    "tracking.every_steps": 1,
}
"""The smallest allowed value of fields, by their dotted names."""
POSITIVE_FIELDS = (
    "scaling.resize_interval_s",
    "scaling.evict_straggler_after_s",
    "data.read_task_mb",
    "data.cache_gb",
    "train.grad_clip_norm",
    "train.outer_lr",
    "train.bucket_mb",
    "failure.step_timeout_s",
    "failure.heartbeat_timeout_s",
    "tracking.system_metrics_s",
)
"""Fields that must be greater than 0."""
_FINITE_FIELDS = ("data.read_task_mb", "train.bucket_mb")


def check_empty_fields(config: Config) -> list[str]:
    """Returns a problem for each field that is empty and must have a value."""
    problems = []
    for section, section_class in SECTIONS.items():
        for name, hint in get_type_hints(section_class).items():
            if getattr(getattr(config, section), name) is None and type(None) not in get_args(hint):
                default = getattr(section_class(), name)
                problems.append(
                    f"{section}.{name} is empty; give a value, or leave the line out for the default, {default!r}."
                )
    return problems


def check_ranges(config: Config) -> list[str]:
    """Returns the problems of single fields: choices and ranges."""
    values = flatten(config.to_dict())
    problems = []
    for section, section_class in SECTIONS.items():
        for name, hint in get_type_hints(section_class).items():
            literals = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
            allowed = [choice for literal in literals for choice in get_args(literal)]
            value = getattr(getattr(config, section), name)
            takes_numbers = bool({int, float} & set(get_args(hint)))
            is_number = takes_numbers and isinstance(value, int | float)
            if allowed and value is not None and not is_number and value not in allowed:
                number = "a number or " if takes_numbers else ""
                problems.append(f"{section}.{name} is {value!r}; it must be {number}one of {', '.join(allowed)}.")
    for name, min_value in MIN_VALUES.items():
        # `not >=` refuses NaN, too.
        if values[name] is not None and not isinstance(values[name], str) and not values[name] >= min_value:
            problems.append(f"{name} is {values[name]}; it must be at least {min_value:g}.")
    for name in POSITIVE_FIELDS:
        if values[name] is not None and not values[name] > 0:
            problems.append(f"{name} is {values[name]}; it must be greater than 0.")
    infinite = [name for name in _FINITE_FIELDS if math.isinf(values[name])]
    return [*problems, *(f"{name} is {values[name]}; it must be finite." for name in infinite)]


_MODEL_NAME = re.compile(r"(?!\.{1,2}$)[^/\\:'\"\x00-\x1f\x7f]{1,256}")


def _is_run_name(name: str) -> bool:
    """Returns whether a name can be that of a folder, of a key in a bucket and of an MLflow run."""
    # Marks (M) belong to letters, such as vowels in Hindi.
    allowed = all(char.isalnum() or char in " ._-" or unicodedata.category(char)[0] == "M" for char in name)
    return allowed and name[:1].isalnum() and not name.endswith((" ", ".")) and len(name.encode()) <= 128


def check_config(config: Config) -> None:
    """Refuses impossible values and combinations by a `ConfigError` with all problems, one per line."""
    # The other checks need a value in every field.
    if not (problems := check_empty_fields(config)):
        problems = check_ranges(config)
        # An unknown strategy has no traits, which these checks need.
        if config.train.strategy in STRATEGIES:
            problems += [*_check_scaling(config), *_check_strategy(config), *check_optimizers(config)]
        problems += [*_check_data(config), *_check_run(config)]
    if problems:
        raise ConfigError("The configuration is refused:\n" + "\n".join(f"  - {problem}" for problem in problems))


def _check_scaling(config: Config) -> list[str]:
    """Returns the problems of the number and the resources of workers, and of what depends on them."""
    scaling, traits = config.scaling, config.train.strategy_traits
    batch = config.data.global_batch_size
    logical = config.logical_workers
    problems = []
    if scaling.min_workers > scaling.worker_limit:
        problems.append(
            f"scaling.min_workers is {scaling.min_workers}, above scaling.max_workers = {scaling.max_workers}; lower"
            " the one or raise the other."
        )
    if not scaling.cpus_per_worker and scaling.gpus_per_worker == 0 == scaling.tpus_per_worker and traits.has_workers:
        problems.append(
            "scaling.cpus_per_worker and scaling.gpus_per_worker are 0, but a worker needs some of either; set one"
            " above 0."
        )
    if scaling.worker_gpus > 1:
        problems.append(
            f"scaling.gpus_per_worker is {scaling.worker_gpus:g}, but a worker computes on one GPU and would leave"
            " the others idle. Set it to 1, and scaling.max_workers to the number of GPUs."
        )
    problems += _check_tpus(config)
    if not traits.has_workers or config.failure.recovery == "restart":
        problems += [
            f"scaling.{name} is {getattr(scaling, name)} with train.strategy {config.train.strategy} and"
            f" failure.recovery {config.failure.recovery}, with which no worker joins others that go on. Leave it out."
            for name in ("standby_workers", "evict_straggler_after_s")
            if getattr(scaling, name)
        ]
    can_move = traits.can_move_shares and config.train.reduction == "exact"
    setup = f"with train.strategy {config.train.strategy} and train.reduction {config.train.reduction}"
    needed = f"with {list_strategies(lambda t: t.can_move_shares)} and exact only"
    if scaling.load_balancing == "speed" and not can_move:
        problems.append(
            f"scaling.load_balancing is speed {setup}; logical workers can move {needed}. Set scaling.load_balancing to"
            " none, or choose these."
        )
    rate = config.failure.sdc_check_rate
    if rate and not can_move:
        problems.append(
            f"failure.sdc_check_rate is {rate} {setup}; shares can be computed again {needed}. Set it to 0, or choose"
            " these."
        )
    if not 0 <= rate <= 1:
        problems.append(f"failure.sdc_check_rate is {rate}; it must be between 0 and 1.")
    if config.failure.compare_params_every_steps is not None and not traits.can_compare_parameters:
        allowed = list_strategies(lambda t: t.can_compare_parameters)
        problems.append(
            f"failure.compare_params_every_steps is {config.failure.compare_params_every_steps} with train.strategy"
            f" {config.train.strategy}; only with {allowed} has each worker all parameters. Leave it out, or choose"
            f" {allowed}."
        )
    if scaling.worker_limit > logical >= 1:
        problems.append(
            f"scaling.max_workers is {scaling.max_workers}, above scaling.logical_workers = {logical}: a worker"
            f" without a logical worker has nothing to do. Set max_workers to at most {logical}, or start a new run"
            " with more logical workers."
        )
    if logical >= 1 and batch >= 1 and batch % logical:
        below, above = batch // logical * logical, -(-batch // logical) * logical
        valid = " or ".join(str(n) for n in (below, above) if n > 0)
        problems.append(
            f"data.global_batch_size is {batch}, not divisible by the {logical} logical workers; the nearest valid"
            f" values are {valid}."
        )
    return problems


def _check_strategy(config: Config) -> list[str]:
    """Returns the problems of the strategy together with other fields."""
    train, traits = config.train, config.train.strategy_traits
    values = flatten(config.to_dict())
    problems = [
        *(
            f"{field} is {'set' if value is True else value} with train.strategy {train.strategy}, {reason}"
            for field, value, reason in traits.refused_values
            if values[field] == value
        ),
        *_check_sharded_parameters(config),
        *_check_capture(config),
        *_check_train_fields(train),
        *_check_reduction(config),
    ]
    if not traits.has_workers and config.scaling.min_workers > 1:
        problems.append(
            f"scaling.min_workers is {config.scaling.min_workers}, but train.strategy {train.strategy} has no workers:"
            " everything happens in the calling process. Set it to 1."
        )
    if not traits.has_workers and config.scaling.label_selector:
        problems.append(
            f"scaling.label_selector is {config.scaling.label_selector}, but train.strategy {train.strategy} has no"
            " workers to place: everything happens in the calling process. Leave it out."
        )
    steps = train.profile_steps
    if steps is not None and (len(steps) != 2 or not 1 <= steps[0] <= steps[1]):
        problems.append(f"train.profile_steps is {train.profile_steps}; it must be [first, last], counted from 1.")
    for name in ("every_steps", "snapshot_every_steps"):
        value = getattr(config.checkpoint, name)
        if value is not None and value % train.local_steps:
            problems.append(
                f"checkpoint.{name} is {value}; between two averages there is no common state, so it must be a"
                f" multiple of train.local_steps = {train.local_steps}."
            )
    return problems


def _check_train_fields(train: TrainSection) -> list[str]:
    """Returns a problem for each field of `train` that is set, and that only other strategies use."""
    unused = frozenset[str]().union(*(t.train_fields for t in STRATEGIES.values())) - train.strategy_traits.train_fields

    def describe(name: str) -> str:
        users = list_strategies(lambda t: name in t.train_fields)
        return f"train.{name} is set, but only train.strategy: {users} looks at it; leave it out."

    return [describe(f.name) for f in fields(train) if f.name in unused and getattr(train, f.name) != f.default]


def _check_reduction(config: Config) -> list[str]:
    """Returns the problems of the gradient reduction: shared GPUs and compression."""
    train, problems = config.train, []
    is_gpu_shared = 0 < config.scaling.worker_gpus < 1 and config.scaling.max_workers != 1
    if is_gpu_shared and not train.strategy_traits.can_share_gpus:
        problems.append(
            f"scaling.gpus_per_worker is {config.scaling.worker_gpus:g} with train.strategy {train.strategy}:"
            f" workers that share a GPU communicate through gloo, which {train.strategy} cannot use. Give each worker a"
            " GPU."
        )
    if train.gradient_compression != "none" and train.reduction == "exact":
        problems.append(
            f"train.gradient_compression is {train.gradient_compression} with train.reduction exact: what travels are"
            " sums over the logical workers of a worker, so rounding them would make the bits depend on the number of"
            " workers. Set train.reduction to overlapped, or train.gradient_compression to none."
        )
    if train.cross_device == "one_device":
        problems.append(
            "train.cross_device is one_device, which has no use here: every worker adds an equal share of the"
            " gradients, in the same order as one device would add all of them, and sends less. Leave it out, or use"
            " flat."
        )
    elif train.cross_device != "auto" and train.reduction != "exact":
        problems.append(
            f"train.cross_device is {train.cross_device} with train.reduction {train.reduction}, with which the backend"
            " decides how gradients travel. Leave it out, or set train.reduction to exact."
        )
    return problems + _check_reducer(config)


def _check_reducer(config: Config) -> list[str]:
    """Returns the problems of a gradient reducer of the user together with other fields."""
    train, default = config.train, TrainSection()
    if train.reducer is None:
        return []
    names = ("cross_device", "bucket_mb", "gradient_compression", "capture")
    unused = [f"train.{name}" for name in names if getattr(train, name) != getattr(default, name)]
    unused += ["failure.sdc_check_rate"] if config.failure.sdc_check_rate else []
    return [
        f"{name} is set with train.reducer {train.reducer}; only the application's own reducers support it. Leave one"
        " of them out."
        for name in unused
    ]


def _check_tpus(config: Config) -> list[str]:
    """Returns the problems of workers with TPUs together with other fields."""
    scaling, train = config.scaling, config.train
    if not scaling.tpus_per_worker:
        return []
    problems = []
    if scaling.tpus_per_worker > 1:
        problems.append(
            f"scaling.tpus_per_worker is {scaling.tpus_per_worker}, but a worker computes on one TPU chip. Set it to 1,"
            " and scaling.max_workers to the number of chips."
        )
    if scaling.worker_gpus:
        problems.append(
            f"scaling.tpus_per_worker is {scaling.tpus_per_worker}, and scaling.gpus_per_worker is"
            f" {scaling.worker_gpus:g}; a worker computes on one device. Leave one of them out."
        )
    if not train.strategy_traits.can_share_gpus:
        problems.append(
            f"scaling.tpus_per_worker is {scaling.tpus_per_worker} with train.strategy {train.strategy}: gradients of"
            f" TPUs travel through the memory of the host by gloo, which {train.strategy} cannot use. Use"
            f" {list_strategies(lambda traits: traits.can_share_gpus)}."
        )
    if config.evaluate.num_gpus:
        problems.append(
            f"evaluate.num_gpus is {config.evaluate.num_gpus:g} with scaling.tpus_per_worker: the evaluator computes on"
            " the CPU there. Set it to 0, or evaluate.where to workers."
        )
    return problems


def _check_capture(config: Config) -> list[str]:
    """Returns the problems of `train.capture` together with other fields."""
    train = config.train
    if not train.capture:
        return []
    obstacles = [
        (config.scaling.tpus_per_worker > 0, "scaling.tpus_per_worker is set: TPUs have no CUDA graphs"),
        (config.scaling.gpus_per_worker == 0, "scaling.gpus_per_worker is 0: CPUs have no CUDA graphs"),
        (
            not train.strategy_traits.can_capture_steps,
            f"train.strategy is {train.strategy}: only steps of {list_strategies(lambda t: t.can_capture_steps)} are"
            " captured",
        ),
        (train.compile, "train.compile is set: what is compiled is not captured"),
        (
            train.reduction != "exact",
            f"train.reduction is {train.reduction}, whose kernels need not give the same bits twice",
        ),
        (
            config.failure.sdc_check_rate > 0,
            "failure.sdc_check_rate is set: what a graph gets wrong would be held for a fault of the hardware",
        ),
        (config.optimizers is not None, "optimizers are several: what has a gradient would change from step to step"),
    ]
    return [
        f"train.capture is set, and {why}. Leave it out; the bits are the same without."
        for applies, why in obstacles
        if applies
    ]


def _check_sharded_parameters(config: Config) -> list[str]:
    """Returns the problems of a strategy that shards the parameters, together with other fields."""
    train = config.train
    if not train.strategy_traits.shards_parameters:
        return []
    problems = []
    if train.cpu_offload and config.scaling.gpus_per_worker == 0:
        problems.append(
            "train.cpu_offload is set, but scaling.gpus_per_worker is 0: the shards are in host memory already; leave"
            " it out."
        )
    if train.reduction == "exact" and config.optimizer.class_path in ("torch.optim.Adafactor", "torch.optim.Muon"):
        problems.append(
            f"optimizer is {config.optimizer.class_path}, which looks at whole parameters, with train.strategy"
            f" {train.strategy}, where no worker has one: the bits would depend on the number of workers. Set"
            " train.reduction to overlapped, or choose another optimizer."
        )
    return problems


def _check_run(config: Config) -> list[str]:
    """Returns the problems of names, early stopping, initial parameters and the model registry."""
    problems = []
    if config.run.name is not None and not _is_run_name(config.run.name):
        problems.append(
            f"run.name is {config.run.name!r}; use 1 to 128 bytes of letters and digits of any language, '.', '_', '-'"
            " and blanks, from a letter or digit on, and not with a blank or '.' at the end."
        )
    if config.train.ema_decay is not None and config.train.ema_decay >= 1:
        problems.append(f"train.ema_decay is {config.train.ema_decay}; it must be below 1, such as 0.999.")
    if not config.task.class_path:
        problems.append("task.class_path is missing; name a task such as ray_app.task.image.ImageClassification.")
    if config.evaluate.patience is not None and config.data.eval_path is None:
        problems.append(
            "evaluate.patience is set without data.eval_path: there is nothing to judge by. Set data.eval_path or leave"
            " patience out."
        )
    if config.evaluate.num_gpus > 1:
        problems.append(
            f"evaluate.num_gpus is {config.evaluate.num_gpus:g}, but the evaluator computes on one GPU; set it to at"
            " most 1. With evaluate.where: workers all GPUs of the training evaluate."
        )
    if config.evaluate.where == "workers" and config.evaluate.workers > 1:
        problems.append(
            f"evaluate.workers is {config.evaluate.workers}, and evaluate.where is workers, with which all workers of"
            " the training evaluate; leave one of them out."
        )
    if config.train.init_digest is not None and config.train.init_from is None:
        problems.append(
            "train.init_digest is given without train.init_from: name the file that holds these parameters, or leave"
            " both out."
        )
    model = config.tracking.registered_model
    if model is not None and not config.tracking.enabled:
        problems.append(
            f"tracking.registered_model is {model!r}, but tracking.enabled is false: the registry is MLflow's. Enable"
            " tracking or leave it out."
        )
    if model is not None and not _MODEL_NAME.fullmatch(model):
        problems.append(
            f"tracking.registered_model is {model!r}; use 1 to 256 characters other than slashes, ':', quotes and"
            f" control characters."
        )
    return problems


def _check_data(config: Config) -> list[str]:
    """Returns the problems of the data, its balancing and its cache."""
    data, problems = config.data, []
    if data.shard == "file" and data.balance_by is not None:
        problems.append(
            f"data.balance_by is {data.balance_by!r} with data.shard: file, where the steps of an epoch would differ"
            " from epoch to epoch. Set data.shard to row or off, or leave balance_by out (task.init_args.class_weights"
            " weighs classes without repeating rows)."
        )
    if data.cache_dir is not None and data.cache != "disk":
        problems.append(
            f"data.cache_dir is {data.cache_dir!r}, but data.cache is {data.cache}; set that to disk or leave cache_dir"
            f" out."
        )
    if data.reader_threads and data.cache == "memory":
        problems.append(
            f"data.reader_threads is {data.reader_threads}, but with data.cache: memory no worker reads; leave it out,"
            " or set data.cache to none or disk."
        )
    if not data.path:
        problems.append("data.path is missing; name a folder of Parquet files (ray-app ingest makes one).")
    return problems
