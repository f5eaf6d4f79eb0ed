"""What a checkpoint cannot hold of a model, and what training may not do with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ray_app.errors import ConfigError
from ray_app.exchange.bits import bits_of
from ray_app.train.step.logical import replaced

_PART = 1 << 20
"""Values that are looked at together."""


@contextmanager
def kept_whole(model: nn.Module, in_turns: bool) -> Iterator[None]:
    """The context of a forward in training.

    Args:
        model: What is trained.
        in_turns: Whether several optimizers take turns, each of which decides what is trained.

    Raises:
        ConfigError: It has given the model another tensor for a parameter or a buffer, has changed a parameter, or a buffer that is not
            persistent, or what is trained, or has left gradients; or see `_refuse_odd`.
    """
    _refuse_odd(model)
    saved = model.state_dict(keep_vars=True)
    _refuse_unsaved(model, saved)
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    held = {id(value) for value in saved.values()}  # under whatever name
    passing = {name: tensor.clone() for name, tensor in model.named_buffers() if id(tensor) not in held}
    bits, trains = _bits(model), _trains(model)
    without = [p for p in model.parameters() if p.grad is None]
    yield
    now: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        if now.get(name) is not tensor:
            raise replaced(name)
        if tensor.shape != shapes[name]:
            raise ConfigError(
                f"Training changes the shape of {name} from {tuple(shapes[name])} to {tuple(tensor.shape)}, and a checkpoint is read into a"
                " model that has never been called. Run a batch through the model at the end of build_model."
            )
    for name, value in passing.items():
        if not value.equal(now[name]):
            raise ConfigError(
                f"Training changes the buffer {name}, which is registered with persistent=False, so no checkpoint has it: a run that goes"
                " on would have lost it. Register it with persistent=True."
            )
    if moved := [name for name, found in _bits(model).items() if found != bits[name]]:
        raise ConfigError(
            f"The forward of training changes the parameter {moved[0]}. A worker that plays several logical workers would change it several"
            " times in a step. What moves by itself (a momentum encoder, an average) is moved once in a step by Task.apply_gradients, or is"
            " a buffer (register_buffer), of which every logical worker starts from the same."
        )
    if not in_turns and (switched := [name for name, found in _trains(model).items() if found != trains[name]]):
        raise ConfigError(
            f"The forward of training changes requires_grad of {switched[0]}. What is trained is decided when the model is made: in"
            " build_model, or by train.freeze; multiply what is not to count yet by 0."
        )
    if any(p.grad is not None for p in without):
        raise ConfigError(
            "training_loss leaves gradients in the model's parameters, since it calls backward(); they would be added to the step's. Take"
            " gradients by torch.autograd.grad, which leaves none."
        )


def _bits(model: nn.Module) -> dict[str, int]:
    """Those of each parameter, in parts: each is copied."""
    parts = ((name, p.detach().reshape(-1).split(_PART)) for name, p in model.named_parameters())
    return {name: sum(int(bits_of(part, 0)) for part in some) for name, some in parts}


def _trains(model: nn.Module) -> dict[str, bool]:
    return {name: p.requires_grad for name, p in model.named_parameters()}


def _refuse_unsaved(model: nn.Module, saved: dict[str, object]) -> None:
    """Refuses what no checkpoint would hold.

    Raises:
        ConfigError: The model's state is not of tensors alone, or of such as files have no type for, or lacks a parameter that is trained.
    """
    for name, value in saved.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"The model's state_dict has {name}, which is no tensor but {type(value).__name__} (get_extra_state), and a checkpoint"
                " holds tensors. Return a tensor from get_extra_state, or keep it in a buffer."
            )
        try:
            safetensors.torch.save({name: torch.empty(0, dtype=value.dtype)})
        except Exception as error:  # what it raises is not said
            raise ConfigError(
                f"{name} of the model is {str(value.dtype).removeprefix('torch.')}, which a checkpoint has no type for (safetensors). Use"
                " another, such as complex64 or float64."
            ) from error
    held = {id(value) for value in saved.values()}
    if lacking := [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]:
        raise ConfigError(
            f"The model's state_dict leaves {lacking[0]} out, which is trained, so no checkpoint would have it. Let state_dict hold what is"
            " trained, or freeze it."
        )


def _refuse_odd(model: nn.Module) -> None:
    """Refuses what cannot be exchanged or written into.

    Raises:
        ConfigError: A layer writes its weights in forward, has a sparse gradient, or counts over processes; or a tensor has no size yet, is
            sparse, or shares memory.
    """
    for name, layer in model.named_modules():
        called = name or type(layer).__name__
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.weight.requires_grad:
            if layer.sparse:
                raise ConfigError(f"{called} of the model has sparse=True, and gradients travel dense. Make it with sparse=False.")
            if layer.max_norm is not None:
                raise ConfigError(
                    f"{called} of the model has max_norm, by which its forward changes its weights: how often in a step would depend on the"
                    " number of workers. Clamp the norms in Task.apply_gradients instead, once in a step."
                )
        if isinstance(layer, nn.SyncBatchNorm):
            raise ConfigError(
                f"{called} of the model is a SyncBatchNorm, whose statistics are those of all processes of a step, of which there may be"
                " any number. Use BatchNorm, which has those of a logical worker, or GroupNorm."
            )
    parameters = dict(model.named_parameters())
    tensors = [*parameters.items(), *model.named_buffers()]
    for name, tensor in tensors:
        if is_lazy(tensor):
            raise ConfigError(
                f"{name} of the model has no shape yet (a lazy layer). Run a batch through the model at the end of build_model."
            )
        if tensor.layout is not torch.strided:
            raise ConfigError(f"{name} of the model is sparse, and what is exchanged and saved is dense. Make it dense: .to_dense().")
        if any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) and name not in parameters:
            raise ConfigError(
                f"Values of the buffer {name} share their memory (expand), so no state can be loaded. Register it with .contiguous()."
            )
    held = [(t.untyped_storage().data_ptr(), t.storage_offset() * t.element_size(), t.nbytes, name) for name, t in tensors if t.nbytes]
    for (storage, begin, size, first), (other, at, _, second) in pairwise(sorted(held)):
        if storage == other and at < begin + size and not parameters.keys().isdisjoint((first, second)):
            raise ConfigError(
                f"{first} and {second} of the model share memory but are different tensors (.data), so that a state is loaded into one over"
                " the other. Share the parameter itself: second.weight = first.weight."
            )
