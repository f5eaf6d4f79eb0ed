"""Secrets: the values that count as secret, and their redaction in output, logs and records for every quoting."""

from __future__ import annotations

import base64
import html
import json
import logging
import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ray_app.config.config import Config
from ray_app.errors import ConfigError
from ray_app.runlog import redaction as module
from ray_app.runlog.journal import put_event, read_events
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import is_secret_name, redact, redact_value, redact_yaml, register_secrets
from ray_app.storage.files import put_atomic
from ray_app.storage.object_stores import credential_variables
from ray_app.submit.options import check_no_secrets


@pytest.fixture(autouse=True)
def _no_registered_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_registered", set())
    monkeypatch.setattr(module, "_registered_runs", set())
    for name in [name for name in os.environ if is_secret_name(name)]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "name",
    [
        "token",
        "hf_token",
        "HF_TOKEN",
        "authToken",
        "client_secret",
        "password",
        "dbPassword",
        "PASSWD",
        "api_key",
        "OPENAI_API_KEY",
        "apikey",
        "aws_access_key_id",
        "AWS_SECRET_ACCESS_KEY",
        "private_key",
        "credentials",
        "GOOGLE_CREDENTIAL",
        "token_value",
        "start_session_token",
        "column_token",
        *("SMTP_PASS", "db_pwd", "KEY_PASSPHRASE", "GITHUB_PAT", "SIGNING_KEY", "ENCRYPTION_KEY", "AccountKey"),
        *("api-key", "x-api-key", "webhook_url", "SENTRY_DSN", "auth", "cookie", "connection_string", "sas", "bearer"),
    ],
)
def test_values_under_names_of_secrets_are_redacted(name: str) -> None:
    assert is_secret_name(name)
    assert redact_value({"deep": [{name: "canary"}]}) == {"deep": [{name: "***"}]}
    assert redact_value({name: {"value": "canary", "list": ["canary", 12345]}})[name]["value"] == "***"


@pytest.mark.parametrize(
    "name",
    [
        *["max_tokens", "tokens_per_row", "tokenizer", "key", "seed", "class_path", "passes", "access", "keep_last"],
        *[
            "token_column",
            "tokenColumn",
            "pad_token",
            "eosToken",
            "unk_token",
            "token_type",
            "password_field",
            "api_key_column",
        ],
        *["keypoints", "monkey", "code_path", "key_padding_mask", "primary_key", "image_key", "author", "compass"],
        *["authenticity", "patience", "bypass", "token_file", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "n_passes"],
    ],
)
def test_values_under_other_names_are_not_redacted(name: str) -> None:
    assert not is_secret_name(name)
    assert redact_value({name: "bert-base"}) == {name: "bert-base"}


def test_column_names_and_text_tokens_are_not_secrets_and_may_be_submitted() -> None:
    config = Config().replace(task__init_args={"token_column": "text", "pad_token": "[PAD]"})
    check_no_secrets(config)
    assert redact("the text [PAD] of a text") == "the text [PAD] of a text"
    with pytest.raises(ConfigError, match=r"holds a secret \(task\.init_args\.hf_token\)"):
        check_no_secrets(config.replace(task__init_args={"hf_token": "canary-42"}))


