"""What a file is by its first bytes, for messages about files that are not the data that they should be."""

from __future__ import annotations

import re

HEAD_BYTES = 512
"""How many bytes `name_foreign_file` needs to see."""
LFS_POINTER_BYTES = 1024
"""A Git LFS pointer is shorter than this, by its specification."""
_IMAGES = re.compile(rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8[79]a|RIFF.{4}WEBP", re.DOTALL)
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_WEB_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*(<!--.*?-->\s*)?<(!doctype html|html|head)\b", re.DOTALL | re.IGNORECASE)
_OTHERS = {
    b"BM": "a BMP image",
    b"II*\0": "a TIFF image",
    b"MM\0*": "a TIFF image",
    b"II+\0": "a TIFF image",
    b"MM\0+": "a TIFF image",
    b"\0\0\1\0": "an ICO image",
    b"\xff\x0a": "a JPEG XL image",
    b"\0\0\0\x0cjP  ": "a JPEG 2000 image",
    b"%PDF": "a PDF document",
    b"PK\3\4": "a ZIP archive",
    b"\x1f\x8b": "gzipped data",
}
_BRANDS = {b"avif": "an AVIF image", b"avis": "an AVIF image", b"heic": "a HEIC image", b"heix": "a HEIC image", b"mif1": "a HEIF image"}


def has_image_signature(head: bytes) -> bool:
    """Returns whether a file that begins so is in a format of images that is decoded: JPEG, PNG, GIF or WebP."""
    return _IMAGES.match(head) is not None


def is_lfs_pointer(head: bytes) -> bool:
    """Returns whether a file that begins so is a pointer that Git LFS puts in the place of a file."""
    return head.startswith(_LFS_POINTER)


def name_foreign_file(head: bytes) -> str | None:
    """Names files that often stand where data should be.

    Args:
        head: The first `HEAD_BYTES` of the file, fewer if it is shorter.

    Returns:
        What the file is and what to do, as the end of "it is ..."; None for everything else.
    """
    if not head:
        return "empty"
    if is_lfs_pointer(head):
        return "a Git LFS pointer, not the file itself (fetch the files with git lfs pull)"
    if _WEB_PAGE.match(head):
        return "a web page (HTML), such as a server sends in the place of a file that it does not give (download it again)"
    return None


def name_other_format(head: bytes) -> str | None:
    """Names a format that `has_image_signature` does not know, as the end of "it is ..."; None where the format is not known."""
    if foreign := name_foreign_file(head):
        return foreign
    if head[4:8] == b"ftyp" and (brand := _BRANDS.get(head[8:12])):
        return brand
    return next((name for magic, name in _OTHERS.items() if head.startswith(magic)), None)
