"""The bits of a gradient as one number, which does not depend on the order of its making: integers are added."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(gradient: Tensor, place: int) -> Tensor:
    """The sum of a tensor's bits as integers, times an odd number, modulo 2**64, shape (): a change of any one value changes it.

    Args:
        gradient: One that is missing counts as zeros, whose bits are 0.
        place: That of the tensor among others, which decides the odd number.
    """
    if gradient.element_size() not in _INTEGERS:  # complex128
        gradient = torch.view_as_real(gradient)
    return (2 * place + 1) * gradient.view(_INTEGERS[gradient.element_size()]).sum(dtype=torch.int64)
