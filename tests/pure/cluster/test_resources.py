"""The number that `scaling.max_workers: all` resolves to, what a run leaves idle, and label selectors of evaluator and
parameter servers.
"""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.train import ScalingConfig
from rich.console import Console

from ray_app import load_config
from ray_app.cluster import resources as resources_module
from ray_app.cluster.controller.scaling_policy import ElasticPolicy
from ray_app.cluster.resources import (
    ClusterCapacity,
    cluster,
    count_fitting_on_gpus,
    is_alone,
    keep_connection,
    keeps_local_cluster,
    reconnect,
    resolve_scaling,
    session,
    workers_that_fit,
)
from ray_app.config.checks import check_config
from ray_app.config.config import Config, from_yaml
from ray_app.driver import run as run_module
from ray_app.driver import train_thread
from ray_app.driver.run import describe_use, open_run
from ray_app.errors import ConfigError
from ray_app.preflight.prepare import claim, prepare
from ray_app.runlog.lease import acquire_lease
from ray_app.runlog.stored_config import read_config
from tests.support.paths import ROOT


def node(name: str, cpus: float, gpus: float = 0, **labels: str) -> dict[str, Any]:
    resources = {"CPU": cpus, "GPU": gpus}
    return {"NodeID": name, "NodeManagerAddress": name, "Alive": True, "Labels": labels, "Resources": resources}


NODES = [node("1", 16, 4, zone="a"), node("2", 16, 4, zone="b")]
ALL = Config().replace(
    task__class_path="x",
    data__path="x",
    data__eval_path="x",
    scaling__max_workers="all",
    scaling__gpus_per_worker=0,
    data__global_batch_size=60,
    evaluate__where="actor",
)


@pytest.fixture
def two_node_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 32.0, "GPU": 8.0})
    monkeypatch.setattr(ray, "nodes", lambda: NODES)
    monkeypatch.setattr(resources_module, "max_resources", lambda: None)


@pytest.mark.usefixtures("two_node_cluster")
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 30),
        ({"scaling__cpus_per_worker": 4}, 7),
        ({"scaling__gpus_per_worker": "auto"}, 8),
        ({"scaling__gpus_per_worker": 1}, 8),
        ({"scaling__gpus_per_worker": 1, "evaluate__num_gpus": 1}, 7),
        ({"scaling__logical_workers": 6}, 6),
        ({"scaling__label_selector": {"zone": "a"}}, 15),
        ({"train__strategy": "single"}, 1),
    ],
)
def test_all_resolves_to_the_number_of_workers_that_fit_into_the_cluster(fields: dict[str, Any], expected: int) -> None:
    config = ALL.replace(**fields)
    check_config(config)
    resolved = resolve_scaling(config)
    assert resolved.scaling.max_workers == expected
    assert resolved.replace(scaling=config.to_dict()["scaling"]) == config


AUTO = ALL.replace(scaling__max_workers=1, scaling__gpus_per_worker="auto", data__global_batch_size=64)


@pytest.mark.usefixtures("two_node_cluster")
@pytest.mark.parametrize(
    ("fields", "limits", "expected"),
    [
        ({}, None, 1),
        ({"scaling__min_workers": 9, "scaling__max_workers": 9}, None, 0),
        ({"scaling__min_workers": 8, "scaling__max_workers": 8, "evaluate__num_gpus": 1}, None, 0),
        ({"scaling__cpus_per_worker": 16, "scaling__min_workers": 2, "scaling__max_workers": 2}, None, 0),
        ({"scaling__min_workers": 9, "scaling__max_workers": 9}, {"CPU": 64.0, "GPU": 16.0}, 1),
        ({"scaling__min_workers": 9, "scaling__max_workers": 9}, {"CPU": math.inf, "GPU": math.inf}, 0),
        ({}, {"CPU": math.inf, "GPU": math.inf}, 1),
    ],
)
def test_auto_resolves_to_one_gpu_where_the_workers_fit_onto_gpus(
    fields: dict[str, Any], limits: dict[str, float] | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources_module, "max_resources", lambda: limits)
    config = AUTO.replace(**fields)
    assert resolve_scaling(config) == config.replace(scaling__gpus_per_worker=expected)


