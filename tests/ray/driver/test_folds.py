"""A cross-validation by runs on a real Ray cluster, with the evaluator actor."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ray_app import fold_configs, run_training
from ray_app.config.config import Config

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_a_cross_validation_scores_each_row_once(make_short_config: Callable[..., Config]) -> None:
    configs = fold_configs(make_short_config(train__max_steps=3), 2)
    runs = [run_training(config) for config in configs]
    assert [run.path.name for run in runs] == ["run-fold-0", "run-fold-1"]
    assert sum(run.evaluations()[-1].rows for run in runs) == 1438
    for run in runs:
        selection, report, both = (run.evaluate(half=half)["loss"] for half in ("selection", "report", None))
        assert run.evaluations()[-1].metrics["loss"] == pytest.approx(both, rel=1e-5)
        assert min(selection, report) < both < max(selection, report)
    half = configs[0].replace(evaluate__half="selection", run__name="half")
    run = run_training(half)
    assert run.evaluations()[-1].metrics["loss"] == pytest.approx(run.evaluate(half="selection")["loss"], rel=1e-5)
    assert run.summary["params_digest"] == runs[0].summary["params_digest"]
