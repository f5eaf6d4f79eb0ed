"""The package, its tests and its benchmarks use the terms of `docs/glossary.md`, which has a better word for each one
that this test refuses.

`python tests/pure/test_vocabulary.py FILE_OR_FOLDER ...` prints the findings in Python files and pages.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Names that say how a value was obtained and not what it is.
EMPTY_NAMES = {
    *("found", "told", "held", "given", "said", "there", "mine", "twice", "made", "got", "own", "each", "place"),
    *("places", "seen", "asked", "wanted", "took", "gone", "shown", "known", "what", "which", "them", "these"),
    *("those", "thing", "things", "stuff"),
}
# Words of an identifier that have a standard term.
WORDS = {
    "most": "max",
    "least": "min",
    "exchange": "reduction, reducer",
    "exchanges": "reductions",
    "exchanged": "reduced",
    "played": "assigned",
    "plays": "runs",
    "replay": "recompute, SDC check (MLflow's replay of a run stays)",
    "lied": "sdc_detected",
    "lies": "sdc",
    "liar": "corrupt_rank",
    "guilty": "corrupt_rank",
    "newcomer": "pending_worker, joining",
    "newcomers": "pending_workers, joining",
    "spare": "standby",
    "spares": "standbys",
    "standstill": "stalled, step watchdog",
    "settle": "synchronize, raise_device_errors",
    "settled": "synchronized",
    "dismiss": "evict",
    "dismissed": "evicted",
    "excuse": "pause_watchdog",
    "excused": "watchdog_paused",
    "shunned": "excluded",
    "rehearse": "dry_run",
    "rehearsal": "dry_run",
    "room": "capacity, buffer pool, package",
    "rooms": "capacity, buffer pool, package",
    "beyond": "rare_rows",
    "pace": "straggler detection, delay",
    "pacing": "straggler reporter",
    "keeper": "snapshot actor",
    "keepers": "snapshot actors",
    "whoever": "the noun",
    "nobody": "none",
}
# Phrases of prose (docstrings, comments, pages).
PHRASES = {
    r"\bwho(ever|m|se)?\b": "name the subject: the worker, the rank, the process, the user",
    r"\b(no|some|every|any)body\b": "name the subject",
    r"[Nn]ot given:": "Default:",
    r"^(Which|Whose|Likewise|They|Those|Whether)\.": "a complete sentence",
    r"\bsigns? of life\b": "heartbeat",
    r"\bof one mind\b": "with the same digest",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\b(holds?|held|holding) (the )?others up\b": "straggler, stalls the group",
    r"\bstands? still\b|\bstood still\b": "stalls, is stalled",
    r"\bplay(s|ed|ing)? (a|the|its|their|all|more|fewer|each)? ?logical\b": "runs",
    r"\blying\b|\blied\b": "silent data corruption",
    r"\bnewcomers?\b": "joining worker, pending worker",
    r"\bspare workers?\b|\bspares\b": "standby workers",
    r"\brooms?\b": "package, capacity, buffer pool",
    r"\brehears\w+": "dry run",
    r"\btells? of\b|\btold of\b": "reports",
    r"\bis no (run|file|folder|number|mapping|list|name|field|class|image|mean|row|column|task)\b": "is not a ...",
}
# Patterns that are not plain English, in what a user reads: pages, messages, and the help of options.
PLAIN_PHRASES = {
    r"\b[Tt](hat|hose) of\b": "name the noun again, or use a genitive",
    r"\bbeside\b": "next to, in addition to",
    r"\banew\b": "again",
    r"\ban own\b": "a custom, a separate, its own",
    r", too\b(?! (few|many|much|long|large|small|short))": "also",
    r"\bgo(es)? (before|with)\b": "overrides, fits",
    r"\b(go(es|ing)?|went) on\b": "continue",
    r"\b(the|same|no|its|their) bits\b": "result, bit-identical",
    r"(?<![Tt]here )\b(is|are) no (?!longer|more|fewer|less|other|such)[a-z]": "is not a, has no",
    r"(^|[.;] )Where\b[^?.]*,": "if",
    r"\btakes? (no|only|any|it|them|what|arrays|columns) ": "accepts, uses",
    r"\b(is|are) gone\b|\bthere already\b|\bis there\.": "is missing, has ended, exists",
    r"\bin (vain|spite of|the place of)\b|\bat hand\b|\bfor want of\b|\bby way of\b": "despite, instead of, without",
}
MESSAGE_PHRASES = {r"^(It|They|Its|Their)\b": "begin with the noun"}
"""Patterns of messages alone."""
ANY_PHRASE = re.compile("|".join(f"(?:{phrase})" for phrase in PHRASES))
EXCEPTIONS: dict[str, str] = {"ray_app/retrain/gate.py: least_drop": "a key of the audit record"}
"""Names and phrases that are allowed, as `FILE: NAME` or `FILE: PHRASE`, with the reason."""


ONE_VALUE = {"(_TOP, _RIGHT, _BOTTOM)", "(per_epoch, text, (epoch, epoch_step))"}
"""Tuples that are one value: the margins of a chart, the parts of a progress line."""


@cache
def words_of(name: str) -> list[str]:
    """Returns the words of an identifier in lower case."""
    return [word.lower() for part in name.split("_") for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", part)]


@lru_cache(1)
def nodes_of(path: Path) -> list[ast.AST]:
    """Returns all nodes of the syntax tree of a module."""
    return list(ast.walk(ast.parse(path.read_text())))


def statements_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the statements of a syntax tree, nested ones included; there are far fewer of them than nodes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child
            yield from statements_of(child)


def names_defined(path: Path) -> Iterator[tuple[str, int]]:
    """Yields each name that a module defines, with its line."""
    for node in nodes_of(path):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, node.lineno


def prose_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yields the lines of docstrings and comments of a module, or of a page outside its code, with their numbers."""
    text = path.read_text()
    if path.suffix == ".md":
        is_code = False
        for number, line in enumerate(text.splitlines(), 1):
            is_code ^= line.lstrip().startswith("```")
            if not is_code:
                yield re.sub(r"`[^`]*`", "`", line), number
        return
    # To tokenize a module takes longest, so only modules in which a comment seems to have a phrase are.
    if any(ANY_PHRASE.search(line.partition("#")[2].lstrip("# ")) for line in text.splitlines() if "#" in line):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.string.lstrip("# "), token.start[0]
    for node in nodes_of(path):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if isinstance(statement, ast.Expr) and isinstance(value := statement.value, ast.Constant):
                for offset, line in enumerate(str(value.value).splitlines()):
                    yield re.sub(r"`[^`]*`", "`", line.strip()), statement.lineno + offset


