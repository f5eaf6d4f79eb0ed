"""The order of the stages of a retraining, on a delivery that is refused: lease, data, effects, record."""

from __future__ import annotations

import dataclasses
import errno
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from ray_app import load_config
from ray_app.cli.retrain import main
from ray_app.config.config import Config, default_tracking_uri
from ray_app.data import parquet_files
from ray_app.errors import LeaseLostError, RunHeldError
from ray_app.models.registry import champion_of, promote
from ray_app.preflight.changes import iter_import_paths
from ray_app.retrain import profile, rounds
from ray_app.retrain.gate import GateFigures
from ray_app.retrain.options import RetrainSection
from ray_app.retrain.retraining import Outcome, retrain
from ray_app.retrain.rounds import RetrainPaths, make_inputs, read_audit_entries, read_delivery
from ray_app.retrain.situation import KEY_TAG, Champion, acquire_alias_lease, load_champion
from ray_app.runlog.lease import LeaseHolder, LeaseRecord, newest_fence
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import list_files, put_json
from ray_app.track.mlflow_client import connect
from tests.support.mlflow_server import make_database

SECTION = RetrainSection()


@pytest.fixture(scope="module", autouse=True)
def _hash_code_once() -> Iterator[None]:
    """Remembers the digest of the code: no test here changes code, and each start would parse all modules again."""
    digests, digest_code = dict[tuple[str, ...], str](), rounds.digest_code

    def digest_once(config: Config) -> str:
        names = tuple(sorted(iter_import_paths(config)))
        if names not in digests:
            digests[names] = digest_code(config)
        return digests[names]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rounds, "digest_code", digest_once)
        yield


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Returns a configuration with too few rows."""
    random = np.random.default_rng(0)
    for name in ("train", "eval"):
        (tmp_path / name).mkdir()
        table = pa.table({"a": random.normal(size=60), "label": random.integers(0, 3, 60)})
        pq.write_table(table, tmp_path / name / "part.parquet")
    make_database(tmp_path / "runs" / "mlflow.db")
    return load_config(
        None,
        task__class_path="ray_app.task.tabular.TabularClassification",
        data__path=str(tmp_path / "train"),
        data__eval_path=str(tmp_path / "eval"),
        run__storage_path=str(tmp_path / "runs"),
        tracking__registered_model="m",
    )


class StageObserver:
    """A hook that each stage calls between its effects and its record; it notes what has been recorded by then.

    Args:
        config: The configuration.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.paths = config, RetrainPaths.of(config)
        self.recorded_at: dict[str, list[str]] = {}
        self.tagged: dict[str, bool] = {}
        self.audited: dict[str, int] = {}

    def __call__(self, stage: str) -> None:
        self.recorded_at[stage] = self.recorded
        client = connect(f"sqlite:///{self.config.run.storage_path}/mlflow.db")
        self.tagged[stage] = any("ray_app.data_refused" in m.tags for m in client.search_registered_models())
        self.audited[stage] = len(read_audit_entries(self.paths))

    @property
    def recorded(self) -> list[str]:
        """The recorded stages."""
        return sorted(file.stem for file in Path(str(self.paths.rounds)).glob("*/*.json"))


def start(config: Config, watch: StageObserver) -> Outcome:
    return retrain(config, SECTION, Console(quiet=True), watch)


def test_refused_data_ends_a_round_before_training_and_effects_precede_records(config: Config, tmp_path: Path) -> None:
    connect(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}").create_registered_model("m")
    watch = StageObserver(config)
    outcome = start(config, watch)
    assert outcome.kind == "data refused"
    assert "the evaluation data has 60 rows, and the gate" in outcome.reason
    assert watch.recorded_at == {
        "decided": [],
        "validated": ["decided"],
        "concluded": ["decided", "validated"],
        "recorded": ["concluded", "decided", "validated"],
    }
    assert watch.tagged == {"decided": False, "validated": False, "concluded": True, "recorded": True}
    assert watch.audited == {"decided": 0, "validated": 0, "concluded": 0, "recorded": 1}
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["mlflow.db", "retraining"], (
        "a run was started"
    )


