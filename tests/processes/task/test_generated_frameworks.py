"""Generated programs give what the tools give that people come from: Lightning, torchmetrics, `transformers`."""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_app import load_config
from ray_app.errors import RayAppError
from ray_app.task.metrics import combine, score
from ray_app.testing import FileStoreMembership, Hooks, make_job, read_trained_run, stream_windows, train_rank
from tests.support import generated_lightning, generated_metrics, generated_transformers
from tests.support.generated_programs import Program, assert_none_differs
from tests.support.local_world import CPU
from tests.support.program_search import compare, draw_choices, one_thread  # noqa: F401

SEARCHED = 300
CLASS_METRICS = generated_metrics.METRICS["class"]


def training_difference(tool: Any, program: Program) -> str:
    """Returns how the run of a program differs from the tool's; empty if it does not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            job = make_job(load_config(**tool.configuration(program, folder)), folder / "run")
            train_rank(0, folder / "store", job, 1, Hooks(), stream_windows, FileStoreMembership)
        except RayAppError as error:
            return "" if any(reason in str(error) for reason in tool.ALLOWED) else f"refused: {error}"
        run, (ended, logged) = read_trained_run(job), tool.train_by_tool(program, job.plan)
        if text := compare(job, run, ended):
            return text
        for step, (ours, theirs) in enumerate(zip(run.steps, logged, strict=bool(logged)), 1):
            recorded = dict(ours[-1]) if theirs else {}
            for key, value in theirs.items():
                if not math.isclose(recorded.get(key, math.nan), value, rel_tol=2e-2, abs_tol=2e-3):
                    return f"{key} of step {step} is {recorded.get(key)}, by the tool {value}"
        return ""


def flat(value: Any) -> list[float]:
    return [n for part in value for n in flat(part)] if isinstance(value, list | tuple) else np.ravel(value).tolist()


def metric_difference(tool: Any, program: Program) -> str:
    """Returns how a metric of an evaluation in parts differs from one update with all rows; empty if it does not."""
    try:
        expected = tool.compute_at_once(program)
    except Exception:
        # Arguments or rows that torchmetrics itself refuses, with errors of many types.
        expected = None
    with tempfile.TemporaryDirectory() as name:
        try:
            job = make_job(load_config(**tool.configuration(program, Path(name))), Path(name) / "run")
            columns, results = tool.make_columns(program, program["rows"]), []
            for size, parts in ((program["rows"], 1), (7, 2), (3, 3)):
                model = job.task.build_model()
                chunks = [c for part in range(parts) for c in score(job.task, model, columns, size, CPU, part, parts)]
                results.append(combine(job.task, chunks))
        except RayAppError as error:
            allowed = expected is None or any(reason in str(error) for reason in tool.ALLOWED)
            return "" if allowed else f"refused: {error}"
    for result in results if expected is not None else []:
        ours = {name: value for name, value in {**result.values, **result.tables}.items() if name != "loss"}
        if ours.keys() != expected.keys():
            return f"there are {sorted(ours)}, of one update {sorted(expected)}"
        for name, value in expected.items():
            if not np.allclose(flat(ours[name]), flat(value), rtol=1e-4, atol=1e-5, equal_nan=True):
                return f"{name} is {ours[name]}, of one update {value}"
    return ""


TOOLS: dict[str, tuple[Any, Callable[[Any, Program], str]]] = {
    "lightning": (generated_lightning, training_difference),
    "metrics": (generated_metrics, metric_difference),
    "transformers": (generated_transformers, training_difference),
}


def draw(tool: Any, seed: int) -> Program:
    return tool.adapt(draw_choices(tool.GRAMMAR, seed, tool.RARE))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["lightning", "metrics", pytest.param("transformers", marks=pytest.mark.rest)])
def test_a_generated_program_gives_what_the_tool_gives(name: str, seed: int) -> None:
    tool, difference = TOOLS[name]
    assert not difference(tool, program := draw(tool, seed)), program


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("lightning", {"body": "batch norm", "eval_mode": True}),
        ("lightning", {"validation": "loss and other"}),
        ("lightning", {"optimized": "part", "clip": 0.5}),
        ("metrics", {"kind": "class", "metric": CLASS_METRICS.index("classification.MulticlassROC")}),
    ],
)
def test_what_a_search_has_shown_stays_right(name: str, choices: dict[str, Any]) -> None:
    tool, difference = TOOLS[name]
    simplest = {key: options[0] for key, options in tool.GRAMMAR.items()} | {"seed": 0}
    assert not difference(tool, tool.adapt(simplest | choices))


@pytest.mark.search
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TOOLS)
def test_generated_programs_give_what_the_tool_gives(name: str) -> None:
    tool, difference = TOOLS[name]
    programs = (draw(tool, seed) for seed in range(SEARCHED))
    assert_none_differs(tool.GRAMMAR, programs, lambda program: difference(tool, tool.adapt(program)))