@pytest.mark.parametrize(
    ("strategy", "gpus", "expected"), [("single", 1, 1), ("ddp", 1, 1), ("ddp", 0, 0), ("single", 0, 0)]
)
def test_auto_resolves_to_the_gpus_of_a_single_machine(
    strategy: str, gpus: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = AUTO.replace(train__strategy=strategy)
    assert resolve_scaling(config) == config.replace(scaling__gpus_per_worker=expected)


def test_auto_resolves_to_the_stored_number_when_a_run_resumes(two_node_cluster: None) -> None:
    assert resolve_scaling(AUTO, AUTO.replace(scaling__gpus_per_worker=0)).scaling.gpus_per_worker == 0


@pytest.mark.usefixtures("two_node_cluster")
@pytest.mark.parametrize(
    ("fields", "where", "num_gpus"),
    [
        ({"scaling__gpus_per_worker": 0}, "actor", 0),
        ({}, "workers", 0),
        ({"scaling__gpus_per_worker": 0.5}, "workers", 0),
        ({"evaluate__num_gpus": 0.5}, "actor", 0.5),
        ({"evaluate__workers": 2}, "actor", 0),
        ({"train__strategy": "fsdp"}, "actor", 1),
        ({"train__strategy": "fsdp", "scaling__max_workers": 8}, "actor", 0),
        ({"train__strategy": "fsdp", "scaling__max_workers": "all"}, "actor", 1),
        ({"train__strategy": "parameter_server", "scaling__max_workers": 7}, "actor", 1),
        ({"evaluate__where": "actor"}, "actor", 0),
    ],
)
def test_the_process_that_evaluates_has_the_devices_of_training(
    fields: dict[str, Any], where: str, num_gpus: float
) -> None:
    config = AUTO.replace(**{"scaling__max_workers": 2, "evaluate__where": "auto"} | fields)
    resolved = resolve_scaling(config)
    assert (resolved.evaluate.where, resolved.evaluate.num_gpus) == (where, num_gpus)
    if config.scaling.max_workers == "all":
        assert resolved.scaling.max_workers == 7, "a GPU is left to the evaluator"
    resumed = resolve_scaling(config, resolved.replace(evaluate__where="actor", evaluate__num_gpus=num_gpus))
    assert (resumed.evaluate.where, resumed.evaluate.num_gpus) == ("actor", num_gpus), "a run keeps what was resolved"


def test_all_resolves_to_the_largest_size_that_the_autoscaler_allows(
    two_node_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources_module, "max_resources", lambda: {"CPU": 102.0})
    assert resolve_scaling(ALL).scaling.max_workers == 100


def test_all_is_refused_on_a_cluster_whose_autoscaler_has_no_known_limit(
    two_node_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources_module, "max_resources", lambda: {"CPU": math.inf, "GPU": math.inf})
    with pytest.raises(ConfigError, match=r"does not report how many nodes it may start; set a number"):
        resolve_scaling(ALL)
    assert resolve_scaling(ALL.replace(scaling__logical_workers=6)).scaling.max_workers == 6
    assert (
        workers_that_fit(
            ALL.replace(scaling__max_workers=4, scaling__min_workers=4),
            ClusterCapacity({}, max_resources={"CPU": math.inf, "GPU": math.inf}),
        )
        == 4
    )


def test_fractional_gpus_of_workers_share_one_gpu(two_node_cluster: None) -> None:
    config = ALL.replace(scaling__max_workers=9, scaling__gpus_per_worker=0.2)
    assert workers_that_fit(config, ClusterCapacity({"CPU": 32.0, "GPU": 1.0})) == 5
    labelled = config.replace(scaling__label_selector={"zone": "a"})
    assert workers_that_fit(labelled, ClusterCapacity({"CPU": 64.0, "GPU": 1.0}, [node("1", 64, 1, zone="a")])) == 5


@pytest.mark.parametrize(
    ("free_gpus", "gpus_per_worker", "expected"),
    [
        (2.0, 0.6, 2),
        (2.0, 0.5, 4),
        (1.0, 0.2, 5),
        (1.7, 0.6, 2),
        (1.5, 0.6, 1),
        (3.0, 1.0, 3),
        (2.5, 1.0, 2),
        (0.0, 0.6, 0),
        (math.inf, 0.6, math.inf),
    ],
)
def test_a_fractional_gpu_is_a_fraction_of_a_single_gpu(
    free_gpus: float, gpus_per_worker: float, expected: float
) -> None:
    assert count_fitting_on_gpus(free_gpus, gpus_per_worker) == expected


def test_a_worker_that_needs_more_than_half_a_gpu_occupies_a_whole_one(
    two_node_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ALL.replace(scaling__max_workers=9, scaling__gpus_per_worker=0.6)
    assert workers_that_fit(config, ClusterCapacity({"CPU": 32.0, "GPU": 2.0})) == 2
    assert workers_that_fit(config.replace(evaluate__num_gpus=0.4), ClusterCapacity({"CPU": 32.0, "GPU": 2.0})) == 2
    labelled = config.replace(scaling__label_selector={"zone": "a"})
    assert workers_that_fit(labelled, ClusterCapacity({"CPU": 64.0, "GPU": 8.0}, [node("1", 64, 3, zone="a")])) == 3
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert (
        resolve_scaling(config.replace(scaling__max_workers="all", data__global_batch_size=60)).scaling.max_workers == 4
    )


def policy_of(**fields: Any) -> ElasticPolicy:
    """Returns the scaling policy of a run of at most 9 workers, without Ray."""
    config = ALL.replace(scaling__max_workers=9, **fields)
    resources = {"CPU": config.scaling.cpus_per_worker, "GPU": config.scaling.gpus_per_worker}
    scaling = ScalingConfig(num_workers=(1, 9), use_gpu=True, resources_per_worker=resources)
    return ElasticPolicy(scaling, config, 2.0)


def test_the_elastic_policy_counts_fractional_gpus_per_node_as_ray_places_them() -> None:
    policy = policy_of(scaling__gpus_per_worker=0.6)
    assert policy.count_in([{"CPU": 16.0, "GPU": 2.0}, {"CPU": 16.0, "GPU": 1.0}]) == 3
    fifths = policy_of(scaling__gpus_per_worker=0.2)
    assert fifths.count_in([{"CPU": 16.0, "GPU": 1.0}]) == 5
    assert fifths.count_in([{"CPU": 16.0, "GPU": 2.0}]) == 9, "scaling.max_workers limits the number"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"scaling__gpus_per_worker": 1.0}, 8),
        ({"scaling__gpus_per_worker": 1.0, "evaluate__num_gpus": 1}, 7),
        ({"scaling__gpus_per_worker": 1.0, "evaluate__num_gpus": 1, "evaluate__where": "workers"}, 8),
        ({"scaling__gpus_per_worker": 1.0, "evaluate__num_gpus": 1, "data__eval_path": None}, 8),
        ({"scaling__gpus_per_worker": 1.0, "scaling__cpus_per_worker": 6}, 5),
        ({"scaling__gpus_per_worker": 1.0, "evaluate__num_gpus": 1, "scaling__label_selector": {"zone": "a"}}, 3),
    ],
)
def test_no_worker_starts_on_the_gpu_of_the_evaluator(fields: dict[str, Any], expected: int) -> None:
    assert policy_of(**fields).limit_by_total_resources(NODES) == expected


