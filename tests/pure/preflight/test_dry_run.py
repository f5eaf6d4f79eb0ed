"""The trial before the start: a mistake anywhere in a task is refused, with the task's own line."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric, MetricCollection

from ray_app.data.dataset import open_dataset
from ray_app.errors import ConfigError
from ray_app.preflight.checks import CHECKS
from ray_app.preflight.context import PreflightContext
from ray_app.preflight.inputs import InitialParameters
from ray_app.preflight.model_checks import KernelRecorder, find_failing_part
from ray_app.task.base import Batch, Losses
from ray_app.task.configured_arguments import compute_row_losses
from ray_app.train.job import Job
from tests.support.local_world import TinyImages, make_job, write_images


class Mistaken(TinyImages):
    """Has a mistake in one method."""

    def __init__(self, where: str) -> None:
        super().__init__(loss_shape="mean" if where == "loss" else "rows")
        self.where = where

    def _stumble(self, where: str) -> None:
        if where == self.where:
            raise KeyError("labels")

    def augment(self, batch: Batch, keys: Tensor) -> Batch:
        self._stumble("augment")
        return super().augment(batch, keys)

    def training_loss(self, model: Any, batch: Batch) -> Tensor:
        self._stumble("training_loss")
        return super().training_loss(model, batch)

    def metrics(self) -> Any:
        self._stumble("metrics")
        return super().metrics()

    def update(self, metrics: Any, outputs: Any, batch: Batch) -> None:
        self._stumble("update")
        super().update(metrics, outputs, batch)

    def predictions(self, outputs: Any, batch: Batch) -> Any:
        self._stumble("predictions")
        return super().predictions(outputs, batch)


def trial(tmp_path: Path, where: str | TinyImages, **fields: Any) -> None:
    data, task = write_images(tmp_path / "data", [[8]]), Mistaken(where) if isinstance(where, str) else where
    job = make_job(
        tmp_path / "run", data, logical_workers=2, batch=4, task=task, **({"data__eval_path": str(data)} | fields)
    )
    dry_run(job)


def dry_run(job: Job) -> None:
    """Makes the checks of a dry run, from the model to the schedule, with a row of zeros."""
    context = PreflightContext(job.config)
    context.job, context.task, context.plan = job, job.task, job.plan
    context.fields, context.dataset = job.fields, open_dataset(job.config.data.path)
    context.rows = {name: np.zeros((1, *spec.shape), np.dtype(spec.dtype)) for name, spec in job.fields.items()}
    context.initial = InitialParameters(job.config)
    names = [check.name for check in CHECKS]
    with closing(context):
        for check in CHECKS[names.index("model") : names.index("schedule") + 1]:
            check.execute(context)


@pytest.mark.parametrize("where", ["augment", "training_loss", "metrics", "update", "predictions"])
def test_a_mistake_is_refused_with_its_line(tmp_path: Path, where: str) -> None:
    with pytest.raises(ConfigError, match="The dry run with one row failed: KeyError: 'labels'") as caught:
        trial(tmp_path, where)
    assert f"in {where}\n" in str(caught.value)
    assert "test_dry_run.py" in str(caught.value).splitlines()[0]


class Spread(Metric):
    """What needs more rows than a trial has, or has a typo."""

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


class Measured(TinyImages):
    """Has `Spread` among its metrics."""

    def metrics(self) -> MetricCollection:
        return MetricCollection({"spread": Spread(self.variant == "unused"), "accuracy": super().metrics()["accuracy"]})


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_a_mistake_in_what_computes_a_metric_is_refused_and_too_few_rows_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, metric: str
) -> None:
    fields = {"evaluate__metric": metric, "evaluate__mode": "min" if metric == "loss" else "max"}
    trial(tmp_path / "few", Measured(), **fields)
    [told] = [record.message for record in caplog.records if "of two rows" in record.message]
    assert "ValueError: at least ten rows are needed (test_dry_run.py, line " in told
    with pytest.raises(
        ConfigError, match=r"The dry run with one row failed: AttributeError: 'Spread' object has no attribute 'row'"
    ):
        trial(tmp_path / "typo", Measured("unused"), **fields)


class Alike(TinyImages):
    """Has two metrics that MLflow calls the same."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def metrics(self) -> MetricCollection:
        return MetricCollection({name: super(Alike, self).metrics()["accuracy"] for name in self.names})


LONG = "m" * 250


