"""Checks of a configuration before anything else uses it.

`RULES` are the combinations that are refused; the ranges and choices of single fields are in their types. Each check
returns a list of problems, so that `check_config` refuses a configuration with all of its problems at once.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ray_app.config.config import SECTIONS, Config
from ray_app.config.import_paths import TASK_OPTIMIZER, OptimizerSpec
from ray_app.config.rules import Rule, check_fields, find_broken_rules, find_empty_fields, refuse, value_of
from ray_app.config.strategies import STRATEGIES, RefusedValue, list_strategies

_NUMERIC_ARGUMENTS = ("lr", "weight_decay", "momentum", "dampening", "eps", "alpha")
_MAX_WEIGHT = 1_000
_NON_NEGATIVE_ARGUMENTS = ("lr", "weight_decay", "momentum", "eps")


def check_optimizers(config: Config) -> list[str]:
    """Returns the problems of the optimizers and schedules, alone and together with other fields."""
    problems: list[str] = []
    traits = config.train.strategy_traits
    if config.optimizer.class_path == TASK_OPTIMIZER and not traits.can_use_task_optimizer:
        allowed = list_strategies(lambda t: t.can_use_task_optimizer)
        problems.append(
            "The task creates the optimizer (configure_optimizers, or Task.configure_optimizers), but train.strategy"
            f" {config.train.strategy} needs several. Set optimizer, or use {allowed}."
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
        return problems if config.optimizers is None else ["optimizers is empty; name one, or leave it out."]
    if config.optimizer != Config.optimizer:
        problems.append("optimizer and optimizers are both set; leave one of them out.")
    if config.schedule is not None:
        problems.append("schedule is set together with optimizers; set optimizers.NAME.schedule instead.")
    if not traits.can_alternate_optimizers:
        problems.append(
            f"optimizers is set, but train.strategy {config.train.strategy} has one optimizer that updates all"
            f" parameters in each step. Use {list_strategies(lambda t: t.can_alternate_optimizers)}."
        )
    for name, spec in config.optimizers.items():
        if spec.steps < 1:
            problems.append(f"optimizers.{name}.steps is {spec.steps}; it must be at least 1.")
        if not spec.parameters:
            problems.append(
                f"optimizers.{name}.parameters is missing; name the parameters that it updates; * matches any text."
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


_MODEL_NAME = re.compile(r"(?!\.{1,2}$)[^/\\:'\"\x00-\x1f\x7f]{1,256}")


def _is_run_name(name: str) -> bool:
    """Returns whether a name can be that of a folder, of a key in a bucket and of an MLflow run."""
    # Marks (M) belong to letters, such as vowels in Hindi.
    allowed = all(char.isalnum() or char in " ._-" or unicodedata.category(char)[0] == "M" for char in name)
    return allowed and name[:1].isalnum() and not name.endswith((" ", ".")) and len(name.encode()) <= 128


_NO_CAPTURE: tuple[tuple[Callable[[Config], object], str], ...] = (
    (lambda c: c.scaling.gpus_per_worker == 0, "scaling.gpus_per_worker is 0: CPUs have no CUDA graphs"),
    (
        lambda c: not c.train.strategy_traits.can_capture_steps,
        "train.strategy is {c.train.strategy}: only steps of"
        f" {list_strategies(lambda t: t.can_capture_steps)} are captured",
    ),
    (lambda c: c.train.compile, "train.compile is set: a compiled model is not captured"),
    (
        lambda c: c.train.reduction != "exact",
        "train.reduction is {c.train.reduction}, whose kernels are not bit-identical when repeated",
    ),
    (
        lambda c: c.failure.sdc_check_rate,
        "failure.sdc_check_rate is set: an error of a graph would look like a hardware fault",
    ),
    (lambda c: c.optimizers, "optimizers has several: the parameters with gradients would change from step to step"),
)
"""When the passes of a step cannot be captured, and why."""


def _can_move_shares(config: Config) -> bool:
    return config.train.strategy_traits.can_move_shares and config.train.reduction == "exact"


_SETUP = " with train.strategy {c.train.strategy} and train.reduction {c.train.reduction}"
_MOVERS = f"with {list_strategies(lambda t: t.can_move_shares)} and exact only"
_SCALING_RULES = (
    Rule(
        "scaling.min_workers",
        lambda c: c.scaling.min_workers > c.scaling.worker_limit,
        ", above scaling.max_workers = {c.scaling.max_workers}; lower min_workers or raise max_workers.",
    ),
    Rule(
        "scaling.min_workers",
        lambda c: not c.train.strategy_traits.has_workers,
        ", but train.strategy {c.train.strategy} has no workers: it trains in the calling process. Set the field to 1.",
    ),
    Rule(
        "scaling.max_workers",
        lambda c: c.scaling.worker_limit > c.logical_workers >= 1,
        ", above scaling.logical_workers = {c.logical_workers}: a worker needs a logical worker. Set max_workers to at"
        " most {c.logical_workers}, or start a new run with more logical workers.",
    ),
    Rule(
        "scaling.cpus_per_worker",
        lambda c: c.scaling.cpus_per_worker == 0 == c.scaling.gpus_per_worker and c.train.strategy_traits.has_workers,
        ", and so is scaling.gpus_per_worker, but a worker needs CPUs or GPUs; set one above 0.",
    ),
    Rule(
        "scaling.gpus_per_worker",
        lambda c: c.scaling.worker_gpus > 1,
        ", but a worker computes on one GPU and would leave the others idle. Set gpus_per_worker to 1, and"
        " scaling.max_workers to the number of GPUs.",
    ),
    Rule(
        "scaling.gpus_per_worker",
        lambda c: (
            0 < c.scaling.worker_gpus < 1 and c.scaling.max_workers != 1 and not c.train.strategy_traits.can_share_gpus
        ),
        " with train.strategy {c.train.strategy}: workers that share a GPU communicate through gloo, which"
        " {c.train.strategy} cannot use. Give each worker a GPU.",
    ),
    Rule(
        "scaling.label_selector",
        lambda c: not c.train.strategy_traits.has_workers,
        ", but train.strategy {c.train.strategy} has no workers to place: it trains in the calling process. Leave it"
        " out.",
    ),
    *(
        Rule(
            name,
            lambda c: not c.train.strategy_traits.has_workers or c.failure.recovery == "restart",
            " with train.strategy {c.train.strategy} and failure.recovery {c.failure.recovery}, but with these, no"
            " worker joins a running group. Leave the field out.",
        )
        for name in ("scaling.standby_workers", "scaling.evict_straggler_after_s")
    ),
    Rule(
        "scaling.load_balancing",
        lambda c: not _can_move_shares(c),
        f"{_SETUP}; logical workers can move {_MOVERS}. Set scaling.load_balancing to none, or change these fields.",
    ),
    Rule(
        "failure.sdc_check_rate",
        lambda c: not _can_move_shares(c),
        f"{_SETUP}; shares can be computed again {_MOVERS}. Set failure.sdc_check_rate to 0, or change these fields.",
    ),
)


def _refused_value_rule(strategy: str, refused: RefusedValue) -> Rule:
    return Rule(
        refused.field,
        lambda c: c.train.strategy == strategy and value_of(c, refused.field) == refused.value,
        f" with train.strategy {strategy}, {refused.reason}",
    )


def _unused_field_rule(name: str) -> Rule:
    return Rule(
        f"train.{name}",
        lambda c: name not in c.train.strategy_traits.train_fields,
        f", but only train.strategy: {list_strategies(lambda t: name in t.train_fields)} uses it; leave the field out.",
    )


def _common_step_rule(name: str) -> Rule:
    return Rule(
        f"checkpoint.{name}",
        lambda c: getattr(c.checkpoint, name) % c.train.local_steps,
        "; it must be a multiple of train.local_steps = {c.train.local_steps}, since there is no common state between"
        " averages.",
    )


_STRATEGY_RULES = (
    *(_refused_value_rule(name, refused) for name, traits in STRATEGIES.items() for refused in traits.refused_values),
    *map(_unused_field_rule, sorted(frozenset[str]().union(*(traits.train_fields for traits in STRATEGIES.values())))),
    *map(_common_step_rule, ("every_steps", "snapshot_every_steps")),
    Rule(
        "checkpoint.snapshot_every_steps",
        lambda c: c.train.strategy_traits.shards_parameters,
        " with train.strategy {c.train.strategy}, whose state does not fit into one process; set train.peer_replica, or"
        " lower checkpoint.every_steps.",
    ),
    Rule(
        "train.cpu_offload",
        lambda c: c.train.strategy_traits.shards_parameters and c.scaling.gpus_per_worker == 0,
        ", but scaling.gpus_per_worker is 0: the shards are in host memory already; leave the field out.",
    ),
    Rule(
        "optimizer.class_path",
        lambda c: (
            c.train.strategy_traits.shards_parameters
            and c.train.reduction == "exact"
            and c.optimizer.class_path in ("torch.optim.Adafactor", "torch.optim.Muon")
        ),
        ", which reads whole parameters, but with train.strategy {c.train.strategy} no worker has one: the result would"
        " depend on the number of workers. Set train.reduction to overlapped, or choose another optimizer.",
    ),
)
_REDUCTION_RULES = (
    *(
        Rule(
            name,
            lambda c: c.train.reducer is not None,
            " with train.reducer {c.train.reducer}; only the application's own reducers support it. Leave one of the"
            " two out.",
        )
        for name in ("train.bucket_mb", "train.capture", "failure.sdc_check_rate")
    ),
    *(
        Rule("train.capture", when, f", and {reason}. Leave the field out; the result is bit-identical without it.")
        for when, reason in _NO_CAPTURE
    ),
)


def _has_weights(sources: list[Any]) -> bool:
    """Returns whether each data set of a list has a path and a weight."""
    return bool(sources) and all(
        isinstance(source, dict)
        and source.keys() == {"path", "weight"}
        and isinstance(source["path"], str)
        and type(source["weight"]) is int
        and 1 <= source["weight"] <= _MAX_WEIGHT
        for source in sources
    )


_OTHER_RULES = (
    Rule(
        "run.name",
        lambda c: not _is_run_name(c.run.name),
        "; use 1 to 128 bytes of letters and digits of any language, '.', '_', '-' and blanks, with a letter or digit"
        " first and no blank or '.' last.",
    ),
    Rule(
        "train.profile_steps",
        lambda c: len(c.train.profile_steps) != 2 or not 1 <= c.train.profile_steps[0] <= c.train.profile_steps[1],
        "; it must be [first, last], counted from 1.",
    ),
    Rule(
        "train.init_digest",
        lambda c: c.train.init_from is None,
        " without train.init_from: name the file with these parameters, or leave both out.",
    ),
    Rule(
        "run.branch_from",
        lambda c: c.train.init_from is not None,
        ", and train.init_from is set: the parameters come from the checkpoint. Set train.init_from to null.",
    ),
    Rule(
        "run.branch_point",
        lambda c: c.run.branch_from is None or not re.fullmatch(r"[1-9]\d*-[0-9a-f]{64}", c.run.branch_point),
        "; it is STEP-SHA of the checkpoint that run.branch_from names. Leave it out.",
    ),
    Rule(
        "evaluate.patience",
        lambda c: c.data.evaluation_path is None,
        " without data.eval_path: there is nothing to evaluate. Set data.eval_path or leave patience out.",
    ),
    Rule(
        "evaluate.num_gpus",
        lambda c: c.evaluate.num_gpus > 1,
        ", but the evaluator computes on one GPU; set num_gpus to at most 1. With evaluate.where: workers, all GPUs of"
        " the training evaluate.",
    ),
    Rule(
        "evaluate.workers",
        lambda c: c.evaluate.where == "workers",
        ", but evaluate.where is workers, so all training workers evaluate; leave one of the two out.",
    ),
    Rule(
        "tracking.registered_model",
        lambda c: not c.tracking.enabled,
        ", but tracking.enabled is false: the registry is MLflow's. Enable tracking or leave the field out.",
    ),
    Rule(
        "tracking.registered_model",
        lambda c: not _MODEL_NAME.fullmatch(c.tracking.registered_model),
        "; use 1 to 256 characters except slashes, ':', quotes and control characters.",
    ),
    Rule(
        "data.balance_by",
        lambda c: c.data.shard == "file",
        " with data.shard: file, so the number of steps would differ from epoch to epoch. Set data.shard to row or off,"
        " or leave balance_by out (task.init_args.class_weights weights classes without repeating rows).",
    ),
    Rule(
        "data.shuffle",
        lambda c: c.data.balance_by or c.data.by_length,
        ", but data.balance_by and data.by_length choose the rows of a step. Leave shuffle or these out.",
    ),
    Rule(
        "data.fold",
        lambda c: c.data.fold >= c.data.folds,
        ", but data.folds is {c.data.folds}; folds are counted from 0. Give one below {c.data.folds}.",
    ),
    Rule(
        "data.eval_path",
        lambda c: c.data.fold is not None,
        ", but the run evaluates on fold {c.data.fold} of data.path (data.fold). Leave one of them out.",
    ),
    Rule(
        "data.fold_by",
        lambda c: c.data.fold_by_class or c.data.fold_by_time,
        ", and so is data.fold_by_class or data.fold_by_time; folds have one rule. Leave the others out.",
    ),
    Rule(
        "data.fold_by_class",
        lambda c: c.data.fold_by_time,
        ", and data.fold_by_time is {c.data.fold_by_time}; folds have one rule. Leave one of them out.",
    ),
    Rule(
        "data.path",
        lambda c: not isinstance(c.data.path, str) and not _has_weights(c.data.path),
        "; a list has {{path: FOLDER, weight: NUMBER}} for each data set, with whole numbers from 1 to 1,000.",
    ),
    Rule(
        "data.path",
        lambda c: (
            not isinstance(c.data.path, str)
            and (c.data.shard != "row" or not c.data.shuffle or c.data.balance_by is not None)
        ),
        "; several data sets need data.shard row, data.shuffle true and no data.balance_by. Set these, or name one.",
    ),
    Rule(
        "data.cache_dir",
        lambda c: c.data.cache != "disk",
        ", but data.cache is {c.data.cache}; set data.cache to disk or leave cache_dir out.",
    ),
    Rule(
        "data.reader_threads",
        lambda c: c.data.cache == "memory",
        ", but with data.cache: memory no worker reads; leave the field out, or set data.cache to none or disk.",
    ),
)
RULES = (*_SCALING_RULES, *_STRATEGY_RULES, *_REDUCTION_RULES, *_OTHER_RULES)
"""Combinations of fields that are refused."""


def check_config(config: Config) -> None:
    """Refuses impossible values and combinations by a `ConfigError` with all problems, one per line."""
    sections = {f"{name}.": getattr(config, name) for name in SECTIONS}
    problems = [problem for name, section in sections.items() for problem in find_empty_fields(section, name)]
    # The other checks need a value in every field.
    if not problems:
        problems = [problem for name, section in sections.items() for problem in check_fields(section, name)]
        problems += _check_required(config)
        # An unknown strategy has no traits, which the rules need.
        if config.train.strategy in STRATEGIES:
            problems += [*find_broken_rules(config, RULES), *check_optimizers(config)]
    refuse(problems)


def _check_required(config: Config) -> list[str]:
    """Returns the problems of fields that are refused at their default, too."""
    batch, logical = config.data.global_batch_size, config.logical_workers
    problems = []
    if logical >= 1 and batch >= 1 and batch % logical:
        below, above = batch // logical * logical, -(-batch // logical) * logical
        valid = " or ".join(str(n) for n in (below, above) if n > 0)
        problems.append(
            f"data.global_batch_size is {batch}, which is not divisible by the {logical} logical workers; the nearest"
            f" valid values are {valid}."
        )
    if not config.task.class_path:
        problems.append("task.class_path is missing; name a task such as ray_app.task.image.ImageClassification.")
    if not config.data.path:
        problems.append("data.path is missing; name a folder of Parquet files (ray-app ingest writes one).")
    return problems
