"""How many workers `scaling.max_workers: all` are, which GPUs stay idle, and where evaluator and parameter servers may
be.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.train import ScalingConfig

from ray_app import load_config
from ray_app.cluster import resources as place
from ray_app.cluster.controller.scaling_policy import ElasticPolicy
from ray_app.cluster.resources import ClusterCapacity, count_fitting_on_gpus, resolve_max_workers, workers_that_fit
from ray_app.config.checks import check_config
from ray_app.config.config import Config, from_yaml
from ray_app.driver.run import idle_gpus
from ray_app.errors import ConfigError
from ray_app.preflight.prepare import claim, prepare
from ray_app.runlog.lease import acquire_lease
from ray_app.runlog.stored_config import read_config
from ray_app.submit.on_cluster import inspect
from tests.support.places import ROOT


def node(name: str, cpus: float, gpus: float = 0, **labels: str) -> dict[str, Any]:
    return {"NodeID": name, "Alive": True, "Labels": labels, "Resources": {"CPU": cpus, "GPU": gpus}}


NODES = [node("1", 16, 4, zone="a"), node("2", 16, 4, zone="b")]
ALL = Config().replace(
    task__class_path="x", data__path="x", data__eval_path="x", scaling__max_workers="all", data__global_batch_size=60
)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 32.0, "GPU": 8.0})
    monkeypatch.setattr(ray, "nodes", lambda: NODES)
    monkeypatch.setattr(place, "max_resources", lambda: None)


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 30),
        ({"scaling__cpus_per_worker": 4}, 7),
        ({"scaling__gpus_per_worker": 1}, 8),
        ({"scaling__gpus_per_worker": 1, "evaluate__num_gpus": 1}, 7),
        ({"scaling__logical_workers": 6}, 6),
        ({"scaling__label_selector": {"zone": "a"}}, 16),
        ({"train__strategy": "single"}, 1),
    ],
)
def test_all_are_as_many_as_the_cluster_has_room_for(fields: dict[str, Any], expected: int) -> None:
    config = ALL.replace(**fields)
    check_config(config)
    assert resolve_max_workers(config).scaling.max_workers == expected
    assert resolve_max_workers(config).replace(scaling__max_workers="all") == config


def test_all_of_a_cluster_that_grows_are_what_it_may_become(joined: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "max_resources", lambda: {"CPU": 102.0})
    assert resolve_max_workers(ALL).scaling.max_workers == 100


def test_all_of_a_cluster_that_grows_nobody_knows_how_far_are_refused(
    joined: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "max_resources", lambda: {"CPU": math.inf, "GPU": math.inf})
    with pytest.raises(ConfigError, match=r"does not tell how many nodes it may start; give a number"):
        resolve_max_workers(ALL)
    assert resolve_max_workers(ALL.replace(scaling__logical_workers=6)).scaling.max_workers == 6
    assert (
        workers_that_fit(
            ALL.replace(scaling__max_workers=4, scaling__min_workers=4),
            ClusterCapacity({}, max_resources=place.max_resources()),
        )
        == 4
    )


def test_parts_of_a_gpu_add_up(joined: None) -> None:
    config = ALL.replace(scaling__max_workers=9, scaling__gpus_per_worker=0.2)
    assert workers_that_fit(config, ClusterCapacity({"CPU": 32.0, "GPU": 1.0})) == 5
    labelled = config.replace(scaling__label_selector={"zone": "a"})
    assert workers_that_fit(labelled, ClusterCapacity({"CPU": 64.0, "GPU": 1.0}, [node("1", 64, 1, zone="a")])) == 5


@pytest.mark.parametrize(
    ("free", "each", "expected"),
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
def test_a_part_of_a_gpu_is_one_of_one_gpu(free: float, each: float, expected: float) -> None:
    assert count_fitting_on_gpus(free, each) == expected


def test_workers_that_have_more_than_half_a_gpu_have_one_for_themselves(
    joined: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ALL.replace(scaling__max_workers=9, scaling__gpus_per_worker=0.6)
    assert workers_that_fit(config, ClusterCapacity({"CPU": 32.0, "GPU": 2.0})) == 2
    assert workers_that_fit(config.replace(evaluate__num_gpus=0.4), ClusterCapacity({"CPU": 32.0, "GPU": 2.0})) == 2
    labelled = config.replace(scaling__label_selector={"zone": "a"})
    assert workers_that_fit(labelled, ClusterCapacity({"CPU": 64.0, "GPU": 8.0}, [node("1", 64, 3, zone="a")])) == 3
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert (
        resolve_max_workers(config.replace(scaling__max_workers="all", data__global_batch_size=60)).scaling.max_workers
        == 4
    )


def sizes(**fields: Any) -> ElasticPolicy:
    """The scaling policy of a run that may have 9 workers, outside of Ray."""
    config = ALL.replace(scaling__max_workers=9, **fields)
    resources = {"CPU": config.scaling.cpus_per_worker, "GPU": config.scaling.gpus_per_worker}
    scaling = ScalingConfig(num_workers=(1, 9), use_gpu=True, resources_per_worker=resources)
    return ElasticPolicy(scaling, config, 2.0)


def test_a_running_job_counts_parts_of_gpus_on_each_node_as_ray_places_them() -> None:
    policy = sizes(scaling__gpus_per_worker=0.6)
    assert policy._count_in([{"CPU": 16.0, "GPU": 2.0}, {"CPU": 16.0, "GPU": 1.0}]) == 3
    fifths = sizes(scaling__gpus_per_worker=0.2)
    assert fifths._count_in([{"CPU": 16.0, "GPU": 1.0}]) == 5
    assert fifths._count_in([{"CPU": 16.0, "GPU": 2.0}]) == 9, "as many as the run may have"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"scaling__gpus_per_worker": 1.0}, 8),
        ({"scaling__gpus_per_worker": 1.0, "evaluate__num_gpus": 1}, 7),
        ({"scaling__gpus_per_worker": 1.0, "evaluate__num_gpus": 1, "evaluate__where": "workers"}, 8),
        ({"scaling__gpus_per_worker": 1.0, "evaluate__num_gpus": 1, "data__eval_path": None}, 8),
        ({"scaling__gpus_per_worker": 1.0, "scaling__cpus_per_worker": 6}, 5),
    ],
)
def test_no_worker_is_begun_on_the_gpu_of_the_evaluator(fields: dict[str, Any], expected: int) -> None:
    assert sizes(**fields)._limit_by_total_resources(NODES) == expected


def test_several_gpus_for_a_worker_are_refused_since_it_uses_one() -> None:
    with pytest.raises(
        ConfigError, match=r"scaling.gpus_per_worker is 2, but a worker computes on one GPU.* Set it to 1"
    ):
        check_config(ALL.replace(scaling__gpus_per_worker=2))


def test_all_of_a_run_that_exists_are_those_it_began_with(joined: None) -> None:
    assert resolve_max_workers(ALL, ALL.replace(scaling__max_workers=4)).scaling.max_workers == 4


def test_a_submission_says_why_all_cannot_be_counted(
    joined: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(place, "max_resources", lambda: {"CPU": math.inf, "GPU": math.inf})
    found = inspect(ALL.replace(run__storage_path=str(tmp_path), run__name="new"))
    assert [(one.level, one.topic) for one in found.findings] == [("refused", "resources")]
    assert "give a number" in found.findings[0].text


def test_all_of_this_machine_are_its_cores_or_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert resolve_max_workers(ALL).scaling.max_workers == 12
    assert resolve_max_workers(ALL.replace(scaling__gpus_per_worker=1, evaluate__num_gpus=1)).scaling.max_workers == 3
    assert resolve_max_workers(ALL.replace(scaling__cpus_per_worker=24)).scaling.max_workers == 1


def test_the_number_of_the_first_start_is_kept(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # another test of this process may have a cluster
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
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    again = prepare(config)
    assert (again.job.config.scaling.max_workers, again.job.config.logical_workers, again.resumes) == (4, 4, True)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    with pytest.raises(ConfigError, match=r"data\.global_batch_size is 64, not divisible by the 7 logical workers"):
        prepare(config.replace(run__name="other"))


@pytest.mark.parametrize("value", [0, -1, "many", None])
def test_other_words_and_numbers_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"scaling\.max_workers is"):
        check_config(ALL.replace(scaling__max_workers=value))


def test_idle_gpus_are_told() -> None:
    four = ALL.replace(scaling__max_workers=4, scaling__gpus_per_worker=1, evaluate__num_gpus=1)
    assert idle_gpus(four, 4, NODES) == (
        "3 of the 8 GPUs of the cluster are not used by this run. Raise scaling.max_workers (all: as many as fit), or"
        " leave them to others."
    )
    assert idle_gpus(four, 7, NODES) is None
    assert idle_gpus(four.replace(scaling__label_selector={"zone": "a"}), 3, NODES) is None
    assert "8 of the 8 GPUs" in str(idle_gpus(ALL.replace(scaling__max_workers=4), 4, NODES))
    assert "set scaling.gpus_per_worker to 1" in str(idle_gpus(ALL.replace(scaling__max_workers=4), 4, NODES))
    assert idle_gpus(ALL, 4, [node("1", 8)]) is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"evaluate__label_selector": {"zone": "c"}},
            r"evaluate.label_selector is .* no node of 1 CPU and 0 GPU .* zone: a, zone: b",
        ),
        ({"evaluate__label_selector": {"zone": "a"}, "evaluate__num_cpus": 20}, "no node of 20 CPU"),
        ({"evaluate__label_selector": {"zone": "a b"}}, r"evaluate.label_selector is .*: Invalid label selector value"),
        (
            {"train__server_label_selector": {"zone": "c"}, "train__strategy": "parameter_server"},
            "train.server_label_selector is",
        ),
    ],
)
def test_a_place_that_no_node_has_is_refused(fields: dict[str, Any], said: str) -> None:
    config = ALL.replace(scaling__max_workers=2)
    for allowed in (
        {"evaluate__label_selector": {"zone": "in(a,b)"}},
        fields | {"data__eval_path": None, "train__strategy": "ddp"},
    ):
        assert workers_that_fit(config.replace(**allowed), ClusterCapacity({"CPU": 64.0}, NODES)) == 2
    with pytest.raises(ConfigError, match=said):
        workers_that_fit(config.replace(**fields), ClusterCapacity({"CPU": 64.0}, NODES))


def test_what_nobody_looks_at_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"evaluate.num_gpus is 2, but the evaluator computes on one GPU"):
        check_config(ALL.replace(evaluate__num_gpus=2))
    with pytest.raises(
        ConfigError, match=r"train.server_label_selector is set, but only train.strategy: parameter_server looks at it"
    ):
        check_config(ALL.replace(train__server_label_selector={"zone": "a"}))
