"""The driver of a study with simulated slots: what it records, repeats, continues and refuses."""

from __future__ import annotations

import random
from contextlib import nullcontext, suppress
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_app.cli import watch
from ray_app.config.config import Config
from ray_app.driver.parsing import load_config, load_section
from ray_app.errors import ConfigError, StorageError
from ray_app.retrain.options import RetrainSection
from ray_app.runlog.lease import acquire_lease
from ray_app.runlog.output import TextConsole
from ray_app.runlog.paths import RunPaths
from ray_app.tune import study
from ray_app.tune.options import TuneSection, check_section
from ray_app.tune.record import StudyPaths, StudyRecord, TrialResult
from ray_app.tune.report import StudyState
from ray_app.tune.slots import LostSlotError, Outcome
from ray_app.tune.space import parse_space
from ray_app.tune.study import StudyDriver, StudyFailedError
from ray_app.tune.trials import TrialConfigs, TrialJob
from tests.support.paths import ROOT
from tests.support.quick_cases import only_quick

TUNE = {
    "space": {"schedule.init_args.max_lr": {"log_uniform": [1.0e-4, 1.0e-1]}},
    "trials": 9,
    # Nothing is trained that could be scored.
    "split_evaluation": False,
}


class SimulatedSlots:
    """Slots in which a trial ends at once, in a random order.

    Args:
        count: Number of slots.
        seed: Seed of the order.
        stops_after: Number of results after which the driver is killed.
        lost: Number of attempts of trial 1 that end with an error.
        error: That error.
    """

    def __init__(
        self,
        count: int,
        seed: int = 0,
        stops_after: int = 1000,
        lost: int = 0,
        error: Exception = StorageError("the disk is away"),
    ) -> None:
        self.count, self.jobs = count, list[TrialJob]()
        self._random = random.Random(seed)
        self._left, self._lost = stops_after, lost
        self._error = error

    def __enter__(self) -> SimulatedSlots:
        return self

    def __exit__(self, *_: object) -> None:
        self.jobs.clear()

    @property
    def free(self) -> int:
        return self.count - len(self.jobs)

    def start(self, job: TrialJob) -> None:
        assert self.free > 0
        self.jobs.append(job)

    def wait(self, timeout_s: float) -> list[Outcome]:
        del timeout_s
        if not self.jobs:
            return []
        self._left -= 1
        if self._left < 0:
            self.jobs.clear()
            raise KeyboardInterrupt
        job = self.jobs.pop(self._random.randrange(len(self.jobs)))
        if job.trial == 1 and self._lost:
            self._lost -= 1
            return [(job, self._error)]
        quality = (
            random.Random(job.trial + (job.fold or 0)).random()
            + 0.1 * random.Random(f"{job.trial} {job.rung}").random()
        )
        return [
            (job, TrialResult(job.trial, job.rung, quality, 1, job.epochs, f"{job.trial} {job.epochs}", fold=job.fold))
        ]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The configuration of a study without a cluster."""
    config = load_config(
        ROOT / "conf" / "digits.yaml",
        train__epochs=9,
        tracking__enabled=False,
        run__storage_path=str(tmp_path),
        scaling__gpus_per_worker=0,
    )

    def prepare(trial: Config) -> Any:
        return SimpleNamespace(job=SimpleNamespace(config=trial, best_metric="accuracy", best_mode="max"))

    monkeypatch.setattr(study, "prepare", prepare)
    monkeypatch.setattr(study, "cluster", lambda _: nullcontext())
    return config


def run(config: Config, slots: SimulatedSlots, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> StudyRecord:
    monkeypatch.setattr(study, "Slots", lambda *_: slots)
    section = load_section("tune", TuneSection, {**TUNE, "slots": slots.count, **fields})
    driver = StudyDriver(config, section, RetrainSection(), TextConsole(quiet=True))
    with suppress(KeyboardInterrupt):
        driver.run()
    return driver.record


@pytest.mark.parametrize("kind", only_quick(["halving", "asha", "median"], "asha"))
def test_decisions_are_equal_for_any_slots_and_after_kills(
    config: Config, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    scheduler = {"kind": kind}
    expected = run(config, SimulatedSlots(1), monkeypatch, name="one", scheduler=scheduler).decisions
    for count, seed in ((2, 1), (4, 2), (9, 3)):
        name = f"{count}-slots"
        record = run(config, SimulatedSlots(count, seed), monkeypatch, name=name, scheduler=scheduler)
        assert record.decisions == expected
    for start in range(6):
        record = run(config, SimulatedSlots(2, start, stops_after=3), monkeypatch, name="killed", scheduler=scheduler)
        if record.end is not None:
            break
        assert len(record.results) == 3 * (start + 1)
    assert record.decisions == expected


def test_an_attempt_without_a_result_is_repeated_twice(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(config, SimulatedSlots(2), monkeypatch, name="undisturbed").decisions
    assert run(config, SimulatedSlots(2, lost=2), monkeypatch, name="twice").decisions == expected
    record = run(config, SimulatedSlots(2, lost=3), monkeypatch, name="thrice")
    [failed] = [result for result in record.results if result.has_failed]
    assert (failed.trial, failed.rung) == (1, 0)
    assert failed.reason == "3 attempts failed, the last one: the disk is away"


def test_an_attempt_that_ended_with_its_node_does_not_count(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "alive_nodes", lambda: {"a", "c"})
    for nodes, failures in (({"a", "b"}, 0), ({"a"}, 1)):
        slots = SimulatedSlots(2, lost=5, error=LostSlotError(nodes))
        record = run(config, slots, monkeypatch, name=f"failures-{failures}")
        assert sum(result.has_failed for result in record.results) == failures


def test_more_trials_later_give_the_study_that_began_with_them(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = run(config, SimulatedSlots(3), monkeypatch, name="straight", trials=18)
    run(config, SimulatedSlots(3), monkeypatch, name="grown")
    grown = run(config, SimulatedSlots(3), monkeypatch, name="grown", trials=18)
    assert grown.end == straight.end
    assert grown.trials == straight.trials


def test_a_study_without_budget_begins_no_trial(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StudyFailedError, match="No trial of the study"):
        run(config, SimulatedSlots(2), monkeypatch, budget={"hours": 1e-9})


def test_a_report_and_a_record_are_written(config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = run(config, SimulatedSlots(2), monkeypatch, name="written")
    assert record.end is not None
    assert record.end["winner"] in (tmp_path / "written" / "report.html").read_text()
    assert (tmp_path / "written" / "study.json").exists()


def test_watch_shows_a_study_from_its_folder(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths, budget = StudyPaths(tmp_path / "watched"), {"worker_hours": 2.5}
    record = run(config, SimulatedSlots(2, stops_after=4), monkeypatch, name="watched", budget=budget)
    [trial] = sorted(set(record.trials) - set(record.newest_results()))[:1]
    [trial_run] = paths.runs(trial, None)
    with acquire_lease(RunPaths(paths.root)), acquire_lease(trial_run):
        state = StudyState.read(paths, record)
    assert (state.status, state.training) == ("running", {trial: 0})
    best = max(record.results, key=lambda result: result.value or 0)
    text = f"4 of {len(record.trials)} trials have a result, best accuracy {best.value:.4f}, trial {best.trial:04d}"
    assert state.line == f"watched: running, {text}, 1 train in 2 slots"
    TextConsole(width=150).print(state.screen())
    screen = capsys.readouterr().out
    assert "0.00 of 2.5 worker-hours" in screen
    assert "trains to epoch 1" in screen
    assert StudyState.read(paths, record).line.startswith("watched: interrupted, 4 of")

    run(config, SimulatedSlots(2), monkeypatch, name="watched", budget=budget)
    capsys.readouterr()
    assert watch.main([str(paths.root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("watched: finished, 9 of 9 trials have a result")
    assert [line.split()[1] for line in lines[-9:]] == ["2", "1", "1", *["0"] * 6]
    assert watch.main([str(paths.root), "--port", "0"]) == 2
    assert "is a study, which is watched alone" in capsys.readouterr().err


def test_a_trial_counts_when_all_its_folds_have_ended(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config.replace(data__eval_path=None)
    expected = run(config, SimulatedSlots(1), monkeypatch, name="one", folds=3).decisions
    record = run(config, SimulatedSlots(2, 1, stops_after=5), monkeypatch, name="killed", folds=3)
    assert (len(record.parts), record.folds) == (5, 3)
    record = run(config, SimulatedSlots(7, 2), monkeypatch, name="killed", folds=3)
    assert record.decisions == expected
    assert all(result.value == fmean(result.scores) for result in record.results)
    assert len(record.parts) == 3 * len(record.results)


def test_the_epochs_that_a_task_chooses_by_its_rows_are_refused_with_their_number(tmp_path: Path) -> None:
    """Rungs by the default of `train.epochs` would end each trial after one of its 75 epochs."""
    pq.write_table(pa.table({"x": [0.0, 1.0] * 40, "label": [0, 1] * 40}), tmp_path / "rows.parquet")
    data = f"data: {{path: {tmp_path / 'rows.parquet'}, eval_path: {tmp_path / 'rows.parquet'}}}\n"
    task = "task: {class_path: ray_app.task.tabular.TabularClassification}\n"
    (tmp_path / "table.yaml").write_text(data + task)
    config = load_config(tmp_path / "table.yaml", run__storage_path=str(tmp_path), tracking__enabled=False)
    space = {"task.init_args.dropout": {"uniform": [0.0, 0.5]}}
    section = load_section("tune", TuneSection, {"space": space, "trials": 2, "dry_run": True})
    with pytest.raises(ConfigError, match=r"task sets (\d+) by the number of rows.* Set train.epochs, such as \1\."):
        StudyDriver(config, section, RetrainSection(), TextConsole(quiet=True))
    config = config.replace(train__epochs=9)
    assert StudyDriver(config, section, RetrainSection(), TextConsole(quiet=True)).rungs[-1] == 9


def test_a_setting_is_inserted_if_that_gives_what_the_parser_gives(config: Config) -> None:
    space = {
        "schedule.init_args.max_lr": {"log_uniform": [1.0e-4, 1.0e-1]},
        "train.grad_clip_norm": {"choice": [None, 0.5]},
        "data.global_batch_size": {"choice": [32, 64]},
        # The second one is the default, which the parser removes.
        "optimizer.init_args.eps": {"choice": [1.0e-6, 1.0e-8]},
        # The parser makes a number of the first one.
        "train.ema_decay": {"choice": ["0.9", 0.99]},
        "optimizer.class_path": {"choice": ["torch.optim.SGD", "torch.optim.AdamW"]},
    }
    paths, section = StudyPaths(Path(config.run.storage_path) / "study"), TuneSection(space=space)
    plain = TrialConfigs(config, paths, section).check(parse_space(space))
    names = ("schedule.init_args.max_lr", "train.grad_clip_norm", "data.global_batch_size", "optimizer.init_args.eps")
    assert plain == set(names)
    settings = dict(zip(names, (0.0123, 0.5, 32, 1.0e-8), strict=True))
    parsed, inserted = (TrialConfigs(config, paths, section, some).make(3, settings) for some in (set[str](), plain))
    assert inserted == parsed
    with pytest.raises(ConfigError, match=r"data\.global_batch_size is 66"):
        TrialConfigs(config, paths, section, plain).make(3, {"data.global_batch_size": 66})


@pytest.mark.parametrize(
    ("fields", "gate", "message"),
    [
        ({"folds": 3}, RetrainSection(), "retrain the file winner.yaml"),
        ({"split_evaluation": False}, RetrainSection(), "or retrain.gate_path"),
        ({"split_evaluation": True}, RetrainSection(force=" "), "retrain.force is empty"),
    ],
)
def test_a_study_without_a_gate_for_its_winner_is_refused(
    config: Config, fields: dict[str, Any], gate: RetrainSection, message: str
) -> None:
    config = config.replace(tracking__registered_model="digits")
    section = load_section("tune", TuneSection, TUNE | {"register": True} | fields)
    with pytest.raises(ConfigError, match=message):
        check_section(config, section, gate)