def test_of_numbers_and_booleans_only_long_numbers_are_secrets() -> None:
    values = {"password": 12345678, "use_token": True, "token_count": 512, "secret": None, "api_key": ""}
    assert redact_value(values) == values | {"password": "***"}
    register_secrets(values)
    assert redact("it is 12345678 of 512, True, None") == "it is *** of 512, True, None"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://a.blob/x?sv=1&sig=a%2Bb&se=2", "https://a.blob/x?sv=1&sig=***&se=2"),
        ("//h/#access_token=abc", "//h/#access_token=***"),
        ("next=x%3Fsig%3Dabc%26b", "next=x%3Fsig%3D***%26b"),
        ("AccountName=x;AccountKey=a/b==;X=1", "AccountName=x;AccountKey=***;X=1"),
        ("User ID=sa;Pwd=p,w)d;", "User ID=sa;Pwd=***;"),
        ("Authorization: Bearer abc.def-1", "Authorization: Bearer ***"),
        ("{'Authorization': b'Basic dXNlcjpwdw=='}", "{'Authorization': b'***'}"),
        ("Cookie: a=b; c=d", "Cookie: ***"),
        ('{"password": "a\\"b", "n": 1}', '{"password": "***", "n": 1}'),
        ('"{\\"client_secret\\": \\"ab\\"}"', '"{\\"client_secret\\": \\"***\\"}"'),
        ("line 3\npassword: hunter2\n", "line 3\npassword: ***\n"),
        ("smtp_pass=a1b2", "smtp_pass=***"),
        ("train.py --hf-token a1b2 --x 1", "train.py --hf-token *** --x 1"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMII=\n-----END", "-----BEGIN RSA PRIVATE KEY-----***-----END"),
        ("-----BEGIN PRIVATE KEY-----\\n" + "M" * 64 + " was read", "-----BEGIN PRIVATE KEY-----*** was read"),
        ("to https://hooks.slack.com/services/T0/B0/x1", "to https://hooks.slack.com/***"),
        ("https://x.webhook.office.com/webhookb2/a@b/c", "https://x.webhook.office.com/***"),
        ("https://discord.com/api/webhooks/1/abc", "https://discord.com/api/webhooks/***"),
        *((f"is '{form}'.", "is '***'.") for form in ("AKIAIOSFODNN7EXAMPLE", "hf_" + "aB3" * 11, "ghp_" + "aB3" * 12)),
        *(
            (f"is '{form}'.", "is '***'.")
            for form in ("github_pat_" + "aB3" * 9, "sk-proj-" + "aB3" * 9, "xoxb-12345-abcde")
        ),
        ("s3://u:p@ss@h/x?api_token=t&b=1", "s3://***@h/x?api_token=***&b=1"),
        ("https://host/a@b", "https://host/a@b"),
        ("sqlite:////x@y/m.db", "sqlite:////x@y/m.db"),
    ],
)
def test_what_shows_itself_to_be_a_secret_is_redacted(text: str, expected: str) -> None:
    assert redact(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("max_tokens=5, pad_token='[PAD]', eos_token=</s>", "the password: must be given", "unexpected token: 'x9'"),
        *(
            "basic understanding of bearer certificates",
            "give --hf-token or set it",
            "token=None, password=self.password",
        ),
        *(
            "def f(password: str, token: str)",
            "KeyError: 'label_key'",
            "sort_key=time, primary_key='id', key=lambda x: x",
        ),
        *("InvalidTokenError: the call failed", "sk-learn-based-classifiers-are-many", "pass=0.93 compass=north"),
        *("code=404 keypoints=17", "author=me?page=2#key", "hf_hub and ghp_ are prefixes", "?pad_token=a1&string=b2"),
    ],
)
def test_other_texts_stay(text: str) -> None:
    assert redact(text) == text


def test_the_variables_of_the_object_stores_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"AWS_PROFILE", "GOOGLE_APPLICATION_CREDENTIALS"}
    for name in credential_variables() | {"AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY", "AWS_SECRET_ACCESS_KEY"}:
        monkeypatch.setenv(name, f"canary-of-{name}")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=x;AccountKey=canary-in-string;")
    monkeypatch.setenv("DATABASE_URL", "postgres://u:canary-in-uri@h/db")
    monkeypatch.setattr(module, "_in_variable", module._in_variable.__wrapped__)
    for name in credential_variables() - plain:
        assert redact(f"canary-of-{name}") == "***", name
    for name in plain | {"AZURE_STORAGE_ACCOUNT"}:
        assert redact(f"canary-of-{name}") == f"canary-of-{name}"
    assert redact("canary-in-string and canary-in-uri") == "*** and ***"


@pytest.mark.parametrize("name", ["ray_app.Webhook", "mine.SubclassOfIt"])
def test_the_address_of_a_webhook_is_a_secret(name: str) -> None:
    config = {"observers": [{"class_path": name, "init_args": {"url": "https://chat.example/T0/B0", "n": "x"}}]}
    assert redact_value(config)["observers"][0]["init_args"] == {"url": "***", "n": "x"}
    register_secrets(config)
    assert redact("POST https://chat.example/T0/B0 failed") == "POST *** failed"


@pytest.mark.parametrize("user", ["", "u:", "me:"])
def test_secrets_in_base64_and_on_two_lines_are_redacted(user: str) -> None:
    secret = "canary-0123456789"
    register_secrets({"token": secret})
    encoded = base64.b64encode(f"{user}{secret}\n".encode()).decode()
    assert encoded[4:-8] not in redact(f"<{encoded}>")
    for text in ("canary-01\n23456789", "│ x canary-01  │\n[step 3] │ 23456789 │", "canary-0\n123456\n789 y"):
        assert not re.search(r"canary|\d", redact(text).replace("step 3", ""))
    assert redact("x canary-01\n23456789 after") == "x *** after"


