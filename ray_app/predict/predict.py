"""Preparation of a batch prediction: from a configuration to a `PreparedPrediction`.

The model is a version of the registry, an export, or the best checkpoint of a run. Everything that can be checked is
checked here, before anything is written.
"""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch

from ray_app.checkpoint.store import CheckpointStore
from ray_app.config.config import Config, default_tracking_uri, digest_json
from ray_app.config.rules import NonNegativeFloat, NumberRange, PositiveInt, check_fields, refuse
from ray_app.data.arrays import ArraySpec
from ray_app.data.dataset import Dataset, hash_files, open_dataset, sha256
from ray_app.data.parquet_files import DataFile
from ray_app.data.probes import probe
from ray_app.data.reader import Reader, ReadSpec, count_rows, cut_reads, rows_per_task
from ray_app.devices import HOST, accelerator
from ray_app.driver.trained_run import choose_checkpoint, load_trained_job
from ray_app.errors import ConfigError, DataError
from ray_app.models.export import fetch_package, is_export, read_export
from ray_app.models.inputs import WithoutTargets
from ray_app.models.package import class_path
from ray_app.plan.manifest import Manifest
from ray_app.plan.order import Segment
from ray_app.predict.actor import Model, PredictJob
from ray_app.preflight.changes import source_files
from ray_app.preflight.data_summary import describe_prediction_columns
from ray_app.preflight.inputs import make_task
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.stored_config import read_config
from ray_app.storage.data_files import find_file
from ray_app.storage.files import Location, list_files, list_folders, put_atomic, read_json, to_location
from ray_app.storage.text_files import iterate_json
from ray_app.task.base import Task
from ray_app.task.fields import OptionalColumn
from ray_app.task.ragged import LENGTHS
from ray_app.task.schema import refuse_other_data

MADE_FROM = "_made_from.json"
COCO_RESULTS = "detections.json"
"""Name of the file with the results of COCO."""
_MAX_PART_ROWS = 100_000
"""Largest number of rows of a part of small rows; a part of large rows is one read task (`data.read_task_mb`)."""
ModelSource = tuple[Model, dict[str, Any], list[dict[str, Any]]]
"""A model, its origin, and name, dtype and shape of the inputs that it needs; no inputs if they are unknown."""


@dataclass(frozen=True)
class PredictSection:
    """Configuration of a batch prediction: data, model, and folder of the predictions.

    Args:
        data: Folder (or file) of Parquet to predict on; it may lack the columns that `Task.targets` names.
        out: Folder of the predictions, or its s3:// URI. It receives part files in the order of the data, each for at
            most `data.read_task_mb` decoded megabytes, and at the end `_predictions.json`.
        model: A version in MLflow's registry, `models:/NAME@ALIAS` or `models:/NAME/VERSION`, or the folder of an
            export. Default, unless `run` is set: the champion of `tracking.registered_model`.
        run: Directory of a run, or its URI in a bucket; its best checkpoint is used instead of `model`.
        columns: Columns of the data to copy to the parts, separated by commas. Default: `row_id` if it exists.
        coco: COCO JSON file from which the data was ingested; the detected objects are also written as
            `detections.json`, results of COCO with the ids of its images and categories.
        batch_size: Rows of one forward pass.
        workers: Largest number of actors. Each reads its own data; with GPUs all CPUs of the cluster read for them.
        num_cpus: Logical CPUs that each actor reserves. It computes with as many CPU threads, at least one.
        num_gpus: GPUs that each actor reserves: 0 (prediction on the CPU), a fraction of one GPU, or 1.
    """

    data: str = ""
    out: str = ""
    model: str | None = None
    run: str | None = None
    columns: str | None = None
    coco: str | None = None
    batch_size: PositiveInt = 256
    workers: PositiveInt = 1
    num_cpus: Annotated[float, NumberRange(ge=0, lt=math.inf)] = 1
    num_gpus: NonNegativeFloat = 0

    @property
    def threads(self) -> int:
        """Returns the number of CPU threads with which each actor computes."""
        return max(1, int(self.num_cpus))


