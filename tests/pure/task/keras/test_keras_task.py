"""Keras programs as tasks: parameters and buffers, inputs and targets, weights of rows, seeds, and what is refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ray_app.config.config import Config
from ray_app.errors import ConfigError
from ray_app.preflight.prepare import prepare
from ray_app.task.keras import KerasTask, library
from ray_app.task.keras.callbacks import CallbackRunner
from ray_app.task.keras.module import fit_inputs
from ray_app.train.state.state import seed_step
from tests.support import keras_programs
from tests.support.keras_tasks import PROGRAMS, build, task_of
from tests.support.local_world import CPU, write_images

keras = library.import_keras()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("keras") / "images", [[40]])


def batch_of(rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "image": torch.randint(0, 255, (rows, 1, 8, 8), generator=generator, dtype=torch.uint8),
        "label": torch.arange(rows) % 5,
        "id": torch.arange(rows),
    }


def gradients_of(task: KerasTask, model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    losses = task.training_loss(model.train(), batch).values
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(zip(named, torch.autograd.grad(losses.mean(), list(named.values())), strict=True))


def test_weights_are_parameters_and_moving_statistics_are_buffers(data: Path) -> None:
    model = build(task_of(data, "get_convolutional"))
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        "conv2d/kernel",
        "batch_normalization/gamma",
        "batch_normalization/beta",
        "dense/kernel",
        "dense/bias",
    ]
    statistics = ["batch_normalization/moving_mean", "batch_normalization/moving_variance"]
    assert [name for name, _ in model.named_buffers()] == statistics
    before = {name: value.clone() for name, value in model.named_buffers()}
    model.train()(torch.rand(6, 8, 8, 1))
    assert all(not torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert torch.equal(model.program.layers[3].moving_mean.value, dict(model.named_buffers())[statistics[0]])


def test_a_model_has_the_same_names_and_weights_each_time_that_it_is_made(data: Path) -> None:
    task = task_of(data, "get_subclassed")
    first, second = build(task).state_dict(), build(task).state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.manual_seed(4)
    assert not all(torch.equal(first[name], value) for name, value in task.build_model().state_dict().items())


def test_frozen_weights_stay_parameters_and_their_statistics_do_not_move(data: Path) -> None:
    model = build(task_of(data, "get_frozen"))
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == {
        "base/base_conv/kernel",
        "base/base_conv/bias",
        "base/base_norm/gamma",
        "base/base_norm/beta",
    }
    before = {name: value.clone() for name, value in model.named_buffers()}
    model.train()(torch.rand(6, 8, 8, 1))
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_layers_that_the_configuration_freezes_keep_their_statistics(data: Path) -> None:
    model = build(task_of(data, "get_convolutional"))
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith("batch_normalization"))
    before = {name: value.clone() for name, value in model.named_buffers()}
    model.train()(torch.rand(6, 8, 8, 1))
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_random_numbers_are_those_of_seed_epoch_step_and_logical_worker(data: Path) -> None:
    task = task_of(data, "get_subclassed")
    model, batch = build(task), batch_of(8)

    def loss_at(step: int, logical_worker: int) -> float:
        seed_step(0, 0, step, logical_worker, CPU)
        return float(task.training_loss(model.train(), batch).values[0])

    assert loss_at(1, 0) == loss_at(1, 0)
    assert len({loss_at(1, 0), loss_at(1, 1), loss_at(2, 0)}) == 3
    model.eval()
    assert float(task.eval_outputs(model, batch).loss) == float(task.eval_outputs(model, batch).loss)


def test_dropout_has_the_distribution_of_keras(data: Path) -> None:
    """Masks cannot be those of Keras' own generators; in number they can."""
    model = build(task_of(data, "get_convolutional")).train()
    dropped = []
    layer = next(layer for layer in model.program.layers if isinstance(layer, keras.layers.Dropout))
    x = torch.ones(64, 6, 6, 4)
    for step in range(20):
        seed_step(0, 0, step, 0, CPU)
        model.seed_generators()
        dropped.append(float((layer(x, training=True) == 0).float().mean()))
    count = x.numel() * len(dropped)
    assert abs(np.mean(dropped) - 0.3) < 4 * np.sqrt(0.3 * 0.7 / count)
    assert len(set(dropped)) > 10, "every step has a mask of its own"


