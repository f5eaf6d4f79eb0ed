"""A run restores the settings of its process, such as a notebook's kernel, ends its own cluster, and does not disturb
another run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.paths import ROOT
from tests.support.waiting import wait_until

_LIMIT_S = 300
_BEGIN = """
import io, json, os, signal, sys, threading, time
import psutil, ray, torch
from ray.data.context import DataContext
from rich.console import Console
from ray_app import load_config, run_training, start_training

DATA, FOLDER, ADDRESS = sys.argv[1:]
me, quiet = psutil.Process(), Console(file=io.StringIO())

def config(name, **fields):
    common = {"data__path": DATA + "/train", "data__eval_path": DATA + "/eval", "run__storage_path": FOLDER, "run__name": name}
    return load_config("conf/digits.yaml", **common, scaling__max_workers=1, **({"tracking__enabled": False, "train__epochs": 1} | fields))

def trained(name, **fields):
    return run_training(config(name, **fields), quiet).status

def is_prepared(process):
    try:
        return process.name() == "ray::IDLE" and "libtorch_cpu" in str(process.memory_maps())
    except psutil.NoSuchProcess:
        return False

def prepared():
    return {process.pid for process in me.children(recursive=True) if is_prepared(process)}

def children():
    return sorted(each.name() for each in me.children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE)
"""  # noqa: E501
_SETTINGS = """
signal.signal(signal.SIGTERM, lambda *_: None)

def settings():
    own = ("MLFLOW_HTTP", "RAY_AUTH", "RAY_TRAIN_HEALTH", "PYTHONPATH", "CUBLAS", "TORCHINDUCTOR_DETERMINISTIC")
    return [
        {name: value for name, value in os.environ.items() if name.startswith(own)},
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory, torch.get_num_threads(),
        torch.get_rng_state().tolist(), DataContext.get_current().enable_progress_bars, ray.is_initialized(), children(),
    ]

found, before = {}, settings()
for name, fields in {"single": {"train__strategy": "single"}, "workers": {"data__cache": "none"}}.items():
    status = trained(name, tracking__enabled=True, **fields)
    found[name] = [status, *(a == b for a, b in zip(before, settings()))]
print(json.dumps(found))
"""  # noqa: E501
_TWO = """
first = start_training(config("first"))
second = start_training(config("second", train__epochs=12))
was_there = 0
while "running" in (first.status, second.status):
    was_there += first.status == "finished" and second.status == "running" and ray.is_initialized()
    time.sleep(0.1)
print(json.dumps([first.status, second.status, was_there > 0, ray.is_initialized(), children()]))
"""
_INTERRUPTED = """
def shoot():
    while not any(name.startswith("gcs_server") for name in children()):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=shoot).start()
try:
    said = trained("stopped")
except KeyboardInterrupt:
    said = "interrupted"
print(json.dumps([said, ray.is_initialized(), children(), trained("stopped")]))
"""
_IN_FRONT = """
from ray_app.errors import ConfigError
from tests.support.waiting import wait_until

def refusal(begin, name):
    try:
        return begin(name)
    except ConfigError as error:
        return str(error)