def test_all_resolves_to_the_stored_number_when_a_run_resumes(two_node_cluster: None) -> None:
    assert resolve_scaling(ALL, ALL.replace(scaling__max_workers=4)).scaling.max_workers == 4


def test_all_without_a_limit_is_refused(two_node_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources_module, "max_resources", lambda: {"CPU": math.inf, "GPU": math.inf})
    with pytest.raises(ConfigError, match="set a number"):
        resolve_scaling(ALL)


def test_all_resolves_to_the_cores_or_gpus_of_a_single_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert resolve_scaling(ALL).scaling.max_workers == 12
    assert resolve_scaling(ALL.replace(scaling__gpus_per_worker=1, evaluate__num_gpus=1)).scaling.max_workers == 3
    assert resolve_scaling(ALL.replace(scaling__cpus_per_worker=24)).scaling.max_workers == 1


def test_the_next_run_of_a_session_resolves_all_as_the_first_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    started: list[str] = []
    starts, module_times = itertools.count(), {"task.py": 1}
    monkeypatch.setattr(ray, "init", lambda **_: started.append(f"cluster {next(starts)}"))
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(started))
    monkeypatch.setattr(ray, "shutdown", started.clear)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 64.0})
    monkeypatch.setattr(ray, "nodes", lambda: NODES)
    monkeypatch.setattr(resources_module, "module_times", module_times.copy)
    workers = resolve_scaling(ALL).scaling.max_workers
    with session():
        for _ in range(2):
            with cluster(ALL) as ends_with_the_process:
                assert ends_with_the_process
                assert is_alone()
                # Without the coordinator, which is not there, the free resources count.
                policy = policy_of()
                policy.after_controller_start(None)
                assert policy.reserved_workers([]) is None
            assert started == ["cluster 0"]
            assert keeps_local_cluster()
            assert resolve_scaling(ALL).scaling.max_workers == workers
        module_times["task.py"] = 2
        with cluster(ALL):
            assert started == ["cluster 1"], "the processes of the other cluster have the old module"
    assert not started


