"""The interface of a gradient reducer, and what every reducer and collective of a step shares.

- `GradientReducer` is what a step calls; `bucketed.py` and `sharded.py` implement it.
- `TreeSum` adds in one fixed binary tree, so that a sum is bit-identical for every assignment of its terms to ranks.
- `World` is one worker's view of the group, and `plan_stages` decides how partial sums travel: first within each host,
  then between the hosts, so that little crosses the network. In a stage each rank of a group cuts its sums into as many
  shards as the group has ranks, receives one shard of the sums of every rank of the group, and adds these shards in the
  tree. After the last stage each rank has one shard of the total; then the shards are gathered, from the last stage to
  the first. Two stages are the hierarchical all-reduce of Jia et al., "Highly Scalable Deep Learning Training System
  with Mixed-Precision", 2018, with additions in one fixed order.
- `collective` and `translate_peer_errors` turn errors that a lost peer causes into `PeerLostError`. After an abort,
  backends raise errors of many classes with many messages (those of "nccl" in torch 2.15 are plain `RuntimeError`s), so
  these first ask whether the group is broken (`is_broken`), and only otherwise read the message. torch.distributed has
  one default group per process at a time, so its state is kept in this module and not in an object.
- `checksum` maps a gradient to one integer, for the check for silent data corruption, and `state_checksum` a state, for
  ranks to compare theirs. `gradient_norms` computes norms on the device, and `scale_and_clip` multiplies gradients by
  factors that the host derives from them.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ray_app.errors import ConfigError, PeerLostError, TaskError
from ray_app.plan.assignment import Node, logical_workers_of, split_point, subtrees
from ray_app.torch_private import OPERATORS_FILE, foreach_add_, foreach_mul_, foreach_norm

logger = logging.getLogger(__name__)

_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_INTEGER_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ALIGNED_BYTES = 64
"""Every gradient begins at a multiple of this number of bytes.

