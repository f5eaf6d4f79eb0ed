"""Pages can be read once: their cells, paragraphs, sentences and lines are short.

`python tests/pure/test_pages.py FILE ...` prints what is too long in Markdown files.
"""

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
MAX = {"line": 120, "cell": 25, "sentence": 35, "paragraph": 90}
"""Characters of a line of prose; words of a cell of a table, of a sentence, and of a paragraph or list item."""
EXCEPTIONS: dict[str, str] = {}
"""The beginnings of texts that may be longer, as `PAGE: TEXT`, with the reason."""


def count_words(text: str) -> int:
    """Returns the number of words; code is one word, and the target of a link is none."""
    return len(re.findall(r"[\w'’-]+", re.sub(r"`[^`]*`", "CODE", re.sub(r"\]\([^)]*\)", "]", text))))


def units(lines: list[str]) -> Iterator[tuple[int, str, str]]:
    """Yields the number, the kind and the text of each line, cell, sentence and paragraph outside of code.

    A list item is a paragraph. A line of a table, of a mark, or with an address is none.
    """
    paragraph: list[str] = []
    start, in_code = 0, False
    for number, line in enumerate([*lines, ""], 1):
        text = line.strip()
        if text.startswith(("```", "~~~")):
            in_code = not in_code
        is_prose = not in_code and text and not text.startswith(("#", "|", "```", "~~~", "<!--", ":::"))
        item = re.match(r"([-*]|\d+\.)\s+", text)
        if paragraph and (item or not is_prose):
            whole = " ".join(paragraph)
            yield start, "paragraph", whole
            yield from ((start, "sentence", sentence) for sentence in re.split(r"(?<=[.!?])\s+", whole))
            paragraph = []
        if is_prose:
            start = start if paragraph else number
            paragraph.append(text[item.end() :] if item else text)
            if "http" not in line:
                yield number, "line", line
        elif text.startswith("|") and not in_code:
            yield from ((number, "cell", cell.strip()) for cell in re.split(r"(?<!\\)\|", text)[1:-1])


def findings(page: str, content: str) -> Iterator[str]:
    """Yields what is too long on a page, except the exceptions, as `PAGE:LINE: PROBLEM: BEGINNING`."""
    for number, kind, text in units(content.split("\n")):
        size = len(text) if kind == "line" else count_words(text)
        if size > MAX[kind] and not any(f"{page}: {text}".startswith(exception) for exception in EXCEPTIONS):
            yield f"{page}:{number}: a {kind} of {size}, at most {MAX[kind]}: {text[:80]}"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_can_be_read_once(page: str) -> None:
    assert list(findings(page, (ROOT / page).read_text())) == []


if __name__ == "__main__":
    print("\n".join(problem for file in sys.argv[1:] for problem in findings(file, Path(file).read_text())))
