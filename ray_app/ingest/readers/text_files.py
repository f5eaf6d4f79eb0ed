"""Files of text lines that readers share: which files are read, and the refusal of encodings that are not UTF-8."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

from ray_app.data.dataset.files import File, Place, files_in, find, is_folder
from ray_app.errors import DataError
from ray_app.task.rows.file_kinds import HEAD_BYTES, name_foreign_file

_BYTE_ORDER_MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def text_files(path: Place, suffixes: tuple[str, ...], kind: str) -> list[File]:
    """One text file, or those in a folder, sorted by name.

    Raises:
        DataError: There is none.
    """
    allowed = " and ".join(suffixes)
    if file := find(path):
        files = [file]
    elif is_folder(path):
        files = files_in(path)
    else:
        raise DataError(f"{path}: no such file or folder; expected one {kind} file ({allowed}) or a folder of them.")
    files = [file for file in files if file.place.name.endswith(suffixes)]
    if not files:
        raise DataError(f"{path}: no {kind} file; allowed are {allowed}. Rename the file or give another input.")
    return files


@contextmanager
def open_text(file: File) -> Iterator[IO[bytes]]:
    """Opens a file, unpacked, for reading UTF-8 from it.

    Raises:
        DataError: Its first bytes say that it is of another encoding.
    """
    with file.open_unpacked() as stream:
        head: bytes = cast(Any, stream).peek(HEAD_BYTES)[:HEAD_BYTES]
        if head and (foreign := name_foreign_file(head)):
            raise DataError(f"{file}: it is {foreign}.")
        # UTF-16 without a mark has a zero byte in each pair of bytes of a Latin letter.
        encoding = next((name for mark, name in _BYTE_ORDER_MARKS.items() if head.startswith(mark)), "UTF-16" if 0 in head[:2] else "")
        if encoding:
            raise DataError(f"{file}: it is {encoding}, and not UTF-8 (as Excel's 'Unicode text' is). Save it as UTF-8.")
        yield stream