@pytest.mark.parametrize(
    "unit", ["a=", '"password": "', "u0026", "://a", "-----BEGIN PRIVATE KEY-----", "eyJa-", "sk-", "&sig=a"]
)
def test_redaction_takes_linear_time(unit: str) -> None:
    """The quadratic expressions that this test refuses take minutes for it."""
    redact(unit * (300_000 // len(unit)))


def test_the_password_of_a_configured_uri_is_redacted_everywhere() -> None:
    register_secrets({"tracking": {"uri": "https://me:long-enough@host/x"}})
    assert redact("the password long-enough is wrong") == "the password *** is wrong"


SECRETS = st.text(st.characters(codec="utf-8", exclude_characters="*"), min_size=8, max_size=40).filter(
    lambda s: len(s.strip()) >= 8
)


@given(
    st.lists(SECRETS, min_size=1, max_size=4),
    st.text(max_size=20),
    st.sampled_from(["raw", "json", "ascii", "repr", "url", "html"]),
)
@example(["\"é'canary"], "", "json")
@example(["\"é'canary"], "", "ascii")
@example(["\néa'canary"], "", "repr")
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_secrets_are_redacted_in_every_quoting(secrets: list[str], around: str, form: str) -> None:
    module._registered.clear()
    register_secrets({"nested": [{"init_args": {"passwords": secrets}}]})
    quoted = {
        "raw": str,
        "json": lambda s: json.dumps(s, ensure_ascii=False)[1:-1],
        "ascii": lambda s: json.dumps(s)[1:-1],
        "repr": lambda s: repr(s)[1:-1],
        "url": lambda s: quote(s, safe=""),
        "html": html.escape,
    }[form]
    text = around.join(quoted(secret) for secret in secrets)
    for secret in secrets:
        assert quoted(secret) not in redact(text)
    assert {redact(quoted(secret)) for secret in secrets} == {"***"}, "parts of a secret are left"


def test_overlapping_and_multiline_secrets_are_redacted() -> None:
    pem = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG9w0\n-----END KEY-----"
    register_secrets({"a": {"token": "abcdefgh"}, "b": {"token": "efghijkl"}, "private_key": pem, "pwd": 8 * "x"})
    assert redact("<abcdefghijkl>, <xxxxxxxxx>") == "<***>, <***>"
    assert "MIIEvQ" not in redact("line 2 is MIIEvQIBADANBgkqhkiG9w0")


def test_environment_secrets_of_eight_or_more_characters_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "canary-environment")
    monkeypatch.setenv("OTHER_TOKEN", "short")
    assert redact("canary-environment, short") == "***, short"


def test_log_lines_and_tracebacks_are_redacted(caplog: pytest.LogCaptureFixture) -> None:
    register_secrets({"token": "canary-log"})
    try:
        raise ValueError("canary-log")
    except ValueError:
        logging.getLogger("ray_app.some.module").exception("%s and %d", "canary-log", 5)
    logging.getLogger("ray_app").warning("100% canary-log")
    assert "canary" not in caplog.text
    assert "*** and 5" in caplog.text
    assert "ValueError: ***" in caplog.text
    assert "100% ***" in caplog.text


def test_events_redact_the_secrets_of_the_configuration_of_the_run(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    put_atomic(paths.config, yaml.safe_dump({"task": {"init_args": {"db": {"password": 'can"ary\n-event'}}}}).encode())
    put_event(paths, "failed", 1, errors={"0": 'ValueError: can"ary\n-event'}, step=3, token="canary")
    [event] = read_events(paths)
    assert event.details == {"errors": {"0": "ValueError: ***"}, "step": 3, "token": "***"}


def test_a_redacted_configuration_has_no_secrets_and_stays_yaml() -> None:
    values: dict[str, Any] = {
        "task": {"init_args": {"token": "it's: canary", "size": 3}},
        "run": {"name": "x", "path": "s3://a:b@c/d"},
    }
    redacted = redact_yaml(yaml.safe_dump(values))
    assert yaml.safe_load(redacted) == {
        "task": {"init_args": {"token": "***", "size": 3}},
        "run": {"name": "x", "path": "s3://***@c/d"},
    }


def test_redaction_tolerates_variables_that_another_thread_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The telemetry of MLflow removes a variable from its own thread."""
    ended = threading.Event()

    def change() -> None:
        while not ended.is_set():
            os.environ["_OF_ANOTHER_THREAD"] = "1"
            os.environ.pop("_OF_ANOTHER_THREAD")

    monkeypatch.setenv("MY_TOKEN", "a-canary-of-mine")
    thread, switching_s = threading.Thread(target=change), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        assert {redact("it is a-canary-of-mine") for _ in range(1000)} == {"it is ***"}
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(switching_s)


def test_a_file_may_be_readable_by_its_owner_only(tmp_path: Path) -> None:
    put_atomic(tmp_path / "a", b"x", mode=0o600)
    put_atomic(tmp_path / "b", b"x")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) & 0o600 == 0o600


@pytest.mark.rest
def test_every_module_that_logs_installs_the_redaction() -> None:
    """Each module that logs imports the redaction, so that log lines are redacted whatever a process imports."""
    root = Path(module.__file__).parents[2]
    files = [f for f in sorted((root / "ray_app").rglob("*.py")) if "logger = logging" in f.read_text()]
    names = [".".join(f.relative_to(root).with_suffix("").parts) for f in files]
    code = (
        f"import importlib, logging\nfor n in {names}:\n importlib.import_module(n)\nassert"
        f" logging.getLogRecordFactory().hides_secrets"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
