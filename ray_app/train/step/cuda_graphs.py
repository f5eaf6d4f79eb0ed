"""Forward and backward of a micro-batch as a CUDA graph: one launch in the place of hundreds, which a small step waits
for.

A graph is captured for every kind of micro-batch: its shapes, dtypes and layouts. Each replay reads the rows and
weights from the memory of the capture and leaves gradients and sums in the memory of the capture; seeds and the offsets
of the generator are those of the replay, so that dropout draws what it would have drawn. The bits are those of an eager
step, which each graph is held against before it is used, and now and then: the number of workers, which decides who
captures what and when, is not in them.

CUDA graphs in PyTorch: Ng et al., "Accelerating PyTorch with CUDA Graphs", PyTorch blog, 2021, and the notes on CUDA
semantics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ray_app.errors import ConfigError
from ray_app.reduction.overlap import get_stream
from ray_app.task.base import Batch, DeviceSums
from ray_app.train.step.micro_batch import TensorGroup

Compute = Callable[[Batch, Tensor], DeviceSums]
"""Forward and backward of rows and their weights: leaves gradients in `.grad`, which is None before, and returns the
sums.
"""
_MOST_KINDS = 16
_EVERY = 1000
"""When a graph is held against an eager step: after 0, 1, 2, 4, ... uses, and every so many. The first is with the rows
that it was captured with, the others show what the capture has read or drawn on the host, if that changes.
"""
_OUT_OF_MEMORY = ("out of memory", "allocate memory")


class GraphBackend(Protocol):
    """What a device captures with."""

    def warm_up(self, work: Callable[[], object]) -> None:
        """Runs it where it will be captured."""

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        """Captures what it gives the device; returns what replays that."""


def make_graph_backend(device: torch.device) -> GraphBackend:
    """What a device captures with.

    Raises:
        ConfigError: It is a CPU, where nothing is launched that one could wait for.
    """
    if device.type != "cuda":
        raise ConfigError(
            f"train.capture is set, and a worker computes on its {device.type.upper()}, which has no CUDA graphs. Give"
            f" the workers GPUs"
            " (scaling.gpus_per_worker), or leave it out: the bits are the same without."
        )
    return CudaGraphBackend(device)


class CudaGraphBackend:
    """CUDA's: graphs that share one pool of memory, of which one is replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        # The "nccl" of torch 2.15 registers each segment of this pool with its communicator when it is allocated, so
        # also in a capture. Whether that matters only two GPUs show; to allocate before a capture would take private
        # calls, and TORCH_DIST_USE_NCCL2=0 in the workers' environment chooses the older class, which registers
        # nothing.
        self._stream, self._pool = get_stream(device, "capture"), torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], object]) -> None:
        """See `GraphBackend.warm_up`."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        self._stream.synchronize()

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        """See `GraphBackend.capture`; other threads may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


@dataclass
class _CapturedGraph:
    """A graph, the memory that it reads and that it leaves its results in, what else it reads, which it keeps alive,
    and its uses.
    """

    fields: Batch
    weights: Tensor
    replay: Callable[[], None]
    gradients: list[Tensor | None]
    sums: DeviceSums
    alive: list[Tensor]
    uses: int = 0


