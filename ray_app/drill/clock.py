"""A wall clock that is hours wrong, for one process, for all of its code: Python, C, threads.

A process reads the clock by functions that the kernel gives it, the vDSO, whose pages are its own once it writes to them. There each
function that tells the wall clock becomes a jump to one that asks the kernel and adds an offset. Other clocks stay right.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ray_app.drill.faults import Proofs, Several
from ray_app.drill.ground import Disturbance, Ended, Ground
from ray_app.record.progress.journal import MetricsReader
from ray_app.runs.faults import Faults
from ray_app.train.hooks import Hooks

_OFFSET = b"\x48\xb9%s\x48\x8b\x09"  # mov rcx, <address of the offset>; mov rcx, [rcx]
_CODE = {
    # rdi: which clock, rsi: where to put it. The real ones are 0 and, less exact, 5
    "__vdso_clock_gettime": b"\xb8\xe4\0\0\0\x0f\x05\x85\xff\x74\x06\x83\xff\x05\x74\x01\xc3" + _OFFSET + b"\x48\x01\x0e\xc3",
    "__vdso_gettimeofday": b"\xb8\x60\0\0\0\x0f\x05\x48\x85\xff\x74\x10" + _OFFSET + b"\x48\x01\x0f\xc3",
    "__vdso_time": b"\xb8\xc9\0\0\0\x0f\x05" + _OFFSET + b"\x48\x01\xc8\x48\x85\xff\x74\x03\x48\x89\x07\xc3",
}
"""For each function: the system call of its name, and the offset added to the seconds that it gives (x86-64)."""
_JUMP = b"\x48\xb8%s\xff\xe0"  # mov rax, <address>; jmp rax
_FAILED = ctypes.c_void_p(-1).value
_HOUR_S, _TOLERANCE_S = 3600, 900


def why_not() -> str | None:
    """Why the clock of a process cannot be moved here, if so."""
    if platform.machine() != "x86_64":
        return f"the clock of a single process can be moved on x86_64 only, and this is {platform.machine()}"
    try:
        absent = _CODE.keys() - dict(_functions()).keys()
    except OSError as error:
        return f"the functions that tell the time cannot be read: {error}"
    return f"this kernel has no {', '.join(sorted(absent))}" if absent else None


def move_to(offset_s: int) -> None:
    """Has the wall clock of this process be wrong by so many seconds from now on.

    Raises:
        OSError: The kernel does not let a process change its own pages.
    """
    _offset().value = offset_s


@cache
def _offset() -> ctypes.c_int64:
    """The offset of this process, after putting the functions that add it in place; it stays for the life of the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    page = libc.mmap(None, mmap.PAGESIZE, access, kind, -1, 0)  # nobody unmaps it, unlike one of Python's, while threads still ask
    if page == _FAILED:
        raise OSError(ctypes.get_errno(), "no page for code")
    offset, free = ctypes.c_int64.from_address(page), page + 8
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        for name, address in _functions():
            if name in _CODE:
                code = _CODE[name] % struct.pack("<Q", page)
                ctypes.memmove(free, code, len(code))
                os.pwrite(memory.fileno(), _JUMP % struct.pack("<Q", free), address)
                free += len(code)
    return offset


def _functions() -> Iterator[tuple[str, int]]:
    """Name and address of the functions of the vDSO, an ELF file in memory."""
    found = re.search(r"^(\w+)-(\w+) .*\[vdso\]$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    if found is None:
        raise OSError("there is no vDSO")
    base, end = int(found[1], 16), int(found[2], 16)
    image = ctypes.string_at(base, end - base)
    (sections,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, sections + i * size) for i in range(count)]
    for _, kind, _, _, at, length, link, _, _, each in headers:
        if kind != 11:  # SHT_DYNSYM
            continue
        names = headers[link][4]
        for place in range(at, at + length, each):
            name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", image, place)
            if section:
                yield image[names + name : image.index(b"\0", names + name)].decode(), base + value


@dataclass(frozen=True)
class Jump:
    """The wall clock of a rank jumps after a step; a hook for `Hooks.after_step`.

    Args:
        proofs: Where it is recorded, by the right clock.
        name: Name of the proof.
        step: Finished steps at which it happens.
        rank: Of which rank.
        offset_s: By how much it is wrong from then on.
    """

    proofs: Proofs
    name: str
    step: int
    rank: int
    offset_s: int

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if step == self.step and rank == self.rank and not self.proofs.has(self.name):
            try:
                move_to(0)
                self.proofs.put(self.name, rank=rank, step=step, clock_s=self.offset_s)
                move_to(self.offset_s)
            except OSError as error:  # the scenario counts as failed; the run must go on
                self.proofs.put("trouble", error=f"the clock cannot be moved: {error}")


def clock_jump(ground: Ground) -> Disturbance | str:
    """The wall clock of the worker that writes the record and the checkpoints jumps hours ahead, then hours back, then is right again."""
    if reason := why_not():
        return reason
    if not isinstance(ground.paths.root, Path) or "://" in ground.config.data.path:
        return "S3 refuses what is signed at another hour"
    step, every = ground.step(), ground.checkpoint_every + 1
    hours_s = _HOUR_S * ground.random.randrange(2, 10)
    jumps = [(step, hours_s), (step + every, -hours_s), (step + 2 * every, 0)]
    names = [f"clock-{i}" for i in range(len(jumps))]
    hooks = tuple(Jump(ground.proofs, name, at, 0, offset_s) for name, (at, offset_s) in zip(names, jumps, strict=True))
    return Disturbance([at for at, _ in jumps], names, wrong_times, Faults(train=Hooks(after_step=Several(hooks))))


def wrong_times(run: Ended) -> list[str]:
    """What speaks against it that the run was recorded by a clock that was wrong, and then by one that was right."""
    reader = MetricsReader(run.paths)
    reader.poll()
    jumps = sorted((p for name, p in run.proofs.items() if name.startswith("clock-")), key=lambda p: p["step"])
    missing = []
    for jump, until in zip(jumps, [jump["step"] for jump in jumps[1:]] + [max(reader.records)], strict=True):
        off_s = [reader.records[n].time_s - jump["time_s"] - jump["clock_s"] for n in range(jump["step"] + 1, until + 1)]
        if not off_s or max(map(abs, off_s)) > _TOLERANCE_S:
            missing.append(f"steps after {jump['step']} were not recorded by a clock that is {jump['clock_s']} s wrong")
    return missing if run.paths.report.exists() else [*missing, "there is no report of the run"]
