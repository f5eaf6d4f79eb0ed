"""The scale of the loss in half precision: found while training, the same on all workers, part of the checkpoint.

Small gradients vanish in float16, so the loss is multiplied by a scale and the gradient divided by it again, see Micikevicius et al.,
"Mixed Precision Training", ICLR 2018. All scales are powers of two, so both change no bit of a number that neither over- nor underflows.
Whether a gradient overflowed is seen in the sum over all logical workers, so every worker decides alike.
"""

from __future__ import annotations

FIRST, MOST = 2.0**16, 2.0**24
_STEPS_TO_GROW = 2000


class LossScale:
    """Halves when a gradient overflows, and doubles after 2,000 steps in a row without."""

    def __init__(self) -> None:
        self.value = FIRST
        self._good_steps = 0

    def update(self, is_finite: bool) -> None:
        """Moves on after a step whose gradient was finite, or not."""
        self._good_steps = self._good_steps + 1 if is_finite else 0
        if not is_finite:
            self.value = self.value / 2
        elif self._good_steps >= _STEPS_TO_GROW and self.value < MOST:
            self.value, self._good_steps = self.value * 2, 0

    @property
    def can_fall(self) -> bool:
        """Whether a smaller scale may still mend an overflow."""
        return self.value > 1

    def state(self) -> list[float]:
        """What `load` reads."""
        return [self.value, float(self._good_steps)]

    def load(self, state: list[float]) -> None:
        """Takes over what `state` returned."""
        self.value, self._good_steps = state[0], int(state[1])
