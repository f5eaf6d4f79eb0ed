"""The dry run before the start: an error anywhere in a task is refused with the line of the task."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torchmetrics import Metric, MetricCollection

from ray_app.config.config import Config
from ray_app.data.dataset import open_dataset
from ray_app.errors import ConfigError
from ray_app.preflight import dry_run as dry_run_module
from ray_app.preflight.checks import CHECKS
from ray_app.preflight.context import PreflightContext
from ray_app.preflight.inputs import InitialParameters, read_training_row
from ray_app.preflight.model_checks import KernelRecorder
from ray_app.task.base import Batch, Rows
from ray_app.task.configured_arguments import compute_row_losses
from ray_app.task.losses import Losses
from ray_app.task.ragged import Arrays
from ray_app.train.job import Job
from tests.support.local_world import TinyImages, make_job, write_images

ODD = "tests.support.odd_optimizers"


class FaultyTask(TinyImages):
    """Raises an error in one method."""

    def __init__(self, where: str) -> None:
        super().__init__(loss_shape="mean" if where == "loss" else "rows")
        self.where = where

    def _raise_in(self, method: str) -> None:
        if method == self.where:
            raise KeyError("labels")

    def augment(self, batch: Batch, keys: Tensor) -> Batch:
        self._raise_in("augment")
        return super().augment(batch, keys)

    def training_loss(self, model: Any, batch: Batch) -> Tensor:
        self._raise_in("training_loss")
        return super().training_loss(model, batch)

    def metrics(self) -> Any:
        self._raise_in("metrics")
        return super().metrics()

    def update(self, metrics: Any, outputs: Any, batch: Batch) -> None:
        self._raise_in("update")
        super().update(metrics, outputs, batch)

    def predictions(self, outputs: Any, batch: Batch) -> Any:
        self._raise_in("predictions")
        return super().predictions(outputs, batch)


def dry_run_task(tmp_path: Path, task_or_method: str | TinyImages, **fields: Any) -> None:
    data, task = (
        write_images(tmp_path / "data", [[8]]),
        FaultyTask(task_or_method) if isinstance(task_or_method, str) else task_or_method,
    )
    job = make_job(
        tmp_path / "run", data, logical_workers=2, batch=4, task=task, **({"data__eval_path": str(data)} | fields)
    )
    dry_run(job)


def dry_run(job: Job) -> PreflightContext:
    """Runs the checks of a dry run, from the model to the schedule, on a row of zeros."""
    context = PreflightContext(job.config)
    context.job = job
    context.task = job.task
    context.plan = job.plan
    context.fields, context.dataset = job.fields, open_dataset(job.config.data.path)
    context.rows = {name: np.zeros((1, *spec.shape), np.dtype(spec.dtype)) for name, spec in job.fields.items()}
    context.undecoded_row, _ = read_training_row(job.config, context.dataset, job.task)
    context.initial = InitialParameters(job.config)
    names = [check.name for check in CHECKS]
    with closing(context):
        for check in CHECKS[names.index("model") : names.index("schedule") + 1]:
            check.execute(context)
    return context


@pytest.mark.parametrize("where", ["augment", "training_loss", "metrics", "update", "predictions"])
def test_an_error_in_a_task_method_is_refused_with_its_line(tmp_path: Path, where: str) -> None:
    with pytest.raises(ConfigError, match="The dry run with one row failed: KeyError: 'labels'") as caught:
        dry_run_task(tmp_path, where)
    assert f"in {where}\n" in str(caught.value)
    assert "test_dry_run.py" in str(caught.value).splitlines()[0]


class Spread(Metric):
    """A metric that needs more rows than a dry run has, or has a typo."""

    def __init__(self, mistake: bool) -> None:
        super().__init__()
        self.mistake = mistake
        self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, target: Tensor) -> None:
        self.rows += len(outputs)

    def compute(self) -> Tensor:
        if self.mistake:
            return self.row.float()
        raise ValueError("at least ten rows are needed")


class SpreadTask(TinyImages):
    """A task with `Spread` among its metrics."""

    def metrics(self) -> MetricCollection:
        return MetricCollection({"spread": Spread(self.variant == "unused"), "accuracy": super().metrics()["accuracy"]})


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_an_error_in_a_metric_is_refused_and_too_few_rows_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, metric: str
) -> None:
    fields = {"evaluate__metric": metric, "evaluate__mode": "min" if metric == "loss" else "max"}
    dry_run_task(tmp_path / "few", SpreadTask(), **fields)
    [message] = [record.message for record in caplog.records if "from two rows" in record.message]
    assert "ValueError: at least ten rows are needed (test_dry_run.py, line " in message
    with pytest.raises(ConfigError, match="The dry run with one row failed: AttributeError: 'Spread' object has"):
        dry_run_task(tmp_path / "typo", SpreadTask("unused"), **fields)


class SimilarMetricsTask(TinyImages):
    """A task of metrics with similar names."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def metrics(self) -> MetricCollection:
        return MetricCollection({name: super(SimilarMetricsTask, self).metrics()["accuracy"] for name in self.names})


