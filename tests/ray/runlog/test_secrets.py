"""A run has canaries in its configuration, its environment and its error message; no output shows them."""

import base64
import logging
import re
import stat
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from ray_app.cli.train import main
from ray_app.config.config import Config, default_tracking_uri
from ray_app.report.facts import read_facts
from ray_app.report.html import render
from ray_app.runlog.paths import RunPaths
from tests.support.cluster import CANARY
from tests.support.mlflow_server import mlflow_runs

pytestmark = pytest.mark.usefixtures("ray_cluster")


def has_secret(text: str) -> bool:
    """Returns whether a text contains the secret of the environment in a form of `secret_task.quoted`, a part of it."""
    secret = CANARY["CANARY_API_KEY"]
    encoded = base64.b64encode(f"me:{secret}".encode()).decode()
    parts = secret[:14], secret[12:24], quote(secret, safe="")[:16], encoded[8:24]
    unwrapped = re.sub(r"\[[^\]\n]*\] |\\n|[\sâ│╭╮╰╯─\x80-\x9f]", "", text)
    return any(part in joined for part in parts for joined in (text, unwrapped))


def test_no_output_of_a_run_contains_a_secret(
    make_short_config: Callable[..., Config],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("CANARY_API_KEY", CANARY["CANARY_API_KEY"])
    caplog.set_level(logging.INFO)
    secrets = {
        "api_token": "canary-'of\\the-\"field",
        "source": "s3://me:canary-of-the-uri@bucket/x?token=canary-parameter",
        "fail_at": 20,
    }
    config = make_short_config(tracking__enabled=True, tracking__every_steps=1, scaling__max_workers=1)
    config = config.replace(task={"class_path": "tests.support.secret_task.SecretTask", "init_args": secrets})
    (tmp_path / "given.yaml").write_text(config.to_yaml())
    assert main(["--config", str(tmp_path / "given.yaml")]) == 1
    console = capfd.readouterr()
    root = tmp_path / "runs" / "run"
    events = "".join(file.read_text() for file in (root / "events").iterdir())
    [run] = mlflow_runs(default_tracking_uri(config), "run")
    client = MlflowClient(default_tracking_uri(config))
    artifacts = {
        a.path: Path(client.download_artifacts(run.info.run_id, a.path)).read_text()
        for a in client.list_artifacts(run.info.run_id)
    }
    assert {"config.yaml", "summary.json"} <= artifacts.keys()
    outputs = {
        "console": console.out,
        "errors": console.err,
        "log": caplog.text,
        "events": events,
        "summary": (root / "summary.json").read_text(),
        "params": str(run.data.params),
        "tags": str(run.data.tags),
        "metrics": str(run.data.metrics),
        "inputs": str(run.inputs),
        "tracking": (root / "tracking.json").read_text(),
        **artifacts,
    }
    assert [name for name, text in outputs.items() if "canary" in text.lower().replace("canary_api_key", "")] == []
    outputs["page"] = render(read_facts(RunPaths(root)))
    files = {str(file): file.read_bytes().decode("latin-1") for file in tmp_path.rglob("*") if file.is_file()}
    assert {str(root / "report.html"), str(root / "config.yaml")} <= files.keys()
    assert any("/output/" in name for name in files), "the task has printed nothing"
    assert [name for name, text in (outputs | files).items() if has_secret(text)] == []
    for name in ("errors", "events"):
        assert "no login at s3://***@bucket/x?token=*** with " in outputs[name], "the run did not fail with the error"
    assert run.data.params["task.init_args.api_token"] == "***"
    assert run.info.status == "FAILED"
    kept = root / "config.yaml"
    assert "canary-of-the-uri" in kept.read_text(), "the run could not be continued"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert "holds a secret" in caplog.text