class CapturedPasses:
    """See the module.

    Args:
        model: What is trained.
        device: Where it is.
        compute: What is captured.
        graphs: Of the device.
    """

    def __init__(self, model: nn.Module, device: torch.device, compute: Compute, graphs: GraphBackend) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._device, self._compute, self._graphs = device, compute, graphs
        self._buffers = TensorGroup(list(model.buffers()))
        self._kinds: dict[tuple[object, ...], _CapturedGraph] = {}

    def run(self, fields: Batch, weights: Tensor) -> DeviceSums:
        """As `Compute`, of the values that the generators have now; waits for the device only where it captures or
        compares.

        Raises:
            ConfigError: It cannot be captured, or a replay has other bits.
        """
        named = sorted(fields.items())
        key = (weights.shape, *((name, v.shape, v.dtype, v.stride()) for name, v in named))
        kind = self._kinds.get(key)
        if kind is None:
            if (
                len(self._kinds) == _MOST_KINDS
            ):  # each keeps memory of the device: what is rarer is computed, with the same bits
                return self._compute(fields, weights)
            kind = self._kinds[key] = self._captured(fields, weights)
        torch._foreach_copy_([*kind.fields.values(), kind.weights], [*(fields[name] for name in kind.fields), weights])
        if not kind.uses & (kind.uses - 1) or not kind.uses % _EVERY:
            self._hold_against_eager(kind, fields, weights)
        else:
            kind.replay()
        kind.uses += 1
        for p, gradient in zip(self._parameters, kind.gradients, strict=True):
            p.grad = gradient
        return kind.sums._replace(values=kind.sums.values.clone())

    def _captured(self, fields: Batch, weights: Tensor) -> _CapturedGraph:
        """A graph for the kind of these; buffers and generators stay as they are."""
        held, held_weights = {name: self._copy(name, v) for name, v in fields.items()}, weights.clone()
        found: list[DeviceSums] = []

        def work() -> None:
            self._forget()
            found[:] = [self._compute(held, held_weights)]

        buffers, drawn, inputs = self._kept(), self._drawn(), _InputRecorder()
        self._graphs.warm_up(work)
        if self._device.type != "cpu" and not torch.equal(torch.default_generator.get_state(), drawn[0]):
            raise _cannot(
                "it draws random numbers on the host, which each replay would repeat; draw them on the device"
            )
        self._put_back(buffers, drawn)
        self._forget()  # what the warm-up has left is not in the memory of the graph

        def watched() -> None:
            with inputs:
                work()

        try:
            replay = self._graphs.capture(watched)
        except RuntimeError as error:
            raise _reason(error) from None
        self._put_back(buffers, drawn)
        kind = _CapturedGraph(held, held_weights, replay, [p.grad for p in self._parameters], found[0], inputs.alive)
        self._forget()
        return kind

    def _copy(self, name: str, field: Tensor) -> Tensor:
        """Memory for a field of every replay, in its layout."""
        if field.device.type != self._device.type:
            raise _cannot(
                f"the field {name} is on the {field.device.type}, where each replay would find that of the capture"
            )
        if any(stride == 0 and size > 1 for size, stride in zip(field.shape, field.stride(), strict=True)):
            raise _cannot(f"the field {name} was expanded, and has no memory of its own; let augment call contiguous()")
        return torch.empty_strided(field.shape, field.stride(), dtype=field.dtype, device=field.device).copy_(field)

    def _hold_against_eager(self, kind: _CapturedGraph, fields: Batch, weights: Tensor) -> None:
        """Replays it, after what it has to equal was computed."""
        buffers, drawn = self._kept(), self._drawn()
        sums = self._compute(fields, weights)
        gradients = [p.grad for p in self._parameters]
        eager = self._kept()
        self._forget()
        self._put_back(buffers, drawn)
        kind.replay()
        names = ["the gradient", "the loss", "a buffer"]
        pairs = [
            zip(gradients, kind.gradients, strict=True),
            [(sums.values, kind.sums.values)],
            [(eager.memory, self._kept().memory)],
        ]
        for name, several in zip(names, pairs, strict=True):
            if not all(_same_bits(a, b) for a, b in several):
                raise _cannot(
                    f"{name} of a replay is not that of the same rows computed without; it depends on what changes on"
                    f" the host"
                )

    def _forget(self) -> None:
        for p in self._parameters:
            p.grad = None

    def _kept(self) -> TensorGroup:
        """A copy of the buffers."""
        kept = self._buffers.like()
        kept.copy(self._buffers)
        return kept

    def _drawn(self) -> list[Tensor]:
        """Where the generators are, the host's first."""
        host = torch.default_generator.get_state()
        return [host] if self._device.type == "cpu" else [host, torch.cuda.get_rng_state(self._device)]

    def _put_back(self, buffers: TensorGroup, drawn: list[Tensor]) -> None:
        self._buffers.copy(buffers)
        torch.default_generator.set_state(drawn[0])
        for state in drawn[1:]:
            torch.cuda.set_rng_state(state, self._device)


class _InputRecorder(TorchDispatchMode):
    """What operators read that none of them made: parameters, buffers, and what a model keeps beside them (a table of
    positions).

    A graph knows the memory alone: where a model gives itself another table, for longer rows, replays would read what
    was there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made, self._read = set[int](), dict[int, Tensor]()

    @property
    def alive(self) -> list[Tensor]:
        """They."""
        return list(self._read.values())

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        for tensor in _tensors((args, kwargs)):
            if (place := tensor.untyped_storage().data_ptr()) not in self._made:
                self._read[place] = tensor.detach()
        found = operator(*args, **(kwargs or {}))
        self._made |= {t.untyped_storage().data_ptr() for t in _tensors(found)} - self._read.keys()
        return found


def _tensors(of: Any) -> list[Tensor]:
    return [each for each in tree_leaves(of) if isinstance(each, Tensor) and each.layout is torch.strided]


def _reason(error: RuntimeError) -> Exception:
    """What was the matter: with the end of a capture that was broken off comes another error."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    said = str(error)
    if "captur" not in said.lower() or any(words in said for words in _OUT_OF_MEMORY):
        return error
    return _cannot(f"it does what a CUDA graph cannot hold ({said.partition(chr(10))[0]})")


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and torch.equal(*(_bytes(each.detach()) for each in (a, b)))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _cannot(why: str) -> ConfigError:
    return ConfigError(
        f"train.capture is set, and a micro-batch cannot be captured: {why}. What forward and loss do has to be the"
        f" same for all rows of"
        " one shape, without waiting for the device (.item(), boolean masks, nonzero, print). Change it, or leave"
        " train.capture out: the"
        " bits are the same without."
    )