def test_a_resumed_run_keeps_the_number_of_workers_of_its_first_start(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # Another test of this process may have started a cluster.
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    config = load_config(
        ROOT / "conf" / "digits.yaml",
        scaling__max_workers="all",
        scaling__logical_workers=None,
        data__path=str(digits / "eval"),
        data__eval_path=None,
        run__storage_path=str(tmp_path),
        run__name="run",
        tracking__enabled=False,
    )
    assert from_yaml(config.to_yaml()).scaling.max_workers == "all"
    prepared = prepare(config)
    with acquire_lease(prepared.job.paths) as lease:
        claim(prepared, lease.fence)
    assert read_config(prepared.job.paths).scaling.max_workers == 4

    def connect(config: Config) -> Any:
        raise NotImplementedError(f"a cluster for {config.scaling.max_workers} workers")

    imported: list[str] = []
    monkeypatch.setattr(run_module, "cluster", connect)
    monkeypatch.setattr(run_module, "import_in_background", imported.append)
    # A cluster of this machine has logical CPUs for all workers.
    with pytest.raises(NotImplementedError, match="for 4 workers"), open_run(config, Console(quiet=True)):
        pass
    assert imported == [train_thread.__name__], "Ray Train would be imported after the start of the cluster"
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    again = prepare(config)
    assert (again.job.config.scaling.max_workers, again.job.config.logical_workers, again.resumes) == (4, 4, True)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    with pytest.raises(
        ConfigError, match=r"data\.global_batch_size is 64, which is not divisible by the 7 logical workers"
    ):
        prepare(config.replace(run__name="other"))


def test_the_start_says_what_the_run_uses_and_what_is_idle() -> None:
    four = ALL.replace(scaling__max_workers=4, scaling__gpus_per_worker=1, evaluate__num_gpus=1)
    assert describe_use(four, 4, NODES) == (
        "Warning: The run uses at most 5 of 8 GPUs and 6 of 32 CPUs of the cluster; idle: 3 GPUs, 26 CPUs. Raise"
        " scaling.max_workers (all: as many as fit) to use them."
    )
    assert describe_use(four.replace(evaluate__workers=4), 4, NODES) == (
        "The run uses at most 8 of 8 GPUs and 9 of 32 CPUs of the cluster; idle: 23 CPUs."
    )
    assert describe_use(four.replace(scaling__label_selector={"zone": "a"}), 3, NODES) == (
        "The run uses at most 4 of 4 GPUs and 5 of 16 CPUs of the cluster; idle: 11 CPUs, nodes on which no worker fits"
        " (of 2): 2."
    )
    on_cpus = str(describe_use(ALL.replace(scaling__max_workers=4), 4, NODES))
    assert "0 of 8 GPUs" in on_cpus
    assert "idle: 8 GPUs" in on_cpus
    assert "set scaling.gpus_per_worker to 1" in on_cpus
    assert describe_use(ALL, 6, [node("1", 8)]) == "The run uses at most 8 of 8 CPUs of the cluster."
    assert describe_use(four, 4, [*NODES, node("3", 16)]) is not None
    assert "nodes on which no worker fits (of 3): 3." in str(describe_use(four, 4, [*NODES, node("3", 16)]))
    assert describe_use(ALL, 4, []) is None


def test_a_start_connects_to_a_joined_cluster_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(calls) and calls[-1] == "connect")
    monkeypatch.setattr(ray, "init", lambda **_: calls.append("connect"))
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("disconnect"))
    monkeypatch.setattr(resources_module, "cluster_capacity", lambda: ClusterCapacity({"CPU": 32.0}, NODES))
    config = ALL.replace(run__ray_address="10.0.0.1:6379")
    with keep_connection():
        resolved = resolve_scaling(config)
        with cluster(resolved) as is_own:
            assert not is_own
        assert calls == ["connect"]
    assert calls == ["connect", "disconnect"]
    with keep_connection(), pytest.raises(ConfigError):
        resolve_scaling(config.replace(scaling__min_workers=1000))
    assert calls == ["connect", "disconnect"] * 2


