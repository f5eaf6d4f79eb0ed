"""The cost of a step independent of the machine: calls of Python functions and of torch operators in the training
thread.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

STEPS = 9
"""Number of steps over which each of the two is counted. The minimum is taken, since a slow machine does more of its
periodic work in a step.
"""


class _Operators(TorchDispatchMode):
    """Counts operators, those of backward pass and optimizer included."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


class StepCost:
    """A hook after each step (`Hooks.after_step`) that counts in rank 0: first calls, then operators, since counting
    operators makes calls.

    Args:
        file: The JSON file for the minimum over the steps.
        first: Number of finished steps at which it begins.
    """

    def __init__(self, file: str, first: int) -> None:
        self._file, self._first = file, first
        self._calls, self._operators = 0, _Operators()
        self._counts: list[tuple[int, int]] = []

    def __call__(self, rank: int, step: int) -> None:
        since = step - self._first
        if rank or not 0 <= since <= 2 * STEPS:
            return
        self._counts.append((self._calls, self._operators.number))
        if since == STEPS:
            sys.setprofile(None)
            self._operators.__enter__()
        if since == 2 * STEPS:
            self._operators.__exit__(None, None, None)
            python, operators = (
                [after[i] - before[i] for before, after in zip(self._counts, self._counts[1:], strict=False)]
                for i in (0, 1)
            )
            costs = {"python_calls": min(python[:STEPS]), "torch_operators": min(operators[STEPS:])}
            Path(self._file).write_text(json.dumps(costs))
        if since == 0:
            # Lightning sets it when a test imports it: PyTorch's optimizers then ask NVML at every step.
            os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
            sys.setprofile(self._count)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self._calls += event in ("call", "c_call")
