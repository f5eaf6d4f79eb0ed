"""Detection of an autoscaler from the status that Ray's own processes report."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private.state import state
from ray.autoscaler.v2 import sdk, utils
from ray.experimental import internal_kv

from ray_app.cluster.ray_private import max_resources

GROWS = {"CPU": math.inf, "GPU": math.inf}


def encoded_status(types: dict[str, str]) -> bytes:
    return json.dumps({"autoscaler_report": {"node_type_mapping": types}}).encode()


@pytest.mark.parametrize(
    ("is_v2", "status", "names", "limits"),
    [
        (False, encoded_status({"1": "node_1a2b"}), ["headgroup"], None),
        (False, encoded_status({"10.0.0.1": "headgroup", "10.0.0.2": "workers"}), [], GROWS),
        (False, encoded_status({}), [], None),
        (False, None, ["headgroup"], None),
        (False, b"no JSON", [], None),
        (False, b"{}", [], None),
        (False, b'{"autoscaler_report": null}', [], None),
        (True, None, ["headgroup", "workers"], GROWS),
        (True, encoded_status({"1": "node_1a2b"}), ["node_1a2b", ""], None),
        (True, None, None, None),
    ],
)
def test_only_an_autoscaler_that_can_start_nodes_sets_limits(
    monkeypatch: pytest.MonkeyPatch, is_v2: bool, status: bytes | None, names: list[str] | None, limits: Any
) -> None:
    def cluster_status(address: str) -> Any:
        if names is None:
            raise RuntimeError("it has not looked yet")
        return SimpleNamespace(active_nodes=[SimpleNamespace(ray_node_type_name=name) for name in names], idle_nodes=[])

    monkeypatch.setattr(state, "get_max_resources_from_cluster_config", lambda: None)
    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda key: status)
    monkeypatch.setattr(utils, "is_autoscaler_v2", lambda fetch_from_server: is_v2)
    monkeypatch.setattr(sdk, "get_cluster_status", cluster_status)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="there"))
    assert max_resources() == limits


def test_the_maximum_resources_of_the_cluster_configuration_are_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "get_max_resources_from_cluster_config", lambda: {"CPU": 8})
    assert max_resources() == {"CPU": 8.0}