A GPU adds up the norm of a gradient in another order if its memory is not aligned. Without padding the alignment, and
with it the norm, would depend on the parameters before it in the same memory, and so on `bucket_mb`.
"""
_BLOCK = 1 << 20
"""Elements that `state_checksum` reads at a time, so that it needs little memory."""


def checksum(gradient: Tensor, position: int) -> Tensor:
    """Returns the checksum of a gradient as an int64 tensor of shape ().

    It is the sum of the elements, each read as an integer of the same bytes, times an odd number, modulo 2**64. A
    change of any one element changes the checksum. The order of the additions has no influence, since integers are
    added. The checksum of zeros is 0, so a missing gradient may be left out of a sum of checksums.

    Args:
        gradient: A gradient of any shape and dtype.
        position: The index of the parameter in the model. It decides the odd number, so that the sum of the checksums
            of two gradients changes if they are swapped.
    """
    return (2 * position + 1) * _as_integers(gradient).sum(dtype=torch.int64)


def _as_integers(tensor: Tensor) -> Tensor:
    """Returns the elements of a tensor, each read as an integer of the same bytes."""
    # No integer type has the 16 bytes of complex128, so its real and imaginary parts are read as 8 bytes each.
    if tensor.element_size() not in _INTEGER_DTYPES:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGER_DTYPES[tensor.element_size()])


def state_checksum(tensors: Iterable[Tensor]) -> int:
    """Returns a checksum of tensors, computed where they are; waits for the device once.

    The elements are multiplied by odd numbers that are nearly random before they are added, so that differences in
    several elements do not cancel each other, as those by rounding up and down may do in a plain sum.
    """
    blocks = [block for tensor in tensors for block in _as_integers(tensor.detach()).reshape(-1).split(_BLOCK)]
    sums = [
        (2 * number + 1) * (block * _factors(block.device)[: len(block)]).sum() for number, block in enumerate(blocks)
    ]
    return int(torch.stack([block_sum.to(sums[0].device) for block_sum in sums]).sum()) if sums else 0


@cache
def _factors(device: torch.device) -> Tensor:
    """Returns odd numbers for the elements of a block, by a multiplicative hash of their positions."""
    numbers = torch.arange(1, _BLOCK + 1, device=device) * -7046029254386353131
    return (numbers ^ (numbers >> 31)) * -4658895280553007687 | 1


def gradient_norms(gradients: list[Tensor]) -> list[Tensor]:
    """Returns the L2 norm of each tensor, each of shape (), without a device synchronization."""
    # `torch.nn.utils.get_total_norm` would return one norm, but it takes 30 us more.
    return [*foreach_norm(gradients)] if gradients else []


def total_norm(norms: Iterable[float], factor: float = 1.0) -> float:
    """Returns the L2 norm of all values of tensors that have these norms, times a factor.

    It is infinite if float32, the dtype of the gradients, cannot represent it.
    """
    norm = math.sqrt(math.fsum([n * n for n in norms])) * factor
    return math.inf if norm > _MAX_FLOAT32 else norm


def scale_and_clip(gradients: list[Tensor], factor: float, norm: float, max_norm: float | None) -> None:
    """Multiplies gradients by a factor and then clips them to a norm, in place.

    The arithmetic is that of `torch.nn.utils.clip_grads_with_norm_`. That function is not called, because it would copy
    the norm from the host to the device and wait for the copy.

    Args:
        gradients: The gradients, or this rank's shards of them.
        factor: The factor.
        norm: The norm of the whole gradient after the multiplication.
        max_norm: The norm to clip to; None for no clipping.
    """
    if factor != 1:
        foreach_mul_(gradients, factor)
    if max_norm is not None:
        clip_factor = np.float32(1) / (np.float32(norm) + np.float32(1e-6)) * np.float32(max_norm)
        if clip_factor < 1:
            foreach_mul_(gradients, float(clip_factor))


def tree_parents(logical_workers: int) -> dict[Node, Node]:
    """Returns the parent of every node of the tree except the root."""
    parents: dict[Node, Node] = {}

    def descend(node: Node) -> None:
        if node[1] - node[0] > 1:
            for child in ((node[0], split_point(node)), (split_point(node), node[1])):
                parents[child] = node
                descend(child)

    descend((0, logical_workers))
    return parents


class TreeSum:
    """Adds tensors in the tree as they are pushed from left to right; keeps at most log2(terms) + 1 tensors at a time.

    A tensor that is pushed belongs to the tree, because each sum is written into its left operand. So the sum of the
    whole tree is in the tensor of the leftmost node, unless `total` is given.

    Args:
        parents: The tree, see `tree_parents`.
        total: The tensor into which the last addition, that of the root, writes; it may be one of the terms.
        add: Adds two terms, as `torch.add` does; the terms may be lists of tensors if it takes lists.

    Attributes:
        nodes: The nodes with a sum that has not been added to another one yet, and these sums, from left to right.
    """

    def __init__(
        self, parents: dict[Node, Node], total: Tensor | None = None, add: Callable[..., Any] = torch.add
    ) -> None:
        self._parents, self._total = parents, total
        self._add = add
        self.nodes: list[tuple[Node, Any]] = []

    def push(self, node: Node, value: Any) -> list[Any]:
        """Adds the tensor of the next node and returns the tensors that the tree no longer needs.

        Args:
            node: The node to the right of all that were pushed before.
            value: The sum of the node.
        """
        freed = []
        self.nodes.append((node, value))
        while len(self.nodes) > 1:
            (left, low), (right, high) = self.nodes[-2:]
            # Two neighbors are added only if they are the two children of one node.
            if left not in self._parents or self._parents.get(left) != self._parents.get(right):
                break
            parent = self._parents[left]
            # Only the root has no parent.
            out = low if self._total is None or parent in self._parents else self._total
            self._add(low, high, out=out)
            freed.append(high)
            self.nodes[-2:] = [(parent, out)]
        return freed

    def clear(self) -> list[Any]:
        """Drops all nodes and returns their tensors."""
        tensors = [value for _, value in self.nodes]
        self.nodes = []
        return tensors


def add_lists(left: list[Tensor], right: list[Tensor], out: list[Tensor]) -> None:
    """Adds tensors to others, `out`, which are `left`; a device does so by one launch for many tensors."""
    del left
    foreach_add_(out, right)


@cache
def are_rows(nodes: tuple[Node, ...], logical_workers: int) -> bool:
    """Returns whether `add_rows` adds the sums of nodes to that of one node.

    They are then neighbors that together are a node, and hold the same power of two of logical workers each, but for
    the last one, which may hold fewer.
    """
    (low, first_high), high = nodes[0], nodes[-1][1]
    size = first_high - low
    is_even = size & (size - 1) == 0 and nodes == tuple((at, min(at + size, high)) for at in range(low, high, size))
    return is_even and subtrees(range(low, high), logical_workers) == [(low, high)]


def add_rows(rows: Tensor, total: Tensor | None = None) -> Tensor:
    """Returns the sum of rows of shape (rows, elements) in the tree, by log2(rows) additions of several rows at a time.

    In each round every second row is added to the row before it, which are the additions of `TreeSum`, since a node of
    the tree splits at a power of two. The rows are overwritten.

    Args:
        rows: The sums of neighboring nodes, see `are_rows`.
        total: The tensor into which the last addition writes; None for the first row.
    """
    while len(rows) > 1:
        left, right = rows[: len(rows) // 2 * 2 : 2], rows[1::2]
        if len(rows) == 2 and total is not None:
            return torch.add(left[0], right[0], out=total)
        left.add_(right)
        rows = rows[::2]
    return rows[0] if total is None else total.copy_(rows[0])


@dataclass(frozen=True)
class Stage:
    """One stage of the reduction, from the view of one rank.

    Args:
        ranks: The ranks that send shards to each other in this stage, including this one, in ascending order.
        nodes: For each of these ranks, the nodes of the tree for which it has sums before the stage.
    """

    ranks: tuple[int, ...]
    nodes: tuple[tuple[Node, ...], ...]

    @cached_property
    def all_nodes(self) -> tuple[Node, ...]:
        """The nodes of all ranks, from left to right."""
        return tuple(node for nodes in self.nodes for node in nodes)


def stage_groups(hosts: Sequence[str]) -> list[list[tuple[int, ...]]]:
    """Returns for each stage the groups of ranks that send shards to each other.

    There are two stages if all hosts have the same number of ranks, more than one, and the ranks of each host are
    consecutive: first one group per host, then one group for each local rank. Otherwise one stage has all ranks.

    Args:
        hosts: The host of every rank.
    """
    size, per_host = len(hosts), hosts.count(hosts[0])
    if not 1 < per_host < size or list(hosts) != [host for host in dict.fromkeys(hosts) for _ in range(per_host)]:
        return [[tuple(range(size))]]
    within = [tuple(range(first, first + per_host)) for first in range(0, size, per_host)]
    return [within, list(zip(*within, strict=True))]


def plan_stages(rank: int, hosts: Sequence[str], logical_workers: int, assignment: Sequence[range] = ()) -> list[Stage]:
    """Returns the stages in which a rank takes part, in their order.

    Args:
        rank: The rank.
        hosts: The host of every rank.
        logical_workers: L, the number of logical workers.
        assignment: The block of logical workers of every rank; if empty, the blocks are as equal as possible.
    """
    # A block holds the logical workers over which a rank has sums; it grows with each stage.
    blocks = list(assignment) or [logical_workers_of(r, len(hosts), logical_workers) for r in range(len(hosts))]
    stages = []
    for groups in stage_groups(hosts):
        [ranks] = (group for group in groups if rank in group)
        stages.append(Stage(ranks, tuple(tuple(subtrees(blocks[r], logical_workers)) for r in ranks)))
        # After the stage every rank of a group has sums over the logical workers of the whole group, of its own shard.
        for group in groups:
            for r in group:
                blocks[r] = range(blocks[group[0]].start, blocks[group[-1]].stop)
    return stages


T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The workers of a generation, from the view of one of them.

    Args:
        rank: The rank of this worker.
        size: W, the number of workers.
        logical_workers: L, the number of logical workers.
        hosts: The host of every rank; if empty, all ranks count as one host.
        groups: The process group of this rank in each stage of the reduction, see `plan_stages`. None stands for
            torch's default group, and for a stage that sends messages from rank to rank and so needs no group.
        strided: Whether each rank runs every W-th logical worker instead of a block. Then the logical workers that the
            ranks run at the same time are neighbors in the tree.
        assignment: The block of logical workers of every rank; if empty, the blocks are as equal as possible.
        has_device_collectives: Whether the device carries the collectives of tensors on it (NCCL), not the host (gloo).
    """

    rank: int
    size: int
    logical_workers: int
    hosts: tuple[str, ...] = ()
    groups: tuple[Any, ...] = (None,)
    strided: bool = False
    assignment: tuple[range, ...] = ()
    has_device_collectives: bool = False

    def assigned_to(self, rank: int) -> range:
        """Returns the logical workers of a rank."""
        if self.assignment:
            return self.assignment[rank]
        return logical_workers_of(rank, self.size, self.logical_workers, self.strided)

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages by which the sums of this rank reach the others."""
        return plan_stages(self.rank, self.hosts or ("",) * self.size, self.logical_workers, self.assignment)

    @cached_property
    def assigned(self) -> range:
        """The logical workers of this rank."""
        return self.assigned_to(self.rank)


_PEER_ERRORS = re.compile(
    "gloo|pair closure|by peer|broken pipe"
    "|nccl (communicator|operation|unique id|stream resources)|nccl [a-z ]+ failed|async error"
    "|processgroupnccl (not initialized|already finalized|has been finalized)|remote process exited|unhandled system"
    " error"
)
"""Matches the lower-case message of an error that a lost peer, or the connection to it, has caused.