@dataclass(frozen=True)
class PreparedPrediction:
    """A prediction that was checked and can start."""

    job: PredictJob
    reader: Reader
    made_from: dict[str, Any]
    source: dict[str, Any]
    rows: int
    columns: list[str]

    @property
    def out(self) -> Location:
        """The folder of the parts."""
        return to_location(self.job.out)


def input_specs(fields: dict[str, ArraySpec]) -> dict[str, tuple[str, list[int]]]:
    """Returns dtype and shape of a row of each field of a task's batch; -1 is any length."""
    specs: dict[str, tuple[str, list[int]]] = {}
    for name, spec in fields.items():
        specs[name] = spec.dtype, [*([] if spec.padding is None else [-1]), *spec.shape]
        if spec.padding is not None:
            specs[name + LENGTHS] = "<i8", []
    return specs


def prepare_prediction(config: Config, section: PredictSection) -> PreparedPrediction:
    """Checks everything that can be known before the start, without writing anything.

    Raises:
        ConfigError: There is no such model, it does not match the task, or the folder contains something else.
        DataError: The data does not match the model.
        Exception: Whatever MLflow raises, mostly because it cannot be reached.
    """
    _check_section(section)
    model, source, inputs = (
        model_of_run(config, section.run) if section.run else model_of_package(config, section.model)
    )
    model.load(HOST)
    dataset = open_dataset(section.data, model.task.data_schema.get("classes"))
    refuse_other_data(model.task, dataset.facts, f"predict.data {section.data}", "the training data of the model")
    reader, carried = make_reader(dataset, model.task), _carried_columns(dataset, section.columns)
    if section.coco:
        read_categories(section.coco)
        if "image_id" not in dataset.facts.columns:
            raise ConfigError(
                f"predict.coco is {section.coco!r}, but the data {section.data} has no column 'image_id'. Ingest it"
                " with --source coco."
            )
        carried = list(dict.fromkeys([*carried, "image_id"]))
    for expected in inputs:
        actual = input_specs(reader.fields).get(expected["name"])
        if actual != (expected["dtype"], expected["shape"]):
            raise DataError(
                f"A decoded row of predict.data {section.data} has {actual} as {expected['name']!r}, but the model was"
                f" trained on {expected}."
            )
    device = accelerator().name if section.num_gpus else HOST.type
    manifest = dataset.manifest
    cut = cut_parts(manifest, min(_MAX_PART_ROWS, rows_per_task(reader.fields, config.data.read_task_mb)))
    parts = {spec[0].position: (f"part-{i:05d}.parquet", spec) for i, spec in enumerate(cut)}
    made_from = {
        "model": source,
        "params_digest": model.params_digest,
        "task": class_path(model.task),
        "code": digest_json({name: sha256(file) for name, file in source_files(class_path(model.task)).items()}),
        "manifest_digest": manifest.digest,
        "content_digest": digest_json(hash_files(dataset.root, manifest.paths)),
        "columns": carried,
        "rows_per_part": max(map(count_rows, cut)),
        "batch_size": section.batch_size,
        "threads": section.threads,
        "device": device,
    }
    digest = digest_json(made_from)
    out = str(to_location(section.out))
    data = (dataset.root, reader.fields, carried, manifest.rules)
    job = PredictJob(model, *data, parts, out, digest, section.batch_size, section.threads, device)
    described = describe_prediction_columns(reader.columns, dataset, carried)
    described += model.task.describe_differences(dataset.facts)
    origin = {"model": source, "data": section.data}
    prepared = PreparedPrediction(job, reader, made_from, origin, manifest.num_rows, described)
    refuse_other_prediction(prepared)
    return prepared


def read_categories(annotations: str) -> list[int]:
    """Returns the ids of the categories in a JSON file of COCO by label: the first is of label 1.

    Raises:
        ConfigError: The file does not exist, or has no categories.
    """
    file = find_file(to_location(annotations))
    items = [item for key, item in iterate_json(file) if key == "categories"] if file else []
    ids = sorted(int(item["id"]) for item in items if isinstance(item, dict) and type(item.get("id")) is int)
    if not ids:
        raise ConfigError(f"predict.coco {annotations!r} is not a file with categories; name the JSON file of COCO.")
    return ids


