"""Counts of classes where kernels must be deterministic.

torchmetrics 1.9 compares every row with every bin then: rows x classes^2 numbers, 2 GB for 256 rows of 1,000 classes, for nothing.
The bits of a sum depend on the order of its additions because floats are rounded; whole numbers are not, so a count is the same in whatever
order threads, or the atomic additions of a GPU, make it. torch 2.15 itself counts as not deterministic only what is weighted.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

_NAME = "_bincount"


def count_directly() -> None:
    """Lets the metrics of torchmetrics that are imported by now count with `torch.bincount`, whatever kernels may do otherwise."""
    from torchmetrics.utilities import data

    theirs = vars(data)[_NAME]
    if theirs is _counted:
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("torchmetrics.") and vars(module).get(_NAME) is theirs:
            vars(module)[_NAME] = _counted


def _counted(x: Tensor, minlength: Any = None) -> Tensor:
    """As torchmetrics' `_bincount` without the comparing."""
    return torch.bincount(x, minlength=minlength if minlength is not None else len(torch.unique(x)))