Only its message tells such an error of gloo, and of a call that is given to "nccl" of torch 2.15
(`ProcessGroupNCCL2`): both raise plain `RuntimeError` without a code. The store (`DistNetworkError`, `DistStoreError`)
and a wait for NCCL (`DistBackendError`) raise types of their own.
"""
_LOCAL_ERRORS = re.compile(
    "out of memory|allocate memory|cuda error|cuda failure|invalid usage|invalid argument \\(run with nccl"
)
"""Matches the lower-case message of an error of this rank's own device, memory or calls that NCCL passes on.

NCCL raises the types of a lost peer for these, too. Errors that torch itself raises are in `_LOCAL_ERROR_TYPES`.
"""
_LOCAL_ERROR_TYPES = (torch.OutOfMemoryError, torch.AcceleratorError)
"""The types of errors of this rank's own device."""


launch_lock = threading.RLock()
"""Held while collectives are launched on the device, the backend is asked for its error, or the group is closed.

An abort from another thread frees the memory that these calls use, so it waits for this lock, see `ProcessGroup.abort`.
The lock is reentrant, because a launch that fails asks the backend for the error.
"""


class Breakable(Protocol):
    """A process group that can break."""

    @property
    def is_aborted(self) -> bool:
        """Returns whether this process has aborted the group."""

    def has_failed(self) -> bool:
        """Returns whether the backend reports a failed collective."""

    def check_device_errors(self) -> None:
        """Waits for the device and raises if a collective failed, see the function `check_device_errors`."""