class ConcurrentStart(StageObserver):
    """Starts a second retraining in the middle of a stage."""

    def __call__(self, stage: str) -> None:
        super().__call__(stage)
        with pytest.raises(RunHeldError):
            start(self.config, StageObserver(self.config))


def test_a_second_start_is_refused_in_every_stage(config: Config) -> None:
    watch = ConcurrentStart(config)
    assert start(config, watch).kind == "data refused"
    assert list(watch.recorded_at) == ["decided", "validated", "concluded", "recorded"]
    assert len(read_audit_entries(watch.paths)) == 1


class TakeOver(StageObserver):
    """Lets another scheduler take over in the middle of a stage, as if this one had stalled for long.

    Args:
        config: The configuration.
        stage: The stage in which the other scheduler takes over.
    """

    def __init__(self, config: Config, stage: str) -> None:
        super().__init__(config)
        self.stage = stage

    def __call__(self, stage: str) -> None:
        super().__call__(stage)
        if stage == self.stage:
            other = LeaseRecord(
                dataclasses.replace(LeaseHolder.here(), host="node-7", machine="node-7"), 0.0, time.time(), 30.0
            )
            put_json(RunPaths(self.paths.root).fence(2), dataclasses.asdict(other))


@pytest.mark.parametrize("stage", ["validated", "concluded"])
def test_a_retraining_that_lost_its_lease_records_nothing_more(config: Config, stage: str) -> None:
    watch = TakeOver(config, stage)
    with pytest.raises(LeaseLostError):
        start(config, watch)
    assert list(watch.recorded_at)[-1] == stage, "the retraining went on to another stage"
    assert watch.recorded == watch.recorded_at[stage]
    assert read_audit_entries(watch.paths) == []


