"""Scheduled retraining from day to day on real Ray and MLflow, also with a scheduler that is killed in each stage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from ray_app.cli.retrain import main
from ray_app.config.config import Config, digest_json, from_yaml
from ray_app.data.dataset import open_dataset
from ray_app.data.folds import open_evaluation_data
from ray_app.models.registry import champion_of
from ray_app.retrain.rounds import STAGES, RetrainPaths, open_rounds, read_audit_entries
from ray_app.storage.files import read_json
from ray_app.track.mlflow_client import connect
from tests.support.mlflow_server import make_database, mlflow_runs
from tests.support.paths import ROOT
from tests.support.train_command import CommandResult

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(1800)]

ARGUMENTS = [
    f"--config={ROOT / 'conf' / 'retrain_digits.yaml'}",
    "--task.class_path=ray_app.task.tabular.TabularClassification",
    '--task.init_args={"features": ["image"], "hidden": [32], "scale": 16}',
    "--optimizer=torch.optim.Adam",
    "--optimizer.lr=0.01",
    "--schedule=null",
    "--train.epochs=8",
    "--checkpoint.every_epochs=8",
    "--scaling.max_workers=1",
    "--scaling.logical_workers=1",
    "--retrain.min_metric=0.2",
    "--retrain.max_recall_drop=1.0",
    "--retrain.start=champion",
]


class Days:
    """A model that is retrained on data delivered day by day; day 1 has few rows.

    Args:
        folder: Folder of data and runs.
        digits: Folder of the ingested digits.
    """

    def __init__(self, folder: Path, digits: Path) -> None:
        self.folder, self.train = folder, folder / "data" / "train"
        self.train.mkdir(parents=True)
        copytree(digits / "eval", folder / "data" / "eval")
        table = pa.concat_tables(pq.read_table(file) for file in sorted((digits / "train").glob("*.parquet")))
        self.rows = table.take(np.random.default_rng(0).permutation(len(table)))
        self.deliver("first", 0, 150)
        make_database(folder / "runs" / "mlflow.db")

    def deliver(
        self, name: str, low: int, high: int, change: Callable[[np.ndarray], np.ndarray] = lambda labels: labels
    ) -> None:
        """Delivers rows [low, high) as a file, with labels changed by `change`."""
        part = self.rows.slice(low, high - low)
        at = part.column_names.index("label")
        pq.write_table(
            part.set_column(at, part.schema.field(at), pa.array(change(part["label"].to_numpy()))),
            self.train / f"{name}.parquet",
        )

    @property
    def arguments(self) -> list[str]:
        """Arguments of every start."""
        data = [f"--data.path={self.train}", f"--data.eval_path={self.folder / 'data' / 'eval'}"]
        return [*ARGUMENTS, *data, f"--run.storage_path={self.folder / 'runs'}"]

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.folder / 'runs' / 'mlflow.db'}"

    @property
    def paths(self) -> RetrainPaths:
        return RetrainPaths(self.folder / "runs" / "retraining" / "digits")

    @property
    def num_gate_rows(self) -> int:
        """Number of evaluation rows that the gate uses."""
        config = Config().replace(data__eval_path=str(self.folder / "data" / "eval"), evaluate__half="report")
        rows = open_evaluation_data(config).manifest.num_rows
        assert 140 < rows < 359 - 140
        return rows

    def champion(self) -> str | None:
        return champion_of(connect(self.uri), "digits")

    def versions(self) -> list[Any]:
        return sorted(connect(self.uri).search_model_versions("name = 'digits'"), key=lambda v: int(v.version))

    def audit_kinds(self) -> list[str]:
        return [entry["what"] for entry in read_audit_entries(self.paths)]

    def facts(self) -> dict[str, Any]:
        """Returns the facts that must not depend on disturbances."""
        versions, digest = self.versions(), "ray_app.params_digest"
        runs = sorted(path.name for path in (self.folder / "runs").iterdir() if (path / "config.yaml").exists())
        return {
            "versions": [
                (v.version, v.tags[digest], v.tags["ray_app.gate"], v.tags["ray_app.retrain_key"]) for v in versions
            ],
            "champion": self.champion(),
            "replaces": versions[-1].tags["ray_app.replaces"],
            "audit": [(entry["key"], entry["what"], entry["figures"]) for entry in read_audit_entries(self.paths)],
            "runs": runs,
            "tracked": [len(mlflow_runs(self.uri, name)) for name in runs],
            "open": open_rounds(self.paths),
            # The keys of rounds include the digest of the package; an edit of it during this test of minutes shows
            # here first.
            "code": digest_json({str(file): file.read_text() for file in sorted((ROOT / "ray_app").rglob("*.py"))}),
        }


@pytest.fixture
def start(capsys: pytest.CaptureFixture[str]) -> Callable[..., CommandResult]:
    """Starts the command in this process."""

    def call(days: Days, *more: str) -> CommandResult:
        code = main([*days.arguments, *more])
        output = capsys.readouterr()
        return CommandResult(code, output.out, output.err)

    return call


@pytest.fixture(scope="module")
def undisturbed(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Days, dict[str, Any]]:
    """Days 1 and 3 without a disturbance, and their facts."""
    days = Days(tmp_path_factory.mktemp("undisturbed"), digits)
    assert main(days.arguments) == 0
    days.deliver("third", 150, 1400)
    assert main(days.arguments) == 0
    return days, days.facts()


def test_retraining_decides_correctly_from_day_to_day(
    undisturbed: tuple[Days, dict[str, Any]], start: Callable[..., CommandResult]
) -> None:
    days, facts = undisturbed
    assert_day_3(days, facts)

    # The data has not changed.
    assert "is what champion version 2 was trained on" in start(days).out
    assert days.facts() == facts

    days.deliver("fourth", 1400, 1438)
    dry = start(days, "--retrain.min_new_rows=38", "--retrain.dry_run=true")
    assert (dry.code, "new data: 38 of 1,438" in dry.out, "sound: 1,438 training rows" in dry.out) == (0, True, True)
    few = start(days)
    assert (few.code, "38 new training rows, fewer than 100" in few.out) == (0, True)
    assert days.facts() == facts

    # The change keeps the balance of the classes.
    days.deliver("fourth", 150, 1400, change=lambda labels: (labels + 1) % 10)
    days.deliver("third", 150, 1400, change=lambda labels: (labels + 1) % 10)
    # The second start does not add a second audit entry.
    for _ in range(2):
        corrupted = start(days)
        assert (corrupted.code, days.champion(), len(days.versions())) == (2, "2", 2)
        assert "labels of the training data: the champion's accuracy on them is 0." in corrupted.out
        assert days.audit_kinds() == ["promoted", "promoted", "data refused"]
    refused = read_audit_entries(days.paths)[-1]
    assert refused["validation"]["agreement"]["training"] < 0.3
    assert refused["validation"]["agreement"]["accepted"] > 0.8
    tags = connect(days.uri).get_registered_model("digits").tags
    assert refused["why"] in tags["ray_app.data_refused"]
    assert tags["ray_app.refused_data_digest"] == refused["inputs"]["data"]

    (days.train / "fourth.parquet").unlink()
    days.deliver("third", 150, 700)
    truncated = start(days)
    assert (truncated.code, days.champion()) == (2, "2")
    assert "700 rows, 50% of the 1,400 of the champion's; allowed are 70%" in truncated.out

    days.deliver("third", 150, 1400)
    days.deliver("fourth", 1400, 1438)
    worse = start(days, "--retrain.min_new_rows=1", "--optimizer.lr=0.0000001")
    assert (worse.code, days.champion()) == (0, "2"), worse.err
    assert "so it may be no better" in worse.out
    gate = read_audit_entries(days.paths)[-1]
    assert (gate["what"], gate["version"], gate["figures"]["rows"]) == ("gate refused", "3", days.num_gate_rows)
    assert gate["figures"]["low"] <= 0 <= gate["figures"]["high"]
    assert days.versions()[2].tags["ray_app.gate"] == "gate refused"
    measured = connect(days.uri).get_run(days.versions()[2].run_id).data.metrics
    assert (measured["gate_gain"], measured["gate_low"]) == (gate["figures"]["gain"], gate["figures"]["low"])
    assert "already judged: gate refused" in start(days, "--retrain.min_new_rows=1", "--optimizer.lr=0.0000001").out

    # The remaining data is the data of version 2.
    (days.train / "fourth.parquet").unlink()
    back = start(days, "--rollback=wrong on customer X")
    assert (back.code, days.champion()) == (0, "1"), back.err
    again = start(days)
    assert (again.code, days.champion(), len(days.versions())) == (0, "1", 3)
    assert "but the same data, configuration and code were already judged: promoted" in again.out
    assert start(days, "--rollback=this one too").code == 2
    assert days.champion() == "1"
    history = start(days, "--history").out
    for text in ("promoted", "data refused", "gate refused", "rolled back", "wrong on customer X"):
        assert text in history
    assert days.audit_kinds() == ["promoted", "promoted", "data refused", "data refused", "gate refused", "rolled back"]


def assert_day_3(days: Days, facts: dict[str, Any]) -> None:
    """Asserts that version 2 began with the parameters of version 1 and is significantly better."""
    first, second = days.versions()
    assert (facts["champion"], facts["replaces"], facts["tracked"]) == ("2", "1", [1, 1])
    assert [kind for _, kind, _ in facts["audit"]] == ["promoted", "promoted"]
    figures = facts["audit"][1][2]
    assert (figures["metric"], figures["rows"]) == ("accuracy", days.num_gate_rows)
    assert figures["champion"] + 0.1 < figures["challenger"] > 0.9
    assert 0 < figures["low"] < figures["gain"] < figures["high"]
    assert second.tags["ray_app.promoted_because"].startswith("retraining: accuracy 0.9")
    assert second.tags["ray_app.trained_because"].startswith("new data: 1,250 of 1,400 training rows")
    config = from_yaml((days.folder / "runs" / second.tags["ray_app.run_name"] / "config.yaml").read_text())
    assert config.train.init_digest == first.tags["ray_app.params_digest"]
    sizes = [
        open_evaluation_data(config.replace(evaluate__half=half)).manifest.num_rows
        for half in (config.evaluate.half, "report", None)
    ]
    assert sizes == [sizes[2] - figures["rows"], figures["rows"], 359]
    assert config.evaluate.half == "selection"
    assert open_dataset(config.data.path).manifest.num_rows == 1400


STARTS = """
import json, os, signal, sys
from pathlib import Path
import mlflow, ray, torch
from ray_app.errors import RunHeldError
from ray_app.driver.parsing import parse_with_sections
from ray_app.retrain.retraining import EXIT_CODES, retrain
from ray_app.retrain.options import RetrainSection

