"""What a checkpoint cannot hold of a model, and what training may not do with its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ray_app.errors import ConfigError
from ray_app.train.step.logical import replaced


@contextmanager
def kept_whole(model: nn.Module) -> Iterator[None]:
    """The context of a forward in training.

    Raises:
        ConfigError: It has given the model another tensor for a parameter or a buffer, or has changed a buffer that is not persistent; or
            the model's state is not of tensors alone, or see `_refuse_odd`.
    """
    _refuse_odd(model)
    saved = model.state_dict(keep_vars=True)
    for name, value in saved.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"The model's state_dict has {name}, which is no tensor but {type(value).__name__} (get_extra_state), and a checkpoint"
                " holds tensors. Return a tensor from get_extra_state, or keep it in a buffer."
            )
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    passing = {name: tensor.clone() for name, tensor in model.named_buffers() if name not in saved}
    yield
    now: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        if now.get(name) is not tensor:
            raise replaced(name)
    for name, value in passing.items():
        if not value.equal(now[name]):
            raise ConfigError(
                f"Training changes the buffer {name}, which is registered with persistent=False, so no checkpoint has it: a run that goes"
                " on would have lost it. Register it with persistent=True."
            )


def _refuse_odd(model: nn.Module) -> None:
    """Refuses what cannot be exchanged or written into.

    Raises:
        ConfigError: A layer's gradient is sparse, or values of a buffer share their memory.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse and layer.weight.requires_grad:
            raise ConfigError(
                f"{name or type(layer).__name__} of the model has sparse=True, and gradients travel dense. Make it with sparse=False."
            )
    for name, buffer in model.named_buffers():
        if buffer.layout is torch.strided and any(n > 1 and not step for n, step in zip(buffer.shape, buffer.stride(), strict=True)):
            raise ConfigError(
                f"Values of the buffer {name} share their memory (expand), so no state can be loaded. Register it with .contiguous()."
            )
