"""Runs forward and backward of a micro-batch as a CUDA graph: one launch instead of hundreds.

In a small step the GPU waits for launches. A graph is captured for each kind of micro-batch, that is, for its shapes,
dtypes and memory layouts. Each replay reads the rows and weights from the memory of the capture, and leaves gradients
and sums there. Seed and offset of the random generator are those of the replay, so dropout draws the same numbers as
without a graph. Results are bit-identical to those of an eager pass, with which each graph is compared at its first use
and from time to time. So it does not matter for the results which worker captures which graph, and when.

CUDA graphs in PyTorch: Ng et al., "Accelerating PyTorch with CUDA Graphs", PyTorch blog, 2021, and the notes on CUDA
semantics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ray_app.data.windows import MicroBatch
from ray_app.devices import GraphBackend, kind_of
from ray_app.errors import ConfigError
from ray_app.plan.order import Cursor
from ray_app.reduction.reducer import GradientReducer
from ray_app.task.base import Batch
from ray_app.task.losses import DeviceSums, sum_on_device
from ray_app.torch_private import TorchDispatchMode, foreach_copy_, run_backward, tree_leaves
from ray_app.train.step.micro_batch import Passes, TensorGroup

_MAX_GRAPHS = 16
"""Each graph takes device memory, so further kinds of micro-batches are computed without a graph."""
_CHECK_EVERY_USES = 1000
"""A graph is compared with an eager pass after 0, 1, 2, 4, ... uses, and after each multiple of this number.

In the first comparison the rows are those of the capture. The others show whether the capture has read or drawn
something on the host that changes.
"""
_CAPTURE_ERRORS = range(900, 909)
"""The values of `cudaError_t` for errors of a capture, in `torch.AcceleratorError.error_code`."""


def make_graph_backend(device: torch.device) -> GraphBackend:
    """Returns the graph backend of a device.

    Raises:
        ConfigError: The device has no graphs; a CPU has no launches to save.
    """
    kind = kind_of(device)
    if not kind.has_graphs:
        raise ConfigError(
            f"train.capture is set, but a worker computes on its {kind.name.upper()}, which has no CUDA graphs. Give"
            " the workers GPUs (scaling.gpus_per_worker), or leave it out: the result is bit-identical without it."
        )
    return kind.make_graph_backend(device)


@dataclass
class _CapturedGraph:
    """A graph with its memory.

    Args:
        fields, weights: The memory from which a replay reads rows and weights.
        run: Replays the graph.
        gradients, sums: The memory in which a replay leaves its results.
        inputs: All other tensors that a replay reads; the reference keeps their memory allocated.
        uses: Number of micro-batches for which the graph was used.
    """

    fields: Batch
    weights: Tensor
    run: Callable[[], None]
    gradients: list[Tensor | None]
    sums: DeviceSums
    inputs: list[Tensor]
    uses: int = 0


class CudaGraphs(Passes):
    """The passes of a step as captured graphs.

    Args:
        backend: The graph backend of the device.
        *args: See `Passes`.
    """

    def __init__(self, backend: GraphBackend, *args: Any) -> None:
        super().__init__(*args)
        self._backend = backend
        self._kind = kind_of(self._device)
        self._buffers = TensorGroup(list(self.model.buffers()))
        self._graphs: dict[tuple[object, ...], _CapturedGraph] = {}

    def run(self, cursor: Cursor, batch: MicroBatch, global_rows: int, reducer: GradientReducer) -> DeviceSums | None:
        """Runs forward and backward of one logical worker, see `Passes.run`."""
        if not batch.rows:
            return super().run(cursor, batch, global_rows, reducer)
        with self.prepared(batch):
            fields, weights = self.fields(cursor, batch), self.weights(batch.rows, global_rows)
            return reducer.collect_from(lambda: self.forward_backward(fields, weights), batch.logical_worker)

    def _compute(self, fields: Batch, weights: Tensor) -> DeviceSums:
        """Runs forward and backward of augmented rows with the weights of their losses, shape (rows,).

        It leaves the gradients in `.grad`, which is None before, and returns the sums of the losses.
        """
        losses = self.losses_of(fields, len(weights))
        run_backward(losses.values, weights)
        return sum_on_device(losses)

    def forward_backward(self, fields: Batch, weights: Tensor) -> DeviceSums:
        """Does what `_compute` does, by a graph, with the present state of the random generators.

        It waits for the device only when it captures a graph or compares one with an eager pass.

        Raises:
            ConfigError: The pass cannot be captured, or a replay is not bit-identical to the eager pass.
        """
        named = sorted(fields.items())
        key = (weights.shape, *((name, v.shape, v.dtype, v.stride()) for name, v in named))
        graph = self._graphs.get(key)
        if graph is None:
            if len(self._graphs) == _MAX_GRAPHS:
                return self._compute(fields, weights)
            graph = self._graphs[key] = self._capture(fields, weights)
        inputs = [*(fields[name] for name in graph.fields), weights]
        foreach_copy_([*graph.fields.values(), graph.weights], inputs)
        if not graph.uses & (graph.uses - 1) or not graph.uses % _CHECK_EVERY_USES:
            self._run_and_compare(graph, fields, weights)
        else:
            graph.run()
        graph.uses += 1
        for p, gradient in zip(self.parameters, graph.gradients, strict=True):
            p.grad = gradient
        # The sums are copied, because the next replay may overwrite them before the host has read them.
        return graph.sums._replace(values=graph.sums.values.clone())

    def _capture(self, fields: Batch, weights: Tensor) -> _CapturedGraph:
        """Returns a graph for this kind of micro-batch; buffers and random generators stay as they are."""
        graph_fields = {name: self._copy(name, v) for name, v in fields.items()}
        graph_weights = weights.clone()
        sums: list[DeviceSums] = []

        def work() -> None:
            self._drop_gradients()
            # Only the sums of the last call are used, that of the capture.
            sums[:] = [self._compute(graph_fields, graph_weights)]

        buffers = self._copy_buffers()
        generators = self._generator_states()
        inputs = InputRecorder()
        self._backend.warm_up(work)
        if not self._kind.is_host and not torch.equal(torch.default_generator.get_state(), generators[0]):
            raise _capture_error(
                "the step draws random numbers on the host, which each replay would repeat; draw them on the device"
            )
        self._restore(buffers, generators)
        # The gradients of the warm-up are not in the memory of the graph.
        self._drop_gradients()

        def recorded_work() -> None:
            with inputs:
                work()

        try:
            run = self._backend.capture(recorded_work)
        except RuntimeError as error:
            raise _explain(error) from None
        self._restore(buffers, generators)
        gradients = [p.grad for p in self.parameters]
        graph = _CapturedGraph(graph_fields, graph_weights, run, gradients, sums[0], inputs.tensors)
        self._drop_gradients()
        return graph

    def _copy(self, name: str, field: Tensor) -> Tensor:
        """Returns a copy of a field with the same memory layout, from which every replay reads.

        Raises:
            ConfigError: The field is not on the device, or several of its values share memory.
        """
        if field.device.type != self._device.type:
            raise _capture_error(
                f"the field {name} is on the {field.device.type}, so each replay would use the values of the capture;"
                " let augment move it to the device"
            )
        if any(stride == 0 and size > 1 for size, stride in zip(field.shape, field.stride(), strict=True)):
            raise _capture_error(
                f"the field {name} was expanded, so several of its values share memory; let augment call contiguous()"
            )
        return torch.empty_strided(field.shape, field.stride(), dtype=field.dtype, device=field.device).copy_(field)

    def _run_and_compare(self, graph: _CapturedGraph, fields: Batch, weights: Tensor) -> None:
        """Replays a graph and compares the results with those of an eager pass, which runs first.

        Raises:
            ConfigError: The results are not bit-identical.
        """
        buffers, generators = self._copy_buffers(), self._generator_states()
        sums = self._compute(fields, weights)
        gradients = [p.grad for p in self.parameters]
        eager_buffers = self._copy_buffers()
        self._drop_gradients()
        self._restore(buffers, generators)
        graph.run()
        pairs_by_name: dict[str, Iterable[tuple[Tensor | None, Tensor | None]]] = {
            "the gradient": zip(gradients, graph.gradients, strict=True),
            "the loss": [(sums.values, graph.sums.values)],
            "a buffer": [(eager_buffers.memory, self._copy_buffers().memory)],
        }
        for name, pairs in pairs_by_name.items():
            if not all(_is_bit_identical(a, b) for a, b in pairs):
                raise _capture_error(
                    f"{name} of a replay differs from an eager pass with the same rows: it depends on changing values"
                    " on the host"
                )

    def _drop_gradients(self) -> None:
        for p in self.parameters:
            p.grad = None

    def _copy_buffers(self) -> TensorGroup:
        copy = self._buffers.like()
        copy.copy(self._buffers)
        return copy

    def _generator_states(self) -> list[Tensor]:
        """Returns the states of the random generators, the host's first."""
        return self._kind.generator_states(self._device)

    def _restore(self, buffers: TensorGroup, generators: list[Tensor]) -> None:
        self._buffers.copy(buffers)
        self._kind.set_generator_states(generators, self._device)


