"""Without one of the fixes for losses on GPUs a test fails: each is removed in a copy of the project, in turn."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.paths import ROOT

LOST = "tests/processes/cluster/rendezvous/test_lost_workers.py"
GROUP = "tests/processes/train/test_device_group.py"
RENDEZVOUS = "tests/pure/cluster/rendezvous/test_rendezvous.py"
NCCL = "tests/pure/train/test_process_group.py"
DEVICES, FAULTS = "tests/pure/test_devices.py", "tests/processes/device/test_faults.py"
ERROR, CAUSES = f"{LOST}::test_survivors_form_again_at_once_after_an_error_of_one_worker", f"{LOST}::test_a_group_that"


class Fix(NamedTuple):
    """A fix.

    Args:
        file: The file, below `ray_app`.
        code: Its code, once in the file.
        without: What takes its place.
        test: The test that fails, by file and the beginning of its name.
    """

    file: str
    code: str
    without: str
    test: str


CLIENT, SERVER = "cluster/rendezvous/client.py", "cluster/rendezvous/rendezvous.py"
PROTOCOL = "cluster/rendezvous/worker_protocol.py"
PROCESS_GROUP = "train/process_group.py"
FIXES = {
    "an error is reported at once": Fix(CLIENT, "            self._report_break(error)\n", "", ERROR),
    "a failed worker reports its exit before it ends": Fix(
        CLIENT, "            self._wake()\n        else:\n            self.close()", "            self._wake()", ERROR
    ),
    "a new generation is not lost": Fix(
        PROTOCOL,
        '= "forming", False\n',
        '= "forming", self.was_broken\n',
        "tests/pure/cluster/rendezvous/test_forming.py::test_members_make_exactly_the_transitions",
    ),
    "a loss is read alone": Fix(
        SERVER,
        "            self._is_broken |= heartbeat.was_broken and not heartbeat.wait_number\n",
        "",
        f"{RENDEZVOUS}::test_a_worker_that_fails_in_the_middle",
    ),
    "computing workers may wait": Fix(
        SERVER, "if len(computing) > 1 and", "if False and", f"{RENDEZVOUS}::test_a_stall_while_several_compute"
    ),
    "another thread connects": Fix(
        PROCESS_GROUP,
        "with backends_created_by(self._connect, backends):",
        "with suppress():",
        f"{LOST}::test_a_worker_lost_while_a_group_connects",
    ),
    "NCCL does not block": Fix(
        "torch_private.py", 'if "nccl" not in backends or', "if backends or", f"{GROUP}::test_an_abort_ends_the_wait"
    ),
    "a worker proves its device before it joins": Fix(
        "cluster/trainer.py",
        "    prove_device(device, choose_backend(config, device))\n",
        "",
        "tests/pure/cluster/test_trainer.py::test_a_worker_proves_its_device",
    ),
    "a device proves its communicator": Fix(
        PROCESS_GROUP,
        "        with open_group_of_one(device, backend):\n            dist.all_reduce(values)\n",
        "        with suppress():\n",
        "tests/processes/device/test_recovery.py::test_a_device_is_proved",
    ),
    "groups abort side by side": Fix(
        PROCESS_GROUP,
        "    if launch_lock.acquire(timeout=_LAUNCH_S):\n        launch_lock.release()\n    try:\n",
        "    launch_lock.acquire(timeout=_LAUNCH_S)\n    try:\n",
        f"{GROUP}::test_all_groups_abort_at_the_same_time",
    ),
    "no launch follows an abort": Fix(
        "reduction/peer_errors.py",
        "    if _group is not None and _group.is_aborted:\n        raise PeerLostError(",
        "    if False:\n        raise PeerLostError(",
        f"{GROUP}::test_an_abort_waits_for_a_running_launch",
    ),
    "failed forms end the run": Fix(CLIENT, "info.failed_forms >= _MAX_FAILED_FORMS", "False", CAUSES),
    "failed forms are counted": Fix(SERVER, "self._failed_forms + 1 if", "0 if", f"{RENDEZVOUS}::test_failed_forms"),
    "a lost worker is not a cause": Fix(
        SERVER,
        "        self._is_forming = False\n        if member.heartbeat",
        "        if member.heartbeat",
        f"{RENDEZVOUS}::test_failed_forms",
    ),
    "a group forms with its first collective": Fix(
        PROCESS_GROUP,
        "        if self.has_device_collectives:\n            # NCCL connects",
        "        if False:\n            # NCCL connects",
        CAUSES,
    ),
    "NCCL warns": Fix("devices.py", '        "NCCL_DEBUG": "WARN",\n', "", f"{NCCL}::test_nccl_is_bound"),
    "the interface has its whole name": Fix(PROCESS_GROUP, 'f"={name}"', "name", f"{NCCL}::test_nccl_gets_the_whole"),
    "ROCm has a variable of its own": Fix(
        "devices.py",
        "if torch.version.hip else super().visible_variable",
        "if False else super().visible_variable",
        f"{DEVICES}::test_the_visible_devices_of_rocm",
    ),
    "a process that sees its own devices alone counts from 0": Fix(
        "devices.py", "if count in (1, len(ids)):", "if False:", f"{DEVICES}::test_a_worker_computes_on_the_gpu"
    ),
    "ROCm is a part of the environment": Fix(
        "devices.py",
        '**({"hip": torch.version.hip} if torch.version.hip else {"cuda": cuda}),',
        '"cuda": cuda,',
        f"{DEVICES}::test_the_visible_devices_of_rocm",
    ),
    "a failed device forms no generation": Fix(
        "train/loop.py", "        kind.check(self._device)\n", "", f"{FAULTS}::test_a_worker_whose_device_has_failed"
    ),
    "a failed device is not the fault of user code": Fix(
        "task/environment.py",
        "    except RuntimeError as failure:\n",
        "    except ZeroDivisionError as failure:\n",
        f"{FAULTS}::test_an_error_of_a_device",
    ),
    "a device that has failed twice is excluded": Fix(
        "cluster/controller/controller.py",
        "                self._pending_workers.exclude(key)\n",
        "",
        "tests/pure/cluster/controller/test_controller.py::test_a_device_that_has_failed_twice",
    ),
    "the cache of the device is freed": Fix(
        "train/loop.py", "        kind.free_cache()\n", "", f"{FAULTS}::test_the_cache_is_empty"
    ),
    "fsdp needs its part of torch": Fix(
        "preflight/model_checks.py",
        'if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):',
        "if False:",
        "tests/pure/preflight/test_dry_run.py::test_fsdp_is_refused_with_a_version",
    ),
    "slices of a GPU use gloo": Fix(
        "cluster/trainer.py",
        "if not kind_of(device).is_slice(device):",
        "if True:",
        "tests/pure/cluster/test_trainer.py::test_workers_that_share_a_gpu",
    ),
    "a slice that the process does not see is refused": Fix(
        "devices.py",
        "int(assigned) if assigned.isdecimal() else count",
        "int(assigned)",
        f"{DEVICES}::test_a_gpu_that_the_process",
    ),
}


@pytest.mark.search
@pytest.mark.parametrize("name", FIXES)
def test_a_removed_fix_is_noticed(tmp_path: Path, name: str) -> None:
    fix = FIXES[name]
    for folder in ("ray_app", "tests", "conf", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    # The simulated devices are compiled once.
    (tmp_path / "build").symlink_to(ROOT / "build")
    file = tmp_path / "ray_app" / fix.file
    assert file.read_text().count(fix.code) == 1
    path, _, test = fix.test.partition("::")
    file.write_text(file.read_text().replace(fix.code, fix.without))
    # Without a fix processes may wait for each other for ever.
    pool = tmp_path / "ray_app" / "testing.py"
    pool.write_text(pool.read_text().replace("_ANSWER_TIMEOUT_S = 240.0", "_ANSWER_TIMEOUT_S = 40.0"))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", path, "-k", test, "-m", ""]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    # The exit status of pytest is another one if it finds no test.
    assert result.returncode == 1, result.stdout
