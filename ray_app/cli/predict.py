"""The command `ray-app predict`: predicts what is not there yet, and says how far it is and what came of it."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from rich.console import Console

from ray_app.cli.main import exit_code
from ray_app.cluster.ray_private import max_resources
from ray_app.cluster.resources import cluster, workers_that_fit
from ray_app.config.config import Config
from ray_app.data.ray_tasks import ActorPool, map_in_actors
from ray_app.data.reader import ReadSpec
from ray_app.driver.parsing import parse_with_sections
from ray_app.errors import DataError
from ray_app.predict.actor import PredictActor, part_facts
from ray_app.predict.predict import (
    MADE_FROM,
    PredictSection,
    PreparedPrediction,
    prepare_prediction,
    refuse_other_prediction,
)
from ray_app.runlog.redaction import redact
from ray_app.storage.files import Location, list_files, put_json, read_json, remove_temporary

_DESCRIPTION = (
    "Predicts a data set with a model, whose task the configuration names, in parts that a second start goes on with."
)
DONE = "predictions.json"
_VERIFYING, _TELL_S, _MOST_CLASSES = 8, 2.0, 20


def predict(prepared: PreparedPrediction, config: Config, section: PredictSection, console: Console) -> dict[str, Any]:
    """Predicts what is not there yet; returns the content of `predictions.json`, which is written last.

    Args:
        prepared: What may start.
        config: The cluster.
        section: What the actors reserve.
        console: Where progress is shown.

    Raises:
        ConfigError: The cluster has no room.
        DataError: A row cannot be used, or the data set changed meanwhile.
    """
    job, out = prepared.job, prepared.out
    remove_temporary(out)
    done = _intact(prepared)
    told = _Progress(prepared, len(done), sum(facts["rows"] for facts in done.values()), console)
    missing = [spec for name, spec in job.parts.values() if name not in done]
    if missing:
        asked: dict[str, Any] = {
            "scaling__max_workers": section.workers,
            "scaling__min_workers": 1,
            "data__eval_path": None,
        }
        asked |= {"train__strategy": "ddp"}  # whatever trained: a prediction has actors
        asked |= {"scaling__cpus_per_worker": section.num_cpus, "scaling__gpus_per_worker": section.num_gpus}
        room = config.replace(**asked)
        with cluster(room):
            most = workers_that_fit(room, ray.cluster_resources(), ray.nodes(), max_resources())
            if not put_json(out / MADE_FROM, prepared.made_from, if_absent=True):
                refuse_other_prediction(prepared)  # another may have begun here meanwhile
            pool = ActorPool(PredictActor, (ray.put(job),), most, section.num_cpus, section.num_gpus)
            specs = dict(job.parts.values())
            for found in map_in_actors(pool, prepared.reader, missing, lambda found: specs[found["name"]]):
                done[found["name"]] = json.loads(found["facts"])
                told.add(done[found["name"]]["rows"])
    before = read_json(out / DONE)
    if before is not None and not missing:
        return before
    result = _result(prepared, done)
    put_json(out / DONE, result)
    return result


def _intact(prepared: PreparedPrediction) -> dict[str, dict[str, Any]]:
    """The facts of the parts that are there, whole and made from the same, by name; damaged ones are made again."""

    def look(name: str, spec: ReadSpec) -> dict[str, Any] | None:
        try:
            facts = part_facts((prepared.out / name).read_bytes())
        except (OSError, ValueError):
            return None
        rows = sum(piece.rows for piece in spec)
        return facts if facts["made_from"] == prepared.job.made_from and facts["rows"] == rows else None

    there = set(list_files(prepared.out))
    parts = [part for part in prepared.job.parts.values() if part[0] in there]
    with ThreadPoolExecutor(_VERIFYING) as pool:
        found = pool.map(look, *zip(*parts, strict=True)) if parts else iter(())
        return {name: facts for (name, _), facts in zip(parts, found, strict=True) if facts is not None}


def _result(prepared: PreparedPrediction, done: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The content of `predictions.json`.

    Raises:
        DataError: Rows are missing, or there are more than there were.
    """
    parts = [done[name] | {"name": name} for name, _ in prepared.job.parts.values() if name in done]
    rows_out = sum(part["rows"] for part in parts)
    if rows_out != prepared.rows:
        raise DataError(
            f"{rows_out} rows were predicted of {prepared.rows}; the data set changed meanwhile. Start again."
        )
    counts: dict[str, int] = {}
    for part in parts:
        for name, count in part["counts"].items():
            counts[name] = counts.get(name, 0) + count
    means = {name: sum(part["sums"][name] for part in parts) / rows_out for name in parts[0]["sums"]}
    described = [{key: part[key] for key in ("name", "rows", "bytes", "sha256")} for part in parts]
    totals = {"rows_in": prepared.rows, "rows_out": rows_out, "counts": dict(sorted(counts.items())), "means": means}
    return prepared.made_from | {"data": prepared.source["data"], **totals, "parts": described, "ended_s": time.time()}


