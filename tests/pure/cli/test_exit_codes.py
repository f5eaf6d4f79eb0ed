"""How commands end: the exit code, and one line on standard error that holds no secret."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ray_app import load_config
from ray_app.cli import drill as drilling
from ray_app.cli import evaluate as evaluating
from ray_app.cli import export, ingest, register, report, track
from ray_app.cli import predict as predicting
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
from ray_app.process import interrupt_at_sigterm
from ray_app.runlog.redaction import redact, register_secrets
from tests.support.made_run import MadeRun
from tests.support.places import ROOT

SECRET = "canary-of-a-command"
OF_A_RUN: dict[str, tuple[Callable[[list[str]], int], list[str]]] = {
    "export": (export.main, ["--out", "out", "--run"]),
    "register": (register.main, ["--name", "m", "--run"]),
    "evaluate": (evaluating.main, ["--name", "e", "--data", "data", "--run"]),
    "track": (track.main, ["--replay"]),
    "report": (report.main, ["--run"]),
}


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def wrapped() -> None:
    try:
        raise ConfigError("no")
    except ConfigError as error:
        raise RuntimeError("what Ray makes of it") from error


@pytest.mark.parametrize(
    ("work", "code", "said"),
    [
        (lambda: None, 0, ""),
        (raising(ConfigError("no")), 2, "ConfigError: no\n"),
        (raising(BadRowError("a.parquet", 0, 1, "cut")), 2, "BadRowError: a.parquet, row group 0, row 1: cut\n"),
        (wrapped, 2, "ConfigError: no\n"),
        (raising(EvaluationError("gave up")), 1, "It failed: EvaluationError: gave up\n"),
        (raising(OSError(5, f"no {SECRET}")), 1, "It failed: OSError: [Errno 5] no ***\n"),
        (raising(RegistryError(SECRET)), 1, "It failed: RegistryError: ***\n"),
        (raising(KeyboardInterrupt()), 75, "Interrupted; it can be started again.\n"),
    ],
)
def test_what_comes_of_the_work_is_the_exit_code(
    work: Callable[[], None], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    register_secrets({"task": {"init_args": {"api_key": SECRET}}})
    assert exit_code(work, "It failed") == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("after_ray", [False, True])
def test_sigterm_interrupts_also_after_ray_put_its_own_handler_in_place(after_ray: bool) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def work() -> None:
        if after_ray:
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))  # as ray.init does
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    assert exit_code(work, "It failed") == 75
    assert signal.getsignal(signal.SIGTERM) == before


def test_another_exit_is_left_alone() -> None:
    with pytest.raises(SystemExit, match="3"), interrupt_at_sigterm():
        sys.exit(3)


@pytest.mark.parametrize("command", OF_A_RUN)
@pytest.mark.parametrize(
    ("written", "said"), [("task: [", "is not a configuration of this version"), (None, "no config.yaml")]
)
def test_a_run_without_a_readable_configuration_is_refused_alike(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    written: str | None,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    run = MadeRun(tmp_path)
    run.start()
    run.paths.config.unlink() if written is None else run.paths.config.write_text(written)
    main, arguments = OF_A_RUN[command]
    assert main([*arguments, str(run.paths.root)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["export", "register", "evaluate", "track"])
def test_a_task_that_cannot_be_made_does_not_tell_its_secret(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    secret = f"canary-of-{command}"
    fields = {
        "task__class_path": "nowhere.Task",
        "task__init_args": {"api_key": secret},
        "data__path": str(digits / "train"),
    }
    run = MadeRun(tmp_path, **fields, data__eval_path=None, tracking__uri="sqlite:///mlflow.db")
    run.start()
    run.end(10)
    run.paths.manifest.write_text(open_dataset(str(digits / "train")).manifest.to_json())
    main, arguments = OF_A_RUN[command]
    assert main([*arguments, str(run.paths.root)]) == 2
    said = capsys.readouterr().err
    assert "nowhere.Task" in said
    assert "***" in said
    assert secret not in said


@pytest.mark.parametrize("main", [train, *(pytest.param(main, marks=pytest.mark.rest) for main in (retrain, submit))])
def test_a_mistyped_value_does_not_tell_the_secret_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int]
) -> None:
    task = {
        "class_path": "ray_app.task.image.ImageClassification",
        "init_args": {"size": "abc", "hub_token": "canary-in-a-file"},
    }
    (tmp_path / "conf.yaml").write_text(yaml.safe_dump({"task": task}))
    for given in (["--config", str(tmp_path / "conf.yaml")], [f"--task={json.dumps(task)}"]):
        with pytest.raises(SystemExit, match="2"):
            main(given)
        said = capsys.readouterr().err
        assert "abc" in said
        assert "canary-in-a-file" not in said
    odd = ["--tracking.token=", "--run.name", "!!timestamp foo", f"--run.storage_path={'[' * 2000}", "--no.such"]
    with pytest.raises(SystemExit, match="2"):
        main(["--config", str(tmp_path / "conf.yaml"), *odd])
    assert "***" not in redact("--run.name stays readable")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "conf.yaml")
    assert "canary-in-a-file" not in str(caught.value)


def test_a_resume_with_another_secret_tells_neither(
    tmp_path: Path, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = MadeRun(tmp_path, task__class_path="nowhere.Task", task__init_args={"api_key": "canary-of-before"})
    old.start()
    given = ["--config", str(ROOT / "conf" / "digits.yaml"), "--run.storage_path", str(tmp_path), "--run.name", "run"]
    data = [
        "--data.path",
        str(digits / "train"),
        "--data.eval_path",
        str(digits / "eval"),
        "--tracking.enabled",
        "false",
    ]
    old.paths.manifest.write_text(open_dataset(str(digits / "train")).manifest.to_json())
    assert train([*given, *data]) == 2
    said = capsys.readouterr().err
    assert "- task.init_args.api_key: ***" in said
    assert "canary-of-before" not in said


@pytest.mark.parametrize("command", ["evaluate", "track", "report"])
def test_a_damaged_record_is_a_line_and_not_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = MadeRun(tmp_path)
    run.start()
    (run.paths.events / "00000000000000000001-started-9.json").write_text("{")
    main, arguments = OF_A_RUN[command]
    assert main([*arguments, str(run.paths.root)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("The ")
    assert "00000000000000000001-started-9.json is damaged" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--num_cpus", "-1"], "evaluate.num_cpus is -1"),
        (["--batch_size", "0"], "evaluate.batch_size is 0"),
    ],
)
def test_options_of_an_evaluation_are_refused_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: list[str], said: str
) -> None:
    started: list[Any] = []
    monkeypatch.setattr("ray.init", lambda *arguments, **fields: started.append(fields))
    monkeypatch.setattr("ray.is_initialized", lambda: bool(started))  # other tests of this process have their cluster
    run = MadeRun(tmp_path, task__class_path="ray_app.task.image.ImageClassification", evaluate__patience=2)
    run.start()
    assert evaluating.main(["--run", str(run.paths.root), *given]) == 2
    assert said in capsys.readouterr().err
    assert not started


def test_ingest_says_what_the_storage_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert ingest.main(["--source", "digits", "--out", str(tmp_path / "file" / "out")]) == 1
    assert "The data was not ingested: NotADirectoryError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "given"),
    [
        (drill, ["--drill.scenarios", SECRET]),
        (predict, ["--predict.model", "m", "--predict.data", SECRET, "--predict.out", "out"]),
    ],
)
def test_what_is_refused_before_the_start_holds_no_secret(
    main: Callable[[list[str]], int], given: list[str], digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register_secrets({"task": {"init_args": {"api_key": SECRET}}})
    data = ["--data.path", str(digits / "train"), "--data.eval_path", str(digits / "eval")]
    assert main(["--config", str(ROOT / "conf" / "digits.yaml"), *data, *given]) == 2
    said = capsys.readouterr().err
    assert "***" in said
    assert SECRET not in said


@pytest.mark.parametrize("main", [check, drill, predict, retrain, submit, train])
def test_a_refused_configuration_is_exit_code_2_of_each_command(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    sections = {predict: ["--predict.data", "data", "--predict.out", "out"]}
    assert main(["--config", str(ROOT / "conf" / "digits.yaml"), "--train.epochs", "-1", *sections.get(main, [])]) == 2
    assert "train.epochs is -1" in capsys.readouterr().err


BAD_ROW, AWAY, REFUSED = BadRowError("a.parquet", 0, 1, "cut"), StorageError("the disk is away"), ConfigError("no")


@pytest.mark.parametrize(
    ("error", "preparing", "working"),
    [(BAD_ROW, 2, 2), (AWAY, 1, 1), (REFUSED, 2, 2), (OSError(5, "the disk"), 1, 1)],
    ids=lambda value: type(value).__name__,
)
def test_a_prediction_is_refused_only_for_what_stays_wrong(
    monkeypatch: pytest.MonkeyPatch, error: Exception, preparing: int, working: int
) -> None:
    given = [
        "--config",
        str(ROOT / "conf" / "digits.yaml"),
        "--predict.data",
        "data",
        "--predict.out",
        "out",
        "--predict.run",
        "run",
    ]
    monkeypatch.setattr(predicting, "prepare_prediction", lambda *_: raising(error)())
    assert predict(given) == preparing
    monkeypatch.setattr(predicting, "prepare_prediction", lambda *_: None)
    monkeypatch.setattr(predicting, "predict", lambda *_: raising(error)())
    assert predict(given) == working


def test_a_training_is_refused_only_for_what_stays_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, code in ((BAD_ROW, 2), (AWAY, 1), (REFUSED, 2), (OSError(5, "the disk"), 1)):
        monkeypatch.setattr(training, "open_run", lambda *_, error=error, **__: raising(error)())
        assert train(["--config", str(ROOT / "conf" / "digits.yaml")]) == code, error
        assert capsys.readouterr().err.startswith(
            type(error).__name__ if code == 2 else f"The run failed: {type(error).__name__}"
        )


@pytest.mark.parametrize(
    ("error", "preparing"),
    [(BAD_ROW, 2), (AWAY, 1), (REFUSED, 2), (OSError(5, "the disk"), 1)],
    ids=lambda value: type(value).__name__,
)
def test_a_drill_is_refused_only_before_its_first_run(
    monkeypatch: pytest.MonkeyPatch, error: Exception, preparing: int
) -> None:
    given = ["--config", str(ROOT / "conf" / "digits.yaml")]
    monkeypatch.setattr(drilling, "make_drill_config", lambda config, *_: raising(error)())
    assert drill(given) == preparing
    monkeypatch.setattr(drilling, "make_drill_config", lambda config, *_: config)
    monkeypatch.setattr(drilling, "_connected", lambda *_: nullcontext())
    monkeypatch.setattr(drilling, "Drill", lambda *_: raising(error)())
    assert drill(given) == preparing
    monkeypatch.setattr(drilling, "Drill", lambda *_: SimpleNamespace(go=raising(error)))
    assert drill(given) == 1


@pytest.mark.parametrize(
    ("main", "what"),
    [
        (train, "Trains a model"),
        (predict, "Predicts"),
        (retrain, "Trains on new data"),
        (drill, "certifies"),
        (submit, "Submits a run"),
    ],
)
def test_the_help_says_what_the_command_does(
    main: Callable[[list[str]], int], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = capsys.readouterr().out
    assert what in said
    assert ("Trains a model" in said) == (main is train)
