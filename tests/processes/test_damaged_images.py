"""Hundreds of damaged images, decoded in a process of its own, since libraries for images have ended processes."""

from __future__ import annotations

import re
import resource
import subprocess
import sys

from tests.support.encoded_images import damaged_files
from tests.support.places import ROOT

MEMORY_BYTES = 8 << 30


def decode_all() -> str:
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.encoded_images"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES)),
    )
    assert done.returncode == 0, f"{done.stdout.splitlines()[-1:]} {done.stderr}"
    return done.stdout


def test_no_damaged_image_ends_the_process_and_each_has_a_reason_the_same_each_time() -> None:
    printed = decode_all()
    *lines, last = printed.splitlines()
    assert last == "done"
    assert len(lines) == 2 * sum(1 for _ in damaged_files(per_kind=8)) > 1000
    refused = [line for line in lines if re.search(r": refused: \S", line)]
    assert all(re.search(r": \(\d+, \d+(, \d+)*\)$", line) for line in lines if line not in refused)
    assert len(refused) > len(lines) / 2
    assert printed == decode_all(), "addresses, or files that are other ones each time"
