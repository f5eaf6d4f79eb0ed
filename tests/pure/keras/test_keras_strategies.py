"""The strategies of `tf.distribute`: their replicas, their fields, the models of their scopes, and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ray_app.driver.parsing import load_config
from ray_app.errors import ConfigError
from ray_app.keras import (
    CentralStorageStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ParameterServerStrategy,
)
from ray_app.keras.strategies import Strategy, strategy_of
from tests.support import keras_programs

HOSTS = {"worker": ["a:1", "b:1", "c:1"], "ps": ["d:1", "e:1"]}


def tf_config(kind: str = "worker", index: int = 0, **hosts: list[str]) -> str:
    return json.dumps({"cluster": HOSTS | hosts, "task": {"type": kind, "index": index}})


@pytest.fixture(autouse=True)
def without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)


TWO_CPUS = ["/cpu:0", "/device:CPU:1"]
MAPPINGS: list[tuple[Callable[[], Strategy], str, dict[str, Any]]] = [
    (lambda: MirroredStrategy(TWO_CPUS), "ddp", {"replicas": 2, "scaling.gpus_per_worker": 0}),
    (lambda: MirroredStrategy(["GPU:1", "GPU:0"]), "ddp", {"replicas": 2, "scaling.gpus_per_worker": 1}),
    (MultiWorkerMirroredStrategy, "ddp", {"replicas": 1}),
    (lambda: MultiWorkerMirroredStrategy(workers=4), "ddp", {"replicas": 4}),
    (lambda: CentralStorageStrategy(TWO_CPUS), "central_storage", {"replicas": 2, "scaling.gpus_per_worker": 0}),
    (lambda: ParameterServerStrategy(workers=2), "parameter_server", {"replicas": 2, "train.servers": 1}),
    (lambda: OneDeviceStrategy("/cpu:0"), "single", {"replicas": 1, "scaling.gpus_per_worker": 0}),
]


@pytest.mark.parametrize(("make", "strategy", "expected"), MAPPINGS)
def test_a_strategy_is_fields_of_the_configuration(
    make: Callable[[], Strategy], strategy: str, expected: dict[str, Any]
) -> None:
    mapped = make()
    replicas = expected.pop("replicas")
    assert mapped.num_replicas_in_sync == replicas
    numbers = {"scaling.max_workers": replicas, "scaling.logical_workers": replicas}
    fields = mapped.fields()
    assert fields == {"train.strategy": strategy, **numbers, **expected}
    task = {
        "class_path": "ray_app.task.keras.KerasTask",
        "init_args": {"model": "tests.support.keras_programs.get_plain", "inputs": "x"},
    }
    config = load_config(task=task, data__path="data", **{k.replace(".", "__"): v for k, v in fields.items()})
    assert config.train.strategy == strategy


def test_all_gpus_of_the_machine_are_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MirroredStrategy().num_replicas_in_sync == max(1, torch.accelerator.device_count())
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert MirroredStrategy().num_replicas_in_sync == 4


@pytest.mark.parametrize(
    ("value", "workers"), [(tf_config(), 3), (tf_config("chief"), 3), (tf_config("chief", chief=["f:1"]), 4)]
)
def test_tf_config_says_how_many_workers_there_are(monkeypatch: pytest.MonkeyPatch, value: str, workers: int) -> None:
    monkeypatch.setenv("TF_CONFIG", value)
    assert MultiWorkerMirroredStrategy().num_replicas_in_sync == workers
    servers = ParameterServerStrategy()
    assert (servers.num_replicas_in_sync, servers.fields()["train.servers"]) == (3, 2)


def test_a_model_has_the_strategy_of_the_innermost_scope_that_made_it() -> None:
    outer, inner = MirroredStrategy(["cpu:0"]), OneDeviceStrategy("cpu:0")
    others = []
    with outer.scope() as entered:
        assert entered is outer
        assert strategy_of(keras_programs.get_dense) is outer
        functional, subclassed = keras_programs.get_plain(), keras_programs.get_subclassed()
        with inner.scope():
            sequential = keras_programs.get_linear()
        thread = threading.Thread(target=lambda: others.append(keras_programs.get_linear()))
        thread.start()
        thread.join()
    after = keras_programs.get_plain()
    assert [strategy_of(model) for model in (functional, subclassed, sequential)] == [outer, outer, inner]
    assert [strategy_of(model) for model in (after, *others, keras_programs.get_dense)] == [None, None, None]
    assert functional.to_json() is not None


def test_a_scope_ends_with_an_error() -> None:
    with pytest.raises(ZeroDivisionError), MirroredStrategy(["cpu:0"]).scope():
        raise ZeroDivisionError
    assert strategy_of(keras_programs.get_plain()) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MirroredStrategy(["gpu:0", "cpu:0"]), "all GPUs"),
        (lambda: MirroredStrategy(["tpu:0"]), "all GPUs"),
        (lambda: MirroredStrategy([]), "all GPUs"),
        (lambda: MirroredStrategy(["gpu:0", "gpu:2"]), "CUDA_VISIBLE_DEVICES=0,2"),
        (lambda: MirroredStrategy(cross_device_ops=object()), "one fixed order"),
        (lambda: MultiWorkerMirroredStrategy(object()), "Ray knows the machines"),
        (lambda: MultiWorkerMirroredStrategy(communication_options=object()), "train.backend"),
        (lambda: MultiWorkerMirroredStrategy(workers=-1), "at least 1"),
        (lambda: CentralStorageStrategy(parameter_device="cpu:0"), "host memory"),
        (lambda: ParameterServerStrategy(variable_partitioner=object()), "servers="),
    ],
)
def test_an_argument_without_a_counterpart_is_refused(make: Callable[[], Strategy], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (tf_config(index=1), "this process is worker 1"),
        (tf_config("ps"), "this process is ps 0"),
        (tf_config(chief=["f:1"]), "this process is worker 0"),
        ("[]", "not JSON as TensorFlow reads it"),
        ("{", "not JSON as TensorFlow reads it"),
    ],
)
def test_only_one_process_of_tf_config_starts_the_program(
    monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    monkeypatch.setenv("TF_CONFIG", value)
    with pytest.raises(ConfigError, match=message):
        MultiWorkerMirroredStrategy()


def test_what_a_custom_loop_calls_says_where_loops_are() -> None:
    with pytest.raises(AttributeError, match=r"has no run here.*docs/loop\.md"):
        MirroredStrategy(["cpu:0"]).run(print)
