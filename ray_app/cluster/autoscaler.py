"""What an autoscaler may make of the cluster: the most of every resource, where Ray knows it, and whether one starts nodes at all.

From `ray._private` and what the autoscaler's own process leaves with the head: nothing public says it. Every head has such a process; one
without a configuration only looks, and calls each node's type after the node.
"""

from __future__ import annotations

import json
import logging
import math

import ray
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._private.state import state
from ray.experimental.internal_kv import _internal_kv_get

logger = logging.getLogger(__name__)

_OF_ONE_NODE = "node_"


def most_resources() -> dict[str, float] | None:
    """The most of every resource that the connected cluster may grow to, by Ray's names; None without an autoscaler.

    Infinite where an autoscaler starts nodes and does not tell how many, as that of `ray up` and KubeRay.
    """
    found = state.get_max_resources_from_cluster_config()
    if found:
        return {name: float(most) for name, most in found.items()}
    return {"CPU": math.inf, "GPU": math.inf} if any(not kind.startswith(_OF_ONE_NODE) for kind in _node_types()) else None


def _node_types() -> set[str]:
    """What the autoscaler's process calls the types of the nodes that are there."""
    from ray.autoscaler.v2.sdk import get_cluster_status
    from ray.autoscaler.v2.utils import is_autoscaler_v2

    try:
        if not is_autoscaler_v2(fetch_from_server=True):  # KubeRay names types of nodes without an autoscaler, too
            told = json.loads(_internal_kv_get(DEBUG_AUTOSCALING_STATUS) or "{}")
            return set(((told.get("autoscaler_report") or {}).get("node_type_mapping") or {}).values())
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        return {node.ray_node_type_name for node in [*status.active_nodes, *status.idle_nodes]} - {""}
    except Exception as error:  # there is none, or it has not looked yet; a run that does not fit is refused then
        logger.debug("No autoscaler tells of the cluster: %s", error)
        return set()
