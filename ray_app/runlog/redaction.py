"""Redaction of secrets: all text that is displayed, logged or sent passes `redact` or `redact_value` first.

A secret is the value of a configuration field or an environment variable with a name that looks like one, wherever it
occurs, and the credentials in a URI. Each process looks environment variables up by itself; it knows the secrets of the
configuration after `register_secrets`.
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
_TEXT_TOKEN = re.compile(
    r"(?i)(?:^|_)(?:additional|begin|blank|bos|cls|end|eod|eos|eot|extra|image|mask|oov|pad|padding|sep|separator|sos|special|start|stop"
    r"|unk|unknown)_?token$"
)
_DESCRIPTION = re.compile(
    r"(?i)(?:token|secret|passw(?:or)?d|key|credential)_?(?:class|column|columns|count|dim|dtype|embedding|feature|features|field|fields"
    r"|index|kind|label|level|position|type|types)$"
)
_MIN_CHARS = 4
_MIN_LINE_CHARS = 16
"""Shorter values are hidden in their own field only: in a text they would hide parts of ordinary words."""
_MIN_ENVIRONMENT_CHARS = 8
_URI_PASSWORD = re.compile(r"://[^/\s:@]*:([^\s'\"/]{8,})@")
_registered: set[str] = set()
_registered_runs: set[str] = set()


def is_secret_name(name: str) -> bool:
    """Returns whether a field of this name contains a secret: `hf_token`, `AWS_SECRET_ACCESS_KEY`, `dbPassword`.

    The tokens of a text are not secrets (`max_tokens`, `pad_token`), nor are descriptions such as `token_column`.
    """
    is_harmless = _TEXT_TOKEN.search(name) or _DESCRIPTION.search(name)
    return _NAME.search(name) is not None and not is_harmless


def register_secrets(values: Mapping[str, Any]) -> bool:
    """Registers the secrets of a configuration in this process, so that `redact` and the log lines hide them.

    It returns whether the configuration contains any, those in URIs included.
    """
    _registered.update(_in_fields(values))
    return redact_value(values) != values


def register_run_secrets(config: Location) -> None:
    """Registers the secrets in the `config.yaml` of a run, once in each process, unless it cannot be read now."""
    if str(config) in _registered_runs:
        return
    try:
        register_secrets(yaml.safe_load(config.read_text()) or {})
    except (OSError, ValueError, yaml.YAMLError):
        return
    _registered_runs.add(str(config))


def redact(text: str) -> str:
    """Returns the text without registered secrets in any quoting, credentials of URIs, and Python's addresses."""
    return _redact(text, _known_secrets())


def _redact(text: str, secrets: tuple[str, ...]) -> str:
    text = _hide(remove_addresses(text), secrets)
    text = re.sub(r"(://)[^/\s'\"]*@", rf"\1{HIDDEN}@", text)
    return re.sub(r"(?i)([?&][\w.-]*(?:token|secret|password|signature|key)=)[^&\s'\"]+", rf"\1{HIDDEN}", text)


def redact_value(value: Any, name: str = "") -> Any:
    """Returns a value of JSON or YAML without secrets; all of a field with the `name` of a secret is hidden."""
    # Once for the whole value, since the look at the environment takes longer than a text.
    return _redact_value(value, name, _known_secrets())


def _redact_value(value: Any, name: str, secrets: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {
            _redact(key, secrets) if isinstance(key, str) else key: _redact_value(item, _below(name, key), secrets)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redact_value(item, name, secrets) for item in value]
    if is_secret_name(name) and _can_be_secret(value, name):
        return HIDDEN
    return _redact(value, secrets) if isinstance(value, str) else value


def redact_yaml(text: str) -> str:
    """Returns the text of a `config.yaml` without secrets."""
    return yaml.safe_dump(redact_value(yaml.safe_load(text)), sort_keys=False, allow_unicode=True)


def _below(name: str, key: Any) -> str:
    """Returns the name that counts for the value of a key: every value below a secret is one."""
    return name if is_secret_name(name) else str(key)


def _can_be_secret(value: Any, name: str) -> bool:
    """Returns whether a value can be a secret: a number can be a password, but a number named token is a count."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (isinstance(value, str) and value != "") or (is_number and "token" not in name.lower())


def _in_fields(values: Any, name: str = "") -> Iterator[str]:
    """Yields the secrets in nested dictionaries and lists."""
    if isinstance(values, Mapping):
        for key, item in values.items():
            yield from _in_fields(item, _below(name, key))
    elif isinstance(values, list | tuple):
        for item in values:
            yield from _in_fields(item, name)
    elif is_secret_name(name) and _can_be_secret(values, name) and len(str(values)) >= _MIN_CHARS:
        yield str(values)
    elif isinstance(values, str):
        yield from _URI_PASSWORD.findall(values)


def _known_secrets() -> tuple[str, ...]:
    """Returns the registered secrets and those in environment variables, in all their forms."""
    return _forms(frozenset(_registered | _in_environment(os.environ)))


def _in_environment(environment: Mapping[str, str]) -> set[str]:
    """Returns the secrets in environment variables."""
    # `get`, since other threads may remove a variable meanwhile, as that of MLflow does.
    values = [environment.get(name, "") for name in environment if _NAME.search(name)]
    return {value for value in values if len(value) >= _MIN_ENVIRONMENT_CHARS}


@lru_cache(maxsize=8)
def _forms(secrets: frozenset[str]) -> tuple[str, ...]:
    """Returns the secrets in the forms of plain text, JSON, Python, URLs and HTML, as a whole and line by line."""
    forms: set[str] = set()
    for secret in secrets:
        lines = [line for line in secret.splitlines() if len(line) >= _MIN_LINE_CHARS]
        for text in (secret, secret.strip(), *lines):
            if len(text) >= _MIN_CHARS:
                escaped = json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1]
                forms.update((text, *escaped, quote(text, safe=""), quote(text), html.escape(text)))
    return tuple(sorted(forms))


def _hide(text: str, secrets: tuple[str, ...]) -> str:
    """Returns the text with all occurrences of secrets hidden; overlapping ones are hidden as one."""
    covered: list[list[int]] = []
    for start, end in sorted(_find_occurrences(text, secrets)):
        if covered and start <= covered[-1][1]:
            covered[-1][1] = max(covered[-1][1], end)
        else:
            covered.append([start, end])
    for start, end in reversed(covered):
        text = text[:start] + HIDDEN + text[end:]
    return text


def _find_occurrences(text: str, secrets: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Yields start and end of each occurrence of a secret."""
    for secret in secrets:
        start = text.find(secret)
        while start >= 0:
            yield start, start + len(secret)
            start = text.find(secret, start + 1)


def _hide_in_logs() -> None:
    """Redacts every log record of the application, with its traceback, when it is created.

    So the record is redacted for every handler; a filter of a logger would not see the records of its child loggers.
    """
    previous = logging.getLogRecordFactory()
    if getattr(previous, "hides_secrets", False):
        return

    def make_record(*args: Any, **options: Any) -> logging.LogRecord:
        record = previous(*args, **options)
        if record.name.split(".")[0] == "ray_app":
            record.msg, record.args = redact(record.getMessage()), ()
            if record.exc_info and record.exc_info[0] is not None:
                record.exc_text = redact("".join(traceback.format_exception(*record.exc_info)).rstrip())
                record.exc_info = None
        return record

    make_record.hides_secrets = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make_record)


_hide_in_logs()