class LastLayerTask(TinyImages):
    """A network that ends in one more layer or function, the variant in `LAYERS`."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 5, 3), LAYERS[self.variant](), nn.Flatten(2))

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(super().forward(nn.Identity(), batch)).mean(-1)


class FunctionLayer(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def sampled(x: Tensor) -> Tensor:
    return functional.grid_sample(
        x, functional.affine_grid(torch.eye(2, 3).expand(len(x), 2, 3), list(x.shape), False), align_corners=False
    )


LAYERS = {
    "AdaptiveAvgPool2d, backward": lambda: nn.AdaptiveAvgPool2d(2),
    "AdaptiveMaxPool2d, backward": lambda: nn.AdaptiveMaxPool2d(2),
    "AvgPool3d, backward": lambda: nn.AvgPool3d(2),
    "FractionalMaxPool2d, backward": lambda: nn.FractionalMaxPool2d(2, 3),
    "ReflectionPad2d, backward": lambda: nn.ReflectionPad2d(1),
    "antialiased interpolation, backward": lambda: FunctionLayer(
        lambda x: functional.interpolate(x, size=(9, 9), mode="bilinear", antialias=True, align_corners=False)
    ),
    "linear interpolation of one dimension, backward": lambda: FunctionLayer(
        lambda x: functional.interpolate(x.flatten(2), size=9, mode="linear")[..., None]
    ),
    "median with indices": lambda: FunctionLayer(lambda x: x.median(-1, keepdim=True).values),
    "grid_sample, backward": lambda: FunctionLayer(sampled),
    "nothing": nn.Identity,
    "put": lambda: FunctionLayer(lambda x: x * torch.zeros(1).put_(torch.zeros(1, dtype=torch.int64), torch.ones(1))),
    "pooled to one": lambda: nn.AdaptiveAvgPool2d(1),
    "fixed pooling": lambda: nn.AvgPool2d(2),
    "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "median of all": lambda: FunctionLayer(lambda x: x * x.detach().median()),
    "recomputed in the backward pass": lambda: FunctionLayer(lambda x: checkpoint(torch.sin, x, use_reentrant=True)),
}
DETERMINISTIC = (
    "nothing",
    "pooled to one",
    "fixed pooling",
    "bilinear",
    "median of all",
    "recomputed in the backward pass",
)


def dry_run_layer(tmp_path: Path, last: str, **fields: Any) -> None:
    dry_run_task(tmp_path, LastLayerTask(last), **({"data__eval_path": None} | fields))


def test_nondeterministic_operations_are_refused_and_the_mode_is_restored(
    tmp_path: Path,
) -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(ConfigError, match="put_ does not have a deterministic implementation"):
        dry_run_layer(tmp_path, "put")
    assert not torch.are_deterministic_algorithms_enabled()
    dry_run_layer(tmp_path / "overlapped", "put", train__reduction="overlapped")


@pytest.mark.parametrize("last", [name for name in LAYERS if name not in (*DETERMINISTIC, "put")])
def test_a_layer_without_a_deterministic_gpu_kernel_is_refused_by_name(tmp_path: Path, last: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(last)) as caught:
        dry_run_layer(tmp_path, last, scaling__gpus_per_worker=1)
    assert ": choose " in str(caught.value)
    assert "train.reduction to overlapped" in str(caught.value)
    dry_run_layer(tmp_path / "cpu", last)
    dry_run_layer(tmp_path / "overlapped", last, scaling__gpus_per_worker=1, train__reduction="overlapped")


@pytest.mark.parametrize("last", DETERMINISTIC)
def test_a_layer_with_deterministic_gpu_kernels_is_accepted(tmp_path: Path, last: str) -> None:
    dry_run_layer(tmp_path, last, scaling__gpus_per_worker=1)


def test_a_recomputed_layer_without_gradients_in_another_turn_is_refused(tmp_path: Path) -> None:
    sgd = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
    turns = {name: sgd | {"parameters": [f"0.{name}"]} for name in ("weight", "bias")}
    default = asdict(Config().optimizer)
    with pytest.raises(ConfigError, match="Set use_reentrant=False"):
        dry_run_layer(tmp_path, "recomputed in the backward pass", optimizer=default, optimizers=turns)
    dry_run_layer(tmp_path / "nothing", "nothing", optimizer=default, optimizers=turns)


def test_unreduced_losses_of_pixels_and_tokens_have_deterministic_kernels() -> None:
    """aten/src/ATen/native/cuda/NLLLoss2d.cu raises its alert only for `reduction != Reduction::None`."""
    for shape in ((2, 3, 4, 4), (2, 3, 5)):
        scores, labels = torch.randn(shape, requires_grad=True), torch.zeros(shape[0], *shape[2:], dtype=torch.int64)
        with KernelRecorder() as kernels:
            Losses.of(
                compute_row_losses({"class_path": "torch.nn.CrossEntropyLoss"}, scores, labels)
            ).values.sum().backward()
        kernels.check(1)
    for reduction in ("mean", "sum"):
        with KernelRecorder() as kernels:
            functional.cross_entropy(
                torch.randn(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.int64), reduction=reduction
            )
        with pytest.raises(ConfigError, match="cross-entropy or NLLLoss over pixels, as mean or sum: choose"):
            kernels.check(1)


class StatefulModel(nn.Sequential):
    """Keeps a running mean of its inputs."""

    def __init__(self, how: str) -> None:
        super().__init__(nn.Flatten(), nn.utils.parametrizations.spectral_norm(nn.Linear(64, 5)))
        self.how = how
        self.register_buffer("mean", torch.zeros(64), persistent=how != "passing")
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        batch_mean = images.detach().flatten(1).mean(0) + 1
        if self.training and self.how == "another tensor":
            self.mean = 0.9 * self.mean + 0.1 * batch_mean
        elif self.training and self.how == "another parameter":
            self.factor = nn.Parameter(self.factor * 2)
        elif self.training:
            self.mean.mul_(0.9).add_(0.1 * batch_mean)
        return super().forward(images.flatten(1) * self.factor - self.mean)


class ExtraState(nn.Module):
    """Keeps a number as extra state."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        del state

    def forward(self, x: Tensor) -> Tensor:
        return x


