"""What a checkpoint cannot hold of a model, and what training may not do with it.

Operations that have no deterministic kernel on a GPU, found while a task is tried on a CPU, where all of them have one.

They are those that `torch.use_deterministic_algorithms` lists as refused for CUDA tensors (torch 2.15), those that the
CUDA kernels of torch and torchvision refuse beside that list (`index_reduce`, pooling of regions), and the deformable
convolution of torchvision, whose backward adds atomically and does not say so. Operations that PyTorch replaces in that
mode, such as bilinear interpolation by `torch.nn.functional.interpolate`, are not among them, nor operations that a CPU
refuses as well, such as `put_` without `accumulate`.

What of a model would be lost where its parameters are cut into shards, which are other tensors than those that it was
made with.

Whether a task can be sent to other processes, and which part of a value cannot be sent or stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import safetensors.torch
import torch
from ray import cloudpickle
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ray_app.errors import ConfigError, remove_addresses
from ray_app.reduction.base import checksum
from ray_app.task.base import Task
from ray_app.train.step.micro_batch import replaced_tensor_error

_CHUNK_VALUES = 1 << 20
"""Values that are looked at together."""


@contextmanager
def check_forward(model: nn.Module, in_turns: bool) -> Iterator[None]:
    """The context of a forward in training.

    Args:
        model: What is trained.
        in_turns: Whether several optimizers take turns, each of which decides what is trained.

    Raises:
        ConfigError: The forward has given the model another tensor for a parameter or a buffer, has changed a
            parameter, a buffer that is not persistent or which parameters are trained, or has left gradients; or see
            `_check_tensors_and_layers`.
    """
    _check_tensors_and_layers(model)
    saved = model.state_dict(keep_vars=True)
    _check_state_dict(model, saved)
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    held = {id(value) for value in saved.values()}  # under whatever name
    passing = {name: tensor.clone() for name, tensor in model.named_buffers() if id(tensor) not in held}
    bits, trains = _parameter_checksums(model), _trained_flags(model)
    without = [p for p in model.parameters() if p.grad is None]
    yield
    now: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        if now.get(name) is not tensor:
            raise replaced_tensor_error(name)
        if tensor.shape != shapes[name]:
            raise ConfigError(
                f"Training changes the shape of {name} from {tuple(shapes[name])} to {tuple(tensor.shape)}, and a"
                f" checkpoint is read into a"
                " model that has never been called. Run a batch through the model at the end of build_model."
            )
    for name, value in passing.items():
        if not value.equal(now[name]):
            raise ConfigError(
                f"Training changes the buffer {name}, which is registered with persistent=False, so no checkpoint has"
                f" it: a run that goes"
                " on would have lost it. Register it with persistent=True."
            )
    if moved := [name for name, found in _parameter_checksums(model).items() if found != bits[name]]:
        raise ConfigError(
            f"The forward of training changes the parameter {moved[0]}. A worker that plays several logical workers"
            f" would change it several"
            " times in a step. What moves by itself (a momentum encoder, an average) is moved once in a step by"
            " Task.apply_gradients, or is"
            " a buffer (register_buffer), of which every logical worker starts from the same."
        )
    if not in_turns and (switched := [name for name, found in _trained_flags(model).items() if found != trains[name]]):
        raise ConfigError(
            f"The forward of training changes requires_grad of {switched[0]}. What is trained is decided when the model"
            f" is made: in"
            " build_model, or by train.freeze; multiply what is not to count yet by 0."
        )
    if any(p.grad is not None for p in without):
        raise ConfigError(
            "training_loss leaves gradients in the model's parameters, since it calls backward(); they would be added"
            " to the step's. Take"
            " gradients by torch.autograd.grad, which leaves none."
        )


def _parameter_checksums(model: nn.Module) -> dict[str, int]:
    """Those of each parameter, in parts: each is copied."""
    parts = ((name, p.detach().reshape(-1).split(_CHUNK_VALUES)) for name, p in model.named_parameters())
    return {name: sum(int(checksum(part, 0)) for part in some) for name, some in parts}


def _trained_flags(model: nn.Module) -> dict[str, bool]:
    return {name: p.requires_grad for name, p in model.named_parameters()}


def _check_state_dict(model: nn.Module, saved: dict[str, object]) -> None:
    """Refuses what no checkpoint would hold.

    Raises:
        ConfigError: The model's state is not of tensors alone, or of such as files have no type for, or lacks a
            parameter that is trained.
    """
    for name, value in saved.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"The model's state_dict has {name}, which is no tensor but {type(value).__name__} (get_extra_state),"
                f" and a checkpoint"
                " holds tensors. Return a tensor from get_extra_state, or keep it in a buffer."
            )
        try:
            safetensors.torch.save({name: torch.empty(0, dtype=value.dtype)})
        except Exception as error:  # what it raises is not said
            raise ConfigError(
                f"{name} of the model is {str(value.dtype).removeprefix('torch.')}, which a checkpoint has no type for"
                f" (safetensors). Use"
                " another, such as complex64 or float64."
            ) from error
    held = {id(value) for value in saved.values()}
    if lacking := [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]:
        raise ConfigError(
            f"The model's state_dict leaves {lacking[0]} out, which is trained, so no checkpoint would have it. Let"
            f" state_dict hold what is"
            " trained, or freeze it."
        )


def _check_tensors_and_layers(model: nn.Module) -> None:
    """Refuses what cannot be exchanged or written into.

    Raises:
        ConfigError: A layer writes its weights in forward, has a sparse gradient, or counts over processes; or a tensor
            has no size yet, is sparse, or shares memory.
    """
    for name, layer in model.named_modules():
        called = name or type(layer).__name__
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.weight.requires_grad:
            if layer.sparse:
                raise ConfigError(
                    f"{called} of the model has sparse=True, and gradients travel dense. Make it with sparse=False."
                )
            if layer.max_norm is not None:
                raise ConfigError(
                    f"{called} of the model has max_norm, by which its forward changes its weights: how often in a step"
                    f" would depend on the"
                    " number of workers. Clamp the norms in Task.apply_gradients instead, once in a step."
                )
        if isinstance(layer, nn.SyncBatchNorm):
            raise ConfigError(
                f"{called} of the model is a SyncBatchNorm, whose statistics are those of all processes of a step, of"
                f" which there may be"
                " any number. Use BatchNorm, which has those of a logical worker, or GroupNorm."
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
                f"{name} of the model is sparse, and what is exchanged and saved is dense. Make it dense: .to_dense()."
            )
        if (
            any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            and name not in parameters
        ):
            raise ConfigError(
                f"Values of the buffer {name} share their memory (expand), so no state can be loaded. Register it with"
                f" .contiguous()."
            )
    held = [
        (t.untyped_storage().data_ptr(), t.storage_offset() * t.element_size(), t.nbytes, name)
        for name, t in tensors
        if t.nbytes
    ]
    for (storage, begin, size, first), (other, at, _, second) in pairwise(sorted(held)):
        if storage == other and at < begin + size and not parameters.keys().isdisjoint((first, second)):
            raise ConfigError(
                f"{first} and {second} of the model share memory but are different tensors (.data), so that a state is"
                f" loaded into one over"
                " the other. Share the parameter itself: second.weight = first.weight."
            )


class _NondeterministicOp(NamedTuple):
    """An operation.

    Args:
        what: Its name for whoever wrote a model.
        instead: What to choose.
        if_: Whether a call of it is refused, given its arguments.
    """

    what: str
    instead: str
    if_: Callable[..., bool] = lambda *args, **options: True


def _has_weights(*args: Any, **options: Any) -> bool:
    """Whether `bincount` gets weights; an argument that is None is none."""
    return (args[1] if len(args) > 1 else options.get("weights")) is not None


def _has_dim(*args: Any, **options: Any) -> bool:
    """Whether a median is taken along a dimension, and so returns indices."""
    return len(args) > 1 or "dim" in options


def _is_not_sum(*args: Any, **options: Any) -> bool:
    """Whether `scatter_reduce` reduces by another operation than a sum or a mean, which PyTorch computes by sorting the
    indices.
    """
    return (args[4] if len(args) > 4 else options.get("reduce")) not in ("sum", "mean")


def _multiplies_tensors(*args: Any, **options: Any) -> bool:
    """Whether `scatter` multiplies by a tensor; a number gives the same product in every order."""
    return options.get("reduce") == "multiply" and isinstance(args[3] if len(args) > 3 else options.get("src"), Tensor)


def _accumulates(*args: Any, **options: Any) -> bool:
    """Whether `put_` adds."""
    return bool(args[3] if len(args) > 3 else options.get("accumulate", False))


_POOLS = "pooling with a kernel of fixed size, or a mean (amax) over the pixels, as an adaptive pooling to size 1 is"
_MEDIAN, _PUT, _REGIONS = "sort, and the middle", "index_add, or scatter_add", "RoIAlign"
_SCATTERED = "index_add or scatter_reduce with sum, or a loop over the groups"
_FRACTIONAL, _PADS = "a convolution with a stride", "zeros, or padding_mode replicate"
_NONDETERMINISTIC_OPS: Mapping[str, _NondeterministicOp] = {
    "_adaptive_avg_pool2d_backward": _NondeterministicOp("AdaptiveAvgPool2d, backward", _POOLS),
    "_adaptive_avg_pool3d_backward": _NondeterministicOp("AdaptiveAvgPool3d, backward", _POOLS),
    "adaptive_max_pool2d_backward": _NondeterministicOp("AdaptiveMaxPool2d, backward", _POOLS),
    "adaptive_max_pool3d_backward": _NondeterministicOp("AdaptiveMaxPool3d, backward", _POOLS),
    "avg_pool3d_backward": _NondeterministicOp(
        "AvgPool3d, backward", "a convolution with a stride, or a mean over reshaped blocks"
    ),
    "fractional_max_pool2d_backward": _NondeterministicOp("FractionalMaxPool2d, backward", _FRACTIONAL),
    "fractional_max_pool3d_backward": _NondeterministicOp("FractionalMaxPool3d, backward", _FRACTIONAL),
    "max_unpool2d": _NondeterministicOp("MaxUnpool1d or MaxUnpool2d", "a transposed convolution, or interpolation"),
    "max_unpool3d": _NondeterministicOp("MaxUnpool3d", "a transposed convolution, or interpolation"),
    "upsample_linear1d_backward": _NondeterministicOp(
        "linear interpolation of one dimension, backward", "mode nearest, or bilinear over (N, C, 1, W)"
    ),
    "_upsample_bilinear2d_aa_backward": _NondeterministicOp("antialiased interpolation, backward", "antialias=False"),
    "_upsample_bicubic2d_aa_backward": _NondeterministicOp("antialiased interpolation, backward", "antialias=False"),
    "reflection_pad1d_backward": _NondeterministicOp("ReflectionPad1d, backward", _PADS),
    "reflection_pad2d_backward": _NondeterministicOp("ReflectionPad2d, backward", _PADS),
    "reflection_pad3d_backward": _NondeterministicOp("ReflectionPad3d, backward", _PADS),
    "nll_loss2d_forward": _NondeterministicOp(
        "cross-entropy or NLLLoss over pixels, as mean or sum",
        "reduction none, and the mean of that",
        lambda *args, **options: (args[3] if len(args) > 3 else options.get("reduction", 1)) != 0,
    ),
    "_ctc_loss_backward": _NondeterministicOp("CTCLoss, backward", "another loss"),
    "_embedding_bag_dense_backward": _NondeterministicOp(
        "EmbeddingBag with mode max, backward",
        "mode sum or mean",
        lambda *args, **options: 2 in (args[7:8] or (options.get("mode"),)),
    ),
    "histc": _NondeterministicOp("histc", "bincount of integers"),
    "bincount": _NondeterministicOp("bincount with weights", "index_add", _has_weights),
    "median": _NondeterministicOp("median with indices", _MEDIAN, _has_dim),
    "nanmedian": _NondeterministicOp("nanmedian with indices", _MEDIAN, _has_dim),
    "scatter_reduce": _NondeterministicOp("scatter_reduce with prod, amax or amin", _SCATTERED, _is_not_sum),
    "scatter_reduce_": _NondeterministicOp("scatter_reduce with prod, amax or amin", _SCATTERED, _is_not_sum),
    "scatter": _NondeterministicOp("scatter that multiplies", _SCATTERED, _multiplies_tensors),
    "scatter_": _NondeterministicOp("scatter that multiplies", _SCATTERED, _multiplies_tensors),
    "index_reduce": _NondeterministicOp("index_reduce", _SCATTERED),
    "index_reduce_": _NondeterministicOp("index_reduce", _SCATTERED),
    "put": _NondeterministicOp("put with accumulate", _PUT, _accumulates),
    "put_": _NondeterministicOp("put with accumulate", _PUT, _accumulates),
    "_roi_pool_backward": _NondeterministicOp("RoIPool, backward", _REGIONS),
    "_ps_roi_align_backward": _NondeterministicOp("PSRoIAlign, backward", _REGIONS),
    "_ps_roi_pool_backward": _NondeterministicOp("PSRoIPool, backward", _REGIONS),
    "_deform_conv2d_backward": _NondeterministicOp("DeformConv2d, backward", "a convolution"),
    "grid_sampler_2d_backward": _NondeterministicOp(
        "grid_sample, backward", "an augmentation before the step, in Task.decode or Task.augment"
    ),
    "grid_sampler_3d_backward": _NondeterministicOp(
        "grid_sample, backward", "an augmentation before the step, in Task.decode or Task.augment"
    ),
}


class KernelRecorder(TorchDispatchMode):
    """Notes what a GPU would refuse of that which is called in its context, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls an operation."""
        options = kwargs or {}
        refused = _NONDETERMINISTIC_OPS.get(func.overloadpacket.__name__)
        if refused is not None and refused.if_(*args, **options):
            self._found[refused.what] = refused.instead
        return func(*args, **options)

    def refuse(self, gpus: float) -> None:
        """Refuses what was found, for workers or an evaluator with so many GPUs.

        Raises:
            ConfigError: Something was.
        """
        if self._found:
            what = "\n".join(f"  {what}: choose {instead}" for what, instead in sorted(self._found.items()))
            raise ConfigError(
                f"train.reduction is exact, for which PyTorch takes deterministic kernels alone, and on GPUs ({gpus:g}"
                f" each) it has none"
                f" for\n{what}\nOr set train.reduction to overlapped, which promises the rows of a step, but no bits."
            )


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def check_shardable(model: nn.Module) -> None:
    """Refuses a model that `train.strategy: fsdp` cannot shard, or would train otherwise than it is meant.

    Raises:
        ConfigError: A parameter has no rows to cut, or a hook, or is kept in a list of the model's own.
    """
    for name, p in model.named_parameters():
        if not p.ndim or not p.numel():
            raise ConfigError(
                f"The parameter {name} has {'no dimensions' if not p.ndim else 'no values'}, and train.strategy fsdp"
                f" cuts parameters along"
                " their first one. Give it the shape (1,), or use ddp."
            )
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"The parameter {name} has a hook (register_hook), which its shards do not have (train.strategy fsdp)."
                f" Do it in the forward"
                " or in Task.apply_gradients, or use ddp."
            )
    known = {id(p) for p in model.parameters()}
    for name, module in model.named_modules():
        kept = (
            _MODULE_ATTRIBUTES | {"_flat_weights"} if isinstance(module, nn.RNNBase) else _MODULE_ATTRIBUTES
        )  # that one follows
        for key, value in vars(module).items():
            if key not in kept and any(id(each) in known for each in tree_leaves(value)):
                raise ConfigError(
                    f"{f'{name}.' if name else ''}{key} of the model is no module and holds parameters, which would not"
                    f" be the ones that"
                    " are trained (train.strategy fsdp puts shards in their place). Keep them in an nn.ParameterList,"
                    " or use ddp."
                )


_MAX_DEPTH, _MAX_PARTS = 8, 10_000


def check_picklable(task: Task) -> None:
    """Pickles a task and reads it again, as it is sent to readers, workers and the evaluator; also where nothing is
    sent.

    A run may be continued with another strategy, so what one of them needs is asked of all.

    Raises:
        ConfigError: It cannot be pickled; the message names the attribute.
    """
    if (refused := find_failing_part(type(task).__name__, task, _pickling_error)) is None:
        return
    name, value, error = refused
    raise ConfigError(
        f"{name} of the task cannot be sent to other processes: it is a"
        f" {type(value).__module__}.{type(value).__qualname__}"
        f" ({type(error).__name__}: {first_line(error)}). A task is pickled to readers, workers and the evaluator,"
        " whatever the strategy: keep settings in it, and make locks, open files, generators and connections where they"
        " are used."
    )


def _pickling_error(value: Any) -> Exception | None:
    """Why a value cannot be pickled and read again; None if it can."""
    try:
        cloudpickle.loads(cloudpickle.dumps(value))
    except Exception as error:  # the classes of a user raise anything
        return error
    return None


def first_line(error: Exception) -> str:
    """What an error says in its first line, without the addresses of objects, which are others each time."""
    return remove_addresses(next(iter(str(error).splitlines()), ""))


def find_failing_part(
    name: str, value: Any, error_of: Callable[[Any], Exception | None], seen: set[int] | None = None
) -> tuple[str, Any, Exception] | None:
    """The innermost part of a value for which there is an error: what it is called, the part and its error; None if
    there is no error.

    Args:
        name: What the value is called.
        value: The value.
        error_of: Returns why a part cannot be used, or None.
        seen: Identities of the parts that were looked at.
    """
    if (error := error_of(value)) is None:
        return None
    seen = set() if seen is None else seen
    seen.add(id(value))
    if len(seen) < _MAX_PARTS and name.count(".") + name.count("[") < _MAX_DEPTH:
        for inner, part in _parts(name, value):
            if id(part) not in seen and (refused := find_failing_part(inner, part, error_of, seen)) is not None:
                return refused
    return name, value, error


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a value holds: attributes, items, and what a function or a method is bound to."""
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{name}[{i}]", part) for i, part in enumerate(value))
    elif (owner := getattr(value, "__self__", None)) is not None and not isinstance(owner, type):
        yield f"{name}.__self__", owner
    elif (closure := getattr(value, "__closure__", None)) is not None:
        names = value.__code__.co_freevars
        yield from (
            (f"{name}, which uses {free}", cell.cell_contents) for free, cell in zip(names, closure, strict=True)
        )
    else:
        yield from ((f"{name}.{attribute}", part) for attribute, part in getattr(value, "__dict__", {}).items())
