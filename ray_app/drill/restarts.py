"""Scenarios in which a run ends before it is done, and is started again."""

from __future__ import annotations

import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from ray_app.checkpoint.commit import Commit
from ray_app.checkpoint.store import CheckpointStore
from ray_app.config.config import Config
from ray_app.drill.faults import DrillStopError, Hold, Stop, driver_command
from ray_app.drill.ground import Disturbance, Ended, Ground
from ray_app.errors import own_error
from ray_app.record.files import Location, put_atomic
from ray_app.record.paths import RunPaths
from ray_app.runs.faults import Faults
from ray_app.train.hooks import Hooks

_DRIVER_S = 180.0


def damage(ground: Ground) -> Disturbance | str:
    """The run is stopped, one bit of its newest checkpoint flips, and it is started again."""
    step = ground.random.randrange(2 * ground.checkpoint_every + 1, 5 * ground.checkpoint_every)

    def before(config: Config) -> None:
        try:
            ground.train(config, Faults(train=Hooks(after_step=Stop(ground.proofs, "stopped", step))))
        except Exception as error:
            if not isinstance(own_error(error), DrillStopError):
                raise
        newest = CheckpointStore(ground.paths).commits()[-1]
        name = flip_a_bit(ground.paths, newest)
        ground.proofs.put("damaged", step=newest.step, checkpoint=ground.paths.checkpoint(newest.step, newest.fence).name, file=name)

    def confirm(run: Ended) -> list[str]:
        damaged = run.proofs["damaged"]["checkpoint"]
        passed = any(e.details["checkpoint"] == damaged for e in run.events("fallback"))
        return [] if passed else [f"the run has no record that {damaged} was passed over"]

    return Disturbance([step], ["stopped", "damaged"], confirm, before=before)


def flip_a_bit(paths: RunPaths, commit: Commit) -> str:
    """Changes one bit in the middle of a checkpoint's largest file; returns its name."""
    name = max(commit.files, key=lambda name: commit.files[name]["bytes"])
    file: Location = paths.checkpoint(commit.step, commit.fence) / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    put_atomic(file, bytes(data))
    return name


def driver(ground: Ground) -> Disturbance | str:
    """The driver is killed, and the same run is started again."""
    step = ground.step()
    hooks = Hooks(after_step=Hold(ground.proofs, "held", "driver_killed", step, 0))

    def before(config: Config) -> None:
        with tempfile.TemporaryDirectory() as folder:
            with (Path(folder) / "output").open("wb") as output:
                command = driver_command(Path(folder) / "run", config, Faults(train=hooks))
                process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
            try:
                deadline_s = time.monotonic() + _DRIVER_S
                while not ground.proofs.has("held") and process.poll() is None and time.monotonic() < deadline_s:
                    time.sleep(0.1)
                if process.poll() is None and ground.proofs.has("held"):
                    process.kill()
                    process.wait()
                    ground.proofs.put("driver_killed", step=step, pid=process.pid, exit_code=process.returncode)
                else:
                    ground.proofs.put("trouble", error=(Path(folder) / "output").read_text()[-2000:])
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
                process.wait()

    def confirm(run: Ended) -> list[str]:
        starts = len(run.events("started"))
        return [] if starts == 2 else [f"the run has the record of {starts} starts"]

    return Disturbance([step], ["held", "driver_killed"], confirm, held={"held": "driver_killed"}, before=before)