@pytest.mark.parametrize("names", [("top@1", "top_1"), (LONG + "a", LONG + "b"), ("of//rows", "of__rows")])
def test_metrics_that_become_one_in_mlflow_are_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"The metrics '{names[0]}' and '{names[1]}' have one name in MLflow, 'eval_"):
        trial(tmp_path, Alike(*names), evaluate__metric="loss")


def test_metrics_that_stay_apart_in_mlflow_are_taken(tmp_path: Path) -> None:
    trial(tmp_path, Alike("accuracy", "of/rows", "of_rows", "m" * 244 + "a", "m" * 244 + "b"))


def test_a_mean_loss_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"returned shape \(\) for 2 rows"):
        trial(tmp_path, "loss")


def test_nothing_is_refused_where_nothing_is_wrong(tmp_path: Path) -> None:
    trial(tmp_path, "")


def test_without_evaluation_its_methods_are_not_needed(tmp_path: Path) -> None:
    trial(tmp_path, "update", data__eval_path=None)


class Pooled(TinyImages):
    """A network that ends in one layer or function more.

    Args:
        last: Its name in `LAYERS`.
    """

    def __init__(self, last: str) -> None:
        super().__init__()
        self.last = last

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 5, 3), LAYERS[self.last](), nn.Flatten(2))

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(super().forward(nn.Identity(), batch)).mean(-1)


class Called(nn.Module):
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
    "antialiased interpolation, backward": lambda: Called(
        lambda x: functional.interpolate(x, size=(9, 9), mode="bilinear", antialias=True, align_corners=False)
    ),
    "linear interpolation of one dimension, backward": lambda: Called(
        lambda x: functional.interpolate(x.flatten(2), size=9, mode="linear")[..., None]
    ),
    "median with indices": lambda: Called(lambda x: x.median(-1, keepdim=True).values),
    "grid_sample, backward": lambda: Called(sampled),
    "nothing": nn.Identity,
    "put": lambda: Called(lambda x: x * torch.zeros(1).put_(torch.zeros(1, dtype=torch.int64), torch.ones(1))),
    "pooled to one": lambda: nn.AdaptiveAvgPool2d(1),
    "fixed pooling": lambda: nn.AvgPool2d(2),
    "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "median of all": lambda: Called(lambda x: x * x.detach().median()),
}
FINE = ("nothing", "pooled to one", "fixed pooling", "bilinear", "median of all")


def pooled(tmp_path: Path, last: str, **fields: Any) -> None:
    data = write_images(tmp_path / "data", [[8]])
    job = make_job(tmp_path / "run", data, logical_workers=2, batch=4, task=Pooled(last), **fields)
    dry_run(job)


def test_operations_without_a_deterministic_kernel_are_refused_and_the_mode_stays(
    tmp_path: Path,
) -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(ConfigError, match="put_ does not have a deterministic implementation"):
        pooled(tmp_path, "put")
    assert not torch.are_deterministic_algorithms_enabled()
    pooled(tmp_path / "overlapped", "put", train__reduction="overlapped")


@pytest.mark.parametrize("last", [name for name in LAYERS if name not in (*FINE, "put")])
def test_what_a_gpu_has_no_deterministic_kernel_for_is_named_before_the_start(tmp_path: Path, last: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(last)) as caught:
        pooled(tmp_path, last, scaling__gpus_per_worker=1)
    assert ": choose " in str(caught.value)
    assert "train.reduction to overlapped" in str(caught.value)
    pooled(tmp_path / "cpu", last)
    pooled(tmp_path / "overlapped", last, scaling__gpus_per_worker=1, train__reduction="overlapped")


@pytest.mark.parametrize("last", FINE)
def test_what_a_gpu_has_kernels_for_is_not(tmp_path: Path, last: str) -> None:
    pooled(tmp_path, last, scaling__gpus_per_worker=1)


def test_unreduced_losses_of_pixels_and_tokens_have_kernels() -> None:
    """As in aten/src/ATen/native/cuda/NLLLoss2d.cu, whose alert comes with `reduction != Reduction::None` alone."""
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
        with pytest.raises(
            ConfigError, match="cross-entropy or NLLLoss over pixels, as mean or sum: choose reduction none"
        ):
            kernels.check(1)