_group: Breakable | None = None
"""The group of this process; None outside of a generation, and in a generation of one worker."""


def is_broken() -> bool:
    """Returns whether this process has aborted its group, or the backend of the group has failed."""
    return _group is not None and (_group.is_aborted or _group.has_failed())


def set_group(breakable: Breakable) -> None:
    """Sets the group of this process."""
    global _group
    _group = breakable


def clear_group(breakable: Breakable) -> None:
    """Unsets the group of this process, unless it is another one by now."""
    global _group
    if _group is breakable:
        _group = None


@contextmanager
def collective() -> Iterator[None]:
    """Turns an error of torch.distributed that a lost peer, or the connection to it, has caused into `PeerLostError`.

    Every other error passes unchanged, because the same error would come again in another generation. While the group
    is broken, every `RuntimeError` counts as caused by a lost peer, see `_is_peer_error`. The block may contain a
    forward or a backward, too.

    Raises:
        PeerLostError: This process has aborted its group before the block, or a collective of the block failed.
    """
    if _group is not None and _group.is_aborted:
        raise PeerLostError("the process group is aborted; no further collective runs in it")
    try:
        yield
    except RuntimeError as error:
        if not _is_peer_error(error):
            raise
        raise PeerLostError(f"a collective failed: {_message_of(error)}") from error


def launch_guard(world: World) -> Callable[[], AbstractContextManager[None]]:
    """Returns the context manager for blocks that launch collectives and, on a device, wait for none of them.

    It translates errors as `collective` does. On a device an abort from another thread waits until the block has ended,
    see `launch_lock`.
    """
    return _locked_collective if world.has_device_collectives else collective


@contextmanager
def _locked_collective() -> Iterator[None]:
    """Does what `collective` does, and delays aborts by other threads by holding `launch_lock`."""
    with launch_lock, collective():
        yield


@contextmanager
def translate_peer_errors() -> Iterator[None]:
    """Turns an error of a step that a lost peer has caused into `PeerLostError`, also an error of user code.

    A lost peer may cause an error in user code: an optimizer of sharded parameters runs collectives of its own, and a
    forward may read what a failed collective has left. While the group is not broken, an error of user code becomes
    `PeerLostError` only if it was raised inside torch.distributed.
    """
    try:
        yield
    except (RuntimeError, TaskError) as error:
        cause = error.__cause__ if isinstance(error, TaskError) else error
        if not _is_peer_error(cause) or not (cause is error or is_broken() or _was_raised_in_distributed(cause)):
            raise
        raise PeerLostError(f"a peer was lost meanwhile: {_message_of(error)}") from error


def _is_peer_error(error: BaseException | None) -> bool:
    """Returns whether a lost peer may have caused an error, so that the step may succeed in another generation.

    While the group is broken this holds for every error: the next generation repeats the step, and an error with
    another cause is raised again there. Otherwise the type of the error, or its message if the backend has no type for
    it, has to indicate a failed connection or collective.
    """
    if is_broken():
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, _LOCAL_ERROR_TYPES):
        return False
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    message = str(error).lower()
    if _LOCAL_ERRORS.search(message):
        return False
    return isinstance(error, dist.DistError) or _PEER_ERRORS.search(message) is not None


