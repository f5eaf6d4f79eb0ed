"""What of a model would be lost where its parameters are cut into shards, which are other tensors than those that it was made with."""

from __future__ import annotations

from torch import nn
from torch.utils._pytree import tree_leaves

from ray_app.errors import ConfigError

_KNOWN = frozenset(vars(nn.Module()))


def refuse_unshardable(model: nn.Module) -> None:
    """Refuses a model that `train.strategy: fsdp` cannot shard, or would train otherwise than it is meant.

    Raises:
        ConfigError: A parameter has no rows to cut, or a hook, or is kept in a list of the model's own.
    """
    for name, p in model.named_parameters():
        if not p.ndim or not p.numel():
            raise ConfigError(
                f"The parameter {name} has {'no dimensions' if not p.ndim else 'no values'}, and train.strategy fsdp cuts parameters along"
                " their first one. Give it the shape (1,), or use ddp."
            )
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"The parameter {name} has a hook (register_hook), which its shards do not have (train.strategy fsdp). Do it in the forward"
                " or in Task.apply_gradients, or use ddp."
            )
    known = {id(p) for p in model.parameters()}
    for name, module in model.named_modules():
        kept = _KNOWN | {"_flat_weights"} if isinstance(module, nn.RNNBase) else _KNOWN  # that one follows
        for key, value in vars(module).items():
            if key not in kept and any(id(each) in known for each in tree_leaves(value)):
                raise ConfigError(
                    f"{f'{name}.' if name else ''}{key} of the model is no module and holds parameters, which would not be the ones that"
                    " are trained (train.strategy fsdp puts shards in their place). Keep them in an nn.ParameterList, or use ddp."
                )
