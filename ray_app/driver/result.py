"""The result of a run, which `run_training` returns, and the comparison of several runs in a notebook."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

import torch
from torch import nn

from ray_app.checkpoint.format import unpack
from ray_app.checkpoint.store import CheckpointStore
from ray_app.config.checks import check_config
from ray_app.data.reader import fetch_in_process, load_all
from ray_app.devices import HOST
from ray_app.driver.finalize import stored_job
from ray_app.driver.model_export import ExportOptions, export_run
from ray_app.driver.trained_run import choose_checkpoint, load_model, read_texts
from ray_app.errors import CheckpointError, ConfigError
from ray_app.models.export import read_rows
from ray_app.models.inputs import decode_inputs, open_evaluation_rows, open_rows
from ray_app.report.facts import read_facts
from ray_app.report.html import Comparison, run_cell
from ray_app.runlog.evaluations import Evaluation, read_evaluations
from ray_app.runlog.history import means
from ray_app.runlog.journal import StepRecord, read_records
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import Location, to_location
from ray_app.task.base import Batch, Task
from ray_app.task.metrics import combine, score
from ray_app.task.precision import Precision
from ray_app.task.ragged import Arrays, Field, concat_fields, to_batch
from ray_app.train.job import Job


@dataclass(frozen=True, repr=False)
class Result:
    """A run that has ended.

    Args:
        summary: The content of `summary.json`.
        task: The prepared task; its `forward` runs the model on decoded fields.
    """

    path: Location
    summary: dict[str, Any]
    task: Task

    def __repr__(self) -> str:
        best = self.summary.get("best")
        score_text = ""
        if best and best["value"] is not None:
            score_text = f", {best['metric']} {best['value']:.4f} at step {best['step']}"
        return f"<{self.status} run of {self.summary['steps']} steps{score_text}, in {self.path}>"

    def _repr_html_(self) -> str:
        """Returns the run's key figures and curves, for notebooks."""
        return run_cell(read_facts(RunPaths(self.path)))

    @property
    def status(self) -> str:
        """`finished`, `stopped_early`, `interrupted` or `failed`."""
        return str(self.summary["status"])

    @property
    def best_checkpoint(self) -> Location | None:
        """The folder of the best checkpoint by the evaluation metric, or of the newest if nothing was evaluated."""
        try:
            commit = choose_checkpoint(self._job, "best")
        except CheckpointError:
            return None
        return RunPaths(self.path).checkpoint(commit.step, commit.fence)

    def load_model(self, checkpoint: str = "best") -> nn.Module:
        """Loads a model in plain PyTorch, without Ray, in evaluation mode and on the CPU.

        Args:
            checkpoint: See `ExportOptions.checkpoint`; so in the other methods.

        Raises:
            ConfigError: There is no checkpoint of this name.
            CheckpointError: There is no checkpoint at all, or it is damaged.
        """
        return load_model(self._job, choose_checkpoint(self._job, checkpoint))

    def keras_model(self, checkpoint: str = "best") -> Any:
        """Returns the trained `keras.Model` of a Keras program, compiled, its optimizer with the state of training.

        Args:
            checkpoint: See `ExportOptions.checkpoint`.

        Raises:
            ConfigError: The run trained something else than a Keras program.
        """
        from ray_app.task.keras.module import KerasModule
        from ray_app.task.keras.optimizer import restore_optimizer

        commit = choose_checkpoint(self._job, checkpoint)
        model = load_model(self._job, commit)
        if not isinstance(model, KerasModule):
            raise ConfigError(
                f"The run in {self.path} trained a {type(model).__name__}, which is not a Keras model; load it with"
                " load_model."
            )
        program = model.saved_program()
        state = unpack(CheckpointStore(self._job.paths).load(commit))
        restore_optimizer(program, state.optimizer, model.steps.phases, state.extra_state.get("scale"))
        return program

    def export(self, folder: str, checkpoint: str = "best", overwrite: bool = False) -> dict[str, Any]:
        """Writes a model to a folder, as `ray-app export` does; returns the content of `export.json`. See `export_run`.

        `ray_app.load_model(folder)` loads it without Ray and MLflow.
        """
        return export_run(ExportOptions(str(self.path), folder, checkpoint, overwrite))

    def read(self, path: str) -> Batch:
        """Reads a whole data set as input of the model, in this process: a tensor (rows, ...) for each decoded field.

        `result.task.forward(model, result.read(path))` runs the model on it.

        Args:
            path: Folder (or file) of Parquet, with the columns of the training data.

        Raises:
            DataError: The data set does not exist, or cannot be decoded.
        """
        return read_rows(self.task, path)

    def evaluate(
        self,
        data: Any = None,
        checkpoint: str = "best",
        workers: int | None = None,
        batch_size: int | None = None,
        half: Literal["selection", "report"] | None = None,
    ) -> dict[str, float]:
        """Scores a model on a data set, such as test rows that were used for no choice.

        The scores are not recorded.

        Args:
            data: Folder (or file) of Parquet, with the columns of the training data; or its columns by name. Default:
                the rows on which the run evaluates, by `half`.
            checkpoint: See `ExportOptions.checkpoint`.
            workers: Number of Ray actors that score the rows of a folder together, each with `evaluate.num_cpus` and
                `num_gpus` of the run; the cluster is that of a training. Default: this process scores them on the CPU,
                without Ray. The scores are bit-identical for any number. Those of this process may differ in the last
                bits, because it may compute with other threads.
            batch_size: Rows of one forward pass; default: `evaluate.batch_size` of the run.
            half: Half of the run's own rows, see `evaluate.half`; default: all of them.

        Returns:
            The mean `loss` and the task's metrics of one number, by name.

        Raises:
            ConfigError: `workers` or `batch_size` is below 1, or the actors would have to read columns of this process.
            DataError: The data set does not exist, or cannot be decoded; a column is missing, there are no rows, or
                columns differ in rows.
        """
        size, job = self._batch_size(batch_size), self._job
        model = self.load_model(checkpoint)
        if workers is None:
            if data is None:
                own_rows = open_evaluation_rows(self.task, job.config.replace(evaluate__half=half))
                rows: Arrays = load_all(fetch_in_process, own_rows).arrays
            else:
                rows = decode_inputs(self.task, data, read_texts(job), targets=True).fields
            fixed, precision = job.config.evaluate.fixed_batches, Precision.of(job.config.train)
            chunks = score(self.task, model, rows, size, HOST, fixed=fixed, precision=precision)
            return combine(self.task, chunks).values
        if not isinstance(data, str):
            raise ConfigError(
                f"workers={workers} evaluates Parquet that the actors read, but the data is columns of this process."
                " Pass a path, or leave out workers."
            )
        fields = {"evaluate__workers": workers, "evaluate__where": "actor", "data__eval_path": data, "data__fold": None}
        config = job.config.replace(**fields, evaluate__batch_size=size, scaling__min_workers=1, scaling__max_workers=1)
        check_config(config)
        # These modules import Ray, which nothing else here needs.
        from ray_app.cluster.resources import cluster
        from ray_app.evaluate.evaluator import score_on_actors
        from ray_app.evaluate.job import EvaluationJob

        evaluation = EvaluationJob.of(config, self.task, str(self.path), job.fence, open_rows(self.task, data))
        with cluster(config):
            return combine(self.task, score_on_actors(evaluation, model.state_dict())).values

    def predict(self, data: Any, checkpoint: str = "best", batch_size: int | None = None) -> dict[str, Field]:
        """Predicts rows in this process, without Ray; the rows need no targets.

        Args:
            data: What `predict` of an export takes (`ModelPredictor.predict`): images, rows or texts, one or several; a
                data set; or columns by name, as in the training data. If the task reads one column besides its
                targets, an array of it is enough.
            checkpoint: See `ExportOptions.checkpoint`.
            batch_size: See `evaluate`.

        Returns:
            The result of `Task.predictions` by name, each (rows, ...) or `Ragged`: for a classification `predicted`,
                `predicted_index` and `confidence`.

        Raises:
            ConfigError: `batch_size` is below 1.
            DataError: See `decode_inputs`.
        """
        outputs, _ = self._run_model(data, checkpoint, batch_size)
        parts = [self.task.predictions(*part) for part in outputs]
        return {name: concat_fields([part[name] for part in parts]) for name in parts[0]}

    def answers(self, data: Any, checkpoint: str = "best", batch_size: int | None = None) -> Any:
        """Predicts in this process, without Ray, and returns what `predict` of an export does.

        Args:
            data: See `predict`; so the others.

        Returns:
            The answer to one input, or a list of answers: see `ModelPredictor.predict`.

        Raises:
            DataError: See `decode_inputs`.
        """
        outputs, is_single = self._run_model(data, checkpoint, batch_size)
        answers = [answer for part in outputs for answer in self.task.answers(*part)]
        return answers[0] if is_single else answers

    def _run_model(self, data: Any, checkpoint: str, batch_size: int | None) -> tuple[list[tuple[Any, Batch]], bool]:
        """Returns the outputs and the fields of each batch, and whether the caller gave one input."""
        size, decoded = self._batch_size(batch_size), decode_inputs(self.task, data, read_texts(self._job))
        model, rows = self.load_model(checkpoint), decoded.fields
        outputs = []
        with torch.no_grad():
            for low in range(0, len(next(iter(rows.values()))), size):
                batch = to_batch(rows, slice(low, low + size))
                outputs.append((self.task.forward(model, batch), batch))
        return outputs, decoded.is_single

    def _batch_size(self, batch_size: int | None) -> int:
        """Returns the rows of one forward pass: by default those of the run's evaluations."""
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}; it must be at least 1, or None for the run's.")
        return batch_size or self._job.config.evaluate.batch_size

    def metrics(self) -> list[StepRecord]:
        """Returns the record of every step, in order."""
        return list(read_records(RunPaths(self.path))[0].values())

    def evaluations(self) -> list[Evaluation]:
        """Returns the evaluations by step."""
        return read_evaluations(RunPaths(self.path))

    def epochs(self) -> list[dict[str, float]]:
        """Returns for each epoch the means over its training rows, and its evaluation with `val_` before the names.

        Steps after early stopping are left out.
        """
        job = self._job
        evaluations = {evaluation.step: evaluation.metrics for evaluation in self.evaluations()}
        epochs = []
        steps = [record for record in self.metrics() if record.step <= self.summary["steps"]]
        for _, records in groupby(steps, lambda record: (record.step - 1) // job.steps_per_epoch):
            in_epoch = list(records)
            scores = evaluations.get(in_epoch[-1].step, {})
            epochs.append(means(in_epoch) | {f"val_{name}": value for name, value in scores.items()})
        return epochs

    @property
    def _job(self) -> Job:
        return replace(stored_job(RunPaths(self.path)), task=self.task)


def compare_runs(runs: Sequence[Result | str | os.PathLike[str]]) -> Comparison:
    """Returns a comparison of runs, which may be in any state.

    Args:
        runs: Results of `run_training`, or directories of runs, also in a bucket.

    Raises:
        ConfigError: The list is empty, or an element is not a run.
        OSError: The storage does not answer.
    """
    if isinstance(runs, str) or not runs:
        raise ConfigError(
            f"compare_runs got {runs!r}; pass a list of results or run directories: compare_runs([first, second])."
        )
    roots = [run.path if isinstance(run, Result) else to_location(os.fspath(run)) for run in runs]
    return Comparison(tuple(read_facts(RunPaths(root)) for root in roots))