def test_two_inputs_and_outputs_go_by_their_names(data: Path) -> None:
    columns = {"inputs": {"picture": "image", "number": "id"}, "target": {"kind": "label", "size": "id"}}
    task = task_of(data, "get_two_inputs", **columns)
    model, batch = build(task), batch_of(6)
    result = task.eval_outputs(model, batch)
    x = {"picture": batch["image"].movedim(1, -1).float(), "number": batch["id"][:, None].float()}
    y = {"kind": batch["label"], "size": batch["id"][:, None].float()}
    expected = model.program.evaluate(x, y, verbose=0, return_dict=True)
    assert float(result.loss) == pytest.approx(expected.pop("loss"), rel=1e-6)
    metrics = task.metrics()
    task.update(metrics, result, batch)
    assert {name: float(value) for name, value in metrics.compute().items()} == pytest.approx(expected, rel=1e-6)
    with torch.inference_mode():
        assert task.predictions(task.forward(model, batch), batch).keys() == {"kind", "size"}


def test_a_model_with_its_own_loss_needs_no_target(data: Path) -> None:
    task = task_of(data, "get_autoencoder", target=None)
    assert task.columns() == ["image"]
    gradients = gradients_of(task, build(task), batch_of(6))
    assert all(float(value.abs().sum()) > 0 for value in gradients.values())


def test_channels_come_first_where_the_model_declares_it() -> None:
    model = keras_programs.get_channels_first()
    image = torch.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    assert torch.equal(fit_inputs(model, image), image.movedim(-1, 1))
    assert torch.equal(fit_inputs(model, image.movedim(-1, 1)), image.movedim(-1, 1))


def test_a_program_may_be_a_file(data: Path, tmp_path: Path) -> None:
    program, file = keras_programs.get_plain(), tmp_path / "model.keras"
    program.save(file)
    spec = {"class_path": "keras.saving.load_model", "init_args": {"filepath": str(file)}}
    task = task_of(data, "", model=spec)
    model = build(task)
    assert all(torch.equal(p, v.value) for p, v in zip(model.parameters(), program.weights, strict=True))
    gradients = gradients_of(task, model, batch_of(6))
    assert all(float(value.abs().sum()) > 0 for value in gradients.values())
    assert task.optimizer_fields()["optimizer"]["init_args"]["serialized"]["class_name"] == "SGD"


def test_a_loss_of_the_class_of_a_model_is_that_of_fit(data: Path) -> None:
    task, batch = task_of(data, "get_own_loss"), batch_of(12)
    model = build(task)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = gradients_of(task, model, batch)
    image = batch["image"].movedim(1, -1).float().numpy()
    model.program.fit(image, batch["label"].numpy(), batch_size=12, epochs=1, verbose=0)
    for name, p in model.named_parameters():
        np.testing.assert_allclose(p.detach(), start[name] - 0.01 * gradients[name], 1e-5, 1e-6)


@pytest.mark.parametrize("weights", [{0: 3.0, 2: 0.5}, "id"])
def test_weights_of_classes_and_rows_are_those_of_fit(data: Path, weights: Any) -> None:
    init_args = {"sample_weight": weights} if isinstance(weights, str) else {"class_weight": weights}
    task = task_of(data, "get_plain", **init_args)
    model, batch = build(task), batch_of(12)
    gradients = gradients_of(task, model, batch)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    sample_weight = {"sample_weight": np.arange(12.0)} if isinstance(weights, str) else {"class_weight": weights}
    image = batch["image"].movedim(1, -1).float().numpy()
    model.program.fit(image, batch["label"].numpy(), batch_size=12, epochs=1, verbose=0, **sample_weight)
    for name, p in model.named_parameters():
        np.testing.assert_allclose(p.detach(), start[name] - 0.01 * gradients[name], 1e-5, 1e-6)


def test_the_optimizer_of_compile_is_that_of_the_run(data: Path) -> None:
    fields = task_of(data, "get_convolutional").optimizer_fields()
    assert fields["optimizer"]["init_args"]["serialized"]["class_name"] == "Adam"
    assert fields["schedule"]["init_args"]["serialized"]["class_name"] == "ExponentialDecay"


def config_of(data: Path, function: str, callbacks: str | None = None, **fields: Any) -> Config:
    init_args = {"model": PROGRAMS + function, "inputs": "image", "target": "label"}
    if callbacks is not None:
        init_args["callbacks"] = PROGRAMS + callbacks
    task = {"class_path": "ray_app.task.keras.KerasTask", "init_args": init_args}
    return Config().replace(
        task=task, **{"data__path": str(data), "data__global_batch_size": 8, "scaling__max_workers": 2, **fields}
    )


def prepare_run(data: Path, function: str, callbacks: str | None = None, **fields: Any) -> Config:
    return prepare(config_of(data, function, callbacks, **fields)).job.config


