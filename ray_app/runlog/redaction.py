"""Secrets never leave the run directory: what is shown, logged or sent goes through `redact` or `redacted` first.

A secret is the value of a configuration field or an environment variable whose name looks like one, wherever it occurs,
and what a URI carries as credentials. Environment variables are looked up in each process; the configuration's are
known after `guard`.
"""

from __future__ import annotations

import html
import json
import logging
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote

import yaml

from ray_app.errors import remove_addresses
from ray_app.storage.files import Location

HIDDEN = "***"

_NAME = re.compile(r"(?i)token(?!iz|s\b|s_)|secret|passw(?:or)?d|api_?key|access_?key|private_?key|credential")
_TOKEN_OF_TEXT = re.compile(
    r"(?i)(?:^|_)(?:additional|begin|blank|bos|cls|end|eod|eos|eot|extra|image|mask|oov|pad|padding|sep|separator|sos|special|start|stop"
    r"|unk|unknown)_?token$"
)
_ABOUT_ONE = re.compile(
    r"(?i)(?:token|secret|passw(?:or)?d|key|credential)_?(?:class|column|columns|count|dim|dtype|embedding|feature|features|field|fields"
    r"|index|kind|label|level|position|type|types)$"
)
_LEAST_CHARS, _LEAST_LINE_CHARS = 4, 16
"""What is shorter is hidden in its own field only: in a text it would hide half of every word."""
_LEAST_ENVIRONMENT_CHARS = 8
_URI_PASSWORD = re.compile(r"://[^/\s:@]*:([^\s'\"/]{8,})@")
_guarded: set[str] = set()
_guarded_runs: set[str] = set()


def is_secret_name(name: str) -> bool:
    """Whether a field of this name holds a secret: `hf_token`, `AWS_SECRET_ACCESS_KEY`, `dbPassword`.

    The tokens of a text are none (`max_tokens`, `pad_token`), nor is what only says where or of what kind one is
    (`token_column`).
    """
    is_harmless = _TOKEN_OF_TEXT.search(name) or _ABOUT_ONE.search(name)
    return _NAME.search(name) is not None and not is_harmless


def register_secrets(values: Mapping[str, Any]) -> bool:
    """Makes the secrets of a configuration known to this process, so that `redact` and our log lines hide them.

    Args:
        values: The configuration as nested dictionaries.

    Returns:
        Whether it holds any, those in URIs included.
    """
    _guarded.update(_in_fields(values))
    return redact_value(values) != values


def register_run_secrets(config: Location) -> None:
    """`guard` of the `config.yaml` of a run, once in each process; nothing if it cannot be read for now."""
    if str(config) in _guarded_runs:
        return
    try:
        register_secrets(yaml.safe_load(config.read_text()) or {})
    except (OSError, ValueError, yaml.YAMLError):
        return
    _guarded_runs.add(str(config))


def redact(text: str) -> str:
    """The text without the secrets that this process knows, however they are quoted, and without the credentials of the
    URIs in it.

    Addresses of Python objects go, too, see `without_addresses`.
    """
    text = _without(remove_addresses(text), _forms(frozenset(_guarded | _in_environment(os.environ))))
    text = re.sub(r"(://)[^/\s'\"]*@", rf"\1{HIDDEN}@", text)
    return re.sub(r"(?i)([?&][\w.-]*(?:token|secret|password|signature|key)=)[^&\s'\"]+", rf"\1{HIDDEN}", text)


def redact_value(value: Any, name: str = "") -> Any:
    """A value of nested dictionaries and lists without secrets; of a field that is named like one all of it goes.

    Args:
        value: Anything that JSON or YAML holds.
        name: Name of the field that it is in.
    """
    if isinstance(value, dict):
        return {
            redact(key) if isinstance(key, str) else key: redact_value(item, _below(name, key))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_value(item, name) for item in value]
    if is_secret_name(name) and _can_be_secret(value, name):
        return HIDDEN
    return redact(value) if isinstance(value, str) else value


def redact_yaml(text: str) -> str:
    """A `config.yaml` without secrets."""
    return yaml.safe_dump(redact_value(yaml.safe_load(text)), sort_keys=False, allow_unicode=True)


def _below(name: str, key: Any) -> str:
    """The name that counts for what is in `key`: everything below a secret is one."""
    return name if is_secret_name(name) else str(key)


def _can_be_secret(value: Any, name: str) -> bool:
    """Numbers can be passwords, but a number called token counts some."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (isinstance(value, str) and value != "") or (is_number and "token" not in name.lower())


def _in_fields(values: Any, name: str = "") -> Iterator[str]:
    if isinstance(values, Mapping):
        for key, item in values.items():
            yield from _in_fields(item, _below(name, key))
    elif isinstance(values, list | tuple):
        for item in values:
            yield from _in_fields(item, name)
    elif is_secret_name(name) and _can_be_secret(values, name) and len(str(values)) >= _LEAST_CHARS:
        yield str(values)
    elif isinstance(values, str):
        yield from _URI_PASSWORD.findall(values)


def _in_environment(environment: Mapping[str, str]) -> set[str]:
    secret = [
        environment.get(name, "") for name in environment if _NAME.search(name)
    ]  # other threads change it: MLflow's does
    return {value for value in secret if len(value) >= _LEAST_ENVIRONMENT_CHARS}


@lru_cache(maxsize=8)
def _forms(secrets: frozenset[str]) -> tuple[str, ...]:
    """The secrets as they are, as JSON, Python, URLs and HTML write them, and line by line."""
    forms: set[str] = set()
    for secret in secrets:
        lines = [line for line in secret.splitlines() if len(line) >= _LEAST_LINE_CHARS]
        for one in (secret, secret.strip(), *lines):
            if len(one) >= _LEAST_CHARS:
                escaped = json.dumps(one)[1:-1], json.dumps(one, ensure_ascii=False)[1:-1], repr(one)[1:-1]
                forms.update((one, *escaped, quote(one, safe=""), quote(one), html.escape(one)))
    return tuple(sorted(forms))


def _without(text: str, secrets: tuple[str, ...]) -> str:
    """The text with every stretch hidden that a secret covers; secrets that overlap are hidden as one."""
    covered: list[list[int]] = []
    for start, end in sorted(_places(text, secrets)):
        if covered and start <= covered[-1][1]:
            covered[-1][1] = max(covered[-1][1], end)
        else:
            covered.append([start, end])
    for start, end in reversed(covered):
        text = text[:start] + HIDDEN + text[end:]
    return text


def _places(text: str, secrets: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    for secret in secrets:
        start = text.find(secret)
        while start >= 0:
            yield start, start + len(secret)
            start = text.find(secret, start + 1)


def _hide_in_logs() -> None:
    """Makes every log line of the application, with its traceback, redacted where it is made, whatever handlers then
    see it.
    """
    make = logging.getLogRecordFactory()
    if getattr(make, "hides_secrets", False):
        return

    def made(*arguments: Any, **more: Any) -> logging.LogRecord:
        record = make(*arguments, **more)
        if record.name.split(".")[0] == "ray_app":
            record.msg, record.args = redact(record.getMessage()), ()
            if record.exc_info and record.exc_info[0] is not None:
                record.exc_text = redact("".join(traceback.format_exception(*record.exc_info)).rstrip())
                record.exc_info = None
        return record

    made.hides_secrets = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(made)


_hide_in_logs()