def test_the_next_start_continues_with_the_first_unrecorded_stage(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = TakeOver(config, "concluded")
    with pytest.raises(LeaseLostError):
        start(config, watch)
    # The other scheduler has ended.
    RunPaths(watch.paths.root).fence(2).unlink()
    second = StageObserver(config)
    assert retrain(config, SECTION, at=second).kind == "data refused"
    assert list(second.recorded_at) == ["concluded", "recorded"], "a recorded stage was repeated"
    [entry] = read_audit_entries(second.paths)
    assert entry["what"] == "data refused"
    assert entry["decision"]["reason"] in capsys.readouterr().out


@pytest.mark.rest
def test_unreachable_storage_does_not_refuse_the_data(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--task.class_path",
        config.task.class_path,
        "--data.path",
        config.data.path,
        "--data.eval_path",
        str(config.data.eval_path),
    ]
    arguments += ["--run.storage_path", config.run.storage_path, "--tracking.registered_model", "m"]

    def raise_stale_handle(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    for module, function in ((parquet_files, "read_tail"), (profile, "DataFile")):
        with monkeypatch.context() as broken:
            broken.setattr(module, function, raise_stale_handle)
            assert main(arguments) == 1
        assert "part.parquet cannot be read: [Errno 116] Stale file handle" in capsys.readouterr().err
    watch = StageObserver(config)
    assert watch.recorded == ["decided"]
    assert read_audit_entries(watch.paths) == []
    assert main(arguments) == 2
    assert "the evaluation data has 60 rows, and the gate" in capsys.readouterr().out


@pytest.mark.rest
def test_a_refused_challenger_is_judged_again_when_another_champion_serves(config: Config, tmp_path: Path) -> None:
    watch = StageObserver(config)
    assert start(config, watch).kind == "data refused"
    [record] = Path(str(watch.paths.rounds)).glob("*/concluded.json")
    concluded = {
        "outcome": "gate refused",
        "reason": "version 2 has become the champion meanwhile",
        "before": "1",
        "version": "3",
    }
    put_json(record, {**concluded, "at": "2026-01-01T00:00:00+00:00"})
    client = connect(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    client.create_registered_model("m")
    for number in ("1", "2", "3"):
        client.create_model_version("m", str(tmp_path), None)
        promote(client, "m", number, "better", "me")
        outcome = start(config, watch)
        if number != "2":
            assert outcome.kind == "nothing"
            assert "already judged: gate refused" in outcome.reason
        else:
            assert outcome.kind == "data refused", "the data is not validated again"
            assert [entry["what"] for entry in read_audit_entries(watch.paths)] == ["data refused", "data refused"]
            put_json(record, {**concluded, "at": "2026-01-01T00:00:00+00:00"})


@pytest.mark.rest
def test_refused_data_is_validated_again_once_when_another_champion_serves(config: Config, tmp_path: Path) -> None:
    watch = StageObserver(config)
    assert start(config, watch).kind == "data refused"
    client = connect(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    client.create_registered_model("m")
    for number in ("1", "2"):
        client.create_model_version("m", str(tmp_path), None)
        promote(client, "m", number, "better", "me")
        for is_validated in (True, False):
            observer = StageObserver(config)
            outcome = start(config, observer)
            assert outcome.kind == "data refused"
            assert outcome.reason.startswith("the same data was refused before") is not is_validated
            assert ("validated" in observer.recorded_at) is is_validated
    assert [entry["champion_before"] for entry in read_audit_entries(watch.paths)] == [None, "1", "2"]


def test_a_partly_removed_round_is_started_from_its_first_stage(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = StageObserver(config)
    assert start(config, watch).kind == "data refused"
    [folder] = Path(str(watch.paths.rounds)).iterdir()
    for name in ("decided", "recorded", "concluded"):
        (folder / f"{name}.json").unlink()
    put_json(folder / "validated.json", {"problems": ["of another round"], "accepted": False})
    put_json(folder / "judged.json", {"verdict": {"promote": True, "reason": "of another round"}})
    with monkeypatch.context() as stuck:
        stuck.setattr(rounds, "remove_tree", lambda folder: None)
        with pytest.raises(OSError, match="cannot be emptied: validated, judged still exist"):
            start(config, StageObserver(config))
    assert watch.recorded == ["judged", "validated"]
    second = StageObserver(config)
    assert "of another round" not in start(config, second).reason
    assert list(second.recorded_at) == ["decided", "validated", "concluded", "recorded"]
    assert not (folder / "judged.json").exists()


class UnrecordedPromotion:
    """A round that promotes version 2 and is stopped before it records that; version 1 was the champion at its start.

    Args:
        config: The configuration.
        folder: The folder that the versions name as their files.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self.paths, self.client = RetrainPaths.of(config), connect(default_tracking_uri(config))
        delivery = read_delivery(config)
        inputs = make_inputs(config, SECTION, delivery, "")
        self.round = rounds.Round(self.paths, inputs.key)
        run = self.client.create_run("0").info.run_id
        self.client.create_registered_model("m")
        for tags in ({}, {KEY_TAG: inputs.key}):
            self.client.create_model_version("m", str(folder), run, tags=tags)
        promote(self.client, "m", "1", "better", "me")
        decision = {"retrain": True, "trigger": "new data", "reason": "40 new rows"}
        self.round.put("decided", {"inputs": dataclasses.asdict(inputs), "champion": "1", "decision": decision})
        table = profile.Profile(60, {"a": "double", "label": "int64"}, {"a": 0.0}, {"0": 20})
        self.round.put(
            "validated",
            {"delivery": dataclasses.asdict(delivery), "problems": [], "accepted": True, "train": table.to_json()},
        )
        self.round.put("trained", {"run": "m-1"})
        self.round.put("registered", {"version": "2"})
        figures = GateFigures("accuracy", "max", 60, 0.9, 0.8, 0.1, 0.05, 0.15)
        self.judged = {"figures": dataclasses.asdict(figures), "verdict": {"promote": True, "reason": "gain +0.1000"}}
        self.data = delivery.digest

    def champion(self) -> Champion:
        champion = load_champion(self.paths, self.client, "m", "", champion_of(self.client, "m"))
        assert champion is not None
        return champion


def write_new_delivery(config: Config) -> None:
    """Writes data with another column type, which validation refuses before it asks a model."""
    pq.write_table(pa.table({"a": np.arange(50), "label": np.arange(50) % 3}), Path(config.data.path) / "part.parquet")


@pytest.mark.parametrize("concluded", [False, pytest.param(True, marks=pytest.mark.rest)])
def test_an_unrecorded_promotion_is_recorded_although_other_data_was_delivered(
    config: Config, tmp_path: Path, concluded: bool
) -> None:
    promotion = UnrecordedPromotion(config, tmp_path)
    promotion.round.put("judged", promotion.judged)
    promote(promotion.client, "m", "2", "retraining: gain +0.1000", "me")
    if concluded:
        promotion.round.put(
            "concluded", {"outcome": "promoted", "reason": "gain +0.1000", "version": "2", "before": "1"}
        )
    write_new_delivery(config)
    assert start(config, StageObserver(config)).kind == "data refused"
    first, second = read_audit_entries(promotion.paths)
    assert (first["what"], first["why"], first["version"], first["champion_before"]) == (
        "promoted",
        "gain +0.1000",
        "2",
        "1",
    )
    assert (second["what"], second["champion_before"]) == ("data refused", "2")
    assert (promotion.round.read("concluded") or {})["before"] == "1"
    champion = promotion.champion()
    assert (champion.version.version, champion.metric_when_promoted("accuracy")) == ("2", 0.9)
    assert champion.delivery is not None
    assert champion.delivery.digest == promotion.data
    assert champion.version.tags.get("ray_app.data_digest", promotion.data) == promotion.data
    assert champion.profiles.train is not None
    again = StageObserver(config)
    assert start(config, again).kind == "data refused"
    assert again.recorded_at == {}, "data that was refused is validated again for the same champion"
    assert len(read_audit_entries(promotion.paths)) == 2


@pytest.mark.parametrize("is_judged", [pytest.param(False, marks=pytest.mark.rest), True])
def test_a_superseded_round_records_the_data_of_its_version(config: Config, tmp_path: Path, is_judged: bool) -> None:
    promotion = UnrecordedPromotion(config, tmp_path)
    if is_judged:
        promotion.round.put("judged", promotion.judged)
    write_new_delivery(config)
    assert start(config, StageObserver(config)).kind == "data refused"
    assert [(entry["what"], entry.get("champion_before")) for entry in read_audit_entries(promotion.paths)] == [
        ("superseded", None),
        ("data refused", "1"),
    ]
    assert champion_of(promotion.client, "m") == "1"
    promote(promotion.client, "m", "2", "by hand", "me")
    assert promotion.champion().profiles.train is not None
    assert rounds.open_rounds(promotion.paths) == []
    assert start(config, StageObserver(config)).kind == "data refused"
    assert [entry["what"] for entry in read_audit_entries(promotion.paths)] == [
        "superseded",
        "data refused",
        "data refused",
    ]


@pytest.mark.parametrize("lease_root", ["root", "deciding"])
def test_lease_files_of_old_starts_are_removed(config: Config, lease_root: str) -> None:
    paths = RetrainPaths.of(config)
    lease = RunPaths(getattr(paths, lease_root))
    for number in range(1, 151):
        put_json(
            lease.fence(number), dataclasses.asdict(LeaseRecord(LeaseHolder.here(), 0.0, 0.0, 30.0, released=True))
        )
    if lease_root == "root":
        start(config, StageObserver(config))
    else:
        acquire_alias_lease(paths).release()
    assert sorted(list_files(lease.fences)) == [f"{number:04d}.json" for number in range(51, 152)]
    assert newest_fence(lease) == 151
