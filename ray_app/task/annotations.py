"""Types of torchmetrics for annotations, without importing it, which takes seconds and which only evaluation needs.

They are a module of their own because jsonargparse, which reads the annotations of a task, executes the `if
TYPE_CHECKING` of its module.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection
else:
    Metric = MetricCollection = Any

__all__ = ["Metric", "MetricCollection"]
