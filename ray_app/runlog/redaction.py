"""Redaction of secrets: all text that is displayed, logged or sent passes `redact` or `redact_value` first.

A secret is the value of a configuration field or an environment variable with a name that looks like one, wherever it
occurs; the credentials in a URI; and what a text itself shows to be one: `password=...`, a header, a private key, a
webhook, a token of a well-known form. Each process looks environment variables up by itself; it knows the secrets of
the configuration after `register_secrets`. All expressions take a time that grows linearly with the text.
"""

from __future__ import annotations

import base64
import html
import json
import logging
import os
import re
import traceback
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any
from urllib.parse import quote, quote_plus

import yaml

from ray_app.config.config import YAML_LOADER
from ray_app.errors import escape_controls, remove_addresses
from ray_app.storage.files import Location
from ray_app.storage.object_stores import credential_variables

HIDDEN = "***"

_SECRET = re.compile(
    r"token(?!iz|s(?:_|$))|secret|passw(?:or)?d|passphrase|credential|webhook|conn(?:ection)?_?str(?:ing)?(?:_|$)"
    r"|(?:access|account|api|encryption|master|private|shared|signing|storage)_?key"
    r"|(?:^|_)(?:auth|authorization|bearer|cookies?|dsn|pass|pat|pwd|sas)$|_key$"
)
"""What names of secrets contain, as `_to_words` writes them."""
_TEXT_TOKEN = re.compile(
    r"(?:^|_)(?:additional|begin|blank|bos|cls|end|eod|eos|eot|extra|image|mask|oov|pad|padding|sep|separator|sos|special|start|stop"
    r"|unk|unknown)_?token$"
)
_DESCRIPTION = re.compile(
    r"(?:token|secret|passw(?:or)?d|key|credentials?)_?(?:class|column|columns|count|dim|dir|dtype|embedding|env|feature|features"
    r"|field|fields|file|folder|index|kind|label|length|level|name|path|position|type|types|variable)$"
)
_DATA_KEY = re.compile(
    r"^(?!.*(?:secret|passw|token))(?:.*_)?(?:(?:[a-z]\d*|answer|attention|audio|batch|box|boxes|bucket|cache|caption|checkpoint|class"
    r"|col|column|config|data|dataset|date|dict|document|dropout|entry|epoch|example|feature|field|file|foreign|graph|group|hash"
    r"|hidden|hot|id|image|img|index|input|item|join|json|kind|label|labels|layer|logits|lookup|loss|map|mask|metric|model"
    r"|monitor|name|natural|node|object|order|output|param|partition|path|prediction|primary|prng|prompt|public|query|question"
    r"|random|record|ref|rng|row|run|sample|score|seq|shard|sort|source|split|src|state|step|table|tag|target|test|text|tgt|time"
    r"|train|type|unique|val|value|video|weight|weights)_key|(?:file|glob|name|path|regex)_pat)$"
)
"""Names of keys of a row, a dictionary or a generator, and of a public key; and of patterns of names."""
_PLAIN_VARIABLES = {"AWS_PROFILE", "GOOGLE_APPLICATION_CREDENTIALS", "PWD"}
"""Environment variables with the name of a profile or the path of a file or a folder."""
_MIN_CHARS = 4
_MIN_LINE_CHARS = 16
"""Shorter values are hidden in their own field only: in a text they would hide parts of ordinary words."""
_MIN_ENVIRONMENT_CHARS = 8
_URI_PASSWORD = re.compile(r"://[^/\s:@]*:([^\s'\"/]{8,})@")

