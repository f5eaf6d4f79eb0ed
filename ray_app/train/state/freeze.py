"""Parameters that are not trained."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ray_app.errors import ConfigError


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
    named = dict(model.named_parameters())
    for pattern in patterns:
        found = [p for name, p in named.items() if fnmatchcase(name, pattern)]
        if not found:
            raise ConfigError(f"train.freeze names {pattern!r}, which matches no parameter; the model has {_some(list(named))}.")
        for p in found:
            p.requires_grad_(False)
    if patterns and not any(p.requires_grad for p in named.values()):
        raise ConfigError(f"train.freeze {patterns} leaves nothing to train; the model has {_some(list(named))}.")
    layers = [(m, [p.requires_grad for p in m.parameters()]) for m in model.modules() if isinstance(m, _BatchNorm)] if patterns else []
    return [layer for layer, trained in layers if trained and not any(trained)]


def _some(names: list[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
