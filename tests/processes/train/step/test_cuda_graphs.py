"""`train.capture` on a CPU in place of a device (`tests/support/recorded_graph.py`): a captured step is bit-identical
to an eager one, and unsuitable models are refused.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from ray_app.config.config import Config
from ray_app.errors import ConfigError
from ray_app.reduction.world import World
from ray_app.task.base import Batch
from ray_app.task.image import ImageClassification
from ray_app.task.losses import sum_on_device
from ray_app.testing import DieAfter, KilledError, WorkerPool, cache_windows, read_trained_run, train_rank
from ray_app.train.build import build_state, build_step
from ray_app.train.job import Hooks, Job
from ray_app.train.step import cuda_graphs
from ray_app.train.step.cuda_graphs import CudaGraphs, InputRecorder, make_graph_backend
from tests.support.local_world import CPU, LocalMembership, TinyImages, make_job
from tests.support.recorded_graph import RecordedGraphs

CAPTURE: dict[str, Any] = {"train__capture": True, "scaling__gpus_per_worker": 1.0, "train__backend": "gloo"}
ROWS = [[50, 1], [46]]
"""97 rows: with L = 4 and batches of 12 the last step has rows (1, 0, 0, 0)."""


def _train_captured(rank: int, store: Path, job: Job, size: int, hooks: Hooks, max_graphs: int) -> tuple[int, int]:
    """Trains with recorded graphs; returns the numbers of captures and replays."""
    graphs = RecordedGraphs()
    with (
        patch("ray_app.train.build.make_graph_backend", lambda device: graphs),
        patch.object(cuda_graphs, "_MAX_GRAPHS", max_graphs),
        patch.object(cuda_graphs, "_CHECK_EVERY_USES", 5),
    ):
        train_rank(rank, store, job, size, hooks, cache_windows, LocalMembership)
    return graphs.captures, graphs.replays


@pytest.mark.rest
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("task", "fields"),
    [
        (None, {}),
        (None, {"train__precision": "bf16", "train__channels_last": True, "train__grad_clip_norm": 0.5}),
        (TinyImages(variant="unused"), {"train__precision": "fp16"}),
        (TinyImages(), {"scaling__logical_workers": 1}),
    ],
)
def test_a_captured_step_is_bit_identical_to_an_eager_one(
    worker_pool: WorkerPool,
    data: Path,
    tmp_path: Path,
    task: ImageClassification | None,
    fields: dict[str, Any],
    workers: int,
) -> None:
    """The runs have batch-norm, dropout, augmentation, and micro-batches of several sizes, of one row and of none."""
    L = fields.get("scaling__logical_workers", 4)
    fields = {"train__epochs": 2} | fields
    eager = worker_pool.train_new_run(
        make_job(tmp_path / "eager", data, logical_workers=L, batch=12, task=task, **fields), 1, cache_windows
    )
    job = make_job(tmp_path / "captured", data, logical_workers=L, batch=12, task=task, **fields, **CAPTURE)
    counts = worker_pool.run(min(workers, L), _train_captured, job, min(workers, L), Hooks(), 16)
    captured = read_trained_run(job)
    assert (captured.digests, captured.steps) == (eager.digests, eager.steps)
    assert all(0 < captures < replays for captures, replays in counts)


@pytest.mark.rest
def test_a_captured_run_resumes_bit_identically_on_other_workers(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"logical_workers": 4, "batch": 12, "train__epochs": 2, "checkpoint__every_steps": 4}
    eager = worker_pool.train_new_run(make_job(tmp_path / "eager", data, **fields), 1, cache_windows)
    job = make_job(tmp_path / "captured", data, **fields, **CAPTURE)
    outcomes = worker_pool.call(2, _train_captured, job, 2, Hooks(after_step=DieAfter(6)), 16)
    assert all(isinstance(outcome.error, KilledError) for outcome in outcomes)
    worker_pool.run(1, _train_captured, job, 1, Hooks(), 16)
    assert read_trained_run(job).digests == eager.digests


@pytest.mark.rest
def test_input_shapes_above_the_maximum_of_graphs_run_eagerly(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"logical_workers": 4, "batch": 12, "train__epochs": 2}
    eager = worker_pool.train_new_run(make_job(tmp_path / "eager", data, **fields), 1, cache_windows)
    job = make_job(tmp_path / "captured", data, **fields, **CAPTURE)
    [(captures, replays)] = worker_pool.run(1, _train_captured, job, 1, Hooks(), 1)
    assert (captures, read_trained_run(job).digests) == (1, eager.digests)
    assert replays < len(eager.steps) * 4


class HostDependentLoss(TinyImages):
    """Its loss depends on the host: on the number of calls, a random number of the host, or a value read there."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0

    def training_loss(self, model: nn.Module, batch: Batch) -> Any:
        losses = self.loss(self.forward(model, batch), batch)
        assert isinstance(losses, Tensor)
        self.calls += 1
        factor = {
            "counts": lambda: self.calls,
            "later": lambda: 1 + self.calls // 4,
            "much later": lambda: 1 + self.calls // 6,
            "draws": random.random,
            "reads": lambda: losses.sum().item(),
        }[self.how]()
        return losses * factor


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("counts", "the gradient of a replay differs from an eager pass with the same rows"),
        ("later", "the gradient of a replay differs from an eager pass with the same rows"),
        ("much later", "the gradient of a replay differs from an eager pass with the same rows"),
        ("draws", "the gradient of a replay differs from an eager pass with the same rows"),
        ("reads", "it does something that a CUDA graph cannot contain (CUDA error: operation not permitted when"),
    ],
)
def test_a_loss_that_depends_on_the_host_is_refused(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, how: str, why: str
) -> None:
    job = make_job(tmp_path / "run", data, logical_workers=4, batch=12, task=HostDependentLoss(how), **CAPTURE)
    [outcome] = worker_pool.call(1, _train_captured, job, 1, Hooks(), 16)
    assert isinstance(outcome.error, ConfigError)
    assert why in str(outcome.error)
    assert "leave train.capture out: the result is bit-identical without" in str(outcome.error)


