"""All private names of PyTorch and torchvision that the package uses, each with its reason and what happens without it.

They are those of torch 2.13 to 2.15; `pyproject.toml` gives the versions that are allowed. A test keeps private names
out of all other modules, so this module is what has to be compared with a new version of torch.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import ErrorType, ProcessGroup
from torch.autograd.graph import _engine_run_backward
from torch.distributed import distributed_c10d
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

__all__ = [
    # See `__getattr__`.
    "DefaultAllGather",
    "DefaultReduceScatter",
    # What a backend reports of itself. Without it a failed collective of NCCL is noticed only by its garbage.
    "ErrorType",
    "ReduceScatter",
    # Sees every operator that runs, also those of a backward; torch documents it under this name. Without it neither a
    # CUDA graph nor a check before the start knows which memory is read and which operators run.
    "TorchDispatchMode",
    # The tensors in the nested arguments and results of an operator, for the same purpose, and those in the outputs of
    # a model. Without the second an evaluation would see the short floats of autocast.
    "tree_leaves",
    "tree_map",
]

# The limit of the next collectives of a group, public from torch 2.15 on. Without it collectives would have the limit
# that a group has while it forms.
set_timeout: Callable[[timedelta, ProcessGroup], None] = getattr(distributed_c10d, "set_timeout", None) or (
    distributed_c10d._set_pg_timeout
)

BatchNorm = _BatchNorm
"""The base of all batch-norm layers. Without it the public classes have to be listed, and a new one is missed."""

# --- operators

# One call for many tensors, which torch documents as "foreach operations" in beta. Without them an update of the
# gradients of a small model takes several times as long, one call for each parameter.
foreach_add_ = torch._foreach_add_
foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_
foreach_copy_ = torch._foreach_copy_
foreach_lerp_ = torch._foreach_lerp_

# The operators of `torch.distributions` that draw numbers; without them a task that uses it in `augment` would draw
# other numbers on another worker.
DRAWING_FUNCTIONS = (torch._standard_gamma, torch._sample_dirichlet)

# The kernels of `fused=True`; without them the last values of a shard on a CPU would be rounded in another way than in
# the whole parameter (`train/strategies/fully_sharded.py`).
FUSED_KERNELS = (torch._fused_adam_, torch._fused_adamw_, torch._fused_sgd_, torch._fused_adagrad_)

# The number of in-place writes into a tensor; without it a task that writes into a tensor that is used again would
# change later steps.
tensor_version: Callable[[Tensor], int] = operator.attrgetter("_version")


# The module through which all operators are called. Its frames do not show the caller of an operator.
OPERATORS_FILE: str = torch._ops.__file__


def run_backward(losses: Tensor, weights: Tensor) -> None:
    """Runs the backward of the weighted sum of losses; `losses` and `weights` have the shape (rows,).

    This is `losses.backward(weights)` without its checks, which take 30 us in a step.
    """
    # A subclass of Tensor may override `backward`.
    if type(losses) is not Tensor:
        losses.backward(weights)
        return
    _engine_run_backward((losses,), (weights,), False, False, (), allow_unreachable=True, accumulate_grad=True)


# --- modules


def version_of(tensor: Tensor) -> int:
    """Returns a number that changes whenever a tensor is written in place; comparing values would read all of them."""
    return int(tensor._version)


def registered_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Returns the dictionary in which a module has its own buffers, to notice at once that one was replaced."""
    return module._buffers


# --- exported programs


def exported_parameters(archive: IO[bytes]) -> dict[str, Tensor]:
    """Returns the parameters and persistent buffers in an archive of a packaged model, without loading its program.

    Without it the program would have to be loaded before its parameters are compared with their digest.
    """
    from torch.export.pt2_archive import _package

    state = _package._load_state_dict(_package.PT2ArchiveReader(archive), "model")
    archive.seek(0)
    # The old form, a pickle, is not in a checked archive.
    assert isinstance(state, dict)
    return {name.removeprefix("model."): values for name, values in state.items()}


# --- process groups


def reset_group_count() -> None:
    """Lets torch number the groups of this process from 0 again.

    torch also counts groups that could not be formed, and all ranks must give a group the same number. Without this
    call a worker that has left a broken generation could form no group with a new one.
    """
    torch.distributed.distributed_c10d._world.group_count = 0


def is_group_open(group: Any) -> bool:
    """Returns whether a process group has not been destroyed; without it a closed group might be aborted."""
    return group in torch.distributed.distributed_c10d._world.pg_map