@pytest.mark.parametrize(
    ("function", "fields", "words"),
    [
        ("get_own_loop", {}, "overrides fit"),
        ("get_uncompiled", {}, "not compiled"),
        ("get_summed", {"train__strategy": "local_sgd", "train__local_steps": 2}, "reduction='sum'"),
        ("get_clipped", {"train__strategy": "fsdp"}, "global_clipnorm|whole weights"),
        ("get_plain", {"train__capture": True}, "train.capture"),
    ],
)
def test_what_cannot_be_trained_is_refused(data: Path, function: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare_run(data, function, **fields)


def test_a_metric_that_is_no_sum_needs_merge_state(data: Path) -> None:
    with pytest.raises(ConfigError, match="'highest' of KerasTask"):
        prepare_run(data, "get_unmerged", data__eval_path=str(data))
    prepare_run(data, "get_measured", data__eval_path=str(data))


def test_random_numbers_in_an_evaluation_are_a_warning(data: Path) -> None:
    warnings = prepare(config_of(data, "get_noisy", data__eval_path=str(data))).warnings
    expected = "'loss', as the evaluation of KerasTask computes it, changes"
    assert [warning.startswith(expected) for warning in warnings].count(True) == 1, warnings


def test_only_means_over_rows_are_means() -> None:
    """The root of a mean over all rows is not the mean of the roots of batches."""
    metrics = keras.metrics
    assert [library.is_mean(one()) for one in (metrics.MeanSquaredError, metrics.BinaryAccuracy)] == [True, True]
    assert not library.is_mean(metrics.RootMeanSquaredError())


def test_the_optimizer_of_the_configuration_counts_more(data: Path) -> None:
    config = prepare_run(data, "get_plain", optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.5}})
    assert config.optimizer.class_path == "torch.optim.AdamW"
    assert config.schedule is None


def test_a_callback_names_the_metric_of_the_best_checkpoint(data: Path) -> None:
    config = prepare_run(data, "get_measured", "get_callbacks", data__eval_path=str(data))
    assert (config.evaluate.metric, config.evaluate.mode) == ("accuracy", "max")
    assert config.evaluate.patience is None


def test_callbacks_that_decide_by_an_evaluation_need_evaluation_data(data: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.eval_path is missing"):
        prepare_run(data, "get_measured", "get_callbacks")


def test_a_callback_and_the_configuration_decide_by_one_metric(data: Path) -> None:
    """Otherwise the mode of the one would be that of the other."""
    fields = {"data__eval_path": str(data), "evaluate__metric": "loss"}
    with pytest.raises(ConfigError, match="'loss', but a callback monitors val_accuracy"):
        prepare_run(data, "get_measured", "get_callbacks", **fields)
    assert prepare_run(data, "get_measured", "get_callbacks", **fields | {"evaluate__metric": "accuracy"})


def test_callbacks_are_known_before_the_data(data: Path) -> None:
    """A retraining compares a champion by the metric that its callbacks name."""
    task = KerasTask(PROGRAMS + "get_measured", "image", "label", callbacks=PROGRAMS + "get_callbacks")
    assert task.configuration_fields()["evaluate.metric"] == "accuracy"
    stored = json.loads(json.dumps(vars(task_of(data, "get_measured", callbacks=PROGRAMS + "get_callbacks"))))
    assert KerasTask.from_settings(stored).configuration_fields() == task.configuration_fields()


def test_the_callbacks_that_run_are_those_that_do_what_no_run_does(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ray_app")
    runner = task_of(data, "get_plain", callbacks=PROGRAMS + "get_callbacks").intervener()
    assert isinstance(runner, CallbackRunner)
    assert "ProgbarLogger: a run always shows its progress" in caplog.text
    assert task_of(data, "get_plain").intervener() is None
    with pytest.raises(ConfigError, match=r"task\.init_args\.callbacks is 'print'"):
        task_of(data, "get_plain", callbacks="print")


def test_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: "tensorflow")
    with pytest.raises(ConfigError, match="KERAS_BACKEND=torch in the environment"):
        library.import_keras()


def test_the_backend_is_chosen_before_keras_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    library.choose_backend()
    assert os.environ["KERAS_BACKEND"] == "tensorflow", "Keras runs already"
    monkeypatch.delitem(sys.modules, "keras")
    library.choose_backend()
    assert os.environ["KERAS_BACKEND"] == "torch"


def test_the_program_of_an_optimizer_is_that_of_the_task(data: Path) -> None:
    """The settings of a package cannot name another one."""
    task = prepare(config_of(data, "get_plain")).job.task
    assert isinstance(task, KerasTask)
    fields = json.dumps({"optimizer": {"init_args": {"program": json.dumps({"class_path": "os.system"})}}})
    restored = task.restore({**vars(task), "compiled": {**task.compiled, "fields": fields}}, "It")
    assert json.loads(restored.optimizer_fields()["optimizer"]["init_args"]["program"]) == task.model
