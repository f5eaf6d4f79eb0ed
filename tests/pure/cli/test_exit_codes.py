"""The exit codes of commands, and their one line on standard error, which contains no secret."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ray_app import load_config
from ray_app.cli import evaluate as evaluating
from ray_app.cli import export, ingest, register, report, track
from ray_app.cli import train as training
from ray_app.cli.check import main as check
from ray_app.cli.drill import main as drill
from ray_app.cli.main import exit_code
from ray_app.cli.predict import main as predict
from ray_app.cli.retrain import main as retrain
from ray_app.cli.submit import main as submit
from ray_app.cli.train import main as train
from ray_app.data.dataset import open_dataset
from ray_app.errors import BadRowError, ConfigError, EvaluationError, RegistryError, StorageError
from ray_app.process import STOP_SIGNALS, interrupt_at_signals
from ray_app.runlog.redaction import redact, register_secrets
from tests.support.paths import ROOT
from tests.support.run_directory import RunDirectory

SECRET = "canary-of-a-command"
RUN_COMMANDS: dict[str, tuple[Callable[[list[str]], int], list[str]]] = {
    "export": (export.main, ["--out", "out", "--run"]),
    "register": (register.main, ["--name", "m", "--run"]),
    "evaluate": (evaluating.main, ["--name", "e", "--data", "data", "--run"]),
    "track": (track.main, ["--replay"]),
    "report": (report.main, ["--run"]),
}


def make_raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def raise_wrapped() -> None:
    try:
        raise ConfigError("no")
    except ConfigError as error:
        raise RuntimeError("what Ray makes of it") from error


@pytest.mark.parametrize(
    ("work", "code", "message"),
    [
        (lambda: None, 0, ""),
        (make_raising(ConfigError("no")), 2, "ConfigError: no\n"),
        (make_raising(BadRowError("a.parquet", 0, 1, "cut")), 2, "BadRowError: a.parquet, row group 0, row 1: cut\n"),
        (raise_wrapped, 2, "ConfigError: no\n"),
        (make_raising(EvaluationError("gave up")), 1, "It failed: EvaluationError: gave up\n"),
        (make_raising(OSError(5, f"no {SECRET}")), 1, "It failed: OSError: [Errno 5] no ***\n"),
        (make_raising(RegistryError(SECRET)), 1, "It failed: RegistryError: ***\n"),
        (make_raising(KeyboardInterrupt()), 75, "Interrupted; the command can be started again.\n"),
    ],
)
def test_the_result_of_the_work_decides_the_exit_code(
    work: Callable[[], None], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    register_secrets({"task": {"init_args": {"api_key": SECRET}}})
    assert exit_code(work, "It failed") == code
    assert capsys.readouterr().err == message


@pytest.mark.usefixtures("default_hangup")
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_interrupts_the_work_and_another_one_does_not_disturb_its_end(number: signal.Signals) -> None:
    ended = []

    def work() -> None:
        try:
            os.kill(os.getpid(), number)
            signal.pause()
        finally:
            os.kill(os.getpid(), signal.SIGHUP)
            ended.append(number)

    assert exit_code(work, "It failed") == 75
    assert ended == [number]


@pytest.mark.parametrize("after_ray", [False, True])
def test_sigterm_interrupts_also_after_ray_has_installed_its_handler(after_ray: bool) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def work() -> None:
        if after_ray:
            # ray.init installs such a handler.
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    assert exit_code(work, "It failed") == 75
    assert signal.getsignal(signal.SIGTERM) == before


def test_another_system_exit_is_passed_on() -> None:
    with pytest.raises(SystemExit, match="3"), interrupt_at_signals():
        sys.exit(3)


@pytest.mark.parametrize("command", RUN_COMMANDS)
@pytest.mark.parametrize(
    ("config_text", "message"),
    [("task: [", "is not a configuration of this version"), (None, "config.yaml")],
)
def test_each_run_command_refuses_a_run_without_a_readable_configuration(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    config_text: str | None,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(tmp_path)
    run.start()
    run.paths.config.unlink() if config_text is None else run.paths.config.write_text(config_text)
    main, arguments = RUN_COMMANDS[command]
    assert main([*arguments, str(run.paths.root)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["export", "register", "evaluate", "track"])
def test_the_error_of_a_task_that_cannot_be_built_hides_its_secret(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    secret = f"canary-of-{command}"
    fields = {
        "task__class_path": "nowhere.Task",
        "task__init_args": {"api_key": secret},
        "data__path": str(digits / "train"),
    }
    run = RunDirectory(tmp_path, **fields, data__eval_path=None, tracking__uri="sqlite:///mlflow.db")
    run.start()
    run.end(10)
    run.paths.manifest.write_text(open_dataset(str(digits / "train")).manifest.to_json())
    main, arguments = RUN_COMMANDS[command]
    assert main([*arguments, str(run.paths.root)]) == 2
    message = capsys.readouterr().err
    assert "nowhere.Task" in message
    assert "***" in message
    assert secret not in message


@pytest.mark.parametrize("main", [train, *(pytest.param(main, marks=pytest.mark.rest) for main in (retrain, submit))])
def test_the_error_of_a_mistyped_value_hides_the_secret_next_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int]
) -> None:
    task = {
        "class_path": "ray_app.task.image.ImageClassification",
        "init_args": {"size": "abc", "hub_token": "canary-in-a-file"},
    }
    (tmp_path / "conf.yaml").write_text(yaml.safe_dump({"task": task}))
    for arguments in (["--config", str(tmp_path / "conf.yaml")], [f"--task={json.dumps(task)}"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        message = capsys.readouterr().err
        assert "abc" in message
        assert "canary-in-a-file" not in message
    unknown_arguments = [
        "--tracking.token=",
        "--run.name",
        "!!timestamp foo",
        f"--run.storage_path={'[' * 2000}",
        "--no.such",
    ]
    with pytest.raises(SystemExit, match="2"):
        main(["--config", str(tmp_path / "conf.yaml"), *unknown_arguments])
    assert "***" not in redact("--run.name stays readable")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "conf.yaml")
    assert "canary-in-a-file" not in str(caught.value)


def test_the_error_of_a_resume_with_another_secret_hides_both(
    tmp_path: Path, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = RunDirectory(tmp_path, task__class_path="nowhere.Task", task__init_args={"api_key": "canary-of-before"})
    old.start()
    arguments = [
        "--config",
        str(ROOT / "conf" / "digits.yaml"),
        "--run.storage_path",
        str(tmp_path),
        "--run.name",
        "run",
    ]
    data = [
        "--data.path",
        str(digits / "train"),
        "--data.eval_path",
        str(digits / "eval"),
        "--tracking.enabled",
        "false",
    ]
    old.paths.manifest.write_text(open_dataset(str(digits / "train")).manifest.to_json())
    assert train([*arguments, *data]) == 2
    message = capsys.readouterr().err
    assert "- task.init_args.api_key: ***" in message
    assert "canary-of-before" not in message


@pytest.mark.parametrize("command", ["evaluate", "track", "report"])
def test_a_damaged_event_is_one_line_and_not_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(tmp_path)
    run.start()
    (run.paths.events / "00000000000000000001-started-9.json").write_text("{")
    main, arguments = RUN_COMMANDS[command]
    assert main([*arguments, str(run.paths.root)]) == 1
    message = capsys.readouterr().err
    assert message.startswith("The ")
    assert "00000000000000000001-started-9.json is damaged" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--num_cpus", "-1"], "evaluate.num_cpus is -1"), (["--batch_size", "0"], "evaluate.batch_size is 0")],
)
def test_options_of_an_evaluation_are_refused_before_ray_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    started: list[Any] = []
    monkeypatch.setattr("ray.init", lambda *arguments, **fields: started.append(fields))
    # Other tests of this process may have started a cluster.
    monkeypatch.setattr("ray.is_initialized", lambda: bool(started))
    run = RunDirectory(tmp_path, task__class_path="ray_app.task.image.ImageClassification", evaluate__patience=2)
    run.start()
    assert evaluating.main(["--run", str(run.paths.root), *options]) == 2
    assert message in capsys.readouterr().err
    assert not started


def test_ingest_reports_the_error_of_the_storage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert ingest.main(["--source", "digits", "--out", str(tmp_path / "file" / "out")]) == 1
    assert "The data could not be ingested: NotADirectoryError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (drill, ["--drill.scenarios", SECRET]),
        (predict, ["--predict.model", SECRET, "--predict.data", "data", "--predict.out", "out"]),
    ],
)
def test_the_error_of_options_refused_before_the_start_hides_secrets(
    main: Callable[[list[str]], int], arguments: list[str], digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register_secrets({"task": {"init_args": {"api_key": SECRET}}})
    data = ["--data.path", str(digits / "train"), "--data.eval_path", str(digits / "eval")]
    assert main(["--config", str(ROOT / "conf" / "digits.yaml"), *data, *arguments]) == 2
    message = capsys.readouterr().err
    assert "***" in message
    assert SECRET not in message


@pytest.mark.parametrize("main", [check, drill, predict, retrain, submit, train])
def test_each_command_refuses_a_configuration_with_exit_code_2(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    sections = {predict: ["--predict.data", "data", "--predict.out", "out"]}
    assert main(["--config", str(ROOT / "conf" / "digits.yaml"), "--train.epochs", "-1", *sections.get(main, [])]) == 2
    assert "train.epochs is -1" in capsys.readouterr().err


BAD_ROW = BadRowError("a.parquet", 0, 1, "cut")
STORAGE_DOWN = StorageError("the disk is away")
REFUSED = ConfigError("no")


def test_a_training_exits_with_2_only_for_errors_that_a_retry_does_not_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, code in ((BAD_ROW, 2), (STORAGE_DOWN, 1), (REFUSED, 2), (OSError(5, "the disk"), 1)):
        monkeypatch.setattr(training, "open_run", lambda *_, error=error, **__: make_raising(error)())
        assert train(["--config", str(ROOT / "conf" / "digits.yaml")]) == code, error
        output = capsys.readouterr().err
        assert (f"The run failed: {type(error).__name__}: " in output) == (code == 1)
        assert output.startswith({2: type(error).__name__, 1: "Traceback"}[code]) or error is STORAGE_DOWN


@pytest.mark.parametrize(
    ("main", "purpose"),
    [
        (train, "Trains a model"),
        (predict, "Predicts"),
        (retrain, "Trains on new data"),
        (drill, "certifies"),
        (submit, "Submits a run"),
    ],
)
def test_the_help_says_what_the_command_does(
    main: Callable[[list[str]], int], purpose: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    help_text = capsys.readouterr().out
    assert purpose in help_text
    assert ("Trains a model" in help_text) == (main is train)
