"""Pages can be read once: their cells, paragraphs, sentences and lines are short.

`python tests/pure/test_pages.py FILE ...` prints what is too long in Markdown files.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
]
MAX_WORDS = {"cell": 25, "paragraph": 90, "sentence": 35}
"""Words of a cell, of a paragraph or list item, and of a sentence in either."""
MAX_LINE = 120
"""Characters of a line outside of tables, unless it has an address."""
EXCEPTIONS: dict[str, str] = {}
"""The beginnings of texts that may be longer, as `PAGE: TEXT`, with the reason."""
UNFINISHED = {
    f"docs/{name}.md"
    for name in (
        *("data-order", "data", "detection", "drill", "environment", "evaluation", "failures"),
        *("from-tf-distribute", "gpu", "guarantees", "jobs", "keras-guides", "language-model", "lightning", "loop"),
        *("module-task", "my-data", "notebooks", "own-task", "registry", "retraining", "runs", "saving"),
        *("start/cluster", "start/images", "start/keras", "start/kubernetes", "start/own-model", "start/pytorch"),
        *("start/schedule", "start/tables", "strategies", "text", "tracking", "training", "troubleshooting"),
        *("versions",),
    )
}
"""UNFINISHED: pages that are being rewritten and are not measured. The set must become empty, and then goes."""


def count_words(text: str) -> int:
    """Returns the number of words; code is one word, and the target of a link is none."""
    return len(re.findall(r"[\w'’-]+", re.sub(r"`[^`]*`", "CODE", re.sub(r"\]\([^)]*\)", "]", text))))


def units(lines: list[str]) -> Iterator[tuple[int, str, str]]:
    """Yields the line, the kind and the text of each cell, and of each paragraph or list item, outside of code."""
    paragraph: list[str] = []
    start, in_code = 0, False
    for number, line in enumerate([*lines, ""], 1):
        text = line.strip()
        if text.startswith(("```", "~~~")):
            in_code = not in_code
        is_prose = not in_code and text and not text.startswith(("#", "|", "```", "~~~", "<!--", ":::"))
        item = re.match(r"([-*]|\d+\.)\s+", text)
        if paragraph and (item or not is_prose):
            yield start, "paragraph", " ".join(paragraph)
            paragraph = []
        if is_prose:
            start = start if paragraph else number
            paragraph.append(text[item.end() :] if item else text)
        elif text.startswith("|") and not in_code:
            yield from ((number, "cell", cell.strip()) for cell in re.split(r"(?<!\\)\|", text)[1:-1])


def findings(page: str, content: str) -> Iterator[str]:
    """Yields what is too long on a page, except the exceptions, as `PAGE:LINE: PROBLEM: BEGINNING`."""
    lines = content.split("\n")
    long_units = [
        (number, f"{kind} of {words} words, at most {MAX_WORDS[kind]}", text)
        for number, whole_kind, whole in units(lines)
        for kind, text in [(whole_kind, whole), *(("sentence", part) for part in re.split(r"(?<=[.!?])\s+", whole))]
        if (words := count_words(text)) > MAX_WORDS[kind]
    ]
    long_lines = [
        (number, f"line of {len(line)} characters, at most {MAX_LINE}", line)
        for number, line in enumerate(lines, 1)
        if len(line) > MAX_LINE and not line.startswith("|") and "http" not in line
    ]
    for number, problem, text in sorted(long_units + long_lines):
        if not any(f"{page}: {text}".startswith(exception) for exception in EXCEPTIONS):
            yield f"{page}:{number}: {problem}: {text[:80]}"


@pytest.mark.parametrize("page", [page for page in PAGES if page not in UNFINISHED])
def test_a_page_can_be_read_once(page: str) -> None:
    assert list(findings(page, (ROOT / page).read_text())) == []


if __name__ == "__main__":
    print("\n".join(problem for file in sys.argv[1:] for problem in findings(file, Path(file).read_text())))
