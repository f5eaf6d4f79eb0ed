"""What an autoscaler may make of the cluster: its configuration, which it reports to Ray, tells the most of every resource.

From `ray._private.state`: nothing public says it; Ray Train asks the same before it refuses workers.
"""

from __future__ import annotations

from ray._private.state import state


def most_resources() -> dict[str, float] | None:
    """The most of every resource that the connected cluster may grow to, by Ray's names; None without an autoscaler."""
    found = state.get_max_resources_from_cluster_config()
    return {name: float(most) for name, most in found.items()} if found else None
