"""Parameters that are not trained."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ray_app.errors import ConfigError
from ray_app.train.state.names import matching, some


def freeze(model: nn.Module, patterns: list[str]) -> list[nn.Module]:
    """Takes parameters out of training.

    Args:
        model: Whose parameters.
        patterns: Names, with `*` for any text.

    Returns:
        The batch-norm layers that have parameters, all of them frozen: they are to keep their statistics, as in Keras.

    Raises:
        ConfigError: A pattern matches no parameter, or nothing is left to train.
    """
    named = dict(model.named_parameters(remove_duplicate=False))  # a tied one has several names
    for pattern in patterns:
        for name in matching(named, pattern, "train.freeze"):
            named[name].requires_grad_(False)
    if patterns and not any(p.requires_grad for p in named.values()):
        raise ConfigError(f"train.freeze {patterns} leaves nothing to train; the model has {some(list(named))}.")
    layers = [(m, [p.requires_grad for p in m.parameters()]) for m in model.modules() if isinstance(m, _BatchNorm)] if patterns else []
    return [layer for layer, trained in layers if trained and not any(trained)]
