"""Nodes by their labels, as Ray itself looks at them (Ray 2.60): `node_labels_match_selector` and `validate_label_selector` are private."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ray_app.errors import ConfigError

Node = dict[str, Any]
"""What `ray.nodes()` says about one."""


def labelled(nodes: Iterable[Node], selector: dict[str, str] | None, field: str = "scaling.label_selector") -> list[Node]:
    """The nodes that live and carry the labels of a selector; without one all that live.

    Args:
        nodes: What `ray.nodes()` says.
        selector: The labels.
        field: What is configured so, for messages.

    Raises:
        ConfigError: The selector is none.
    """
    alive = [node for node in nodes if node["Alive"]]
    if not selector:
        return alive
    from ray._private.label_utils import validate_label_selector
    from ray._raylet import node_labels_match_selector  # type: ignore[attr-defined]

    problem = validate_label_selector(selector)
    if problem is not None:
        raise ConfigError(f"{field} is {selector}: {problem} Write it as Ray does, such as {{zone: a}} or {{zone: 'in(a,b)'}}.")
    return [node for node in alive if node_labels_match_selector(node["Labels"], selector)]


def known_labels(nodes: Iterable[Node]) -> str:
    """The labels of the nodes that live, each once, without those that name single nodes."""
    found = {f"{name}: {value}" for node in nodes if node["Alive"] for name, value in node["Labels"].items() if name != "ray.io/node-id"}
    return ", ".join(sorted(found)) or "none"