class InputRecorder(TorchDispatchMode):
    """Records the tensors that operators read and no operator made: parameters, buffers, other tensors of the model.

    A graph reads from memory addresses. If a model replaces a tensor later, such as a table of positions by one for
    longer rows, the memory of the old tensor must stay allocated: otherwise replays would read other values there.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._output_addresses = set[int]()
        self._inputs = dict[int, Tensor]()

    @property
    def tensors(self) -> list[Tensor]:
        """The recorded tensors."""
        return list(self._inputs.values())

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        for tensor in _tensors((args, kwargs)):
            if (address := tensor.untyped_storage().data_ptr()) not in self._output_addresses:
                self._inputs[address] = tensor.detach()
        outputs = operator(*args, **(kwargs or {}))
        addresses = {t.untyped_storage().data_ptr() for t in _tensors(outputs)}
        self._output_addresses |= addresses - self._inputs.keys()
        return outputs


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.layout is torch.strided]


def _explain(error: RuntimeError) -> Exception:
    """Returns the error that made a capture fail, as a `ConfigError` if the reason is what the pass does.

    The end of a failed capture raises another error, so the first one is in the contexts of `error`.
    """
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    message = str(error)
    # torch refuses some calls during a capture itself, with a plain `RuntimeError`, of which only the message tells.
    is_of_capture = getattr(error, "error_code", None) in _CAPTURE_ERRORS or "captur" in message.lower()
    if isinstance(error, torch.OutOfMemoryError) or not is_of_capture:
        return error
    return _capture_error(f"it does something that a CUDA graph cannot contain ({message.partition(chr(10))[0]})")


def _is_bit_identical(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a.detach()), _bytes(b.detach()))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _capture_error(reason: str) -> ConfigError:
    return ConfigError(
        f"train.capture is set, but a micro-batch cannot be captured: {reason}. Forward and loss must make the same"
        " operations for all rows of one shape, without waiting for the device (.item(), boolean masks, nonzero,"
        " print). Change them, or leave train.capture out: the result is bit-identical without it."
    )
