"""Rollback of a champion on a real MLflow store: one champion further back each time, with the alias moved last."""

from pathlib import Path
from typing import Any

import pytest

from ray_app.config.config import Config
from ray_app.errors import RegistryError
from ray_app.models import registry
from ray_app.models.registry import champion_of, promote, rollback, rollbacks
from ray_app.retrain import rounds
from ray_app.retrain.rounds import RetrainPaths, read_audit_entries
from ray_app.retrain.situation import record_rollbacks, roll_back
from ray_app.runlog.lease import acquire_lease
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import read_all_json
from ray_app.track.mlflow_client import connect
from tests.support.mlflow_server import make_database


class Stopped(BaseException):
    """The process was stopped."""


class StoppingClient:
    """MLflow's client in a process that is stopped before a changing call, the one with the number `at`."""

    def __init__(self, client: Any, at: int) -> None:
        self._client, self._calls_left = client, at

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if not name.startswith("set_"):
            return method

        def call(*args: Any) -> Any:
            self._calls_left -= 1
            if not self._calls_left:
                raise Stopped
            return method(*args)

        return call


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return connect(make_database(tmp_path_factory.mktemp("rollback") / "mlflow.db"))


def register_promoted(client: Any, name: str, versions: int, folder: Path) -> None:
    """Registers a model and promotes its versions one after the other."""
    client.create_registered_model(name)
    for number in range(1, versions + 1):
        client.create_model_version(name, str(folder), None)
        promote(client, name, str(number), "better", "me")


@pytest.mark.rest
@pytest.mark.parametrize("calls", [1, *(calls for calls in (2, 4, 5)), 3, 6])
def test_a_stopped_promotion_leaves_no_tags_that_a_rollback_reads(client: Any, tmp_path: Path, calls: int) -> None:
    name = f"stopped-{calls}"
    register_promoted(client, name, 2, tmp_path)
    served = dict(client.get_model_version(name, "1").tags)
    with pytest.raises(Stopped):
        promote(StoppingClient(client, calls), name, "1", "never said", "me")
    assert champion_of(client, name) == "2"
    rollback(client, name, "worse", "me")
    assert champion_of(client, name) == "1"
    assert client.get_model_version(name, "1").tags == served


def test_each_rollback_goes_one_champion_further_back(client: Any, tmp_path: Path) -> None:
    register_promoted(client, "m", 3, tmp_path)
    first = rollback(client, "m", "wrong on customer X", "me")
    assert (first.version, first.to) == ("3", "2")
    assert champion_of(client, "m") == "2"
    tags = client.get_model_version("m", "3").tags
    assert tags["ray_app.rolled_back_because"] == "wrong on customer X"
    assert tags["ray_app.rolled_back_by"] == "me"
    assert client.get_model_version("m", "2").tags["ray_app.replaces"] == "1"
    second = rollback(client, "m", "this one too", "me")
    assert (second.version, second.to) == ("2", "1")
    with pytest.raises(RegistryError, match="Version 1 of 'm' replaced no other champion"):
        rollback(client, "m", "and this", "me")
    assert champion_of(client, "m") == "1"
    assert sorted(
        (rolled_back.version, rolled_back.to, rolled_back.reason) for rolled_back in rollbacks(client, "m")
    ) == [("2", "1", "this one too"), ("3", "2", "wrong on customer X")]


def test_a_stopped_rollback_leaves_the_champion_and_is_not_recorded(client: Any, tmp_path: Path) -> None:
    register_promoted(client, "stopped", 2, tmp_path)
    for number in range(1, 5):
        with pytest.raises(Stopped):
            rollback(StoppingClient(client, number), "stopped", "bad", "me")
        assert champion_of(client, "stopped") == "2"
        assert rollbacks(client, "stopped") == []
    assert rollback(StoppingClient(client, 5), "stopped", "bad", "me").to == "1"


