"""Text files: opened uncompressed, and JSON that is read value by value."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

from ray_app.errors import DataError
from ray_app.storage.data_files import HEAD_BYTES, File, name_foreign_file, parser_errors

MAX_LINE_BYTES = 64 << 20
"""Maximum size of a line, and of a value of JSON."""
_NUMBER_ENDS = frozenset(",]} \t\r\n")
_BYTE_ORDER_MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


@contextmanager
def open_text(file: File) -> Iterator[IO[bytes]]:
    """Opens a text file, uncompressed; raises DataError if its first bytes show another encoding than UTF-8."""
    with file.open_unpacked() as stream:
        head: bytes = cast(Any, stream).peek(HEAD_BYTES)[:HEAD_BYTES]
        if head and (foreign := name_foreign_file(head)):
            raise DataError(f"{file} is {foreign}.")
        # UTF-16 without a mark has a zero byte in each pair of bytes of a Latin letter.
        encoding = next(
            (name for mark, name in _BYTE_ORDER_MARKS.items() if head.startswith(mark)),
            "UTF-16" if 0 in head[:2] else "",
        )
        if encoding:
            raise DataError(
                f"{file} is {encoding} instead of UTF-8 (like Excel's 'Unicode text'). Save it as UTF-8, or for a CSV"
                " in UTF-16, set --encoding utf-16."
            )
        yield stream


def iterate_json(file: File) -> Iterator[tuple[str, Any]]:
    """Yields the items of a file that is one JSON list, or one object of lists, in bounded memory.

    Each item comes with its key in the object, "" in a list; another value of the object comes as it is.

    Raises:
        DataError: The file is no such JSON, or an item has more than `MAX_LINE_BYTES`.
    """
    with parser_errors(file, "Expected one JSON list or object. Write the file again."), open_text(file) as stream:
        text = _JsonText(io.TextIOWrapper(stream, "utf-8-sig"))
        if text.skip("["):
            yield from (("", item) for item in text.items("]"))
        elif text.skip("{"):
            for key in text.items("}"):
                if not isinstance(key, str) or not text.skip(":"):
                    raise ValueError(f"no key of an object before character {text.position}")
                if text.skip("["):
                    yield from ((key, item) for item in text.items("]"))
                else:
                    yield key, text.value()
        else:
            raise ValueError("the file begins with neither [ nor {")
        if text.peek():
            raise ValueError(f"the file continues after the end of the JSON, at character {text.position}")


class _JsonText:
    """Reads JSON values from a text, a block at a time."""

    _BLOCK = 1 << 20

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self._stream = stream
        self._text = ""
        self._at = self._before = 0
        self._decoder = json.JSONDecoder(parse_constant=self._refuse_constant)

    @property
    def position(self) -> int:
        """The number of characters before the next one."""
        return self._before + self._at

    def peek(self) -> str:
        """Returns the next character that is no space, "" at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in " \t\r\n":
                    return self._text[self._at]
                self._at += 1
            if not self._fill(self._BLOCK):
                return ""

    def skip(self, mark: str) -> bool:
        """Skips a character, if it is the next one; returns whether it is."""
        is_next = self.peek() == mark
        self._at += is_next
        return is_next

    def items(self, end: str) -> Iterator[Any]:
        """Yields the values, or the keys, that commas separate, up to the end mark."""
        if self.skip(end):
            return
        while True:
            yield self.value()
            if self.skip(end):
                return
            if not self.skip(","):
                raise ValueError(f"a comma or {end} is expected at character {self.position}")

    def value(self) -> Any:
        """Returns the next value."""
        self.peek()
        while True:
            try:
                start = self._at
                value, end = self._decoder.raw_decode(self._text, start)
                # A number may go on in the next block, unless another character ends it in this one.
                is_complete = not isinstance(value, int | float) or self._text[end : end + 1] in _NUMBER_ENDS
                if is_complete or not self._fill(self._BLOCK):
                    # `_fill` drops the text before the value.
                    self._at += end - start
                    return value
            except RecursionError as error:
                raise ValueError(f"lists and objects are nested too deeply at character {self.position}") from error
            except json.JSONDecodeError as error:
                size = len(self._text) - self._at
                if size > MAX_LINE_BYTES:
                    raise ValueError(
                        f"the value at character {self.position} has more than the allowed {MAX_LINE_BYTES} characters,"
                        " or is not JSON"
                    ) from error
                if not self._fill(max(self._BLOCK, size)):
                    raise ValueError(f"{error.msg} at character {self._before + error.pos}") from error

    def _fill(self, size: int) -> bool:
        """Reads more text; returns False at the end of the file."""
        more = self._stream.read(size)
        self._text = self._text[self._at :] + more
        self._before += self._at
        self._at = 0
        return bool(more)

    @staticmethod
    def _refuse_constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")
