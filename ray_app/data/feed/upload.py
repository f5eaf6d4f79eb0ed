"""Micro-batches on their way to a device: through pinned memory, on a stream beside the one that computes."""

from __future__ import annotations

from typing import Any

import torch

from ray_app.data.feed.windows import MicroBatch
from ray_app.exchange.side_stream import SideStream

STEPS_AHEAD = 2
"""How many steps are on their way while one is computed, at least."""


class Uploaded(list[MicroBatch]):
    """The micro-batches of a step, which are there when the stream has come to the mark, see `SideStream.mark`."""

    mark: Any


class Upload:
    """See the module.

    Args:
        device: Where to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._side = device, SideStream(device, "upload")

    def send(self, batches: list[MicroBatch]) -> Uploaded:
        """Gives the device copies to make, and waits for none; the pinned memory is used again when they are made."""
        with self._side.entered():
            sent = Uploaded(batch._replace(fields=self._there(batch)) for batch in batches)
        sent.mark = self._side.mark()
        return sent

    def _there(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        return {name: values.pin_memory().to(self._device, non_blocking=True) for name, values in batch.fields.items()}

    def arrive(self, sent: list[MicroBatch]) -> None:
        """Lets what computes from now on use what was sent."""
        assert isinstance(sent, Uploaded)
        self._side.hand_over([values for batch in sent for values in batch.fields.values()], sent.mark)