def _was_raised_in_distributed(error: BaseException | None) -> bool:
    """Returns whether code of torch.distributed raised an error.

    Its collectives call operators, so frames of the module that calls operators do not count.
    """
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)] if error is not None else []
    innermost = next((Path(name) for name in reversed(files) if name != OPERATORS_FILE), Path())
    return innermost.is_relative_to(Path(dist.__file__).parent)


def _message_of(error: Exception) -> str:
    """Returns the message of an error, without the causes that gloo suggests after the words "This is typically"."""
    message = error.message if isinstance(error, TaskError) else str(error)
    return message.partition(" This is typically")[0]


def partial_gradient_error(name: str) -> ConfigError:
    """Returns the error for a parameter that receives its gradient in several parts in one backward."""
    return ConfigError(
        f"The gradient of the parameter {name} came in several parts in one backward; a part that comes after the"
        " others have left would be lost, and the result would depend on the number of workers. Activation"
        " checkpointing of layers that share parameters does this: call torch.utils.checkpoint.checkpoint with"
        " use_reentrant=False, or checkpoint the layers together. With train.strategy fsdp so does a gradient that"
        " training_loss takes itself (torch.autograd.grad): use ddp."
    )


def check_device_errors() -> None:
    """Waits until the device has done its queued work, and raises if a collective of that work failed.

    It is needed if the device carries the collectives (`World.has_device_collectives`): a wait for a collective of NCCL
    only orders streams, and a failed collective leaves garbage in its output. Waits of gloo raise the error themselves.

    Raises:
        PeerLostError: A collective failed.
    """
    if _group is not None:
        _group.check_device_errors()


class GradientReducer(ABC):
    """Adds the gradients of all logical workers and leaves the sum in every parameter's `.grad`.

    In each step a rank calls `backward`, `collect_from` or `skip` for each logical worker that it runs, in their order,
    then `launch`, then `finish`. Each loss is weighted by one over the global number of rows, so the gradients are
    added, never averaged.

    A reducer of the user (`train.reducer`) is made anew for each generation of workers, as `cls(model, world)`, a
    `torch.nn.Module` and a `World`, when torch's default process group consists of the workers of the world. It

    - adds the gradients of the parameters that require gradients, and sees them in `.grad` after a backward;
    - leaves the same sum on every rank, with zeros for a missing gradient of a logical worker;
    - runs collectives within `ray_app.reduction.base.collective`, so that a lost peer is recognized;
    - begins anew with `world.assigned[0]`: another reducer repeats a step that has lost a peer.

    The result is bit-identical for any number of workers if the order of the additions depends on the numbers of the
    logical workers only.
    """

    @abstractmethod
    def backward(self, losses: Tensor, weights: Tensor, logical_worker: int) -> None:
        """Runs the backward of the weighted sum of one logical worker's losses and adds the gradients.

        Args:
            losses: The loss of every row, shape (rows,).
            weights: The weight of every row, shape (rows,).
            logical_worker: The logical worker to which the rows belong.
        """

    def collect_from(self, compute: Callable[[], T], logical_worker: int) -> T:
        """Calls `compute`, adds the gradients that it leaves in `.grad`, and returns its result.

        It takes the place of `backward` for a logical worker.

        Raises:
            NotImplementedError: This reducer takes gradients from a backward only.
        """
        raise NotImplementedError(f"{type(self).__name__} takes gradients from a backward only")

    @abstractmethod
    def skip(self, logical_worker: int) -> None:
        """Adds zeros for a logical worker without rows."""

    @abstractmethod
    def launch(self) -> None:
        """Starts each part of the reduction that has not started yet.

        Between this call and `finish` the step may run other collectives.
        """

    @abstractmethod
    def finish(self) -> None:
        """Waits for the reduction; afterwards every parameter's `.grad` holds the sum.

        Raises:
            PeerLostError: A peer left during the reduction; the step can be repeated.
        """

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """Returns the tensors of the sum that this rank has: the whole gradient, or its shards of it."""

    @abstractmethod
    def norms(self) -> list[Tensor]:
        """Returns norms of tensors that together are the whole sum, without waiting for the device; a collective.

        Raises:
            PeerLostError: A peer left meanwhile.
        """

    @abstractmethod
    def close(self) -> None:
        """Removes the hooks and gradients of this reducer from the model."""
