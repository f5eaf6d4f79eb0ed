"""Elastic, bit-exact PyTorch training on Ray clusters whose size changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_app.pipeline.cli import load_config
    from ray_app.pipeline.result import Result
    from ray_app.pipeline.run import run_training

__all__ = ["Result", "load_config", "run_training"]


def __getattr__(name: str) -> Any:
    """Imports the public names when they are first used, so that importing a part does not import all of it."""
    import importlib

    places = {"load_config": "cli", "run_training": "run", "Result": "result"}
    if name not in places:
        raise AttributeError(f"module 'ray_app' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ray_app.pipeline.{places[name]}"), name)
