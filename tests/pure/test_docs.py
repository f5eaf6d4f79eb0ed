"""The pages say what the code does: their commands are understood, each block has a test or a reason, symptoms are
messages of the code.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import jsonargparse
import pytest

from ray_app.cli.main import COMMANDS
from tests.support.pages import EXECUTED, MARKS, PAGES, SHELLS, Block, blocks, blocks_in
from tests.support.places import ROOT

_MADE = ("my.yaml", "run.yaml", "train.yaml", "iris.yaml", "photos.yaml", "detection.yaml", "segmentation.yaml")


class UnderstoodError(Exception):
    """The parser took the command line."""


def commands() -> Iterator[tuple[str, str]]:
    """Every command of ours on a page."""
    for block in chain.from_iterable(map(blocks, PAGES)):
        if block.language in SHELLS:
            for line in block.text.replace("\\\n", " ").splitlines():
                for found in re.findall(
                    rf"(?:ray-app|python -m ray_app) (?:{'|'.join(COMMANDS)})\b(?:'[^']*'|[^|;&>])*", line
                ):
                    yield block.page, found.rstrip().removesuffix('",')


@pytest.mark.parametrize(("page", "command"), sorted(set(commands())))
def test_a_command_on_a_page_is_understood(
    page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("conf", "datasets"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in _MADE:
        (tmp_path / name).write_text((ROOT / "conf" / "digits.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    given = [word for word in shlex.split(command, comments=True) if word != "..."]
    name, *arguments = given[1:] if given[0] == "ray-app" else given[3:]
    if (
        name in ("submit", "predict", "drill", "retrain", "train")
        and "--config" not in arguments
        and "--help" not in arguments
    ):
        arguments = ["--config", "conf/digits.yaml", *arguments]

    for kind in (jsonargparse.ArgumentParser, argparse.ArgumentParser):

        def parsed(
            self: argparse.ArgumentParser, *given: object, original: object = kind.parse_args, **more: object
        ) -> None:
            original(self, *given, **more)  # type: ignore[operator]
            raise UnderstoodError

        monkeypatch.setattr(kind, "parse_args", parsed)
    main = importlib.import_module(f"ray_app.cli.{name}").main
    try:
        code = main(arguments)
    except UnderstoodError:
        return
    except SystemExit as ended:
        code = ended.code
    assert "--help" in arguments or code == 1, f"{page}: {command}"  # 1: the command caught that it was understood
    assert "--help" not in arguments or code == 0


def is_there(test: str) -> bool:
    """Whether a test is there, by its name as `tests/FOLDER/FILE.py::FUNCTION`."""
    file, _, function = test.partition("::")
    path = ROOT / file
    tree = ast.parse(path.read_text() if path.is_file() else "")
    return any(
        isinstance(node, ast.FunctionDef) and node.name == function and function.startswith("test_")
        for node in tree.body
    )


def problem(block: Block) -> str | None:
    """What is wrong with how a block is tested, and what to do."""
    if block.mark == "not run":
        return None if block.told.strip() else "say after `not run:` why no test can execute it"
    if block.mark == "run by":
        absent = [test for test in block.told.split(", ") if not is_there(test)]
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


def test_a_block_is_executed_or_says_why_not() -> None:
    found = [block for page in PAGES for block in blocks(page) if block.is_code()]
    wrong = [f"{block.page}, line {block.line}: {said}" for block in found if (said := problem(block))]
    assert not wrong, "\n".join(wrong)
    assert {block.page for block in found if block.is_executed()} == set(EXECUTED), (
        "EXECUTED has a page without anything to execute"
    )


@pytest.mark.parametrize(
    ("comment", "page", "said"),
    [
        ("", "docs/new.md", "no test executes this page"),
        ("<!-- file: a.py -->\n", "docs/new.md", "no test executes this page"),
        ("<!-- not run: -->\n", "docs/new.md", "is no mark"),
        ("<!-- never: -->\n", "README.md", "is no mark"),
        ("<!-- run by: tests/pure/test_docs.py -->\n", "README.md", "no test tests/pure/test_docs.py;"),
        (
            "<!-- run by: tests/pure/test_docs.py::problem -->\n",
            "README.md",
            "no test tests/pure/test_docs.py::problem;",
        ),
        (
            "<!-- run by: tests/pure/test_none.py::test_it -->\n",
            "README.md",
            "no test tests/pure/test_none.py::test_it;",
        ),
        ("", "README.md", None),
        ("<!-- not run: needs a GPU -->\n", "docs/new.md", None),
        ("<!-- run by: tests/pure/test_docs.py::test_a_block_is_executed_or_says_why_not -->\n", "docs/new.md", None),
    ],
)
def test_a_block_without_a_test_is_found(comment: str, page: str, said: str | None) -> None:
    [block] = [b for b in blocks_in(f"```text\nbash\n```\n\n{comment}```bash\nls\n```\n", page) if b.is_code()]
    assert (block.line, block.text) == (5 + bool(comment), "ls\n")
    assert problem(block) is None if said is None else said in str(problem(block))


def test_the_page_of_commands_has_all_of_them() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert (
        set(re.findall(r"^## `ray-app (\w+)`$", page, re.MULTILINE))
        == set(COMMANDS)
        == set(re.findall(r"{command} (\w+)", page))
    )


def test_symptoms_are_messages_of_the_code() -> None:
    """A piece of a message between dots is a piece of a text in the code, with its placeholders cut out."""
    texts = []
    for file in (ROOT / "ray_app").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
    said = "\n".join(texts)
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    cells = re.findall(r"^\| (.*?) \|", page, re.MULTILINE)
    symptoms = [
        piece.strip() for cell in cells for code in re.findall(r"`([^`]+)`", cell) for piece in code.split("...")
    ]
    foreign = {
        "AuthenticationError",
        "does not have a deterministic implementation",
        "summary.json",
        "data_wait_fraction",
    }
    foreign |= {
        "ray-app track --replay",
        "ray job stop",
        "1 of 5 failures",
        "parquet::ParquetException",
        "terminate called",
    }
    missing = [piece for piece in symptoms if piece and piece not in foreign and piece not in said]
    assert missing == []
