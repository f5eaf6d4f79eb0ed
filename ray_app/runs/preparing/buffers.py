"""What training may not do with a model's tensors: replace them, or change one that no checkpoint has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ray_app.errors import ConfigError
from ray_app.train.step.logical import replaced


@contextmanager
def kept_whole(model: nn.Module) -> Iterator[None]:
    """The context of a forward in training.

    Raises:
        ConfigError: It has given the model another tensor for a parameter or a buffer, or has changed a buffer that is not persistent.
    """
    saved = model.state_dict(keep_vars=True)
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