class Remembering(nn.Sequential):
    """Keeps a mean over what it has seen."""

    def __init__(self, how: str) -> None:
        super().__init__(nn.Flatten(), nn.utils.parametrizations.spectral_norm(nn.Linear(64, 5)))
        self.how = how
        self.register_buffer("mean", torch.zeros(64), persistent=how != "passing")
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        seen = images.detach().flatten(1).mean(0) + 1
        if self.training and self.how == "another tensor":
            self.mean = 0.9 * self.mean + 0.1 * seen
        elif self.training and self.how == "another parameter":
            self.factor = nn.Parameter(self.factor * 2)
        elif self.training:
            self.mean.mul_(0.9).add_(0.1 * seen)
        return super().forward(images.flatten(1) * self.factor - self.mean)


class Extra(nn.Module):
    """Keeps a number beside its tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        del state

    def forward(self, x: Tensor) -> Tensor:
        return x


class Kept(TinyImages):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def build_model(self) -> nn.Module:
        return Remembering(self.how) if self.how != "extra" else nn.Sequential(super().build_model(), Extra())


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("another tensor", r"another tensor for mean \(self.mean = ...\).*self.mean.copy_"),
        ("another parameter", "another tensor for factor"),
        ("extra", "state_dict has 1._extra_state, which is no tensor but dict"),
        ("passing", "the buffer mean, which is registered with persistent=False, so no checkpoint has it"),
    ],
)
def test_state_of_a_model_outside_of_checkpoints_is_refused(tmp_path: Path, how: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        trial(tmp_path, Kept(how))


class Odd(TinyImages):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def build_model(self) -> nn.Module:
        model = super().build_model()
        if self.how == "expanded":
            model.register_buffer("mask", torch.ones(1).expand(12))
        else:
            model[1].add_module("words", nn.Embedding(9, 4, sparse=True))  # type: ignore[operator]
        return model


@pytest.mark.parametrize(
    ("how", "said"), [("expanded", "the buffer mask share.*contiguous"), ("sparse", "words of the model.*sparse=False")]
)
def test_what_cannot_be_exchanged_or_written_into_is_refused(tmp_path: Path, how: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        trial(tmp_path, Odd(how))


def test_an_embedding_that_is_frozen_may_be_sparse(tmp_path: Path) -> None:
    trial(tmp_path, Odd("sparse"), train__freeze=["1.words.*"])


class Doing(TinyImages):
    """Does what a forward in training may not do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        if self.how == "momentum":
            model[1].add_module("encoder", nn.Linear(3, 3).requires_grad_(False))
        return model

    def forward(self, model: Any, batch: Batch) -> Tensor:
        if not model.training:
            return super().forward(model, batch)
        with torch.no_grad():
            if self.how == "momentum":
                model[1].encoder.weight.mul_(0.9)
            if self.how == "data":
                model[1].weight.data = functional.normalize(model[1].weight.data)
            if self.how == "in place":
                model[1].weight.data.mul_(0.5)
        if self.how == "unfreezing":
            model[1].requires_grad_(False)
        outputs = super().forward(model, batch)
        if self.how == "backward":
            outputs.sum().backward(retain_graph=True)
        return outputs


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("momentum", "changes the parameter 1.encoder.weight.*Task.apply_gradients"),
        ("data", "changes the parameter 1.weight"),
        ("in place", "changes the parameter 1.weight"),
        ("unfreezing", "changes requires_grad of 1.weight"),
        ("backward", "leaves gradients in the model's parameters.*torch.autograd.grad"),
    ],
)
def test_what_a_forward_in_training_may_not_do_is_refused(tmp_path: Path, how: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        trial(tmp_path, Doing(how))


class Lacking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.more = nn.Sequential(nn.Flatten(), nn.Linear(64, 5)), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + self.more(x.flatten(1))

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {name: value for name, value in super().state_dict(*args, **options).items() if "more" not in name}


class Made(TinyImages):
    """Makes a model that cannot be trained here."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def build_model(self) -> nn.Module:
        model: Any = Lacking() if self.how == "lacking" else super().build_model()
        match self.how:
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


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("max_norm", "words of the model has max_norm"),
        ("sync", "2 of the model is a SyncBatchNorm"),
        ("lazy", "last.weight of the model has no shape yet"),
        ("sparse", "graph of the model is sparse"),
        ("complex128", "wave of the model is complex128"),
        ("shared", "1.weight and second.weight of the model share memory"),
        ("lacking", "state_dict leaves more.weight out, which is trained"),
    ],
)
def test_a_model_that_cannot_be_trained_or_kept_is_refused(tmp_path: Path, how: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        trial(tmp_path, Made(how))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("scalar", "temperature has no dimensions"),
        ("empty", "nothing has no values"),
        ("hook", "1.weight has a hook"),
        ("listed", "all of the model is no module and holds parameters.*ParameterList"),
    ],
)
def test_a_model_that_shards_would_train_otherwise_is_refused(tmp_path: Path, how: str, said: str) -> None:
    trial(tmp_path / "ddp", Made(how))
    with pytest.raises(ConfigError, match=said):
        trial(tmp_path / "fsdp", Made(how), train__strategy="fsdp")


class Recurrent(TinyImages):
    """PyTorch's own keeps its parameters in a list, too, which follows."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(super().build_model(), nn.Unflatten(1, (1, 5)), nn.GRU(5, 5, batch_first=True), Last())


class Last(nn.Module):
    def forward(self, found: tuple[Tensor, Tensor]) -> Tensor:
        return found[0][:, -1]


class Delegating(nn.Module):
    """Its state is that of what it wraps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self.inner.state_dict(*args, **options)


class Wrapped(TinyImages):
    def build_model(self) -> nn.Module:
        return Delegating(super().build_model())


class Teacher(TinyImages):
    """Puts a part that is not trained into evaluation mode each time."""

    def forward(self, model: Any, batch: Batch) -> Tensor:
        model[2].eval()
        return super().forward(model, batch)


@pytest.mark.parametrize(
    ("task", "fields"),
    [
        (Recurrent(), {"train__strategy": "fsdp"}),
        (Wrapped(), {}),
        (Teacher(), {}),
        (TinyImages(), {"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "fused": True}}}),
        (TinyImages(), {"optimizer": {"class_path": "torch.optim.Adagrad", "init_args": {"lr": 0.1, "fused": True}}}),
    ],
    ids=["recurrent", "wrapped", "teacher", "fused SGD", "fused Adagrad"],
)
def test_what_trains_alike_on_any_number_of_workers_is_not_refused(
    tmp_path: Path, task: TinyImages, fields: dict[str, Any]
) -> None:
    trial(tmp_path, task, **fields)


def test_an_optimizer_that_counts_in_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keeps t in itself \(self.t\), which no checkpoint has"):
        trial(tmp_path / "a", TinyImages(), optimizer={"class_path": "tests.support.odd_optimizers.Counting"})
    trial(tmp_path / "b", TinyImages(), optimizer={"class_path": "tests.support.odd_optimizers.Finding"})


def test_a_learning_rate_that_no_checkpoint_can_be_read_with_is_refused(tmp_path: Path) -> None:
    def schedule(of: str) -> dict[str, Any]:
        given = {"lr_lambda": f"tests.support.odd_optimizers.{of}"}
        return {"class_path": "torch.optim.lr_scheduler.LambdaLR", "init_args": given}

    with pytest.raises(ConfigError, match=r"The schedule keeps .*, which no checkpoint can be read with.*float"):
        trial(tmp_path / "a", TinyImages(), schedule=schedule("single_precision"))
    trial(tmp_path / "b", TinyImages(), schedule=schedule("cosine"))
    with pytest.raises(ConfigError, match=r"The learning rate is nan after the first step; it must be finite"):
        trial(tmp_path / "c", TinyImages(), schedule=schedule("not_a_number"))


def test_a_lock_in_the_groups_of_an_optimizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"Locking keeps param_groups\[0\]\['lock'\], which no checkpoint can be read with: cannot pickle",
    ):
        trial(tmp_path / "a", TinyImages(), optimizer={"class_path": "tests.support.odd_optimizers.Locking"})


def test_what_a_model_writes_into_its_buffers_is_fine(tmp_path: Path) -> None:
    trial(tmp_path, Kept("in place"))


class WithNanTable(TinyImages):
    """Has a table with NaN that no checkpoint holds and no forward changes."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_buffer("table", torch.tensor([1.0, float("nan")]), persistent=False)
        return model


def test_an_unchanged_buffer_with_nan_is_not_refused(tmp_path: Path) -> None:
    trial(tmp_path, WithNanTable())


def test_a_closure_whose_variable_has_no_value_yet_is_passed_over() -> None:
    def use_later() -> object:
        return later

    failing = find_failing_part("task.call", use_later, lambda part: ValueError("it cannot be pickled"))
    assert failing is not None
    assert failing[:2] == ("task.call", use_later)
    later = 1
    assert use_later() == later
