"""The strategies of `tf.distribute`: their replicas, their fields, the models of their scopes, and what is refused."""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from ray_app.cli.launch import Group, Machines
from ray_app.driver.parsing import load_config
from ray_app.errors import ConfigError, RayAppError
from ray_app.keras import (
    CentralStorageStrategy,
    CommunicationOptions,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ParameterServerStrategy,
    TFConfigClusterResolver,
    TPUStrategy,
    fit,
    get_strategy,
    has_strategy,
    strategies,
)
from ray_app.keras.strategies import Strategy, strategy_of
from tests.support import keras_programs

HOSTS = {"worker": ["a:1", "b:1", "c:1"], "ps": ["d:1", "e:1"]}
FORMED = HOSTS | {"chief": ["f:1"], "evaluator": ["g:1"]}


def tf_config(kind: str = "worker", index: int = 0, **hosts: list[str]) -> str:
    return json.dumps({"cluster": HOSTS | hosts, "task": {"type": kind, "index": index}})


@pytest.fixture(autouse=True)
def without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    # Another test of this process may have a cluster.
    monkeypatch.setattr(ray, "is_initialized", lambda: False)


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


def join_nodes(monkeypatch: pytest.MonkeyPatch, value: str, nodes: dict[str, tuple[int, int]]) -> list[str]:
    """Sets `TF_CONFIG`, and makes the machines of its tasks nodes with CPUs and GPUs; returns what the chief sends."""
    monkeypatch.setenv("TF_CONFIG", value)
    machines, sent = TFConfigClusterResolver().machines, list[str]()
    tasks = [name.partition(" ")[0] for name in machines.names]

    @contextmanager
    def join(machine: Machines, label: str) -> Iterator[Group]:
        assert (machine, label) == (machines, f"tf-task={tasks[machine.rank]}")
        amounts = [dict(zip(("CPU", "GPU"), nodes[kind], strict=True)) for kind in tasks]
        described = [{"Labels": {"tf-task": k}, "Resources": r} for k, r in zip(tasks, amounts, strict=True)]
        yield Group(machine, described if machines.nodes else [], sent.append)

    monkeypatch.setattr(strategies, "join", join)
    monkeypatch.setattr(strategies, "_groups", [])
    return sent


def test_all_gpus_of_the_machines_of_tf_config_are_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = {"worker": [f"h{number}:1" for number in range(7)], "ps": []}
    sent = join_nodes(monkeypatch, tf_config(**hosts), {"worker": (32, 4)})
    strategy = MultiWorkerMirroredStrategy()
    assert (strategy.num_replicas_in_sync, sent) == (28, ["28"])
    assert strategy.fields().keys() == {"train.strategy", "scaling.max_workers", "scaling.logical_workers"}


def test_each_task_of_tf_config_has_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"chief": (6, 0), "worker": (4, 0), "ps": (2, 0), "evaluator": (2, 0)}
    join_nodes(monkeypatch, tf_config("chief", **FORMED), sizes)
    servers = ParameterServerStrategy()
    with pytest.raises(ConfigError, match="has no parameter servers"):
        MultiWorkerMirroredStrategy()
    join_nodes(monkeypatch, tf_config("chief", **FORMED | {"ps": []}), sizes)
    mirrored = MultiWorkerMirroredStrategy()
    assert (mirrored.num_replicas_in_sync, servers.num_replicas_in_sync) == (4, 3)
    fields = servers.fields()
    assert {name: value for name, value in fields.items() if not name.startswith("scaling.m")} == {
        "train.strategy": "parameter_server",
        "train.servers": 2,
        "train.server_label_selector": {"tf-task": "ps"},
        "evaluate.where": "actor",
        "evaluate.label_selector": {"tf-task": "evaluator"},
        "scaling.label_selector": {"tf-task": "in(worker)"},
        "scaling.cpus_per_worker": 3,
        "scaling.logical_workers": 3,
    }
    assert mirrored.fields()["scaling.label_selector"] == {"tf-task": "in(chief,master,worker)"}


def test_the_tasks_of_one_machine_are_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = join_nodes(monkeypatch, tf_config(worker=["localhost:1", "localhost:2"], ps=[]), {"worker": (0, 0)})
    strategy = MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == max(2, torch.accelerator.device_count())
    assert strategy.cluster_resolver.cluster_spec().as_dict()["worker"] == ["localhost:1", "localhost:2"]
    assert (strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id, len(sent)) == ("worker", 0, 1)


