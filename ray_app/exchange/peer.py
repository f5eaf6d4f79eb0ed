"""From one rank to another, in the host's memory; the waits last as long as it takes.

gloo's own waits for what one rank sends another last no longer than a group may take to form (torch 2.15: what is set for the group later
counts for collectives only), but who is late by more than that is not lost: the rendezvous knows who is.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

_AS_LONG_AS_IT_TAKES = timedelta(days=1)


class Transfer:
    """What has begun.

    Args:
        work: As PyTorch has it.
        value: What travels, kept until it has.
    """

    def __init__(self, work: Any, value: Tensor) -> None:
        self._work, self._value = work, value

    def wait(self) -> None:
        """Returns when it has been received, or has left.

        Raises:
            RuntimeError: The peer is lost, see `exchange.collective`.
        """
        self._work.wait(_AS_LONG_AS_IT_TAKES)


def sending(value: Tensor, peer: int, tag: int = 0, group: Any = None) -> Transfer:
    """Begins to send; what goes to the same rank under the same tag arrives in this order. `group`: not given, torch's default group."""
    group = group if group is not None else dist.group.WORLD
    return Transfer(group.send([value], peer, tag), value)


def receiving(value: Tensor, peer: int, tag: int = 0, group: Any = None) -> Transfer:
    """Begins to receive into a tensor; see `sending`."""
    group = group if group is not None else dist.group.WORLD
    return Transfer(group.recv([value], peer, tag), value)


def send(value: Tensor, peer: int) -> None:
    """Sends, and waits until it has left."""
    sending(value, peer).wait()


def receive(value: Tensor, peer: int) -> None:
    """Receives into a tensor."""
    receiving(value, peer).wait()