def write_coco_results(prepared: PreparedPrediction, annotations: str) -> Location:
    """Writes the detected objects of all parts as a list of results of COCO, and returns the file.

    Raises:
        ConfigError: The model does not detect objects, or more classes than COCO's file has categories.
    """
    categories, lines = read_categories(annotations), []
    for name, _ in prepared.job.parts.values():
        table = pq.read_table(pa.BufferReader((prepared.out / name).read_bytes()))
        if missing := {"boxes", "labels", "scores"} - set(table.column_names):
            raise ConfigError(
                f"predict.coco is {annotations!r}, but the predictions have no {sorted(missing)[0]!r}: the model does"
                " not detect objects. Leave predict.coco out."
            )
        for row in table.select(["image_id", "boxes", "labels", "scores"]).to_pylist():
            for box, label, score in zip(row["boxes"], row["labels"], row["scores"], strict=True):
                if not 1 <= label <= len(categories):
                    raise ConfigError(
                        f"predict.coco {annotations!r} has {len(categories)} categories, but the model predicts the"
                        f" label {label}. Name the file of its training data."
                    )
                left, top, right, bottom = box
                result = {"image_id": row["image_id"], "category_id": categories[label - 1]}
                lines.append(json.dumps(result | {"bbox": [left, top, right - left, bottom - top], "score": score}))
    put_atomic(prepared.out / COCO_RESULTS, f"[{f',{chr(10)}'.join(lines)}]\n".encode())
    return prepared.out / COCO_RESULTS


def model_of_package(config: Config, model: str | None) -> ModelSource:
    """Returns the model of a package, its origin, and the inputs that it was trained on.

    The class of the task is that of the configuration, which is trusted; its settings are those of the package, and
    data, see `Task.restore`. Raises ConfigError if no model is named, or the configuration is not that of the package.
    """
    name = config.tracking.registered_model
    if model is None and name is None:
        raise ConfigError(
            "No model is named. Set --predict.model models:/NAME@champion or the folder of an export, --predict.run"
            " runs/NAME, or tracking.registered_model."
        )
    uri = model or f"models:/{name}@champion"
    package = read_export(uri) if is_export(uri) else fetch_package(default_tracking_uri(config), uri)
    called = package.called
    configured = make_task(config)
    if class_path(configured) != package.class_path:
        raise ConfigError(
            f"{called} has the task {package.class_path}, but task.class_path is {class_path(configured)}. Use the"
            " configuration of its training."
        )
    for argument, parameter in inspect.signature(type(configured)).parameters.items():
        value = config.task.init_args.get(argument, parameter.default)
        if value is not None and argument in package.settings and package.settings[argument] != value:
            raise ConfigError(
                f"task.init_args.{argument} is {value!r}, but {called} was trained with {package.settings[argument]!r}."
                " Set the same value."
            )
    task = configured.restore(package.settings, called)
    inputs = [spec["name"] for spec in package.inputs] if package.format == "torch.export" else None
    return Model(task, package.weights, inputs, package.params_digest), package.source, package.inputs


def model_of_run(config: Config, run: str) -> ModelSource:
    """Returns the model of the best checkpoint, and its origin; raises ConfigError if the run has not ended."""
    paths = RunPaths(to_location(run))
    if read_json(paths.summary) is None:
        raise ConfigError(
            f"predict.run {run!r} has no summary.json: the run does not exist or has not ended. Name a run's directory."
        )
    trained = read_config(paths)
    if trained.task != config.task:
        raise ConfigError(
            f"The run {paths.name!r} was trained with {asdict(trained.task)}, but the configuration has"
            f" {asdict(config.task)}."
        )
    # The file is not read again: another one may be in its place by now.
    job = load_trained_job(paths, trained)
    commit = choose_checkpoint(job, "best")
    source = {"run": paths.name, "step": commit.step, "config_digest": commit.config_digest}
    weights = safetensors.torch.save(CheckpointStore(paths).load_model(commit))
    return Model(job.task, weights, None, commit.params_digest), source, []