_QUOTE = r"\\{0,8}['\"]|&(?:quot|apos|#34|#39|#x22|#x27);"
_ASSIGNMENT = re.compile(
    r"(?:(?<![\w.-])|(?<=[36fFnrt])(?:(?<=u0026)|(?<=\\[nrt])|(?<=%2[36])|(?<=%3[fF])))(?P<name>[A-Za-z_][\w.-]{0,199}+)"
    rf"(?P<close>{_QUOTE})?\s{{0,3}}(?P<sign>=>?|:|%3[aAdD])\s{{0,3}}(?:[bru]?(?P<quote>{_QUOTE}))?"
)
"""Name and sign before a value in JSON, YAML, Python, a URL, a header or a connection string."""
_OPTION = re.compile(r"(?<![\w-])--(?P<name>[\w.-]*+)(?P<close>)(?P<sign>[ \t]{1,3})(?P<quote>['\"])?")
_QUERY_START = re.compile(r"(?:[?&#]|&amp;|u0026|%2[36]|%3[fF])$")
_WORD = re.compile(r"[A-Za-z]?[a-z-]*[.,:;!?)]*")
"""A word of a sentence: no password follows the colon in `the password: must be given`."""
_NO_VALUE = re.compile(r"None|[Tt]rue|[Ff]alse|null|\*+|self\.[\w.]*|\$?\{[\w.]*\}|\[.*|\d*\.\d+")
_VALUE_NAME = re.compile(
    r"(?:token|secret|passw(?:or)?d|passphrase|credential|key|key_id|webhook|webhook_url|str|string"
    r"|auth|authorization|bearer|cookie|dsn|pass|pat|pwd|sas)s?$"
)
"""How names end that stand before a value; `InvalidTokenError: ...` is the name of an error."""
_QUERY_NAME = re.compile(r"(?:token|secret|password|signature|key)$|^(?:auth|code|pwd|sas|sig)$")
_SPOKEN_NAMES = {"auth", "cookie", "cookies", "credential", "credentials", "pass", "pat", "token"}
"""Names before a colon in sentences: `unexpected token: 'x'`."""


def _start(pattern: str) -> str:
    """Returns a pattern that matches at the start of a word only; it begins with its first letter to be quick."""
    first = pattern[0]
    return rf"{first}(?:(?<![\w-]{first})|(?<=\\[nrt]{first})|(?<=%[0-9A-Fa-f]{{2}}{first})){pattern[1:]}"


_FORMS = (
    *("AGE-SECRET-KEY-1[0-9A-Z]{20,}", r"AIza[\w-]{30,}", "A(?:KIA|SIA)[A-Z0-9]{12,}", "dapi[0-9a-f]{32}"),
    *(r"dop_v1_\w{20,}", r"eyJ[\w-]{10,}\.eyJ[\w-]{5,}(?:\.[\w-]+)?", "gh[opsru]_[A-Za-z0-9]{16,}", r"hvs\.[\w-]{20,}"),
    *(r"github_pat_\w{20,}", r"gl(?:cbt|dt|pat|rt)-[\w-]{16,}", "gsk_[A-Za-z0-9]{20,}", "hf_[A-Za-z0-9]{16,}"),
    *("npm_[A-Za-z0-9]{30,}", r"nvapi-[\w-]{20,}", r"pypi-[\w-]{40,}", "r8_[A-Za-z0-9]{30,}", r"xapp-[\w-]{10,}"),
    *("rk_(?:live|test)_[A-Za-z0-9]{16,}", "sk_(?:live|test)_[A-Za-z0-9]{16,}", r"sk-(?=[A-Za-z_-]*\d)[\w-]{16,}"),
    *(r"SG\.[\w-]{16,}\.[\w-]{16,}", r"xox[a-z]-[\w-]{10,}", r"ya29\.[\w-]{20,}"),
)
"""Tokens of AWS, Google, GitHub, GitLab, Hugging Face, OpenAI, Slack and others, and JSON web tokens."""
_PRIVATE_KEY = "-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----"
_PATTERNS = [
    (r"://([^/\s'\"]+)@", "://"),
    (rf"{_PRIVATE_KEY}((?:[^-]|-(?!----))*+)-----END", "private key"),
    (rf"{_PRIVATE_KEY}((?:(?:[\s|│]|\\[nr])*+[A-Za-z0-9+/=]{{24,}}+)+)", "private key"),
    (
        r"(?:hooks\.slack(?:-gov)?\.com|webhook\.office\.com|outlook\.office\.com/webhook|hooks\.zapier\.com"
        r"|discord(?:app)?\.com/api(?:/v\d+)?/webhooks|api\.telegram\.org)/([^\s'\"<>]+)",
        *("hook", "api.telegram.org"),
    ),
    (
        r"(?i:\b(?:basic|bearer|digest|negotiate|sharedkey(?:lite)?|authorization['\"]?: ?['\"]?token) {1,3})"
        r"(?![A-Za-z]?[a-z-]*+(?![\w+/=.~]))([A-Za-z0-9+/=_.~:-]{8,})",
        *("basic ", "bearer ", "digest ", "negotiate ", "sharedkey", "authorization"),
    ),
    (r"(?i:\b(?:set-)?cookie: ?)([\w.-]{1,64}=[^\r\n'\"<]+)", "cookie:"),
    ("(" + "|".join(map(_start, _FORMS)) + ")", ""),
]
"""What shows by itself to be a secret, which is the first group, and words of which such a text has one."""
_LINE_START = re.compile(r"(?:\[[^\]]{0,80}\] )?[ \t│┃|]*")
"""What a line of output begins with: the step, see `Output`, and the border of a table or box."""
_WEBHOOK = "init_args of a hook"
"""The name that counts for the arguments of an observer, of which `Webhook` may be a base: its `url` is a secret."""
_registered: set[str] = set()
_registered_runs: set[str] = set()