class StatefulTask(TinyImages):
    def build_model(self) -> nn.Module:
        return (
            StatefulModel(self.variant)
            if self.variant != "extra"
            else nn.Sequential(super().build_model(), ExtraState())
        )


class UnsupportedTensorTask(TinyImages):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        if self.variant == "expanded":
            model.register_buffer("mask", torch.ones(1).expand(12))
        else:
            model[1].add_module("words", nn.Embedding(9, 4, sparse=True))
        return model


class ForwardSideEffects(TinyImages):
    """Has a side effect in the forward pass of training."""

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        if self.variant == "momentum":
            model[1].add_module("encoder", nn.Linear(3, 3).requires_grad_(False))
        return model

    def forward(self, model: Any, batch: Batch) -> Tensor:
        if not model.training:
            return super().forward(model, batch)
        with torch.no_grad():
            if self.variant == "momentum":
                model[1].encoder.weight.mul_(0.9)
            if self.variant == "data":
                model[1].weight.data = functional.normalize(model[1].weight.data)
            if self.variant == "in place":
                model[1].weight.data.mul_(0.5)
        if self.variant == "unfreezing":
            model[1].requires_grad_(False)
        outputs = super().forward(model, batch)
        if self.variant == "backward":
            outputs.sum().backward(retain_graph=True)
        return outputs


class IncompleteStateDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.more = nn.Sequential(nn.Flatten(), nn.Linear(64, 5)), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + self.more(x.flatten(1))

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {name: value for name, value in super().state_dict(*args, **options).items() if "more" not in name}


