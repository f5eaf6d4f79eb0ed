"""The command `ray-app predict`: predicts the missing parts of a data set, and shows its progress and a summary."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray
from rich.console import Console

from ray_app.cli.main import exit_code
from ray_app.cluster.resources import cluster, cluster_capacity, workers_that_fit
from ray_app.config.config import Config
from ray_app.data.ray_tasks import ActorPool, map_in_actors
from ray_app.data.reader import ReadSpec, count_rows
from ray_app.driver.parsing import add_current_folder_to_path, parse_with_sections
from ray_app.driver.result import Result
from ray_app.driver.trained_run import load_trained_job
from ray_app.errors import DataError
from ray_app.ingest.ingest import ingest
from ray_app.ingest.options import IngestOptions
from ray_app.models.export import load_model
from ray_app.models.inputs import list_pictures
from ray_app.predict.actor import PredictActor, part_facts
from ray_app.predict.predict import (
    MADE_FROM,
    PredictSection,
    PreparedPrediction,
    prepare_prediction,
    refuse_other_prediction,
    write_coco_results,
)
from ray_app.runlog.output import TextConsole
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact
from ray_app.storage.files import Location, list_files, put_json, read_json, remove_temporary, to_location

_DESCRIPTION = (
    "Predicts a data set with a model, part by part; a second start continues. The configuration names the model's"
    " task. Single files need no configuration: --file cat.jpg --model EXPORT, or --run RUN."
)
DONE = "_predictions.json"
_VERIFY_THREADS = 8
_PROGRESS_INTERVAL_S = 2.0
_MAX_CLASSES = 20


def predict(prepared: PreparedPrediction, config: Config, section: PredictSection, console: Console) -> dict[str, Any]:
    """Predicts the missing parts and returns the content of `_predictions.json`, which is written last.

    Raises:
        ConfigError: The cluster has no capacity for one actor, or another prediction was started in the folder
            meanwhile.
        DataError: A row cannot be used, or the data set has changed meanwhile.
    """
    job, out = prepared.job, prepared.out
    remove_temporary(out)
    done = _read_finished_parts(prepared)
    progress = _Progress(prepared, len(done), sum(facts["rows"] for facts in done.values()), console)
    missing = [spec for name, spec in job.parts.values() if name not in done]
    if missing:
        settings: dict[str, Any] = {
            "scaling__max_workers": section.workers,
            "scaling__min_workers": 1,
            "data__eval_path": None,
        }
        # A prediction always runs in actors. The configured strategy would give other resources: `single` reserves none
        # for workers, and `parameter_server` reserves CPUs for the servers.
        settings |= {"train__strategy": "ddp"}
        settings |= {"scaling__cpus_per_worker": section.num_cpus, "scaling__gpus_per_worker": section.num_gpus}
        actor_config = config.replace(**settings)
        with cluster(actor_config):
            num_actors = workers_that_fit(actor_config, cluster_capacity())
            if not put_json(out / MADE_FROM, prepared.made_from, if_absent=True):
                # Another process may have started a prediction in this folder meanwhile.
                refuse_other_prediction(prepared)
            pool = ActorPool(PredictActor, (ray.put(job),), num_actors, section.num_cpus, section.num_gpus)
            specs = dict(job.parts.values())
            for part in map_in_actors(pool, prepared.reader, missing, lambda part: specs[part["name"]]):
                done[part["name"]] = json.loads(part["facts"])
                progress.add(done[part["name"]]["rows"])
    before = read_json(out / DONE)
    if before is not None and not missing:
        return before
    result = _result(prepared, done)
    put_json(out / DONE, result)
    return result


def _read_finished_parts(prepared: PreparedPrediction) -> dict[str, dict[str, Any]]:
    """Returns the facts of the complete parts of this prediction by name; damaged parts are left out."""

    def look(name: str, spec: ReadSpec) -> dict[str, Any] | None:
        try:
            facts = part_facts((prepared.out / name).read_bytes())
        except (OSError, ValueError):
            return None
        rows = count_rows(spec)
        return facts if facts["made_from"] == prepared.job.made_from and facts["rows"] == rows else None

    existing_files = set(list_files(prepared.out))
    parts = [part for part in prepared.job.parts.values() if part[0] in existing_files]
    with ThreadPoolExecutor(_VERIFY_THREADS) as pool:
        results = pool.map(look, *zip(*parts, strict=True)) if parts else iter(())
        return {name: facts for (name, _), facts in zip(parts, results, strict=True) if facts is not None}


def _result(prepared: PreparedPrediction, done: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the content of `_predictions.json`; raises `DataError` if rows are missing."""
    parts = [done[name] | {"name": name} for name, _ in prepared.job.parts.values() if name in done]
    rows_out = sum(part["rows"] for part in parts)
    if rows_out != prepared.rows:
        raise DataError(
            f"{rows_out} of {prepared.rows} rows were predicted, because the data set changed meanwhile. Start again."
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
    """Shows lines with the progress, at most one every two seconds."""

    def __init__(self, prepared: PreparedPrediction, parts: int, rows: int, console: Console) -> None:
        self._parts = parts
        self._rows = rows
        self._prepared = prepared
        self._console, self._first_row = console, rows
        self._started_s = self._shown_s = time.monotonic()
        kept = f"; {parts:,} parts exist already" if parts else ""
        for line in prepared.columns:
            self._say(line)
        self._say(
            f"{prepared.rows:,} rows of {prepared.source['data']} to {len(prepared.job.parts):,} parts in"
            f" {prepared.out}{kept}"
        )

    def add(self, rows: int) -> None:
        """Counts a finished part with its rows."""
        self._parts, self._rows = self._parts + 1, self._rows + rows
        now_s = time.monotonic()
        if now_s - self._shown_s >= _PROGRESS_INTERVAL_S or self._rows == self._prepared.rows:
            self._shown_s = now_s
            rate = (self._rows - self._first_row) / max(1e-9, now_s - self._started_s)
            self._say(
                f"{self._parts:,}/{len(self._prepared.job.parts):,} parts, {self._rows:,}/{self._prepared.rows:,}"
                f" rows, {rate:,.0f} rows/s"
            )

    def _say(self, text: str) -> None:
        self._console.print(redact(text), markup=False, highlight=False, soft_wrap=True)


def _summary(result: dict[str, Any], out: Location) -> list[str]:
    """Returns the lines of the summary."""
    rows = result["rows_out"]
    lines = [
        f"model        {', '.join(f'{k} {v}' for k, v in result['model'].items())}, parameters sha256"
        f" {result['params_digest']}"
    ]
    lines.append(f"rows         {result['rows_in']:,} in, {rows:,} out, {len(result['parts']):,} parts")
    if result["counts"]:
        largest = sorted(result["counts"].items(), key=lambda item: -item[1])
        shares = [f"{name} {count / rows:.1%}" for name, count in largest[:_MAX_CLASSES]] + ["..."] * (
            len(largest) > _MAX_CLASSES
        )
        lines.append("predicted    " + ", ".join(shares))
    lines += [f"mean         {name} {value:.4f}" for name, value in result["means"].items()]
    return [*lines, f"predictions  {out}"]


def _predict_files(arguments: list[str], prog: str) -> None:
    """Predicts files one by one in this process, and prints a line for each."""
    parser = argparse.ArgumentParser(prog=prog, description="Predicts files, and prints a line for each.")
    parser.add_argument("--file", nargs="+", required=True, help="Images, folders of images, or .csv, .json, .jsonl.")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", "--predict.model", dest="model", help="The folder of an export.")
    model.add_argument(
        "--run", "--predict.run", dest="run", help="The directory of a run; its best checkpoint is used."
    )
    parser.add_argument("--trust", action="store_true", help="Allows running the code of an export without model.pt2.")
    options = parser.parse_args(arguments)
    add_current_folder_to_path()
    answer = load_model(options.model, options.trust).predict if options.model else _result_of(options.run).answers
    for name in options.file:
        for called, value in _answer_file(Path(name).expanduser(), answer):
            print(redact(f"{called}  {value}"))


def _result_of(run: str) -> Result:
    paths = RunPaths(to_location(run))
    return Result(paths.root, read_json(paths.summary) or {}, load_trained_job(paths).task)


def _answer_file(file: Path, answer: Callable[[Any], Any]) -> Iterator[tuple[str, str]]:
    """Yields a name and the answer to each image, row or text of a file."""
    if file.is_dir() and not any(file.rglob("*.parquet")):
        for picture in list_pictures(file):
            yield str(picture), format_answer(answer(picture))
        return
    data: Any = file
    if file.suffix == ".json":
        data = json.loads(file.read_text())
    elif file.suffix == ".jsonl":
        data = [json.loads(line) for line in file.read_text().splitlines()]
    elif file.suffix in (".csv", ".tsv"):
        data = _read_csv(file)
    answers = answer(data)
    if file.suffix in (".csv", ".tsv", ".jsonl", ".parquet") or isinstance(data, list):
        yield from ((f"{file}, row {row}", format_answer(one)) for row, one in enumerate(answers, 1))
    else:
        yield str(file), format_answer(answers)


def _read_csv(file: Path) -> pa.Table:
    """Returns the rows of a CSV file in their order, with the types and the notation of values of an ingest."""
    with tempfile.TemporaryDirectory() as folder:
        ingest(IngestOptions("csv", f"{folder}/rows", str(file)))
        table = pa.concat_tables(map(pq.read_table, sorted(Path(folder).rglob("*.parquet"))))
    lines = [int(row_id.rpartition(":")[2]) for row_id in table["row_id"].to_pylist()]
    return table.take(sorted(range(len(lines)), key=lines.__getitem__))


def format_answer(answer: Any) -> str:
    """Returns an answer as a line: a class with its probability, a number, objects, or values by name."""
    if isinstance(answer, dict) and "probability" in answer:
        box = f" at {[round(edge) for edge in answer['box']]}" if "box" in answer else ""
        return f"{answer['label']} {answer['probability']:.4f}{box}"
    if isinstance(answer, dict) and "labels" in answer:
        return ", ".join(f"{name} {answer['probabilities'][name]:.4f}" for name in answer["labels"]) or "none"
    if isinstance(answer, list):
        return "; ".join(map(format_answer, answer)) or "none"
    return f"{answer:g}" if isinstance(answer, float) else str(answer)


def main(arguments: list[str] | None = None, prog: str = "ray-app predict") -> int:
    """Runs `ray-app predict`; see `exit_code`. A second start continues with the missing parts."""
    options = sys.argv[1:] if arguments is None else arguments
    if "--file" in options:
        return exit_code(lambda: _predict_files(options, prog), "The prediction failed")

    def work() -> None:
        console = TextConsole(file=sys.stdout)
        config, sections = parse_with_sections(arguments, {"predict": PredictSection}, prog, description=_DESCRIPTION)
        section: PredictSection = sections["predict"]
        prepared = prepare_prediction(config, section)
        result = predict(prepared, config, section, console)
        for line in _summary(result, prepared.out):
            console.print(redact(line), markup=False, highlight=False, soft_wrap=True)
        if section.coco:
            results = write_coco_results(prepared, section.coco)
            console.print(redact(f"COCO results {results}"), markup=False, highlight=False, soft_wrap=True)

    return exit_code(work, "The prediction failed")
