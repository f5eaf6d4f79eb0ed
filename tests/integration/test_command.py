"""The command `jobs/train.py`: help, refusals, a bad row in mid-run, Ctrl-C and a user's own task."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ray_app import load_config
from ray_app.checkpoint.store import CheckpointStore
from ray_app.errors import ConfigError
from ray_app.pipeline.cli import parse
from ray_app.pipeline.cluster import workers_that_fit
from ray_app.pipeline.prepare import claim, prepare
from ray_app.pipeline.training import main
from ray_app.record.journal import read_events
from ray_app.record.lease import acquire
from ray_app.record.paths import RunPaths

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "jobs" / "train.py"
USER_TASK = Path(__file__).parent / "user_task"
_PROCESS_S = 240


def own_cluster() -> dict[str, str]:
    """The environment of a process that starts a Ray cluster of its own."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"PYTHONPATH": str(ROOT)}


@dataclass(frozen=True)
class Ended:
    """What a call of the command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[[Sequence[str]], Ended]:
    """Calls the command in this process."""

    def run(arguments: Sequence[str]) -> Ended:
        try:
            code: Any = main(list(arguments))
        except SystemExit as exit:
            code = exit.code
        shown = capsys.readouterr()
        return Ended(code, shown.out, shown.err)

    return run


@pytest.fixture
def command(digits: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """The arguments of a good command, with others after them."""

    def make(*more: str) -> list[str]:
        fields = {
            "config": str(ROOT / "conf" / "digits.yaml"),
            "data.path": str(digits / "train"),
            "data.eval_path": str(digits / "eval"),
            "run.storage_path": str(tmp_path / "runs"),
            "run.name": "run",
            "tracking.enabled": "false",
        }
        return [*(f"--{name}={value}" for name, value in fields.items()), *more]

    return make


def test_help_explains_the_fields_with_units_and_defaults() -> None:
    done = subprocess.run([sys.executable, str(TRAIN), "--help"], capture_output=True, text=True, timeout=_PROCESS_S, check=False)
    shown = " ".join(done.stdout.split())
    assert done.returncode == 0
    assert not done.stderr
    for expected in (
        "--data.global_batch_size GLOBAL_BATCH_SIZE Rows of one optimizer step over all workers; divisible by the number of logical"
        " workers. (type: int, default: 32)",
        "--failure.heartbeat_timeout_s HEARTBEAT_TIMEOUT_S Seconds without a sign of life after which the others go on without a worker."
        " (type: float, default: 5.0)",
        "--data.read_task_mb READ_TASK_MB Most decoded megabytes of one read task. (type: float, default: 64.0)",
        "--train.reduction {exact,overlapped}",
        "--task.help",
    ):
        assert expected in shown


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--train.epoch=3"], "unrecognized arguments: --train.epoch=3"),
        (["--train.epochs=many"], '(?s)"train.epochs".*int.* many'),
        (["--data.last_batch=some"], "'keep', 'drop'.* some"),
        (["--data.global_batch_size=66"], "66, not divisible by the 4 logical workers; the nearest valid values are 64 or 68"),
        (["--scaling.max_workers=5"], "max_workers is 5, above scaling.logical_workers = 4: .* Set max_workers to at most 4"),
        (["--scaling.min_workers=3", "--train.epochs=0"], r"(?s)epochs is 0; it must be at least 1.*min_workers is 3"),
        (["--run.name=../there"], "run.name is '../there'; use"),
        (["--data.path=nowhere"], "'nowhere' does not exist .* ingest"),
        (["--task.init_args.image=label"], "Column 'label' .* holds integer int64; the image needs array or bytes"),
        (["--task.init_args.label=image"], "Column 'image' .* the label needs integer"),
        (["--task.init_args.num_classes=5"], "labels from 0 to 9; 5 classes allow 0 to 4"),
        (["--task.init_args.model=resnet999"], "'resnet999'; it must be one of .*resnet18"),
        (["--task.class_path=nowhere.Missing"], "'nowhere.Missing':\\s+No module named 'nowhere'"),
        (["--task.class_path=torch.nn.Linear"], "torch.nn.Linear does not correspond to a subclass of Task"),
        (["--evaluate.metric=recall"], "evaluate.metric is 'recall'; the task's metrics of one number are accuracy, "),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    command: Callable[..., list[str]],
    call: Callable[[Sequence[str]], Ended],
    tmp_path: Path,
    arguments: list[str],
    expected: str,
) -> None:
    refused(call(command(*arguments)), expected, tmp_path)


def refused(ended: Ended, expected: str, tmp_path: Path) -> None:
    assert ended.code == 2
    assert not ended.out
    assert re.search(expected, ended.err), ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "runs").exists()


def test_an_unknown_field_in_a_file_is_refused(
    command: Callable[..., list[str]], call: Callable[[Sequence[str]], Ended], tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text("train:\n  epoch: 3\n")
    refused(call(command(f"--config={tmp_path / 'mine.yaml'}")), "'train' does not accept option 'epoch'", tmp_path)


def test_an_empty_folder_is_refused(command: Callable[..., list[str]], call: Callable[[Sequence[str]], Ended], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(call(command(f"--data.path={tmp_path / 'empty'}")), "empty' holds no .*parquet file; ingest", tmp_path)


def write_images(folder: Path, count: int, group: int, bad: int) -> Path:
    """JPEG images in row groups of `group` rows, one of them no image; alternating labels."""
    folder.mkdir()
    random = np.random.default_rng(0)
    files = [BytesIO() for _ in range(count)]
    for file in files:
        Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(file, "JPEG")
    images = [file.getvalue() for file in files]
    images[bad] = images[bad][:40]
    table = pa.table({"image": images, "label": [i % 2 for i in range(count)]})
    pq.write_table(table, folder / "images.parquet", row_group_size=group)
    return folder


def of_images(folder: Path) -> list[str]:
    return [
        "--task.class_path=ray_app.task.image.ImageClassification",
        "--task.init_args.pixel_max=255",
        "--task.init_args.size=16",
        f"--data.path={folder}",
        "--data.eval_path=null",
        "--data.cache=none",
        "--data.global_batch_size=8",
        "--data.shuffle_window_rows=96",
        "--scaling.max_workers=1",
    ]


def test_a_first_row_that_is_no_image_is_refused(
    command: Callable[..., list[str]], call: Callable[[Sequence[str]], Ended], tmp_path: Path
) -> None:
    folder = write_images(tmp_path / "images", 32, 16, bad=0)
    refused(call(command(*of_images(folder))), r"BadRowError: images\.parquet, row group 0, row 0: ", tmp_path)


def test_a_run_name_of_another_configuration_is_refused(
    command: Callable[..., list[str]], call: Callable[[Sequence[str]], Ended], tmp_path: Path
) -> None:
    prepared = prepare(parse(command()))
    with acquire(prepared.job.paths) as lease:
        claim(prepared, lease.fence)  # a run that got as far as its configuration
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    ended = call(command("--seed=7"))
    assert ended.code == 2
    assert "The run 'run' exists with another configuration" in ended.err
    assert "+ seed: 7" in ended.err
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before


@pytest.mark.parametrize(
    ("fields", "resources", "expected"),
    [
        ({"scaling__max_workers": 4}, {"CPU": 6.0}, 4),
        ({"scaling__max_workers": 4}, {"CPU": 5.0}, 3),
        ({"scaling__max_workers": 4, "data__eval_path": None}, {"CPU": 5.0}, 4),
        ({"scaling__max_workers": 4, "evaluate__num_cpus": 0}, {"CPU": 5.0}, 4),
        ({"scaling__max_workers": 4, "scaling__cpus_per_worker": 2}, {"CPU": 7.0}, 2),
        ({"scaling__max_workers": 4, "scaling__gpus_per_worker": 1}, {"CPU": 9.0, "GPU": 2.0}, 2),
        ({"scaling__max_workers": 4, "scaling__gpus_per_worker": 1, "evaluate__num_gpus": 1}, {"CPU": 9.0, "GPU": 2.0}, 1),
    ],
)
def test_as_many_workers_as_fit(fields: dict[str, Any], resources: dict[str, float], expected: int) -> None:
    assert workers_that_fit(load_config(ROOT / "conf" / "digits.yaml").replace(**fields), resources, []) == expected


@pytest.mark.parametrize("resources", [{"CPU": 3.0}, {}])
def test_a_cluster_that_is_too_small_is_refused_with_the_numbers(resources: dict[str, float]) -> None:
    config = load_config(ROOT / "conf" / "digits.yaml", scaling__min_workers=2)
    with pytest.raises(ConfigError, match=rf"need 4 CPU and 0 GPU; the cluster has {resources.get('CPU', 0):g} CPU and 0 GPU\. Add nodes"):
        workers_that_fit(config, resources, [])


def test_null_switches_a_default_off(command: Callable[..., list[str]]) -> None:
    assert parse(command()).checkpoint.every_epochs == 5
    config = parse(command("--checkpoint.every_epochs=null", "--schedule=null", "--data.eval_path=null"))
    assert (config.checkpoint.every_epochs, config.schedule, config.data.eval_path) == (None, None, None)


def test_a_bad_row_in_mid_run_is_named_and_fails_the_run(
    command: Callable[..., list[str]], call: Callable[[Sequence[str]], Ended], tmp_path: Path, ray_cluster: None
) -> None:
    del ray_cluster
    folder = write_images(tmp_path / "images", 192, 64, bad=2 * 64 + 17)
    ended = call(command(*of_images(folder), "--scaling.logical_workers=1", "--checkpoint.every_steps=1"))
    assert ended.code == 1
    assert "The run failed: BadRowError: images.parquet, row group 2, row 17: " in ended.err
    assert "Traceback" not in ended.err
    paths = RunPaths(tmp_path / "runs" / "run")
    summary = json.loads(paths.summary.read_text())
    assert summary["status"] == "failed"
    assert summary["steps"] < 24
    assert summary["restarts"]["failures"] == 1
    assert [event.kind for event in read_events(paths, "failed", "gave_up", "finished")] == ["failed", "gave_up"]


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    (tmp_path / "gate").mkdir()
    return tmp_path / "gate"


@dataclass
class Started:
    """The command in a process of its own, with an own process group as a shell gives it."""

    process: subprocess.Popen[str]
    out: Path
    err: Path

    def wait_until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PROCESS_S
        while not happened():
            assert self.process.poll() is None, self.out.read_text() + self.err.read_text()
            assert time.monotonic() < deadline, self.out.read_text() + self.err.read_text()
            time.sleep(0.05)

    def end(self) -> int:
        return self.process.wait(_PROCESS_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[list[str]], Started]]:
    started: list[Started] = []

    def run(arguments: list[str]) -> Started:
        out, err = (tmp_path / f"{name}-{len(started)}.txt" for name in ("out", "err"))
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, str(TRAIN), *arguments],
                stdout=stdout,
                stderr=stderr,
                text=True,
                cwd=tmp_path,
                env=own_cluster(),
                start_new_session=True,
            )
        started.append(Started(process, out, err))
        return started[-1]

    yield run
    for each in started:
        if each.process.poll() is None:
            os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()


def test_ctrl_c_stops_with_a_checkpoint_and_the_same_command_goes_on(
    command: Callable[..., list[str]],
    call: Callable[[Sequence[str]], Ended],
    start: Callable[[list[str]], Started],
    gate: Path,
    tmp_path: Path,
    ray_cluster: None,
) -> None:
    del ray_cluster
    gated = ["--task.class_path=tests.integration.gated_task.Gated", "--task.init_args", json.dumps({"gate": str(gate)})]
    arguments = command(*gated, "--data.eval_path=null", "--train.max_steps=150", "--scaling.max_workers=1")
    paths = RunPaths(tmp_path / "runs" / "run")

    first = start(arguments)
    first.wait_until((gate / "reached").exists)
    os.killpg(first.process.pid, signal.SIGINT)  # to the whole group, as a terminal does
    first.wait_until(lambda: "Stopping after this step" in first.out.read_text())
    (gate / "open").touch()
    assert first.end() == 75, first.err.read_text()
    interrupted = json.loads(paths.summary.read_text())
    [stopped] = CheckpointStore(paths).commits()
    assert interrupted["status"] == "interrupted"
    assert (stopped.why, stopped.step) == ("extra", interrupted["steps"])
    assert 0 < interrupted["steps"] < 150
    assert "Traceback" not in first.err.read_text()

    second = call(arguments)
    assert second.code == 0, second.err
    summary = json.loads(paths.summary.read_text())
    assert "Continuing run run" in second.out
    assert summary["status"] == "finished"
    assert summary["restarts"]["driver"] == 1
    assert summary["redone_steps"] == 0
    assert summary["steps"] == 150

    assert call([*arguments, "--run.name=undisturbed"]).code == 0
    expected = json.loads((tmp_path / "runs" / "undisturbed" / "summary.json").read_text())
    assert summary["params_digest"] == expected["params_digest"]
    assert summary["rows"] == expected["rows"]


def test_sigterm_before_the_first_step_ends_in_order(
    command: Callable[..., list[str]], start: Callable[[list[str]], Started], gate: Path, tmp_path: Path
) -> None:
    gated = ["--task.class_path=tests.integration.gated_task.Gated", "--task.init_args", json.dumps({"gate": str(gate), "wait_before": 1})]
    rehearsing = start(command(*gated))
    started = start(command("--run.name=started", "--scaling.max_workers=1", "--data.eval_path=null"))

    rehearsing.wait_until((gate / "reached").exists)
    rehearsing.process.send_signal(signal.SIGTERM)
    assert rehearsing.end() == 75
    assert "Interrupted; starting it again" in rehearsing.err.read_text()
    assert not RunPaths(tmp_path / "runs" / "run").root.exists()

    paths = RunPaths(tmp_path / "runs" / "started")
    started.wait_until(lambda: bool(read_events(paths, "started")))
    started.process.send_signal(signal.SIGTERM)
    assert started.end() == 75, started.err.read_text()
    assert "Traceback" not in started.err.read_text()
    assert json.loads(paths.summary.read_text())["status"] == "interrupted"
    assert [event.kind for event in read_events(paths, "interrupted", "failed", "finished")] == ["interrupted"]


def test_a_task_of_ones_own_trains_as_its_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "own-task.md").read_text()
    folder = shutil.copytree(USER_TASK, tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    assert {path.name for path in folder.iterdir()} == {"my_task.py", "make_data.py", "surface.yaml"}
    for path in folder.iterdir():
        assert f"\n{path.read_text()}```\n" in page, f"docs/own-task.md shows another {path.name}"

    for arguments in (["make_data.py"], [str(TRAIN), "--config", "surface.yaml", "--run.name", "mine"]):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=folder, env=own_cluster(), capture_output=True, text=True, timeout=_PROCESS_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((folder / "runs" / "mine" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["steps"] == 5 * 63
    assert summary["best"]["metric"] == "error"
    assert summary["best"]["value"] < 0.1