class _Progress:
    """Lines that say how far it is, at most one every two seconds."""

    def __init__(self, prepared: PreparedPrediction, parts: int, rows: int, console: Console) -> None:
        self._parts, self._rows, self._of = parts, rows, prepared
        self._console, self._first_row, self._started_s, self._told_s = (
            console,
            rows,
            time.monotonic(),
            time.monotonic(),
        )
        kept = f"; {parts:,} parts are there already" if parts else ""
        for line in prepared.columns:
            self._say(line)
        self._say(
            f"{prepared.rows:,} rows of {prepared.source['data']} to {len(prepared.job.parts):,} parts in"
            f" {prepared.out}{kept}"
        )

    def add(self, rows: int) -> None:
        """Another part is done."""
        self._parts, self._rows = self._parts + 1, self._rows + rows
        now_s = time.monotonic()
        if now_s - self._told_s >= _TELL_S or self._rows == self._of.rows:
            self._told_s = now_s
            rate = (self._rows - self._first_row) / max(1e-9, now_s - self._started_s)
            self._say(
                f"{self._parts:,}/{len(self._of.job.parts):,} parts, {self._rows:,}/{self._of.rows:,} rows, {rate:,.0f}"
                f" rows/s"
            )

    def _say(self, text: str) -> None:
        self._console.print(redact(text), markup=False, highlight=False, soft_wrap=True)


def _summary(result: dict[str, Any], out: Location) -> list[str]:
    rows = result["rows_out"]
    lines = [
        f"model        {', '.join(f'{k} {v}' for k, v in result['model'].items())}, parameters sha256"
        f" {result['params_digest']}"
    ]
    lines.append(f"rows         {result['rows_in']:,} in, {rows:,} out, {len(result['parts']):,} parts")
    if result["counts"]:
        shown = sorted(result["counts"].items(), key=lambda item: -item[1])
        shares = [f"{name} {count / rows:.1%}" for name, count in shown[:_MOST_CLASSES]] + ["..."] * (
            len(shown) > _MOST_CLASSES
        )
        lines.append("predicted    " + ", ".join(shares))
    lines += [f"mean         {name} {value:.4f}" for name, value in result["means"].items()]
    return [*lines, f"predictions  {out}"]


def main(arguments: list[str] | None = None, prog: str = "ray-app predict") -> int:
    """The command.

    Returns:
        See `exit_code`; a prediction that was interrupted, or failed, goes on with the parts that are missing when it
        is started again.
    """

    def work() -> None:
        console = Console(file=sys.stdout)
        config, sections = parse_with_sections(arguments, {"predict": PredictSection}, prog, description=_DESCRIPTION)
        section: PredictSection = sections["predict"]
        prepared = prepare_prediction(config, section)
        result = predict(prepared, config, section, console)
        for line in _summary(result, prepared.out):
            console.print(redact(line), markup=False, highlight=False, soft_wrap=True)

    return exit_code(work, "The prediction failed")
