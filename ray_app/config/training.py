"""The section `train` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ray_app.config.sections import result


@dataclass(frozen=True)
class TrainSection:
    """How it is trained.

    Args:
        epochs: Passes over the training data; with `steps_per_epoch`, stretches of so many steps. More than at the last start make a run
            go on from its end, also one that has finished, with the bits of a run that was as long from the beginning; a schedule that
            spreads over the whole run (`OneCycleLR` without `total_steps`) is refused then.
        steps_per_epoch: Optimizer steps of an epoch; not given: one pass over the data. Rows go on where the last epoch ended, so each
            is still used once per pass.
        max_steps: Most optimizer steps in all, whatever `epochs` says; not given: no limit. May grow as `epochs`.
        strategy: How workers share the model: `ddp` holds a copy in each and adds the gradients of every step. `local_sgd` lets every
            logical worker go `local_steps` steps of its own, then averages parameters and optimizer state. `parameter_server` keeps
            parameters and optimizer on `servers` actors; workers fetch the ones and send gradients, and do not wait for each other.
            `fsdp` shards parameters, gradients and optimizer state over the workers. `central_storage`
            keeps parameters and optimizer state in the host memory of one worker, which makes all updates. `single` is `ddp` in the
            calling process, without workers, so that a breakpoint stops there.
        local_steps: Steps between two averages with `local_sgd` (H).
        outer_lr: What multiplies the averaged change of the parameters with `local_sgd`; 1 is the average itself.
        outer_momentum: Nesterov momentum of that change, as in DiLoCo (there 0.9, with `outer_lr` 0.7); 0: none.
        servers: Parameter servers (P), with `parameter_server`; may be another number when a run is continued.
        server_cpus: Logical CPUs that each of them reserves.
        server_label_selector: Labels of the nodes that they may run on, as `scaling.label_selector`; not given: any node.
        min_shard_kb: A parameter is split over servers only into parts of at least so many kilobytes.
        staleness: Steps that a logical worker may be ahead of the slowest one, with `parameter_server`. 0: synchronous, the gradients of
            all logical workers are added in one fixed order and applied once. Above, each is applied when it arrives.
        second_copy: Sends what a worker alone has of the state (its shards with `fsdp`, everything of rank 0 with `central_storage`) to the
            host memory of the next worker after every step, so that a killed worker makes no step be done again.
        cpu_offload: Keeps the shards of `fsdp` in host memory and makes the updates there; only what computes just now is on the GPU.
        reduction: `exact` adds the gradients of the logical workers in one fixed order: the same bits on any number of workers.
            `overlapped` lets the network add them while backward runs: the same rows and weights, not the same bits.
        backend: What moves gradients between workers: `auto` is NCCL between GPUs and gloo between CPUs; `gloo` moves those of GPUs through
            host memory, where NCCL cannot be used.
        bucket_mb: Mebibytes of gradients that travel together while backward still runs, as DDP's `bucket_cap_mb`.
        gradient_compression: `bf16` halves what travels with `reduction: overlapped`: sums of gradients are rounded to bfloat16 for it.
        precision: `fp32`, or autocast of forward and loss to `bf16` or `fp16` (parameters and gradients stay fp32). With `fp16` the loss is
            scaled by a power of two that is found while training and is part of the checkpoint.
        grad_clip_norm: Largest global L2 norm of the gradient; not given: no clipping.
        ema_decay: Decay of an exponential moving average of the parameters, such as 0.999; it is what is evaluated, returned and
            registered. Not given: the parameters themselves.
        freeze: Names of parameters that are not trained, with `*` for any text (`features.*`); batch-norm layers that are frozen as a whole
            keep their statistics.
        compile: Compiles the model with `torch.compile`; needs a C++ compiler on the workers' nodes, and minutes for a big model.
        capture: Captures forward and backward of a micro-batch as a CUDA graph, for small steps in which a GPU waits to be told what to do
            next; the same bits. Refused where the forward depends on the host.
        channels_last: Lays images out with the channels last, which convolutions on GPUs with tensor cores prefer.
        init_from: Parameters (and persistent buffers) to begin with: a safetensors file, the folder of an export, or a registered model
            (`models:/NAME@ALIAS`, `models:/NAME/VERSION`). They are read at the run's first start and kept with it; not given: what the
            model's own initialization draws from the seed.
        profile_steps: Steps that rank 0 traces with `torch.profiler`, to `profile/` in the run's directory: the first and the last, counted
            from 1 over the run, or how many after three steps of each start. Not given: none.
        init_digest: SHA-256 of these parameters, as `params_digest` in `summary.json`, which decides the result where their place does
            not; not given: that of those at the run's first start.
    """

    epochs: int = result(1)
    steps_per_epoch: int | None = result(None)
    max_steps: int | None = result(None)
    strategy: Literal["ddp", "single", "local_sgd", "parameter_server", "fsdp", "central_storage"] = result("ddp")
    local_steps: int = result(1)
    outer_lr: float = result(1.0)
    outer_momentum: float = result(0.0)
    servers: int = 1
    server_cpus: float = 1
    server_label_selector: dict[str, str] | None = None
    min_shard_kb: int = 256
    staleness: int = result(0)
    second_copy: bool = False
    cpu_offload: bool = result(False)
    reduction: Literal["exact", "overlapped"] = result("exact")
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    bucket_mb: float = 8.0
    gradient_compression: Literal["none", "bf16"] = result("none")
    precision: Literal["fp32", "bf16", "fp16"] = result("fp32")
    grad_clip_norm: float | None = result(None)
    ema_decay: float | None = result(None)
    freeze: list[str] | None = result(None)
    compile: bool = result(False)
    capture: bool = False
    channels_last: bool = result(False)
    init_from: str | None = None
    profile_steps: list[int] | int | None = None
    init_digest: str | None = result(None)

    def total_steps(self, pass_steps: int) -> int:
        """Steps of the whole run, given those of a pass over the data."""
        steps = self.epochs * (self.steps_per_epoch or pass_steps)
        return min(steps, self.max_steps or steps)
