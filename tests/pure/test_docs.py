"""The documentation agrees with the code: its commands parse, each block has a test or a reason, and symptoms are
messages of the code.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import jsonargparse
import pytest

from ray_app.cli.main import COMMANDS
from ray_app.version import __version__
from tests.support.pages import EXECUTED, MARKS, PAGES, SHELLS, Block, blocks
from tests.support.paths import ROOT

_EXISTING_FILES = (
    "my.yaml",
    "run.yaml",
    "train.yaml",
    "iris.yaml",
    "tune.yaml",
    "runs/digits-study/winner.yaml",
    "photos.yaml",
)


class ParsedError(Exception):
    """The parser accepted the command line."""


def commands() -> Iterator[tuple[str, str]]:
    """Yields the page and the text of each `ray-app` command in the documentation."""
    for block in chain.from_iterable(map(blocks, PAGES)):
        if block.language in SHELLS:
            for line in block.text.replace("\\\n", " ").splitlines():
                for command in re.findall(
                    rf"(?:ray-app|python -m ray_app) (?:{'|'.join(COMMANDS)})\b(?:'[^']*'|[^|;&>])*", line
                ):
                    yield block.page, command.rstrip().removesuffix('",')


def cases() -> Iterator[Any]:
    """Yields the commands as parameters, all but the first three of a page with the mark `rest`."""
    for page, pairs in groupby(sorted(set(commands())), key=itemgetter(0)):
        for number, (_, command) in enumerate(pairs):
            yield pytest.param(page, command, marks=pytest.mark.rest if number >= 3 else ())


@pytest.mark.parametrize(("page", "command"), cases())
def test_a_command_in_the_documentation_parses(
    page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("conf", "datasets"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "runs" / "digits-study").mkdir(parents=True)
    for name in _EXISTING_FILES:
        (tmp_path / name).write_text((ROOT / "conf" / "digits.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    words = [word for word in shlex.split(command, comments=True) if word != "..."]
    name, *arguments = words[1:] if words[0] == "ray-app" else words[3:]
    if name in ("submit", "predict", "drill", "retrain", "train") and not {"--config", "--file", "--help"} & set(
        arguments
    ):
        arguments = ["--config", "conf/digits.yaml", *arguments]

    for kind in (jsonargparse.ArgumentParser, argparse.ArgumentParser):

        def parse_and_stop(
            self: argparse.ArgumentParser, *args: object, original: object = kind.parse_args, **more: object
        ) -> None:
            original(self, *args, **more)
            raise ParsedError

        monkeypatch.setattr(kind, "parse_args", parse_and_stop)
    main = importlib.import_module(f"ray_app.cli.{name}").main
    try:
        code = main(arguments)
    except ParsedError:
        return
    except SystemExit as exited:
        code = exited.code
    # The command catches ParsedError and exits with 1.
    assert "--help" in arguments or code == 1, f"{page}: {command}"
    assert "--help" not in arguments or code == 0


def has_test(test: str) -> bool:
    """Returns whether the test `tests/FOLDER/FILE.py::FUNCTION` exists."""
    file, _, function = test.partition("::")
    path = ROOT / file
    tree = ast.parse(path.read_text() if path.is_file() else "")
    return any(
        isinstance(node, ast.FunctionDef) and node.name == function and function.startswith("test_")
        for node in tree.body
    )


def problem_of(block: Block) -> str | None:
    """Returns what is wrong with how a block is tested, and the remedy; None if nothing is."""
    if block.mark == "not run":
        return None if block.argument.strip() else "say after `not run:` why no test can execute it"
    if block.mark == "run by":
        absent = [test for test in block.argument.split(", ") if not has_test(test)]
        return (
            f"there is no test {', '.join(absent)}; name what does the same as tests/FOLDER/FILE.py::FUNCTION"
            if absent
            else None
        )
    if block.mark not in ("", *MARKS):
        return f"the comment before it is no mark; it begins with one of {', '.join(MARKS)} and a colon"
    if block.page not in EXECUTED:
        return (
            "no test executes this page; name the test that does the same in the line before it, <!-- run by:"
            " FILE::FUNCTION -->, or the"
            " reason why none can, <!-- not run: REASON -->, or add the page to EXECUTED in tests/support/pages.py"
        )
    return (
        "write what is typed as a bash block, so that it can be executed"
        if block.is_executed() and block.language == "console"
        else None
    )


def test_each_code_block_is_executed_or_has_a_reason() -> None:
    code_blocks = [block for page in PAGES for block in blocks(page) if block.is_code()]
    problems = [
        f"{block.page}, line {block.line}: {problem}" for block in code_blocks if (problem := problem_of(block))
    ]
    assert not problems, "\n".join(problems)
    assert {block.page for block in code_blocks if block.is_executed()} == set(EXECUTED), (
        "EXECUTED has a page without anything to execute"
    )


def test_a_file_that_a_reader_writes_is_named_before_its_block() -> None:
    """The mark with the name of the file is a comment, which a reader does not see."""
    for page in PAGES:
        lines = page.read_text().split("\n")
        for block in blocks(page):
            if block.mark == "file":
                assert f"`{block.argument}`" in " ".join(lines[max(0, block.line - 9) : block.line - 2]), f"{block}"


def test_the_reference_page_has_each_command() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert (
        set(re.findall(r"^## `ray-app (\w+)`$", page, re.MULTILINE))
        == set(COMMANDS)
        == set(re.findall(r"{command} (\w+)", page))
    )


def test_the_pages_name_the_version_of_the_package() -> None:
    assert f"pip install ray_app-{__version__}-py3-none-any.whl" in (ROOT / "README.md").read_text()
    assert f"| {__version__.rpartition('.')[0]}.x | yes" in (ROOT / "SECURITY.md").read_text()


def test_modules_define_the_names_for_which_pages_point_to_them() -> None:
    """A page says "`name` in `module.py`" only if the module of the package has the name."""
    pages = "\n".join(" ".join(page.read_text().split()) for page in PAGES)
    pointers = re.findall(r"((?:`[\w.]+`(?:,| and)? )+)in `(?:ray_app/)?((?!tests)[\w/]+\.py)`", pages)
    assert len(pointers) > 15
    wrong = [
        f"{name} in {module}"
        for names, module in pointers
        for name in re.findall(r"\w+(?=`)", names)
        if not re.search(rf"(?m)^ *(?:(?:async )?def |class )?{name}\b", (ROOT / "ray_app" / module).read_text())
    ]
    assert wrong == []


def test_documented_symptoms_are_messages_of_the_code() -> None:
    """Each part of a symptom between dots is part of a string in the code, in which placeholders are removed.

    Symptoms begin the entries of docs/troubleshooting.md, and are in the sentences "You see" of docs/failures.md.
    """
    texts = []
    for file in (ROOT / "ray_app").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
    all_texts = "\n".join(texts)
    pages = [(ROOT / "docs" / name).read_text() for name in ("troubleshooting.md", "failures.md")]
    entries = re.findall(r"^- \*\*(.*?)\*\*", pages[0], re.MULTILINE | re.DOTALL)
    sentences = re.findall(r"\*\*You see\*\*((?:`[^`]*`|[.:](?!\s)|[^`.:])*)", " ".join(pages[1].split()))
    assert len(entries) > 30
    assert len(sentences) > 30
    codes = [code for symptom in entries + sentences for code in re.findall(r"`([^`]+)`", symptom)]
    symptoms = [part.strip() for code in codes for part in code.split("...")]
    messages_of_others = {
        *("AuthenticationError", "No module named ray_app", "parquet::ParquetException", "terminate called"),
        *("does not have a deterministic implementation", "ray job stop"),
        *("1 of 5 failures", "1 preemption"),
    }
    missing = [part for part in symptoms if part and part not in messages_of_others and part not in all_texts]
    assert missing == []