def test_a_worker_that_computes_on_its_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="a worker computes on its CPU, which has no CUDA graphs"):
        make_graph_backend(torch.device("cpu"))


def make_device_error(code: int, message: str) -> RuntimeError:
    """Returns an error of the device as torch raises it."""
    error = torch.AcceleratorError(message)
    error.error_code = code  # type: ignore[attr-defined]
    return error


class FailingGraphs(RecordedGraphs):
    """Fails in a capture, and then at the end of the capture, as CUDA does."""

    def __init__(self, error: RuntimeError) -> None:
        super().__init__()
        self.error = error

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        try:
            raise self.error
        except RuntimeError:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")  # noqa: B904


def _make_small_graphs(graphs: RecordedGraphs, device: str = "cpu", draws: bool = False) -> CudaGraphs:
    def loss(model: nn.Module, fields: Batch) -> Tensor:
        losses = model(fields["x"]).square().sum(1)
        return losses * torch.rand(()) if draws else losses

    return CudaGraphs(graphs, Config(), TinyImages(), torch.device(device), nn.Linear(3, 1), None, loss)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory while capturing"), torch.OutOfMemoryError),
        (RuntimeError("operation not permitted when stream is capturing"), ConfigError),
        (make_device_error(900, "the stream does not permit it"), ConfigError),
        (make_device_error(719, "unspecified launch failure"), torch.AcceleratorError),
    ],
)
def test_the_first_error_of_a_capture_is_raised(error: RuntimeError, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        _make_small_graphs(FailingGraphs(error)).forward_backward({"x": torch.ones(2, 3)}, torch.ones(2))
    assert type(caught.value) is kind
    assert str(error) in str(caught.value)


def test_an_error_of_the_task_is_raised_unchanged() -> None:
    graphs = _make_small_graphs(RecordedGraphs())
    with (
        patch.object(graphs.model, "forward", side_effect=RuntimeError("the captured screenshot has 3 channels")),
        pytest.raises(RuntimeError, match="screenshot"),
    ):
        graphs.forward_backward({"x": torch.ones(2, 3)}, torch.ones(2))


@pytest.mark.parametrize(
    ("field", "why"),
    [
        (torch.ones(1, 3).expand(2, 3), "the field x was expanded"),
        (torch.ones(2, 3, device="meta"), "the field x is on the meta"),
    ],
)
def test_a_field_without_its_own_memory_on_the_device_is_refused(field: Tensor, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        _make_small_graphs(RecordedGraphs()).forward_backward({"x": field}, torch.ones(2))


def test_a_slice_of_a_field_is_captured_in_its_layout() -> None:
    graphs, slice_of_field = _make_small_graphs(RecordedGraphs()), torch.arange(24.0).view(4, 6)[1:3, 2:5]
    strides = set[tuple[int, ...]]()
    graphs.model.register_forward_pre_hook(lambda _, arguments: strides.add(arguments[0].stride()))
    for _ in range(3):
        sums = graphs.forward_backward({"x": slice_of_field}, torch.ones(2))
        assert sums.values == sum_on_device(graphs.losses_of({"x": slice_of_field}, 2)).values
        graphs.model.zero_grad()
    assert strides == {slice_of_field.stride()}


def test_a_graph_is_checked_after_1_2_4_uses_and_then_periodically() -> None:
    graphs, checked_uses = _make_small_graphs(RecordedGraphs()), list[int]()
    with (
        patch.object(cuda_graphs, "_CHECK_EVERY_USES", 6),
        patch.object(graphs, "_run_and_compare", lambda kind, *_: checked_uses.append(kind.uses)),
    ):
        for _ in range(20):
            graphs.forward_backward({"x": torch.ones(2, 3)}, torch.ones(2))
    assert checked_uses == [0, 1, 2, 4, 6, 8, 12, 16, 18]


def test_random_numbers_drawn_on_the_host_are_refused_at_the_first_capture() -> None:
    """The device is a stand-in of CUDA; only the state of its generator is read."""
    states = {"get_rng_state": lambda device: torch.zeros(1), "set_rng_state": lambda state, device: None}
    with (
        patch.multiple(torch.cuda, **states),
        patch("ray_app.train.step.cuda_graphs.CudaGraphs._copy", lambda self, name, field: field.clone()),
    ):
        with pytest.raises(ConfigError, match="the step draws random numbers on the host"):
            _make_small_graphs(RecordedGraphs(), "cuda", draws=True).forward_backward(
                {"x": torch.ones(2, 3)}, torch.ones(2)
            )
        _make_small_graphs(RecordedGraphs(), "cuda").forward_backward({"x": torch.ones(2, 3)}, torch.ones(2))


def test_the_inputs_of_a_graph_are_kept_alive_and_its_outputs_are_not() -> None:
    """A model may keep a table as a plain attribute, and replace it for longer rows."""
    table, weight = torch.ones(3), nn.Parameter(torch.ones(3))
    with InputRecorder() as inputs:
        ((weight * table + 1).relu() * 2).sum().backward()
    assert {t.data_ptr() for t in inputs.tensors} == {table.data_ptr(), weight.data_ptr()}


def test_a_closed_step_frees_its_graphs(data: Path, tmp_path: Path) -> None:
    job = make_job(tmp_path / "run", data, logical_workers=1, batch=8, **CAPTURE)
    state = build_state(job.config, job.task, CPU, 1)
    with patch("ray_app.train.build.make_graph_backend", lambda device: RecordedGraphs()):
        step = build_step(job, state, World(0, 1, 1), CPU, lambda phase: None)
    step.close()
    step_reference, graphs_reference = weakref.ref(step), weakref.ref(step.passes)
    gc.disable()
    try:
        del step
        assert (step_reference(), graphs_reference()) == (None, None)
    finally:
        gc.enable()