said = [refusal(lambda name: start_training(config(name, train__strategy="single")).wait().status, "background")]
first = threading.Thread(target=lambda: said.append(trained("first", train__strategy="single", train__epochs=10)))
first.start()
wait_until(lambda: os.path.exists(FOLDER + "/first/metrics"), "it did not begin", 60)
said.append(refusal(lambda name: trained(name, train__strategy="single"), "second"))
first.join()
said.append(trained("third", train__strategy="single"))
print(json.dumps(said))
"""
_OTHER_MODE = """
print(json.dumps([trained("joined", run__ray_address=ADDRESS), trained("own"), trained("again", run__ray_address=ADDRESS)]))
"""  # noqa: E501
_HEAD = """
import sys
from ray.cluster_utils import Cluster
print(Cluster(initialize_head=True, head_node_args={"num_cpus": 4}).address, flush=True)
sys.stdin.read()
"""


def last_output(code: str, data: Path, folder: Path, address: str = "") -> Any:
    """Runs a script in another process, as the cells of a notebook, and returns the last line that it prints."""
    command = [sys.executable, "-c", _BEGIN + code, str(data), str(folder), address]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.rest
def test_a_run_restores_the_settings_of_its_process(digits: Path, tmp_path: Path) -> None:
    flags = last_output(_SETTINGS, digits, tmp_path)
    assert {name: values[0] for name, values in flags.items()} == {"single": "finished", "workers": "finished"}
    assert {name: values[1:] for name, values in flags.items()} == dict.fromkeys(flags, [True] * 9)


@pytest.mark.rest
def test_the_first_run_to_end_leaves_the_shared_cluster_to_the_other(digits: Path, tmp_path: Path) -> None:
    assert last_output(_TWO, digits, tmp_path) == ["finished", "finished", True, False, []]


@pytest.mark.rest
def test_an_interrupt_during_the_cluster_start_leaves_no_process(digits: Path, tmp_path: Path) -> None:
    assert last_output(_INTERRUPTED, digits, tmp_path) == ["interrupted", False, [], "finished"]


@pytest.mark.rest
def test_in_process_runs_are_refused_where_they_would_share_random_state(digits: Path, tmp_path: Path) -> None:
    in_background, second, first, third = last_output(_IN_FRONT, digits, tmp_path)
    assert "Use run_training, or another strategy" in in_background
    assert "Wait until it ends, or use another strategy" in second
    assert (first, third) == ("finished", "finished")


@pytest.mark.rest
def test_a_cluster_without_tokens_is_joined_again_after_an_own_cluster(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with monkeypatch.context() as head_environment:
        head_environment.setenv("RAY_AUTH_MODE", "disabled")
        head = subprocess.Popen(
            [sys.executable, "-c", _HEAD], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    try:
        assert head.stdout is not None
        address = head.stdout.readline().strip()
        assert last_output(_OTHER_MODE, digits, tmp_path, address) == ["finished"] * 3
    finally:
        head.communicate("", timeout=_LIMIT_S)


_SESSION = """
from ray_app import session
from ray_app.cluster.rendezvous.actor import RendezvousHandle
from tests.support.waiting import wait_until
import shifting

pids = []

def observe(job):
    pids.extend(worker.pid for worker in RendezvousHandle(ray.get_actor(job.rendezvous)).workers())

def train(name):
    pids.clear()
    result = run_training(config(name), quiet, observe=observe)
    return result.summary["params_digest"], set(pids)

with session():
    first = train("first")
    wait_until(lambda: len(prepared()) >= 3, "the processes of the next run are not ready")
    before = prepared()
    second = train("second")
    address = ray.get_runtime_context().gcs_address
    os.utime(shifting.__file__, (1, 1))
    # The thread that starts the other cluster ends before the last run uses it.
    thread = threading.Thread(target=train, args=("third",))
    thread.start()
    thread.join()
    replaced = ray.get_runtime_context().gcs_address != address
    fourth = train("fourth")
print(json.dumps([len({first[0], second[0], fourth[0]}), bool(second[1]) and second[1] <= before, bool(second[1] & first[1]),
                  replaced, ray.is_initialized()]))
"""  # noqa: E501


def test_runs_of_a_session_share_a_cluster_and_start_in_processes_that_are_prepared(
    digits: Path, tmp_path: Path
) -> None:
    (tmp_path / "shifting.py").write_text("")
    path = f"sys.path.append({str(tmp_path)!r})\n"
    digests, is_prepared, is_used_twice, is_replaced, is_connected = last_output(path + _SESSION, digits, tmp_path)
    assert (digests, is_prepared, is_used_twice, is_replaced, is_connected) == (1, True, False, True, False)


_ENDING = """
from ray_app import session
from tests.support.waiting import wait_until

session()
trained("first")
wait_until(prepared, "the processes of the next run are not ready")
processes = [each for each in me.children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]
services = [process.pid for process in processes if {"monitor.py", "dashboard.py", "log_monitor.py"}
            & {os.path.basename(part) for part in process.cmdline()}]
print(json.dumps([[process.pid for process in processes], services]), flush=True)
"""


@pytest.mark.parametrize("end", ["", "os.kill(me.pid, signal.SIGKILL)"])
def test_the_processes_of_a_session_end_with_the_program(digits: Path, tmp_path: Path, end: str) -> None:
    command = [sys.executable, "-c", _BEGIN + _ENDING + end, str(digits), str(tmp_path), ""]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert (done.returncode != 0) == bool(end), done.stderr
    processes, services = json.loads(done.stdout.splitlines()[-1])
    assert len(processes) > 4
    assert services == [], "no one uses the autoscaler and the dashboard of such a cluster"
    # The agents of Ray look for their parent once in a while.
    wait_until(lambda: not any(map(psutil.pid_exists, processes)), "processes are left")
