"""The parameters that a run begins with where they do not come from the seed."""

from __future__ import annotations

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ray_app.checkpoint.format import params_digest
from ray_app.errors import ConfigError
from ray_app.record.files import location
from ray_app.task.rows.file_kinds import HEAD_BYTES, name_foreign_file

_MAX_SHARED_NAMED = 5


def contiguous(model: nn.Module) -> nn.Module:
    """A model whose parameters lie in memory as their shapes say: fused optimizers pair a parameter's values with those of gradient and
    state by their places in memory, and what is exchanged, saved or sent lies as the shape says.

    Raises:
        ConfigError: Values of a parameter share their memory, which its copy would not do.
    """
    for name, p in model.named_parameters():
        if isinstance(p, UninitializedParameter):
            continue
        if any(size > 1 and not step for size, step in zip(p.shape, p.stride(), strict=True)):
            raise ConfigError(
                f"Values of the parameter {name}, of shape {tuple(p.shape)}, share their memory (expand): an optimizer would move one value"
                " several times in a step. Make it with .clone(), so that each has its own, or make the parameter small and expand it in"
                " forward."
            )
        if p.stride() != torch.empty(p.shape, device="meta").stride():
            p.data = p.data.clone(memory_format=torch.contiguous_format)  # also where a size is 1, and PyTorch calls it contiguous
    return model


def read(place: str, digest: str | None) -> dict[str, Tensor]:
    """Reads a file of parameters.

    Args:
        place: A safetensors file, a path or an s3:// URI.
        digest: `params_digest` that they must have; None: any.

    Raises:
        ConfigError: It is not there, is no safetensors file, or holds other parameters than these.
        OSError: The storage does not answer.
    """
    try:
        data = location(place).read_bytes()
    except FileNotFoundError as error:
        raise unreadable(place, error) from error
    try:
        found = safetensors.torch.load(data)
    except Exception as error:  # an exception of the library's own
        foreign = name_foreign_file(data[:HEAD_BYTES])
        reason = f"it is {foreign}" if foreign else str(error)
        raise ConfigError(f"train.init_from {place!r} is no safetensors file: {reason}. Save parameters with safetensors.torch.") from error
    refuse_others(found, place, digest)
    return found


def unreadable(place: str, error: OSError) -> ConfigError:
    """How a file of parameters that cannot be read is refused."""
    return ConfigError(
        f"train.init_from {place!r} cannot be read: {error}. Name a safetensors file, the folder of an export, or models:/NAME@ALIAS."
    )


def refuse_others(found: dict[str, Tensor], place: str, digest: str | None) -> None:
    """Refuses parameters that do not have the digest that they must have.

    Raises:
        ConfigError: They do not.
    """
    if digest is not None and params_digest(found) != digest:
        raise ConfigError(
            f"train.init_from {place!r} holds parameters with the digest {params_digest(found)}, but the run begins with {digest}. Give"
            " those of before, or start a new run."
        )


def begin_with(model: nn.Module, found: dict[str, Tensor], called: str | None) -> None:
    """Gives a model parameters.

    Args:
        model: The model as its task built it.
        found: Its parameters and persistent buffers by name.
        called: What the configuration calls them.

    Raises:
        ConfigError: They are not the model's.
    """
    problems = _differences(model.state_dict(), found)
    if problems:
        raise ConfigError(
            f"train.init_from {called!r} does not fit the model: {'; '.join(problems)}. Give parameters of the same model, or set"
            " task.init_args to what they were trained with."
        )
    model.load_state_dict(found)


def _differences(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """Why parameters are not those of a model."""
    kinds = {
        "missing": sorted(wanted.keys() - found.keys()),
        "unexpected": sorted(found.keys() - wanted.keys()),
        "of another shape or type": [
            f"{name} {found[name].dtype} {tuple(found[name].shape)}, wanted {wanted[name].dtype} {tuple(wanted[name].shape)}"
            for name in sorted(wanted.keys() & found.keys())
            if (wanted[name].dtype, wanted[name].shape) != (found[name].dtype, found[name].shape)
        ],
    }
    return [f"{kind}: {_some(names)}" for kind, names in kinds.items() if names]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_SHARED_NAMED} more" if len(names) > _MAX_SHARED_NAMED else ""
    return ", ".join(names[:_MAX_SHARED_NAMED]) + more