class UntrainableModels(TinyImages):
    """Builds a model that cannot be trained or checkpointed."""

    def build_model(self) -> nn.Module:
        model: Any = IncompleteStateDict() if self.variant == "lacking" else super().build_model()
        match self.variant:
            case "max_norm":
                model[1].add_module("words", nn.Embedding(9, 4, max_norm=1.0))
            case "sync":
                model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
            case "lazy":
                model.add_module("last", nn.LazyLinear(5))
            case "sparse":
                model.register_buffer("graph", torch.eye(3).to_sparse())
            case "complex128":
                model.register_buffer("wave", torch.zeros(3, dtype=torch.complex128))
            case "shared":
                model.add_module("second", nn.Linear(64, 12))
                model.second.weight.data = model[1].weight.data
            case "scalar":
                model.register_parameter("temperature", nn.Parameter(torch.ones(())))
            case "empty":
                model.register_parameter("nothing", nn.Parameter(torch.ones(0, 3)))
            case "hook":
                model[1].weight.register_hook(lambda gradient: gradient * 2)
            case "listed":
                model.all = [model[1].weight]
        return model


def test_fsdp_is_refused_with_a_version_of_torch_that_lacks_a_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
    dry_run_task(tmp_path / "ddp", TinyImages())
    with pytest.raises(ConfigError, match=r"train\.strategy is fsdp, which needs PyTorch 2\.15, but"):
        dry_run_task(tmp_path / "fsdp", TinyImages(), train__strategy="fsdp")


class RecurrentTask(TinyImages):
    """PyTorch's recurrent layers keep their parameters in a list too, which follows a replacement."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            super().build_model(), nn.Unflatten(1, (1, 5)), nn.GRU(5, 5, batch_first=True), LastTimeStep()
        )


class LastTimeStep(nn.Module):
    def forward(self, outputs: tuple[Tensor, Tensor]) -> Tensor:
        return outputs[0][:, -1]


class DelegatingModel(nn.Module):
    """Returns the state of the module that it wraps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self.inner.state_dict(*args, **options)


class DelegatingTask(TinyImages):
    def build_model(self) -> nn.Module:
        return DelegatingModel(super().build_model())


class FrozenPartTask(TinyImages):
    """Puts a part that is not trained into evaluation mode in each forward pass."""

    def forward(self, model: Any, batch: Batch) -> Tensor:
        model[2].eval()
        return super().forward(model, batch)