def messages_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yields the texts of a module that are not docstrings, with ` for what is inserted, and their lines."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.JoinedStr):
            yield (
                "".join(str(part.value) if isinstance(part, ast.Constant) else "`" for part in node.values),
                node.lineno,
            )
            pending += [part for part in node.values if not isinstance(part, ast.Constant)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node.lineno
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            pending += ast.iter_child_nodes(node)


def help_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yields the numbers and lines of the docstrings that the command line shows as the help of options."""
    for node in nodes_of(path):
        if isinstance(node, ast.ClassDef) and re.search("(Section|Options|Spec)$", node.name):
            for offset, line in enumerate((ast.get_docstring(node) or "").splitlines()):
                yield re.sub(r"`[^`]*`", "`", line), node.lineno + 1 + offset


def read_by_users(path: Path) -> Iterator[tuple[str, int, dict[str, str]]]:
    """Yields what a user reads of a page or module, with the line and the patterns that it must not have."""
    if path.suffix == ".md":
        yield from ((text, line, PLAIN_PHRASES) for text, line in prose_of(path))
    elif path.is_relative_to(ROOT / "ray_app"):
        patterns = PLAIN_PHRASES | MESSAGE_PHRASES
        yield from ((text, line, patterns) for text, line in messages_of(path) if len(text.split()) > 2)
        yield from ((text, line, PLAIN_PHRASES) for text, line in help_of(path))


def problems(path: Path) -> list[str]:
    """Returns the findings in a file, each as `FILE:LINE: ...`."""
    findings = list[str]()
    relative = path.resolve().relative_to(ROOT)
    for text, line, patterns in read_by_users(path.resolve()):
        for pattern, better in patterns.items():
            if (match := re.search(pattern, text)) and f"{relative}: {match[0]}" not in EXCEPTIONS:
                findings.append(f"{relative}:{line}: {match[0]!r}; {better}")
    if path.suffix == ".py":
        for name, line in names_defined(path):
            bare = name.strip("_").lower()
            words = words_of(name)
            if bare in EMPTY_NAMES and f"{relative}: {name}" not in EXCEPTIONS:
                findings.append(f"{relative}:{line}: the name {name!r} does not say what it is")
            for word in WORDS.keys() & words:
                if f"{relative}: {name}" not in EXCEPTIONS:
                    findings.append(f"{relative}:{line}: {word!r} in {name!r}; say {WORDS[word]}")
        findings += [f"{relative}:{line}: more than two names in one assignment" for line in crowded_assignments(path)]
    for line_text, line in prose_of(path):
        for phrase, better in PHRASES.items() if ANY_PHRASE.search(line_text) else ():
            if (match := re.search(phrase, line_text)) and f"{relative}: {match[0]}" not in EXCEPTIONS:
                findings.append(f"{relative}:{line}: {match[0]!r}; {better}")
    return findings


def crowded_assignments(path: Path) -> list[int]:
    """Returns the lines of a module that assign a tuple to more than two names; `_TOP, ...` may be one value."""
    return [
        node.lineno
        for node in nodes_of(path)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Tuple) and len(target.elts) > 2 and ast.unparse(target) not in ONE_VALUE
    ]


def repeated_classes(paths: list[Path]) -> list[str]:
    """Returns a line for each class name that several classes of these files have, private and nested ones included."""
    lines: dict[str, list[str]] = {}
    for path in paths:
        if path.suffix == ".py":
            for node in statements_of(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    lines.setdefault(node.name, []).append(f"{path.resolve().relative_to(ROOT)}:{node.lineno}")
    return [
        f"the class {name!r} is in {', '.join(locations)}" for name, locations in lines.items() if len(locations) > 1
    ]


def files_below(*paths: str) -> list[Path]:
    """Returns the Python files and pages below these folders, except the project template."""
    return [
        path
        for file_or_folder in paths
        for path in sorted(
            (ROOT / file_or_folder).rglob("*") if (ROOT / file_or_folder).is_dir() else [ROOT / file_or_folder]
        )
        if path.suffix in (".py", ".md") and "project" not in path.parts
    ]


def test_the_package_uses_the_terms_of_its_field() -> None:
    paths = ("ray_app", "jobs", "docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")
    assert [problem for path in files_below(*paths) for problem in problems(path)] == []


def test_the_tests_and_benchmarks_use_the_terms_of_the_field() -> None:
    assert [problem for path in files_below("tests", "benchmarks") for problem in problems(path)] == []


def test_the_package_has_few_modules_and_none_is_too_long() -> None:
    modules = [path for path in files_below("ray_app") if path.suffix == ".py" and path.name != "__init__.py"]
    assert len([path for path in modules if "project" not in path.parts]) <= 274
    files = [path for path in files_below("ray_app", "tests", "benchmarks") if path.suffix == ".py"]
    assert [str(path.relative_to(ROOT)) for path in files if len(path.read_text().splitlines()) > 600] == []


def test_each_class_name_is_used_once() -> None:
    assert repeated_classes(files_below("ray_app")) == []


def test_each_class_name_of_the_test_support_is_used_once() -> None:
    """Test modules may repeat the names of their classes, since no other module imports these."""
    assert repeated_classes(files_below("tests/support", "tests/conftest.py")) == []


if __name__ == "__main__":
    files = files_below(*sys.argv[1:])
    lines = [problem for path in files for problem in problems(path)]
    for folder in ("ray_app", "tests/support"):
        lines += repeated_classes([path for path in files if path.is_relative_to(ROOT / folder)])
    print("\n".join(lines), f"{len(lines)} problems", sep="\n")