@contextmanager
def backends_created_by(call: Callable[[Callable[[], Any]], Any], names: Iterable[str]) -> Iterator[None]:
    """Lets `call` call the functions that create backends with these names, for example in another thread.

    Without it nothing ends the wait in the constructor of `ProcessGroupNCCL2` for a peer that was lost. torch 2.13 and
    2.14 create NCCL's older class without such a function.
    """
    backends, plugins = dist.Backend, dist.Backend._plugins
    for name in names if hasattr(backends, "_ensure_backend_registered") else ():
        backends._ensure_backend_registered(name)
    originals = {name.upper(): plugins[name.upper()] for name in names if name.upper() in plugins}

    def wrap(create: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: call(functools.partial(create, *arguments))

    plugins |= {name: plugin._replace(creator_fn=wrap(plugin.creator_fn)) for name, plugin in originals.items()}
    try:
        yield
    finally:
        plugins |= originals


def nonblocking_options(backends: str, timeout: timedelta) -> Any:
    """Returns options with which NCCL connects within a time-out, where it would wait for ever for a lost peer.

    torch passes them to no other backend. The result is None without NCCL, or if it has no such options.
    """
    nccl: Any = getattr(distributed_c10d, "ProcessGroupNCCL", None)
    if "nccl" not in backends or not hasattr(nccl, "NCCLConfig"):
        return None
    options = nccl.Options()
    options.config.blocking, options._timeout = 0, timeout
    return options


def backend_error(group: Any, device: torch.device) -> ErrorType:
    """Returns the error that the backend of a group for a device reports of itself, see `ErrorType`."""
    return group._get_backend(device).get_error()


# --- FSDP

_FSDP_MODULES = {
    "ReduceScatter": "_fsdp_api",
    "DefaultAllGather": "_fsdp_collectives",
    "DefaultReduceScatter": "_fsdp_collectives",
}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Imports the classes of FSDP's collectives when they are first used, because their import takes two seconds.

        `set_custom_all_gather` and `set_custom_reduce_scatter` are public and take objects of these classes. Without
        them the order in which FSDP adds gradients would depend on the number of workers.
        """
        if name not in _FSDP_MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"torch.distributed.fsdp._fully_shard.{_FSDP_MODULES[name]}")
        return getattr(module, name)


class FsdpParameters:
    """The parameters of all units of a sharded model, in FSDP's own form.

    Without it a gradient that comes after the reduction of its unit would go into the next step unnoticed.

    Args:
        units: The FSDP units of the model.
    """

    def __init__(self, units: Sequence[Any]) -> None:
        groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
        self._params: list[Any] = [p for group in groups for p in group.fsdp_params]
        self._are_trained = [p.sharded_param.requires_grad for p in self._params]

    def has_changed_training(self) -> bool:
        """Returns whether a gathered parameter requires a gradient now and its shard did not, or vice versa."""
        gathered = [getattr(p, "_unsharded_param", None) for p in self._params]
        return any(
            p is not None and p.requires_grad != is_trained
            for p, is_trained in zip(gathered, self._are_trained, strict=True)
        )

    def name_of_late_gradient(self) -> str | None:
        """Returns the name of a parameter with a gradient that has not been reduced; None if there is none."""
        for p in self._params:
            gathered = getattr(p, "_unsharded_param", None)
            if gathered is not None and gathered.grad is not None:
                return str(p._param_fqn)
        return None


def is_before_backward(unit: Any) -> bool:
    """Returns whether FSDP has gathered a unit for its backward; a forward is then one of activation checkpointing."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    return bool(unit._get_fsdp_state()._training_state == TrainingState.PRE_BACKWARD)


def shard_version(sharded: Any) -> int:
    """Returns the number of in-place writes into the local tensor of a `DTensor`; `to_local` would make a new view."""
    return int(sharded._local_tensor._version)


def wrap_shard(part: Tensor, parameter: Any) -> Any:
    """Returns a `DTensor` with this rank's shard `part` and with the shape and placements of `parameter`.

    The public `DTensor.from_local` would move a shard in host memory to the device of the mesh, and with
    `train.cpu_offload` a gradient has to be where its parameter is.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import _from_local_no_grad

    return _from_local_no_grad(part.detach(), parameter._spec)


# --- the compiler


def lift_recompile_limit(limit: int) -> None:
    """Sets how many input sizes PyTorch compiles a model for before it runs further ones uncompiled.

    Without it the results of a size would depend on how many sizes the process had before.
    """
    import torch._dynamo as dynamo

    dynamo.config.recompile_limit = dynamo.config.accumulated_recompile_limit = limit


def is_compiler_imported() -> bool:
    """Returns whether PyTorch's code generator is imported, which takes two seconds; without it each start does."""
    return "torch._inductor" in sys.modules


def has_cpp_compiler() -> bool:
    """Returns whether PyTorch finds a C++ compiler; without it the first step fails as an error of user code."""
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        cpp_builder.get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


# --- optimizers

_global_hooks = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
_is_profiled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def remove_compiler_hooks(optimizer: type[Optimizer]) -> None:
    """Changes the methods of a class of optimizers so that they neither import the compiler nor call an idle profiler.

    Optimizers of torch 2.15 import PyTorch's compiler when they are made and at every step, only to be excluded from
    compilation. That takes two seconds in every training process. Each step also reports its begin and end to the
    profiler, which takes 30 us of a small step. This function removes both for a run that compiles nothing. If another
    version of PyTorch has these calls in another form, nothing changes. It has to be called before the first optimizer
    of the class is made.
    """
    # If the compiler has been imported already, nothing can be saved.
    if "torch._dynamo" in sys.modules:
        return
    for method in filter(inspect.isfunction, vars(Optimizer).values()):
        plain: Any = getattr(method, "__wrapped__", method)
        # `torch._disable_dynamo` keeps the result of its first call in this attribute, and reuses it.
        plain.__dynamo_disable = plain
    step = optimizer.step
    if getattr(step, "__code__", _with_grad.__code__).co_name == "_use_grad":
        # Otherwise each step would look for an accelerator, to ask whether it captures a graph.
        if not torch.accelerator.is_available():
            optimizer._accelerator_graph_capture_health_check = lambda self: None  # type: ignore[method-assign]
        optimizer.step = _hooked(_with_grad(vars(step)["__wrapped__"]))  # type: ignore[method-assign]


def _with_grad(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step wrapped as by `torch.optim.optimizer._use_grad_for_differentiable`, without compiler marks."""

    @functools.wraps(step)
    def stepped(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return stepped


def _hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step that runs in `torch.optim.Optimizer.profile_hook_step` only if there is a hook or a profiler."""
    profiled_step = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def stepped(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        has_listener = (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_hooks[0]
            or _global_hooks[1]
            or _is_profiled()
        )
        return (profiled_step if has_listener else step)(self, *args, **kwargs)

    # Without this mark the first optimizer that is made would wrap the step again.
    stepped.hooked = True  # type: ignore[attr-defined]
    return stepped


_ROIS_AT_ONCE = 256
"""Regions of one pass: each intermediate value takes 50 MB with 256 channels, 7 x 7 bins and 2 x 2 samples."""


def use_eager_roi_align() -> None:
    """Replaces the compiled implementation of torchvision's RoIAlign by the same one without compilation.

    torchvision (0.29) has a backward that adds atomically, and for deterministic algorithms on a GPU an implementation
    in Python, which it compiles for dynamic shapes. That needs Triton and a C compiler on every node, and the first
    shapes choose the kernels, so the result of a step would depend on the earlier steps of a worker. The same
    implementation without compilation needs neither; `_RoiAlignInParts` limits its memory.
    """
    module: Any = sys.modules.get("torchvision.ops.roi_align")
    if module is None or isinstance(module._roi_align, _RoiAlignInParts):
        return
    module._roi_align = _RoiAlignInParts(module._roi_align.__wrapped__)
    # torchvision calls the function only where it supports compilation.
    module.is_compile_supported = lambda device: True


class _RoiAlignInParts:
    """Runs RoIAlign in Python on some regions at a time; backward recomputes each part instead of keeping it."""

    def __init__(self, roi_align: Any) -> None:
        self._roi_align = roi_align

    def __call__(self, features: Tensor, rois: Tensor, *options: Any) -> Tensor:
        """Returns the values of the regions, shape (regions, channels, *bins).

        Args:
            features: Shape (images, channels, height, width).
            rois: Shape (regions, 5): the image's index, left, top, right, bottom.
            options: Scale, numbers of bins, of samples, and whether pixels are aligned.
        """
        if not torch.is_grad_enabled() or not features.requires_grad:
            return torch.cat([self._roi_align(features, part, *options) for part in rois.split(_ROIS_AT_ONCE)])
        from torch.utils.checkpoint import checkpoint

        fields: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        return torch.cat(
            [checkpoint(self._roi_align, features, part, *options, **fields) for part in rois.split(_ROIS_AT_ONCE)]
        )
