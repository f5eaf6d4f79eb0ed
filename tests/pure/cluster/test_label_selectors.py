"""Label selectors of nodes: the nodes that they select, and invalid selectors."""

from __future__ import annotations

from typing import Any

import pytest

from ray_app.cluster.ray_private import known_labels, nodes_with_labels
from ray_app.cluster.resources import ClusterCapacity, workers_that_fit
from ray_app.config.config import Config
from ray_app.errors import ConfigError

NODES: list[dict[str, Any]] = [
    {
        "NodeID": "1",
        "Alive": True,
        "Labels": {"ray.io/node-id": "1", "zone": "a", "gpu": "h100"},
        "Resources": {"CPU": 5.0},
    },
    {"NodeID": "2", "Alive": True, "Labels": {"ray.io/node-id": "2", "zone": "b"}, "Resources": {"CPU": 3.0}},
    {"NodeID": "3", "Alive": False, "Labels": {"ray.io/node-id": "3", "zone": "a"}, "Resources": {"CPU": 8.0}},
]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        (None, ["1", "2"]),
        ({"zone": "a"}, ["1"]),
        ({"zone": "in(a,b)"}, ["1", "2"]),
        ({"zone": "!a"}, ["2"]),
        ({"zone": "a", "gpu": "a100"}, []),
    ],
)
def test_a_label_selector_selects_the_nodes_that_ray_selects(
    selector: dict[str, str] | None, expected: list[str]
) -> None:
    assert [node["NodeID"] for node in nodes_with_labels(NODES, selector)] == expected


def test_an_invalid_label_selector_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"scaling.label_selector is \{'zone': 'a b'\}: Invalid label selector value"):
        nodes_with_labels(NODES, {"zone": "a b"})
    assert known_labels(NODES) == "gpu: h100, zone: a, zone: b"


def test_only_nodes_with_the_labels_count_as_capacity() -> None:
    config = Config().replace(scaling__max_workers=8, scaling__cpus_per_worker=2, data__global_batch_size=64)

    def fit(**fields: Any) -> int:
        return workers_that_fit(config.replace(**fields), ClusterCapacity({"CPU": 100.0}, NODES))

    assert fit() == 8
    assert fit(scaling__label_selector={"zone": "a"}) == 2, "a worker fits on one node only, and the third node is dead"
    assert fit(scaling__label_selector={"zone": "in(a,b)"}) == 3
    evaluated = {"scaling__label_selector": {"zone": "a"}, "data__eval_path": "eval"}
    assert fit(**evaluated, evaluate__num_cpus=2) == 1
    with pytest.raises(ConfigError, match="capacity for 0 workers"):
        fit(**evaluated, evaluate__num_gpus=1)
    servers = {"train__strategy": "parameter_server", "train__servers": 3, "scaling__logical_workers": 8}
    assert fit(**servers, scaling__label_selector={"zone": "a"}) == 1
    elsewhere = {"evaluate__label_selector": {"zone": "b"}, "train__server_label_selector": {"zone": "b"}}
    assert fit(**evaluated, **servers, **elsewhere) == 2, "evaluator and servers have nodes of their own"
    with pytest.raises(ConfigError, match=r"labeled \{'zone': 'a'\} .* have capacity for 2 workers of 2 CPU"):
        fit(scaling__label_selector={"zone": "a"}, scaling__min_workers=3)
    with pytest.raises(ConfigError, match="no node of the cluster has these labels; it has gpu: h100, zone: a"):
        fit(scaling__label_selector={"zone": "c"})