class WithNanTable(TinyImages):
    """Has a non-persistent table with NaN that no forward pass changes."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_buffer("table", torch.tensor([1.0, float("nan")]), persistent=False)
        return model


FSDP = {"train__strategy": "fsdp"}


def optimized(name: str, **init_args: Any) -> dict[str, Any]:
    return {"optimizer": {"class_path": name, "init_args": init_args}}


def scheduled(function: str) -> dict[str, Any]:
    init_args = {"lr_lambda": f"{ODD}.{function}"}
    return {"schedule": {"class_path": "torch.optim.lr_scheduler.LambdaLR", "init_args": init_args}}


SHARDED = {
    "scalar": "temperature has no dimensions",
    "empty": "nothing has no values",
    "hook": "1.weight has a hook",
    "listed": "all of the model is not a module but holds parameters.*ParameterList",
}
"""The variants of `UntrainableModels` that only `fsdp` refuses, because it would train them differently."""


@pytest.mark.parametrize(
    ("task", "fields"),
    [
        ("", {}),
        ("update", {"data__eval_path": None}),
        (RecurrentTask(), FSDP),
        (DelegatingTask(), {}),
        (FrozenPartTask(), {}),
        (WithNanTable(), {}),
        (StatefulTask("in place"), {}),
        (UnsupportedTensorTask("sparse"), {"train__freeze": ["1.words.*"]}),
        (SimilarMetricsTask("accuracy", "of/rows", "of_rows", "m" * 244 + "a", "m" * 244 + "b"), {}),
        *((UntrainableModels(variant), {}) for variant in SHARDED),
        (TinyImages(), optimized("torch.optim.SGD", lr=0.1, fused=True)),
        (TinyImages(), optimized("torch.optim.Adagrad", lr=0.1, fused=True)),
        (TinyImages(), optimized(f"{ODD}.AdaptiveStepSize")),
        (TinyImages(), optimized(f"{ODD}.NoisySgd")),
        (TinyImages(), scheduled("cosine")),
    ],
)
def test_what_trains_identically_for_every_number_of_workers_is_accepted(
    tmp_path: Path, task: str | TinyImages, fields: dict[str, Any]
) -> None:
    dry_run_task(tmp_path, task, **fields)


@pytest.mark.parametrize(
    ("message", "task", "fields"),
    [
        (r"returned shape \(\) for 2 rows", "loss", {}),
        # State of a model outside of checkpoints.
        (r"another tensor for mean \(self.mean = ...\).*self.mean.copy_", StatefulTask("another tensor"), {}),
        ("another tensor for factor", StatefulTask("another parameter"), {}),
        ("state_dict has 1._extra_state, which is a dict", StatefulTask("extra"), {}),
        ("the buffer mean, which is registered with persistent=False, so no", StatefulTask("passing"), {}),
        ("the buffer mask share.*contiguous", UnsupportedTensorTask("expanded"), {}),
        ("words of the model.*sparse=False", UnsupportedTensorTask("sparse"), {}),
        # Side effects of a forward pass in training.
        ("changes the parameter 1.encoder.weight.*Task.apply_gradients", ForwardSideEffects("momentum"), {}),
        ("changes the parameter 1.weight", ForwardSideEffects("data"), {}),
        ("changes the parameter 1.weight", ForwardSideEffects("in place"), {}),
        ("changes requires_grad of 1.weight", ForwardSideEffects("unfreezing"), {}),
        ("leaves gradients in the model's parameters.*torch.autograd.grad", ForwardSideEffects("backward"), {}),
        # Models that cannot be trained or checkpointed, and those that would train differently when they are sharded.
        ("words of the model has max_norm", UntrainableModels("max_norm"), {}),
        ("2 of the model is a SyncBatchNorm", UntrainableModels("sync"), {}),
        ("last.weight of the model has no shape yet", UntrainableModels("lazy"), {}),
        ("graph of the model is sparse", UntrainableModels("sparse"), {}),
        ("wave of the model is complex128", UntrainableModels("complex128"), {}),
        ("1.weight and second.weight of the model share memory", UntrainableModels("shared"), {}),
        ("state_dict leaves out more.weight, which is trained", UntrainableModels("lacking"), {}),
        *((message, UntrainableModels(variant), FSDP) for variant, message in SHARDED.items()),
        # Optimizers and schedules with state that no checkpoint contains.
        ("keeps t in the attribute self.t, which no", TinyImages(), optimized(f"{ODD}.CountingSgd")),
        ("keeps rng in the attribute self.rng", TinyImages(), optimized(f"{ODD}.NoisySgd", has_generator=True)),
        ("draws random numbers for whole parameters.*fsdp", TinyImages(), optimized(f"{ODD}.NoisySgd") | FSDP),
        (r"LockInGroups keeps param_groups\[0\]\['lock'\], and", TinyImages(), optimized(f"{ODD}.LockInGroups")),
        ("The schedule keeps .*, and a checkpoint with it .*float", TinyImages(), scheduled("single_precision")),
        # Metrics with one name in MLflow.
        ("The metrics 'top@1' and 'top_1' have", SimilarMetricsTask("top@1", "top_1"), {"evaluate__metric": "loss"}),
        ("of//rows. and .of__rows", SimilarMetricsTask("of//rows", "of__rows"), {"evaluate__metric": "loss"}),
        ("ma. and .m", SimilarMetricsTask("m" * 250 + "a", "m" * 250 + "b"), {"evaluate__metric": "loss"}),
    ],
)
def test_what_would_train_differently_is_refused(
    tmp_path: Path, message: str, task: str | TinyImages, fields: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=message):
        dry_run_task(tmp_path, task, **fields)


class SlowImages(TinyImages):
    """Decodes a row in about a million additions."""

    def decode(self, rows: Rows) -> Arrays:
        sum(range(1_000_000))
        return super().decode(rows)


def test_decoding_is_measured_for_gpus(tmp_path: Path) -> None:
    data, task = write_images(tmp_path / "data", [[8]]), SlowImages()
    job = make_job(tmp_path / "run", data, logical_workers=2, batch=4, task=task, scaling__gpus_per_worker=1)
    rates = dry_run(job).reading_rates
    assert rates is not None
    assert 0.001 < rates.decode_s < 1
    # A step of at most 4 rows takes at least 10 ms.
    assert 0 < rates.train_rows <= 4 / 0.01


def test_the_time_of_a_row_leaves_out_other_processes() -> None:
    """The wall time of a few rows on a loaded machine would announce evaluations that last a hundred times too long."""

    def run(*arguments: Any) -> None:
        subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)

    context: Any = SimpleNamespace(row_probe=SimpleNamespace(run=run))
    began_s = time.perf_counter()
    cpu_s = dry_run_module.seconds_per_row(context, {"x": np.zeros((1, 1))}, evaluates=False)
    assert 4 * cpu_s < time.perf_counter() - began_s