def test_a_rollback_to_a_rolled_back_version_is_refused_until_it_is_promoted_again(client: Any, tmp_path: Path) -> None:
    register_promoted(client, "fro", 2, tmp_path)
    promote(client, "fro", "1", "the older one, by hand", "me")
    assert rollback(client, "fro", "worse still", "me").to == "2"
    with pytest.raises(
        RegistryError, match="Version 2 of 'fro' replaced version 1, which was rolled back itself: worse still"
    ):
        rollback(client, "fro", "bad", "me")
    assert champion_of(client, "fro") == "2"
    promote(client, "fro", "1", "it was the data", "me")
    assert rollbacks(client, "fro") == []
    assert rollback(client, "fro", "no", "me").to == "2"


def test_a_stopped_rollback_does_not_count_after_another_promotion(client: Any, tmp_path: Path) -> None:
    register_promoted(client, "passed", 2, tmp_path)
    with pytest.raises(Stopped):
        rollback(StoppingClient(client, 4), "passed", "bad", "me")
    client.create_model_version("passed", str(tmp_path), None)
    promote(client, "passed", "3", "better", "me")
    assert rollbacks(client, "passed") == []
    assert rollback(client, "passed", "bad", "me").to == "2"


def test_a_rollback_without_a_reason_or_an_earlier_version_is_refused(client: Any, tmp_path: Path) -> None:
    register_promoted(client, "one", 2, tmp_path)
    with pytest.raises(RegistryError, match="needs a reason"):
        rollback(client, "one", " ", "me")
    with pytest.raises(RegistryError, match="has no champion"):
        rollback(client, "unknown", "bad", "me")
    client.delete_model_version("one", "1")
    with pytest.raises(RegistryError, match="has no version '1'"):
        rollback(client, "one", "bad", "me")
    assert champion_of(client, "one") == "2"


def test_a_rollback_whose_reply_was_lost_is_repeated_without_a_second_effect(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = {"tracking__uri": client.tracking_uri, "run__storage_path": str(tmp_path / "runs")}
    config = Config().replace(tracking__registered_model="lost", **uri)
    register_promoted(client, "lost", 4, tmp_path)

    def move_and_stop(self: Any, *args: Any) -> None:
        move(self, *args)
        raise Stopped

    move = type(client).set_registered_model_alias
    with monkeypatch.context() as losing:
        losing.setattr(type(client), "set_registered_model_alias", move_and_stop)
        with pytest.raises(Stopped):
            roll_back(config, "wrong on customer X")
    assert champion_of(client, "lost") == "3"
    for _ in range(2):
        repeated = roll_back(config, "wrong on customer X")
        assert (repeated.version, repeated.to, champion_of(client, "lost")) == ("4", "3", "3")
    assert [entry["what"] for entry in read_audit_entries(RetrainPaths.of(config))] == ["rolled back"]
    assert roll_back(config, "wrong on customer Y").to == "2"
    monkeypatch.setattr(registry, "_now", lambda: "2999-01-01T00:00:00+00:00")
    promote(client, "lost", "3", "right after all", "me")
    assert roll_back(config, "wrong on customer X").to == "2", (
        "the repeated request was taken for the old one although the version was promoted since"
    )


def test_a_rollback_does_not_wait_for_a_training(client: Any, tmp_path: Path) -> None:
    config = Config().replace(
        tracking__registered_model="busy", tracking__uri=client.tracking_uri, run__storage_path=str(tmp_path / "runs")
    )
    register_promoted(client, "busy", 2, tmp_path)
    paths = RetrainPaths.of(config)
    # This is the lease of a retraining that takes hours.
    with acquire_lease(RunPaths(paths.root)):
        assert roll_back(config, "wrong on customer X").to == "1"
    assert champion_of(client, "busy") == "1"
    assert [entry["what"] for entry in read_audit_entries(paths)] == ["rolled back"]


def test_recording_rollbacks_reads_the_audit_record_once(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_promoted(client, "many", 5, tmp_path)
    paths = RetrainPaths(tmp_path / "many")
    reads: list[int] = []
    for reason in "abcd":
        rollback(client, "many", reason, "me")
    record_rollbacks(paths, client, "many")

    def count_read(folder: Any) -> Any:
        reads.append(1)
        return read_all_json(folder)

    monkeypatch.setattr(rounds, "read_all_json", count_read)
    record_rollbacks(paths, client, "many")
    assert len(reads) == 1
    assert sorted(entry["why"] for entry in read_audit_entries(paths)) == ["a", "b", "c", "d"]
