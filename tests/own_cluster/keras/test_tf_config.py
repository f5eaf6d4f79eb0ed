"""One Keras program, started in every process of `TF_CONFIG`, makes one run over their machines, one or several."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_app.runlog.paths import RunPaths
from ray_app.runlog.stored_config import read_config
from tests.support.hosts import Namespaces, skip_unless_supported
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

PROGRAM = """
import json, sys
from pathlib import Path
from ray_app.keras import MultiWorkerMirroredStrategy, fit
import keras
import numpy as np
import ray

class Where(keras.layers.Layer):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def call(self, x, training=None):
        if ray.is_initialized() and not keras.backend.is_keras_tensor(x):
            kind = "train" if training else "evaluate"
            Path(self.folder, f"{kind}-{ray.util.get_node_ip_address()}").touch()
        return x

strategy = MultiWorkerMirroredStrategy()
resolver = strategy.cluster_resolver
x, y = np.random.default_rng(0).random((64, 8), dtype=np.float32), np.arange(64) % 3
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), Where(sys.argv[2]), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
fields = {"run.storage_path": sys.argv[1], "tracking.enabled": False, "scaling.min_workers": 2}
size = 8 * strategy.num_replicas_in_sync
history = fit(model, x, y, batch_size=size, epochs=2, verbose=0, validation_data=(x, y), fields=fields)
result = {"task": [resolver.task_type, resolver.task_id], "replicas": strategy.num_replicas_in_sync}
result |= {"history": history.history, "weights": [w.tolist() for w in model.get_weights()]}
result |= {"path": str(history.result.path), "loss": model.evaluate(x, y, verbose=0)[0]}
print(json.dumps(result))
"""


def variables(cluster: dict[str, list[str]], kind: str, index: int) -> dict[str, str]:
    """Returns the environment of a process of `TF_CONFIG`."""
    spec = {"cluster": cluster, "task": {"type": kind, "index": index}}
    clean = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return clean | {"TF_CONFIG": json.dumps(spec), "PYTHONPATH": str(ROOT), "RAY_AUTH_TOKEN": "f" * 64}


def read_results(processes: list[subprocess.Popen[bytes]], files: list[Path]) -> list[dict[str, Any]]:
    """Waits for the processes, and returns what each has printed last; all of them tell the same of the run."""
    codes = [process.wait(300) for process in processes]
    assert not any(codes), "\n".join(file.read_text()[-3000:] for file in files)
    results = [json.loads(file.read_text().splitlines()[-1]) for file in files]
    shared = [{name: value for name, value in result.items() if name != "task"} for result in results]
    assert all(one == shared[0] for one in shared)
    return results


def test_the_processes_of_one_machine_have_the_history_and_the_weights_of_the_chief(tmp_path: Path) -> None:
    cluster = {"worker": ["localhost:21345", "localhost:21355"]}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "runs"), str(tmp_path)]
    files, processes = [tmp_path / "0", tmp_path / "1"], []
    for index, file in enumerate(files):
        with file.open("w") as output:
            environment = variables(cluster, "worker", index)
            processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
    results = read_results(processes, files)
    assert [result["task"] for result in results] == [["worker", 0], ["worker", 1]]
    assert results[0]["replicas"] == 2
    assert results[0]["loss"] == pytest.approx(results[0]["history"]["val_loss"][-1])


def test_a_process_of_a_parameter_server_waits_beside_the_chief(tmp_path: Path) -> None:
    cluster = {kind: [f"localhost:2{number}365"] for number, kind in enumerate(("chief", "worker", "ps"))}
    program = PROGRAM.replace("MultiWorkerMirrored", "ParameterServer").replace('min_workers": 2', 'min_workers": 1')
    files, processes = [tmp_path / kind for kind in cluster], []
    for kind, file in zip(cluster, files, strict=True):
        with file.open("w") as output:
            command = [sys.executable, "-c", program, str(tmp_path / "runs"), str(tmp_path)]
            environment = variables(cluster, kind, 0)
            processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
    results = read_results(processes, files)
    assert [result["task"] for result in results] == [["chief", 0], ["worker", 0], ["ps", 0]]
    train = read_config(RunPaths(Path(results[0]["path"]))).train
    assert (train.strategy, train.servers, results[0]["replicas"]) == ("parameter_server", 1, 1)


@pytest.fixture
def namespaces() -> Iterator[Namespaces]:
    skip_unless_supported()
    hosts = Namespaces(3)
    yield hosts
    hosts.close()


def test_the_machines_of_all_tasks_serve_the_run_each_in_its_role(namespaces: Namespaces, tmp_path: Path) -> None:
    address = [f"{namespaces.address_of(host)}:23456" for host in (1, 2, 3)]
    tasks = {"chief": address[:1], "worker": address[1:2], "evaluator": address[2:]}
    files, processes = [], []
    for host, kind in enumerate(tasks, 1):
        # So many CPUs that a worker takes a whole machine.
        environment = variables(tasks, kind, 0) | {"SLURM_CPUS_ON_NODE": "4"}
        files.append(tmp_path / kind)
        with files[-1].open("w") as output:
            command = [sys.executable, "-c", PROGRAM, str(tmp_path / "runs"), str(tmp_path)]
            processes.append(namespaces.popen(host, command, environment, output))
    results = read_results(processes, files)
    assert [result["task"] for result in results] == [["chief", 0], ["worker", 0], ["evaluator", 0]]
    assert results[0]["replicas"] == 2
    config = read_config(RunPaths(Path(results[0]["path"])))
    assert config.scaling.label_selector == {"tf-task": "in(chief,master,worker)"}
    assert (config.evaluate.where, config.evaluate.label_selector) == ("actor", {"tf-task": "evaluator"})
    train, evaluate = (
        {file.name.partition("-")[2] for file in tmp_path.glob(f"{kind}-*")} for kind in ("train", "evaluate")
    )
    chief, worker, evaluator = (namespaces.address_of(host) for host in (1, 2, 3))
    assert train == {chief, worker}, "each has a replica"
    assert evaluator in evaluate
    wait_until(lambda: [namespaces.process_count(host) for host in (1, 2, 3)] == [0, 0, 0])