def test_a_kept_connection_stays_open_for_a_use_that_outlasts_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(calls) and calls[-1] == "connect")
    monkeypatch.setattr(ray, "init", lambda **_: calls.append("connect"))
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("disconnect"))
    config = ALL.replace(run__ray_address="10.0.0.1:6379")
    evaluation = cluster(config)
    with keep_connection():
        with cluster(config):
            pass
        # As `Result.evaluate` does in another thread while a run in the background ends.
        evaluation.__enter__()
    assert calls == ["connect"]
    reconnect(config)
    assert calls == ["connect", "disconnect", "connect"]
    evaluation.__exit__(None, None, None)
    assert calls == ["connect", "disconnect"] * 2


@pytest.mark.parametrize("selector", [None, {"zone": "in(a,b)"}])
def test_an_evaluator_that_fits_on_no_node_is_refused(selector: dict[str, str] | None) -> None:
    config = ALL.replace(scaling__max_workers=2, scaling__label_selector=selector, evaluate__num_cpus=20)
    with pytest.raises(ConfigError, match="The evaluator reserves 20 CPU and 0 GPU, which no node"):
        workers_that_fit(config, ClusterCapacity({"CPU": 64.0}, NODES))
    assert workers_that_fit(config.replace(data__eval_path=None), ClusterCapacity({"CPU": 64.0}, NODES)) == 2


def test_no_worker_starts_on_a_node_from_which_a_straggler_was_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {name: {"CPU": 4.0, "GPU": workers} for name, workers in (("a", 1.0), ("b", 2.0), ("c", 4.0))}
    monkeypatch.setattr("ray_app.cluster.controller.scaling_policy.available_resources_per_node", lambda: free)
    policy = policy_of(scaling__gpus_per_worker=1.0)
    nodes = [node(name, 4) for name in "abc"]
    assert policy.count_free(nodes) == 7
    policy.excluded_nodes = {"b"}
    assert policy.count_free(nodes) == 5