def test_a_cluster_resolver_says_what_tf_config_would(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(as_dict=lambda: {"worker": ["a:1", "b:1"]})
    resolver = SimpleNamespace(cluster_spec=lambda: spec, task_type="worker", task_id=0)
    join_nodes(monkeypatch, tf_config(worker=["a:1", "b:1"], ps=[]), {"worker": (8, 2)})
    monkeypatch.delenv("TF_CONFIG")
    assert MultiWorkerMirroredStrategy(resolver).num_replicas_in_sync == 4


def test_one_task_needs_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "join", None)
    for value in ("{}", tf_config(worker=["a:1"], ps=[])):
        monkeypatch.setenv("TF_CONFIG", value)
        assert MultiWorkerMirroredStrategy().num_replicas_in_sync == 1


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
        (TPUStrategy, "not on TPUs"),
        (lambda: MultiWorkerMirroredStrategy(workers=-1), "at least 1"),
    ],
)
def test_an_argument_without_a_counterpart_is_refused(make: Callable[[], Strategy], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (tf_config(index=1), r"this process is worker 1 \(b:1\)"),
        (tf_config("ps"), "this process is ps 0"),
        (tf_config(chief=["f:1"]), "this process is worker 0"),
        ("[]", "which names no machines"),
        ("{", "which names no machines"),
    ],
)
def test_in_a_ray_cluster_only_one_process_of_tf_config_starts_the_program(
    monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    monkeypatch.setenv("TF_CONFIG", value)
    monkeypatch.setenv("RAY_ADDRESS", "a:6379")
    with pytest.raises(ConfigError, match=message):
        ParameterServerStrategy()


def test_what_a_custom_loop_calls_says_where_loops_are() -> None:
    with pytest.raises(AttributeError, match=r"has no run here.*docs/loop\.md#a-loop-with-a-keras-model"):
        MirroredStrategy(["cpu:0"]).run(print)


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (CommunicationOptions(), {"train.backend": "auto"}),
        (CommunicationOptions(8 << 20, 60.0, "NCCL"), {"bucket": 8.0, "timeout": 60.0, "train.backend": "auto"}),
        (CommunicationOptions(implementation=SimpleNamespace(value="RING")), {"train.backend": "gloo"}),
    ],
)
def test_communication_options_are_fields(options: Any, fields: dict[str, Any]) -> None:
    names = {"bucket": "train.bucket_mb", "timeout": "failure.step_timeout_s"}
    expected = {names.get(name, name): value for name, value in fields.items()}
    strategy = MultiWorkerMirroredStrategy(communication_options=options)
    assert {name: value for name, value in strategy.fields().items() if name in expected} == expected


def test_arguments_that_change_nothing_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        MirroredStrategy(["cpu:0"], cross_device_ops=object())
        ParameterServerStrategy(variable_partitioner=object(), workers=1)
        CentralStorageStrategy(["cpu:0"], parameter_device="cpu:0")
    assert [message.partition(" ")[0] for message in caplog.messages] == [
        "cross_device_ops",
        "variable_partitioner",
        "parameter_device",
    ]


def test_the_present_strategy_is_that_of_the_scope() -> None:
    assert (has_strategy(), get_strategy().num_replicas_in_sync) == (False, 1)
    strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        assert has_strategy()
        assert get_strategy() is strategy
    with get_strategy().scope() as default:
        assert default.fields()["train.strategy"] == "single"


@pytest.mark.parametrize(("line", "message"), [("", "has ended; see its output there"), (None, None)])
def test_another_process_ends_with_the_chief_or_without_the_folder_of_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str | None, message: str
) -> None:
    sent = json.dumps({"path": str(tmp_path / "run"), "course": {}}) if line is None else line
    monkeypatch.setenv("TF_CONFIG", tf_config(index=1, ps=[]))
    group = Group(TFConfigClusterResolver().machines, receive=lambda: sent)
    monkeypatch.setattr(strategies, "_groups", [group])
    with MultiWorkerMirroredStrategy(workers=2).scope():
        model = keras_programs.get_plain()
    with pytest.raises(RayAppError if message else SystemExit, match=message) as raised:
        fit(model, None)
    if not message:
        assert isinstance(raised.value, SystemExit)
        assert raised.value.code == 0
        assert "This machine does not have its folder" in capsys.readouterr().out