@lru_cache(maxsize=4096)
def _to_words(name: str) -> str:
    """Returns a name in lower case, with an underscore between its words: `dbPassword`, `x-api-key`."""
    return re.sub(r"[\W_]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)).lower()


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Returns whether a field of this name contains a secret: `hf_token`, `AWS_SECRET_ACCESS_KEY`, `dbPassword`.

    The tokens of a text are not secrets (`max_tokens`, `pad_token`), nor are descriptions such as `token_column`, and
    keys of data (`image_key`, `primary_key`).
    """
    words = _to_words(name)
    is_harmless = any(pattern.search(words) for pattern in (_TEXT_TOKEN, _DESCRIPTION, _DATA_KEY))
    return _SECRET.search(words) is not None and not is_harmless


def register_secrets(values: Mapping[str, Any]) -> None:
    """Registers the secrets of a configuration in this process, so that `redact` and the log lines hide them."""
    _registered.update(_in_fields(values))


def register_run_secrets(config: Location) -> None:
    """Registers the secrets in the `config.yaml` of a run, once in each process, unless it cannot be read now."""
    if str(config) in _registered_runs:
        return
    try:
        register_secrets(yaml.load(config.read_text(), YAML_LOADER) or {})
    except (OSError, ValueError, yaml.YAMLError):
        return
    _registered_runs.add(str(config))


def redact(text: str) -> str:
    """Returns the text without secrets in any quoting, Python's addresses, and characters that control a terminal."""
    return escape_controls(_redact(text, _known_secrets()))


def _redact(text: str, secrets: tuple[str, ...]) -> str:
    text = remove_addresses(text)
    return _hide(text, sorted(_find_secrets(text, secrets)))


def redact_value(value: Any, name: str = "") -> Any:
    """Returns a value of JSON or YAML without secrets; all of a field with the `name` of a secret is hidden."""
    # Once for the whole value, since the look at the environment takes longer than a text.
    return _redact_value(value, name, _known_secrets())


def _redact_value(value: Any, name: str, secrets: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {
            _redact(key, secrets) if isinstance(key, str) else key: _redact_value(item, below, secrets)
            for key, item, below in _items(value, name)
        }
    if isinstance(value, list | tuple):
        return [_redact_value(item, name, secrets) for item in value]
    if is_secret_name(name) and _can_be_secret(value, name):
        return HIDDEN
    return _redact(value, secrets) if isinstance(value, str) else value


def redact_yaml(text: str) -> str:
    """Returns the text of a `config.yaml` without secrets."""
    return yaml.safe_dump(redact_value(yaml.safe_load(text)), sort_keys=False, allow_unicode=True)


def _items(values: Mapping[Any, Any], name: str) -> Iterator[tuple[Any, Any, str]]:
    """Yields keys, values, and the names that count for the values: every value below a secret is one."""
    is_webhook = name == "observers" or "webhook" in str(values.get("class_path")).rpartition(".")[2].lower()
    for key, item in values.items():
        if is_secret_name(name):
            yield key, item, name
        elif name == _WEBHOOK and key == "url":
            yield key, item, "webhook_url"
        else:
            yield key, item, _WEBHOOK if is_webhook and key == "init_args" else str(key)


def _can_be_secret(value: Any, name: str) -> bool:
    """Returns whether a value can be a secret: a number can be a password, but a number named token is a count.

    A short or fractional number is one only below a plain name: `{"pass": 0.9}` is a metric.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return isinstance(value, str) and value != ""
    is_plain = re.search(r"(?i)passw|secret|credential", name) is not None
    return "token" not in name.lower() and (is_plain or (isinstance(value, int) and len(str(value)) >= _MIN_CHARS))


def _in_fields(values: Any, name: str = "") -> Iterator[str]:
    """Yields the secrets in nested dictionaries and lists."""
    if isinstance(values, Mapping):
        for _, item, below in _items(values, name):
            yield from _in_fields(item, below)
    elif isinstance(values, list | tuple):
        for item in values:
            yield from _in_fields(item, name)
    elif is_secret_name(name) and _can_be_secret(values, name):
        yield from _parts(str(values), _MIN_CHARS)
    elif isinstance(values, str):
        yield from _URI_PASSWORD.findall(values)


def _parts(value: str, min_chars: int) -> Iterator[str]:
    """Yields a secret, and those in it if it is a URI, a connection string or JSON."""
    spans = _find_assigned(value)
    for part in (value, *_URI_PASSWORD.findall(value), *(value[start:end] for start, end in spans)):
        if len(part) >= min_chars:
            yield part


def _known_secrets() -> tuple[str, ...]:
    """Returns the registered secrets and those in environment variables, in all their forms."""
    # `get`, since other threads may remove a variable meanwhile, as that of MLflow does.
    values = (_in_variable(name, os.environ.get(name, "")) for name in list(os.environ))
    return _forms(frozenset(_registered.union(*values)))


@lru_cache(maxsize=4096)
def _in_variable(name: str, value: str) -> tuple[str, ...]:
    """Returns the secrets in an environment variable."""
    if name in _PLAIN_VARIABLES:
        return ()
    if is_secret_name(name) or _TEXT_TOKEN.search(_to_words(name)) or name in credential_variables():
        return tuple(_parts(value, _MIN_ENVIRONMENT_CHARS))
    return tuple(_URI_PASSWORD.findall(value))


@lru_cache(maxsize=8)
def _forms(secrets: frozenset[str]) -> tuple[str, ...]:
    """Returns the secrets in the forms of plain text, JSON, Python, URLs, HTML and base64, as a whole and by line."""
    forms: set[str] = set()
    for secret in secrets:
        lines = [line for line in secret.splitlines() if len(line) >= _MIN_LINE_CHARS]
        for text in (secret, secret.strip(), *lines):
            if len(text) >= _MIN_CHARS:
                escaped = json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1]
                forms.update((text, *escaped, quote(text, safe=""), quote(text), quote_plus(text), html.escape(text)))
            if len(text) >= _MIN_ENVIRONMENT_CHARS:
                forms.update(_in_base64(text.encode(errors="replace")))
    return tuple(sorted(forms))


def _in_base64(secret: bytes) -> Iterator[str]:
    """Yields what all texts in base64 contain that encode the secret behind 0, 1 or 2 other bytes, modulo 3."""
    for before in range(3):
        num_bits = 8 * (before + len(secret))
        text = base64.b64encode(bytes(before) + secret).decode()[-(-8 * before // 6) : num_bits // 6]
        yield from (text, text.translate(str.maketrans("+/", "-_")))


def _hide(text: str, spans: list[tuple[int, int]]) -> str:
    """Returns the text with the sorted spans hidden; overlapping ones are hidden as one."""
    parts, end = list[str](), -1
    for start, stop in spans:
        if start > end:
            parts += [text[max(end, 0) : start], HIDDEN]
        end = max(end, stop)
    return "".join([*parts, text[max(end, 0) :]])


def _find_secrets(text: str, secrets: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Yields start and end of each secret in a text."""
    yield from _find_occurrences(text, secrets)
    if "\n" in text:
        yield from _find_wrapped(text, tuple(s for s in secrets if len(s) >= _MIN_ENVIRONMENT_CHARS))
    yield from _find_assigned(text)
    lower = text.lower()
    for pattern, *words in _PATTERNS:
        # A search for words is a hundred times as quick as one for a pattern without regard to case.
        if any(word in lower for word in words):
            yield from (match.span(1) for match in re.finditer(pattern, text))


def _find_occurrences(text: str, secrets: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Yields start and end of each occurrence of a secret."""
    for secret in secrets:
        start = text.find(secret)
        while start >= 0:
            yield start, start + len(secret)
            start = text.find(secret, start + 1)


def _find_wrapped(text: str, secrets: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Yields start and end of each secret that goes on in the next line, as `rich` wraps it, also in a box."""
    lines, starts = list[str](), list[int]()
    position = 0
    for line in text.split("\n"):
        start = _LINE_START.match(line).end()  # type: ignore[union-attr]
        lines.append(line[start:].rstrip(" \t\r│┃|"))
        starts.append(position + start)
        position += len(line) + 1
    firsts = [0, *accumulate(map(len, lines))]

    def original(index: int) -> int:
        line = bisect_right(firsts, index) - 1
        return starts[line] + index - firsts[line]

    for start, end in _find_occurrences("".join(lines), secrets):
        yield original(start), original(end - 1) + 1


def _find_assigned(text: str) -> Iterator[tuple[int, int]]:
    """Yields start and end of each value behind a name of a secret."""
    for pattern in (_ASSIGNMENT, _OPTION):
        last_end = 0
        for match in pattern.finditer(text):
            if match.start() >= last_end and _ends_as_secret(match["name"]):
                last_end = _end_of_secret(text, match)
                if last_end > match.end():
                    yield match.end(), last_end


@lru_cache(maxsize=4096)
def _ends_as_secret(name: str) -> bool:
    """Returns whether a name ends as one of a value or a parameter that is a secret; most names do not."""
    words = _to_words(name.rpartition(".")[2])
    return _VALUE_NAME.search(words) is not None or _QUERY_NAME.search(words) is not None


def _end_of_secret(text: str, match: re.Match[str]) -> int:
    """Returns where the value behind a name ends that is a secret; 0 if it is none."""
    name, before = match["name"].rpartition(".")[2], text[max(0, match.start() - 6) : match.start()]
    words, start = _to_words(name), match.end()
    sign, quoted = match["sign"].strip(), match["quote"]
    is_query = sign in ("=", "%3D", "%3d") and _QUERY_START.search(before) is not None
    if is_query:
        is_secret = _QUERY_NAME.search(words) is not None and _TEXT_TOKEN.search(words) is None
    else:
        is_secret = _VALUE_NAME.search(words) is not None and is_secret_name(name)
    if not is_secret:
        return 0
    value = _value_pattern(quoted, sign, is_query).match(text, start)[0]  # type: ignore[index]
    value = value if quoted else value.rstrip(",)]}.:")
    is_word = not quoted and (_WORD.fullmatch(value) is not None or (not sign and value.startswith("-")))
    is_sentence = sign in ("", ":") and not match["close"] and (is_word or name.lower() in _SPOKEN_NAMES)
    is_count = value.isdecimal() and not _can_be_secret(int(value[:18]), name)
    return 0 if is_sentence or is_count or _NO_VALUE.fullmatch(value) else start + len(value)


@cache
def _value_pattern(quote_mark: str | None, sign: str, is_query: bool) -> re.Pattern[str]:
    """Returns the pattern of a value; a quotation mark ends it, which a backslash escapes, or the end of its line."""
    if quote_mark:
        return re.compile(rf"(?:(?!{re.escape(quote_mark)})(?:\\.|[^\n]))*+")
    if is_query:
        return re.compile(rf"(?:{'(?!%26)' if sign[0] == '%' else ''}[^\s&'\"<>])*+")
    return re.compile(r"(?:[^\s;&'\"<>\\]|\\(?![nrt'\"]))*+")


def _hide_in_logs() -> None:
    """Redacts every log record of the application, with its traceback, when it is created.

    So the record is redacted for every handler; a filter of a logger would not see the records of its child loggers.
    Further lines are indented, so that a text with line breaks cannot look like further records.
    """
    previous = logging.getLogRecordFactory()
    if getattr(previous, "hides_secrets", False):
        return

    def make_record(*args: Any, **options: Any) -> logging.LogRecord:
        record = previous(*args, **options)
        if record.name.split(".")[0] == "ray_app":
            record.msg, record.args = _indent(redact(record.getMessage())), ()
            if record.exc_info and record.exc_info[0] is not None:
                trace = "".join(traceback.format_exception(*record.exc_info)).rstrip()
                record.exc_text = "  " + _indent(redact(trace))
                record.exc_info = None
        return record

    make_record.hides_secrets = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make_record)


def _indent(text: str) -> str:
    return text.replace("\n", "\n  ")


_hide_in_logs()
