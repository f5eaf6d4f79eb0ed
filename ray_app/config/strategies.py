"""What each value of `train.strategy` can do and needs, as one record per strategy in the table `STRATEGIES`.

All code that treats strategies differently asks for a trait of the record. Only the module that puts the parts of a
strategy together, `train/build.py`, compares names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

StrategyName = Literal["ddp", "single", "local_sgd", "parameter_server", "fsdp", "central_storage"]


class RefusedValue(NamedTuple):
    """A value of a field that a strategy refuses.

    Args:
        field: Dotted name of the field.
        value: The value.
        reason: Why the strategy refuses it and what to do, as the end of the sentence `FIELD is VALUE with
            train.strategy NAME, `.
    """

    field: str
    value: object
    reason: str


@dataclass(frozen=True)
class StrategyTraits:
    """What a strategy can do and needs. By default it can do nothing that not all strategies can.

    Args:
        train_fields: The fields of `train` that it uses, of those that not all strategies use.
        refused_values: Values of fields that it refuses.
        in_process_form_of: The strategy that gives the same result with workers, if this one has none and trains in the
            calling process. None for a strategy with workers.
        can_move_shares: Any worker can run any logical worker at any step, so that loads can be balanced and shares
            recomputed.
        can_compare_parameters: Several workers have all parameters, so that they can compare them after a step.
        can_use_task_optimizer: One optimizer updates all parameters, so that the task can make it.
        can_alternate_optimizers: A step can update some of the parameters, with one of several optimizers.
        can_capture_steps: The passes of a step can be captured as CUDA graphs.
        can_run_user_loops: The loop of a script can make the steps.
        can_intervene: Every worker has the whole state after every step, so that it can be changed between two epochs.
        can_share_gpus: Workers can share a GPU, so that gloo carries what they send.
        keeps_parameter_groups: The optimizer gets the model's parameters, so that it may group them by itself.
        fills_missing_gradients: A missing gradient is replaced by zeros even with one logical worker.
        has_servers: Parameters and optimizer state are on `train.servers` actors, and workers have no connections to
            each other.
        shards_parameters: Each rank has a shard of every parameter; units of the model gather them while they compute.
        needs_min_workers: Fewer than `scaling.min_workers` workers would lack the memory for the state, so they wait.
        detects_stragglers: Workers compute independently of each other within a step, so that a straggler shows.
    """

    train_fields: frozenset[str] = frozenset()
    refused_values: tuple[RefusedValue, ...] = ()
    in_process_form_of: StrategyName | None = None
    can_move_shares: bool = False
    can_compare_parameters: bool = False
    can_use_task_optimizer: bool = False
    can_alternate_optimizers: bool = False
    can_capture_steps: bool = False
    can_run_user_loops: bool = False
    can_intervene: bool = False
    can_share_gpus: bool = False
    keeps_parameter_groups: bool = False
    fills_missing_gradients: bool = False
    has_servers: bool = False
    shards_parameters: bool = False
    needs_min_workers: bool = False
    detects_stragglers: bool = False

    @property
    def can_evaluate(self) -> bool:
        """Whether the workers can evaluate, see `evaluate.where`."""
        return all((one.field, one.value) != ("evaluate.where", "workers") for one in self.refused_values)

    @property
    def has_workers(self) -> bool:
        """Whether workers train; otherwise the calling process does."""
        return self.in_process_form_of is None


_FP16_SCALES = RefusedValue("train.precision", "fp16", "whose workers would each need a loss scale; use bf16.")
_DDP = StrategyTraits(
    train_fields=frozenset({"backend", "bucket_mb", "profile_steps", "reducer"}),
    can_move_shares=True,
    can_compare_parameters=True,
    can_use_task_optimizer=True,
    can_alternate_optimizers=True,
    can_capture_steps=True,
    can_run_user_loops=True,
    can_intervene=True,
    can_share_gpus=True,
    keeps_parameter_groups=True,
    detects_stragglers=True,
)
STRATEGIES: dict[str, StrategyTraits] = {
    "ddp": _DDP,
    "single": replace(_DDP, in_process_form_of="ddp", can_move_shares=False, can_compare_parameters=False),
    "local_sgd": StrategyTraits(
        train_fields=frozenset({"local_steps", "outer_lr", "outer_momentum", "backend", "bucket_mb", "profile_steps"}),
        refused_values=(_FP16_SCALES,),
        can_share_gpus=True,
        fills_missing_gradients=True,
        detects_stragglers=True,
    ),
    "parameter_server": StrategyTraits(
        train_fields=frozenset({"servers", "staleness"}),
        refused_values=(
            _FP16_SCALES,
            RefusedValue("evaluate.where", "workers", "whose workers never synchronize; use actor."),
            RefusedValue(
                "data.on_bad_row",
                "skip",
                "whose workers do not know how many rows the others skip; use fail.",
            ),
        ),
        can_share_gpus=True,
        has_servers=True,
    ),
    "fsdp": StrategyTraits(
        train_fields=frozenset({"cpu_offload", "peer_replica", "profile_steps"}),
        refused_values=(
            RefusedValue("train.precision", "fp16", "but bf16 needs no loss scale; use bf16."),
            RefusedValue("evaluate.where", "workers", "but no worker has a whole model; use actor."),
        ),
        keeps_parameter_groups=True,
        fills_missing_gradients=True,
        shards_parameters=True,
        needs_min_workers=True,
    ),
    "central_storage": StrategyTraits(
        train_fields=_DDP.train_fields | {"peer_replica"},
        can_move_shares=True,
        can_use_task_optimizer=True,
        can_share_gpus=True,
        keeps_parameter_groups=True,
        detects_stragglers=True,
    ),
}
"""The traits of each strategy by its name, in the order of `StrategyName`."""


def list_strategies(has_trait: Callable[[StrategyTraits], bool]) -> str:
    """Returns the names of the strategies with a trait, such as `ddp, single or central_storage`."""
    *names, last = [name for name, traits in STRATEGIES.items() if has_trait(traits)]
    return f"{', '.join(names)} or {last}" if names else last


def strategy_with_workers(name: str) -> str:
    """Returns the strategy that gives the same result with workers; the name itself if it is unknown."""
    traits = STRATEGIES.get(name)
    return name if traits is None else traits.in_process_form_of or name