def _check_section(section: PredictSection) -> None:
    problems = [f"predict.{name} is missing." for name in ("data", "out") if not getattr(section, name)]
    problems += check_fields(section, "predict.")
    if section.num_gpus > 1:
        problems.append(
            f"predict.num_gpus is {section.num_gpus:g}, but an actor computes on one GPU and would leave the others"
            " idle. Set num_gpus to at most 1, and predict.workers to the number of GPUs."
        )
    if section.model is not None and section.run is not None:
        problems.append("predict.model and predict.run are both set; set only one.")
    refuse(problems, "prediction")


def make_reader(dataset: Dataset, task: Task) -> Reader:
    """Returns the reader of a task's inputs; raises DataError if the data lacks them."""
    decode = WithoutTargets(task)
    columns = decode.columns
    missing = [name for name in columns if name not in dataset.facts.columns]
    if missing:
        raise DataError(
            f"predict.data {dataset.facts.path} has no column {', '.join(map(repr, missing))}, which the model needs;"
            f" its columns are {', '.join(sorted(dataset.facts.columns))}. Ingest it like the training data."
        )
    if type(task).decode.__module__.startswith(f"{Task.__module__.rpartition('.')[0]}."):
        refuse_missing_values(dataset, columns)
    return Reader(dataset.root, columns, decode, probe(dataset, columns, decode), rules=dataset.manifest.rules)


def refuse_missing_values(dataset: Dataset, columns: list[str]) -> None:
    """Refuses columns with missing values, which the tasks of this application do not support."""
    required = (name for name in columns if not isinstance(name, OptionalColumn))
    lacking = [name for name in required if dataset.facts.columns[name].nulls]
    others = f" The same holds for {', '.join(map(repr, lacking[1:]))}." if lacking[1:] else ""
    for name in lacking:
        for path in dataset.manifest.paths:
            with DataFile(dataset.root, path, dataset.manifest.rules) as file:
                missing = file.read([name]).column(0).is_null().to_numpy()
            if missing.any():
                raise DataError(
                    f"{path}, row {int(missing.argmax())}: column {name!r} of predict.data {dataset.facts.path} has no"
                    f" value there, and {dataset.facts.columns[name].nulls} missing values in total. Fill them, or"
                    f" remove these rows.{others}"
                )


def _carried_columns(dataset: Dataset, columns: str | None) -> list[str]:
    available = dataset.facts.columns
    default = "row_id" if "row_id" in available else ""
    carried = [name.strip() for name in (default if columns is None else columns).split(",") if name.strip()]
    for name in carried:
        if name not in available:
            raise ConfigError(
                f"predict.columns names {name!r}, which is not in the data; its columns are"
                f" {', '.join(sorted(available))}."
            )
        if name in ("position", "predicted", "predicted_index", "confidence"):
            raise ConfigError(f"predict.columns names {name!r}, which is a column of the predictions; leave it out.")
    return carried


def cut_parts(manifest: Manifest, max_rows: int) -> list[ReadSpec]:
    """Cuts a data set, in its order, into parts of whole row groups; cuts row groups of more than `max_rows` rows."""
    groups: list[list[Segment]] = [[]]
    capacity = max_rows
    for i, rows in enumerate(manifest.rows.tolist()):
        if rows > capacity:
            groups.append([])
            capacity = max_rows
        groups[-1].append(Segment(i, 0, rows))
        capacity -= rows
    return [spec for group in groups for spec in cut_reads(manifest, group, max_rows)]


def refuse_other_prediction(prepared: PreparedPrediction) -> None:
    """Raises ConfigError, with the differences, for a folder that the same prediction did not write."""
    before, now = read_json(prepared.out / MADE_FROM), prepared.made_from
    if before is None and (list_files(prepared.out) or list_folders(prepared.out)):
        raise ConfigError(
            f"predict.out {prepared.out} is not empty and has no {MADE_FROM}, so it does not hold predictions. Name"
            " another folder."
        )
    if before is not None and before != now:
        other = [f"  - {name}: {before.get(name)}, now {now[name]}" for name in now if before.get(name) != now[name]]
        raise ConfigError(
            f"predict.out {prepared.out} was made from another model or data; name another folder:\n" + "\n".join(other)
        )