address, root, starts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])

def child(arguments, stage):
    ray.init(address=address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": root}})
    def at(reached):
        if reached == stage:
            os.kill(os.getpid(), signal.SIGKILL)
    config, sections = parse_with_sections(arguments, {"retrain": RetrainSection}, "retrain.py")
    try:
        code = EXIT_CODES[retrain(config, sections["retrain"], at=at).kind]
    except RunHeldError as error:
        print(error)
        code = 75
    ray.shutdown()
    return code

ended = []
for group in starts:
    pids = []
    for one in group:
        pids.append(os.fork())
        if not pids[-1]:
            code = 99
            try:
                code = child(*one)
            finally:
                sys.stdout.flush()
                os._exit(code)
    ended.append([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
    if set(ended[-1]) - {0, 75, -signal.SIGKILL}:
        break
print(json.dumps(ended))
"""


def schedule(folder: Path, starts: list[list[tuple[list[str], str | None]]]) -> list[list[int]]:
    """Starts schedulers on the test's cluster, concurrently within a group, each in its own process; returns their exit
    codes.

    A start consists of its arguments and the stage in which it kills itself.
    """
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", STARTS, address, str(ROOT), json.dumps(starts)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1700, check=False
    )
    # For a test that fails by an exit code.
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = json.loads(done.stdout.splitlines()[-1])
    assert len(ended) == len(starts), done.stdout + done.stderr
    return ended


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param(
            ["training", "registered", "judged", "concluded", "recorded"], id="that changes something elsewhere"
        ),
        pytest.param(["decided", "validated", "training", *STAGES[2:]], id="of all"),
    ],
)
def test_a_scheduler_killed_in_each_stage_does_not_change_the_result(
    undisturbed: tuple[Days, dict[str, Any]], digits: Path, tmp_path: Path, stages: list[str]
) -> None:
    """The stages in only the slow case change nothing but their own record; other tests write it without Ray."""
    days = Days(tmp_path, digits)
    [both] = schedule(tmp_path, [[(days.arguments, None)] * 2])
    # Of two concurrent starts, one retrains.
    assert sorted(both) == [0, 75]
    assert (days.champion(), len(days.versions()), days.audit_kinds()) == ("1", 1, ["promoted"])

    days.deliver("third", 150, 1400)
    ended = schedule(tmp_path, [*([(days.arguments, stage)] for stage in stages), [(days.arguments, None)]])
    assert ended == [[-signal.SIGKILL]] * len(stages) + [[0]]
    assert days.facts() == undisturbed[1]
    run = days.folder / "runs" / days.versions()[1].tags["ray_app.run_name"]
    assert read_json(run / "summary.json")["status"] == "finished"
