"""The environment variables of other tools: what is used, recorded, replaced and refused, and MLflow's."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_app.config.sections import TrackingSection
from ray_app.config.variables import (
    DEFAULT_EXPERIMENT,
    bypass_proxies,
    check_variables,
    complete_tracking,
    describe_overridden,
    python_variables,
    recorded_variables,
    tracking_of_job,
)
from ray_app.errors import ConfigError
from tests.support.paths import ROOT

SERVER = "http://mlflow:5000"


def test_a_run_records_the_variables_that_the_page_says() -> None:
    rows = re.findall(r"^\| (`[A-Za-z].*?) \| (\w+)", (ROOT / "docs" / "environment.md").read_text(), re.MULTILINE)
    treatments = {name.replace("*", "X"): kind for names, kind in rows for name in re.findall(r"`(.+?)`", names)}
    assert "recorded" in treatments.values()
    recorded = recorded_variables(dict.fromkeys(treatments, "1"))
    assert recorded == dict.fromkeys((name for name in sorted(treatments) if treatments[name] == "recorded"), "1")


def test_the_bits_that_depend_on_a_variable_are_recorded() -> None:
    variables = {"MKL_CBWR": "COMPATIBLE", "OMP_PROC_BIND": "true", "TORCHINDUCTOR_CACHE_DIR": "/x", "HOME": "/root"}
    assert recorded_variables(variables | {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}) == {
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_DEFAULT_FPMATH_MODE": "BF16",
    }


@pytest.mark.parametrize(
    ("variables", "no_proxy"),
    [
        ({}, None),
        ({"no_proxy": "a"}, None),
        ({"https_proxy": "http://p:1"}, "localhost,127.0.0.1,::1"),
        ({"HTTP_PROXY": "http://p:1", "no_proxy": "a,localhost", "NO_PROXY": "b"}, "a,localhost,b,127.0.0.1,::1"),
        ({"http_proxy": "http://p:1", "NO_PROXY": "*"}, None),
    ],
)
def test_servers_of_this_machine_are_reached_without_the_proxy(variables: dict[str, str], no_proxy: str | None) -> None:
    values = bypass_proxies(variables)
    assert (values.get("no_proxy"), values.get("NO_PROXY")) == (no_proxy, no_proxy)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"GLOO_SOCKET_IFNAME": "lo,nope0"}, "GLOO_SOCKET_IFNAME names 'nope0', but this machine has lo"),
        ({"RAY_RUNTIME_ENV_HOOK": "nowhere.hook"}, "RAY_RUNTIME_ENV_HOOK is 'nowhere.hook'"),
        ({"TMPDIR": "/dev/null/x"}, "TMPDIR is '/dev/null/x', but Ray cannot write there: /dev/null is a file"),
        ({"TMPDIR": "/tmp", "RAY_TMPDIR": "/proc/x"}, "RAY_TMPDIR is '/proc/x', but Ray cannot write"),
    ],
)
def test_variables_with_which_ray_cannot_start_are_refused(variables: dict[str, str], message: str) -> None:
    check_variables(variables, on_this_machine=False)
    check_variables({"GLOO_SOCKET_IFNAME": "lo", "RAY_RUNTIME_ENV_HOOK": "json.loads"}, on_this_machine=True)
    with pytest.raises(ConfigError) as refused:
        check_variables(variables, on_this_machine=True)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ("", {}),
        ("ignore::UserWarning", {}),
        ("error", {"PYTHONWARNINGS": "default"}),
        ("ignore,error::DeprecationWarning", {"PYTHONWARNINGS": "ignore"}),
    ],
)
def test_processes_of_ray_do_not_end_by_a_warning(filters: str, expected: dict[str, str]) -> None:
    assert python_variables({"PYTHONWARNINGS": filters}) == expected | {"PYTHONHASHSEED": "0"}
    of_user = {"PYTHONWARNINGS": filters, "PYTHONHASHSEED": "7"}
    assert python_variables(of_user) == expected


def test_another_encoding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("locale.getencoding", lambda: "ISO-8859-1")
    with pytest.raises(ConfigError, match=r"Text is read as ISO-8859-1 here .* set PYTHONUTF8=1"):
        check_variables({}, on_this_machine=False)


@pytest.mark.parametrize("name", ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "RAY_memory_monitor_refresh_ms"])
def test_a_variable_of_ray_that_has_to_be_a_number_is_one(name: str) -> None:
    check_variables({name: "2.5", "RAY_ADDRESS": "auto"}, on_this_machine=False)
    for value in ("abc", "1s", ""):
        with pytest.raises(ConfigError, match=f"{name} is {value!r}; Ray needs a number"):
            check_variables({name: value}, on_this_machine=False)


def tracked(uri: str | None = None, experiment: str | None = None) -> TrackingSection:
    return TrackingSection(uri=uri, experiment=experiment)


@pytest.mark.parametrize(
    ("section", "stored", "variables", "expected"),
    [
        (tracked(), None, {}, tracked(None, DEFAULT_EXPERIMENT)),
        (tracked(), None, {"MLFLOW_TRACKING_URI": SERVER}, tracked(SERVER, DEFAULT_EXPERIMENT)),
        (tracked(), None, {"MLFLOW_EXPERIMENT_NAME": "mine"}, tracked(None, "mine")),
        (tracked(), None, {"MLFLOW_EXPERIMENT_ID": "3"}, tracked()),
        (tracked(), tracked(SERVER, "mine"), {}, tracked(SERVER, "mine")),
        (tracked(), tracked("http://old", "old"), {"MLFLOW_TRACKING_URI": SERVER}, tracked(SERVER, "old")),
    ],
)
def test_what_the_configuration_leaves_out_is_that_of_mlflow_or_of_the_last_start(
    section: TrackingSection,
    stored: TrackingSection | None,
    variables: dict[str, str],
    expected: TrackingSection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert complete_tracking(section, stored) == expected


def test_the_configuration_has_precedence_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://other")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "other")
    section = tracked(SERVER, "mine")
    assert complete_tracking(section, None) == section
    fields = {"run.ray_address": "auto", "tracking.uri": SERVER, "tracking.experiment": None}
    assert describe_overridden(fields, {**os.environ, "RAY_ADDRESS": "auto"}) == [
        f"tracking.uri is {SERVER}, which overrides MLFLOW_TRACKING_URI (http://other)."
    ]
    assert tracking_of_job(section) == section
    assert tracking_of_job(tracked()) == tracked("http://other", "other")
    assert not describe_overridden(fields | {"tracking.experiment": "mine"}, {"MLFLOW_EXPERIMENT_NAME": ""})
    relative = {"MLFLOW_TRACKING_URI": "sqlite:///x.db"}
    assert not describe_overridden(fields | {"tracking.uri": f"sqlite:///{Path.cwd()}/x.db"}, relative)
    # The command of a job is public.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:password@other")
    assert tracking_of_job(tracked()) == tracked(None, "other")


def test_a_relative_file_and_the_open_run_of_a_program_are_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mine.db")
    assert complete_tracking(tracked(), None).uri == f"sqlite:///{tmp_path}/mine.db"
    program: Any = SimpleNamespace(active_run=lambda: SimpleNamespace(info=None), get_tracking_uri=lambda: SERVER)
    monkeypatch.setitem(sys.modules, "mlflow", program)
    assert complete_tracking(tracked(), None) == tracked(SERVER)
