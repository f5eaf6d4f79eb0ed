"""Checks of a model and a task: what checkpoints, sharding, pickling and deterministic kernels do not support.

`KernelRecorder` finds operations without a deterministic kernel on GPUs while a task runs on the CPU, where all
operations have one. The list has the operations that `torch.use_deterministic_algorithms` documents as refused for CUDA
tensors (torch 2.15), those that the CUDA kernels of torch and torchvision refuse in addition (`index_reduce`, pooling
of regions), and the deformable convolution of torchvision: its backward adds atomically without an error. It does not
have operations that PyTorch replaces in deterministic mode, such as bilinear interpolation by
`torch.nn.functional.interpolate`, nor operations that a CPU refuses as well, such as `put_` without `accumulate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import safetensors.torch
import torch
from ray import cloudpickle
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ray_app.checkpoint.format import params_digest
from ray_app.errors import ConfigError, remove_addresses
from ray_app.preflight.purity import iter_parts
from ray_app.reduction.reducer import checksum
from ray_app.task.base import Task
from ray_app.torch_private import TorchDispatchMode, tree_leaves
from ray_app.train.step.micro_batch import replaced_tensor_error

_CHUNK_VALUES = 1 << 20
"""Number of values that are copied and summed at a time."""


@contextmanager
def check_forward(model: nn.Module, in_turns: bool, moving: Sequence[Tensor] = ()) -> Iterator[None]:
    """Checks that a training forward in the block does not change the model in ways that a checkpoint cannot store.

    Args:
        model: The model that is trained.
        in_turns: Whether optimizers alternate, each of which sets the parameters that are trained.
        moving: The parameters that the forward may change.

    Raises:
        ConfigError: The forward replaces a parameter or a buffer by another tensor; changes a shape, a parameter, a
            buffer that is not persistent, or (unless `in_turns`) `requires_grad`; or leaves gradients. Before the
            block: see `_check_tensors_and_layers` and `_check_state_dict`.
    """
    _check_tensors_and_layers(model)
    saved = model.state_dict(keep_vars=True)
    _check_state_dict(model, saved)
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    # A tied tensor may be saved under another name.
    saved_ids = {id(value) for value in saved.values()}
    unsaved_buffers = {name: tensor.clone() for name, tensor in model.named_buffers() if id(tensor) not in saved_ids}
    checksums = _parameter_checksums(model, moving)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    without_gradient = [p for p in model.parameters() if p.grad is None]
    yield
    now: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        if now.get(name) is not tensor:
            raise replaced_tensor_error(name)
        if tensor.shape != shapes[name]:
            raise ConfigError(
                f"Training changes the shape of {name} from {tuple(shapes[name])} to {tuple(tensor.shape)}, but a"
                " checkpoint is read into a model that has not been called yet. Run a batch through the model at the"
                " end of build_model."
            )
    for name, value in unsaved_buffers.items():
        # The bytes are compared, because NaN differs from itself.
        if params_digest({"": value}) != params_digest({"": now[name]}):
            raise ConfigError(
                f"Training changes the buffer {name}, which is registered with persistent=False, so no checkpoint"
                " contains it and a resumed run would lose it. Register the buffer with persistent=True."
            )
    if changed := [name for name, sum_ in _parameter_checksums(model, moving).items() if sum_ != checksums[name]]:
        raise ConfigError(
            f"The forward of training changes the parameter {changed[0]}. A worker that runs several logical workers"
            " would change it several times in a step. Update such a value (a momentum encoder, an average) once per"
            " step in Task.apply_gradients, or make it a buffer (register_buffer), from which every logical worker"
            " starts a step."
        )
    if not in_turns and (switched := [name for name, p in model.named_parameters() if p.requires_grad != flags[name]]):
        raise ConfigError(
            f"The forward of training changes requires_grad of {switched[0]}. The trained parameters are fixed when the"
            " model is built: set requires_grad in build_model or with train.freeze, and multiply ignored losses by 0."
        )
    if any(p.grad is not None for p in without_gradient):
        raise ConfigError(
            "training_loss leaves gradients in the model's parameters, because it calls backward(); the step would add"
            " its own gradients to them. Compute gradients with torch.autograd.grad, which leaves none."
        )


def _parameter_checksums(model: nn.Module, moving: Sequence[Tensor]) -> dict[str, int]:
    """Returns a checksum of each other parameter by name, computed in parts, since the sum copies what it adds."""
    others = ((name, p) for name, p in model.named_parameters() if all(p is not one for one in moving))
    parts = ((name, p.detach().reshape(-1).split(_CHUNK_VALUES)) for name, p in others)
    return {name: sum(int(checksum(part, 0)) for part in chunks) for name, chunks in parts}


def _check_state_dict(model: nn.Module, saved: dict[str, object]) -> None:
    """Refuses state that a checkpoint would not hold: other than tensors, of other types, or without a parameter."""
    for name, value in saved.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"The model's state_dict has {name}, which is a {type(value).__name__} (get_extra_state), but a"
                " checkpoint holds only tensors. Return a tensor from get_extra_state, or keep it in a buffer."
            )
        try:
            safetensors.torch.save({name: torch.empty(0, dtype=value.dtype)})
        except Exception as error:  # safetensors does not document the types of its errors.
            raise ConfigError(
                f"{name} of the model is {str(value.dtype).removeprefix('torch.')}, a type that a checkpoint"
                " (safetensors) cannot store. Use another type, such as complex64 or float64."
            ) from error
    saved_ids = {id(value) for value in saved.values()}
    if lacking := [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in saved_ids]:
        raise ConfigError(
            f"The model's state_dict leaves out {lacking[0]}, which is trained, so no checkpoint would contain it. Let"
            " state_dict include all trained parameters, or freeze this one."
        )


def _check_tensors_and_layers(model: nn.Module) -> None:
    """Refuses layers and tensors that cannot be reduced over workers or loaded from a checkpoint."""
    for name, layer in model.named_modules():
        layer_name = name or type(layer).__name__
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.weight.requires_grad:
            if layer.sparse:
                raise ConfigError(
                    f"{layer_name} of the model has sparse=True, but gradients are sent dense. Set sparse=False."
                )
            if layer.max_norm is not None:
                raise ConfigError(
                    f"{layer_name} of the model has max_norm, with which its forward changes its weights: the number of"
                    " changes per step would depend on the number of workers. Clamp the norms in Task.apply_gradients"
                    " instead, once in a step."
                )
        if isinstance(layer, nn.SyncBatchNorm):
            raise ConfigError(
                f"{layer_name} of the model is a SyncBatchNorm, which computes statistics over all processes of a step,"
                " and their number may change. Use BatchNorm, which computes them per logical worker, or GroupNorm."
            )
    parameters = dict(model.named_parameters())
    tensors = [*parameters.items(), *model.named_buffers()]
    for name, tensor in tensors:
        if is_lazy(tensor):
            raise ConfigError(
                f"{name} of the model has no shape yet (a lazy layer). Run a batch through the model at the end of"
                f" build_model."
            )
        if tensor.layout is not torch.strided:
            raise ConfigError(
                f"{name} of the model is sparse, but gradients and checkpoints are dense. Call .to_dense()."
            )
        if (
            any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            and name not in parameters
        ):
            raise ConfigError(
                f"Values of the buffer {name} share their memory (expand), so no state can be loaded. Register the"
                " buffer with .contiguous()."
            )
    spans = [
        (t.untyped_storage().data_ptr(), t.storage_offset() * t.element_size(), t.nbytes, name)
        for name, t in tensors
        if t.nbytes
    ]
    for (storage, begin, size, first), (other, at, _, second) in pairwise(sorted(spans)):
        if storage == other and at < begin + size and not parameters.keys().isdisjoint((first, second)):
            raise ConfigError(
                f"{first} and {second} of the model share memory but are different tensors (.data), so loading one"
                " overwrites the other. Share the parameter itself: second.weight = first.weight."
            )


_POOLS = "pooling with a kernel of fixed size, or a mean (amax) over the pixels for adaptive pooling to size 1"
_BLOCKS, _STRIDE = "a convolution with a stride, or a mean over reshaped blocks", "a convolution with a stride"
_UNPOOL, _PADS = "a transposed convolution, or interpolation", "zeros, or padding_mode replicate"
_ROWS, _MEDIAN = "mode nearest, or bilinear over (N, C, 1, W)", "sort, and take the middle value"
_SCATTERED = "index_add or scatter_reduce with sum, or a loop over the groups"
_PIXELS, _UNREDUCED = "cross-entropy or NLLLoss over pixels, as mean or sum", "reduction none, followed by a mean"
_SAMPLED = "grid_sample, backward", "an augmentation before the step, in Task.decode or Task.augment"
_NONDETERMINISTIC_OPS: Mapping[str, tuple[str, str]] = {
    "_adaptive_avg_pool2d_backward": ("AdaptiveAvgPool2d, backward", _POOLS),
    "_adaptive_avg_pool3d_backward": ("AdaptiveAvgPool3d, backward", _POOLS),
    "adaptive_max_pool2d_backward": ("AdaptiveMaxPool2d, backward", _POOLS),
    "adaptive_max_pool3d_backward": ("AdaptiveMaxPool3d, backward", _POOLS),
    "avg_pool3d_backward": ("AvgPool3d, backward", _BLOCKS),
    "fractional_max_pool2d_backward": ("FractionalMaxPool2d, backward", _STRIDE),
    "fractional_max_pool3d_backward": ("FractionalMaxPool3d, backward", _STRIDE),
    "max_unpool2d": ("MaxUnpool1d or MaxUnpool2d", _UNPOOL),
    "max_unpool3d": ("MaxUnpool3d", _UNPOOL),
    "upsample_linear1d_backward": ("linear interpolation of one dimension, backward", _ROWS),
    "_upsample_bilinear2d_aa_backward": ("antialiased interpolation, backward", "antialias=False"),
    "_upsample_bicubic2d_aa_backward": ("antialiased interpolation, backward", "antialias=False"),
    "reflection_pad1d_backward": ("ReflectionPad1d, backward", _PADS),
    "reflection_pad2d_backward": ("ReflectionPad2d, backward", _PADS),
    "reflection_pad3d_backward": ("ReflectionPad3d, backward", _PADS),
    "nll_loss2d_forward": (_PIXELS, _UNREDUCED),
    "_ctc_loss_backward": ("CTCLoss, backward", "another loss"),
    "_embedding_bag_dense_backward": ("EmbeddingBag with mode max, backward", "mode sum or mean"),
    "histc": ("histc", "bincount of integers"),
    "bincount": ("bincount with weights", "index_add"),
    "median": ("median with indices", _MEDIAN),
    "nanmedian": ("nanmedian with indices", _MEDIAN),
    "scatter_reduce": ("scatter_reduce with prod, amax or amin", _SCATTERED),
    "scatter": ("scatter that multiplies", _SCATTERED),
    "index_reduce": ("index_reduce", _SCATTERED),
    "put": ("put with accumulate", "index_add, or scatter_add"),
    "_roi_pool_backward": ("RoIPool, backward", "RoIAlign"),
    "_ps_roi_align_backward": ("PSRoIAlign, backward", "RoIAlign"),
    "_ps_roi_pool_backward": ("PSRoIPool, backward", "RoIAlign"),
    "_deform_conv2d_backward": ("DeformConv2d, backward", "a convolution"),
    "grid_sampler_2d_backward": _SAMPLED,
    "grid_sampler_3d_backward": _SAMPLED,
}
"""Operations without a deterministic kernel on GPUs: a name for the author of a model, and what to use instead."""
_IS_REFUSED: Mapping[str, Callable[[Callable[[int, str], Any]], bool]] = {
    "nll_loss2d_forward": lambda argument: argument(3, "reduction") != 0,
    "_embedding_bag_dense_backward": lambda argument: argument(7, "mode") == 2,
    "bincount": lambda argument: argument(1, "weights") is not None,
    "median": lambda argument: argument(1, "dim") is not None,
    "nanmedian": lambda argument: argument(1, "dim") is not None,
    "scatter_reduce": lambda argument: argument(4, "reduce") not in ("sum", "mean"),
    # Multiplied by a number, and not by a tensor, the product is the same in every order.
    "scatter": lambda argument: argument(4, "reduce") == "multiply" and isinstance(argument(3, "src"), Tensor),
    "put": lambda argument: bool(argument(3, "accumulate")),
}
"""Whether a call of an operation is refused, by its arguments; all calls of the other operations are."""


class KernelRecorder(TorchDispatchMode):
    """Records the operations in its context, backward included, that a GPU would refuse."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._refused: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Records an operation if a GPU would refuse it, and calls it."""
        options = kwargs or {}

        def argument(index: int, name: str) -> Any:
            return args[index] if len(args) > index else options.get(name)

        # An operation in place has the same name with a `_` at its end.
        name = func.overloadpacket.__name__.rstrip("_")
        if name in _NONDETERMINISTIC_OPS and (name not in _IS_REFUSED or _IS_REFUSED[name](argument)):
            title, instead = _NONDETERMINISTIC_OPS[name]
            self._refused[title] = instead
        return func(*args, **options)

    def check(self, gpus: float) -> None:
        """Refuses the recorded operations, and names alternatives; each worker, or an evaluator, has these GPUs."""
        if self._refused:
            lines = "\n".join(f"  {title}: choose {instead}" for title, instead in sorted(self._refused.items()))
            raise ConfigError(
                f"train.reduction is exact, which needs deterministic kernels, but PyTorch has none on GPUs ({gpus:g}"
                f" per worker) for\n{lines}\nOr set train.reduction to overlapped, which guarantees the rows of a step,"
                " but not bit-identical parameters."
            )


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes of every module, in which PyTorch itself keeps parameters."""


def check_shardable(model: nn.Module) -> None:
    """Refuses a model that `train.strategy: fsdp` cannot shard, or would train incorrectly.

    Shards are other tensors than the parameters, and neither hooks nor other attributes of the model follow.
    """
    # Importing it takes a while.
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ConfigError(
            f"train.strategy is fsdp, which needs PyTorch 2.15, but {torch.__version__} is installed: earlier versions"
            " send no zeros for parameters that a pass leaves out. Install torch 2.15 on all nodes, or use ddp."
        )
    for name, p in model.named_parameters():
        if not p.ndim or not p.numel():
            raise ConfigError(
                f"The parameter {name} has {'no dimensions' if not p.ndim else 'no values'}, and train.strategy fsdp"
                " cuts parameters along their first dimension. Give the parameter the shape (1,), or use ddp."
            )
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"The parameter {name} has a hook (register_hook), which its shards would not have (train.strategy"
                " fsdp). Move the hook's work to the forward or to Task.apply_gradients, or use ddp."
            )
    parameter_ids = {id(p) for p in model.parameters()}
    for name, module in model.named_modules():
        ignored = _MODULE_ATTRIBUTES
        if isinstance(module, nn.RNNBase):
            # PyTorch updates this list when parameters are replaced.
            ignored = ignored | {"_flat_weights"}
        for key, value in vars(module).items():
            if key not in ignored and any(id(leaf) in parameter_ids for leaf in tree_leaves(value)):
                raise ConfigError(
                    f"{f'{name}.' if name else ''}{key} of the model is not a module but holds parameters, which would"
                    " not be trained (train.strategy fsdp replaces parameters by shards). Keep the parameters in an"
                    " nn.ParameterList, or use ddp."
                )


_MAX_DEPTH, _MAX_PARTS = 8, 10_000


def check_picklable(task: Task) -> None:
    """Refuses a task that cannot be pickled for readers, workers and the evaluator, whatever the strategy now is."""
    failure = find_failing_part(type(task).__name__, task, lambda value: cloudpickle.loads(cloudpickle.dumps(value)))
    if failure is None:
        return
    name, value, error = failure
    raise ConfigError(
        f"{name} of the task cannot be sent to other processes, because it is a"
        f" {type(value).__module__}.{type(value).__qualname__} ({type(error).__name__}: {first_line(error)}). A task is"
        " pickled to readers, workers and the evaluator, with any strategy: keep only settings in it, and create locks,"
        " open files, generators and connections where they are used."
    )


def first_line(error: Exception) -> str:
    """Returns the first line of an error without addresses of objects, which differ every time."""
    return remove_addresses(next(iter(str(error).splitlines()), ""))


def find_failing_part(
    name: str, value: Any, copy: Callable[[Any], object], visited: set[int] | None = None
) -> tuple[str, Any, Exception] | None:
    """Returns the innermost part of a value that cannot be copied: its name, the part and the error; else None.

    Args:
        name: Name of the value in messages.
        value: The value.
        copy: Copies a part, and raises any error.
        visited: Identities of the parts that were examined.
    """
    try:
        copy(value)
        return None
    except Exception as raised:
        error = raised
    visited = set() if visited is None else visited
    visited.add(id(value))
    if len(visited) < _MAX_PARTS and name.count(".") + name.count("[") < _MAX_DEPTH:
        for inner, part in iter_parts(value):
            if id(part) not in visited and (failure := find_failing_part(name + inner, part, copy, visited)):
                return failure
    return name, value, error
