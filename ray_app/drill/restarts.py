"""Scenarios in which a run ends before it is done, and is started again."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ray_app.checkpoint.store import CheckpointStore
from ray_app.config.config import Config
from ray_app.drill.delays import Hold
from ray_app.drill.faults import DrillStopError, KillOnCommit, Stop, driver_command
from ray_app.drill.ground import Disturbance, Ended, Ground
from ray_app.errors import own_error
from ray_app.record.evaluations import read_evaluations
from ray_app.record.files import put_atomic
from ray_app.runs.faults import Faults
from ray_app.train.hooks import Hooks

_DRIVER_S = 180.0


def damage(ground: Ground) -> Disturbance | str:
    """The run is stopped, one bit of its newest checkpoint flips, and it is started again."""
    return _damaged(ground, flip_a_bit)


def torn_write(ground: Ground) -> Disturbance | str:
    """The run is stopped, half of the largest file of its newest checkpoint is gone, and it is started again."""
    return _damaged(ground, cut_in_half)


def _damaged(ground: Ground, harm: Callable[[bytearray], bytearray]) -> Disturbance:
    step = ground.random.randrange(2 * ground.checkpoint_every + 1, 5 * ground.checkpoint_every)

    def before(config: Config) -> None:
        try:
            ground.train(config, Faults(train=Hooks(after_step=Stop(ground.proofs, "stopped", step))))
        except Exception as error:
            if not isinstance(own_error(error), DrillStopError):
                raise
        newest = CheckpointStore(ground.paths).commits()[-1]
        folder = ground.paths.checkpoint(newest.step, newest.fence)
        name = max(newest.files, key=lambda name: newest.files[name]["bytes"])
        put_atomic(folder / name, bytes(harm(bytearray((folder / name).read_bytes()))))
        ground.proofs.put("damaged", step=newest.step, checkpoint=folder.name, file=name)

    def confirm(run: Ended) -> list[str]:
        damaged = run.proofs["damaged"]["checkpoint"]
        passed = any(e.details["checkpoint"] == damaged for e in run.events("fallback"))
        return [] if passed else [f"the run has no record that {damaged} was passed over"]

    return Disturbance([step], ["stopped", "damaged"], confirm, before=before)


def flip_a_bit(data: bytearray) -> bytearray:
    """With another bit in the middle."""
    data[len(data) // 2] ^= 1
    return data


def cut_in_half(data: bytearray) -> bytearray:
    """The first half."""
    return data[: len(data) // 2]


def driver(ground: Ground) -> Disturbance | str:
    """The driver is killed, and the same run is started again."""
    step = ground.step()
    return _driver(ground, step, Faults(train=Hooks(after_step=Hold(ground.proofs, "held", "driver_killed", step, 0))), ["held"])


def evaluator_and_driver(ground: Ground) -> Disturbance | str:
    """The evaluator is killed while it evaluates, then the driver, and the same run is started again."""
    if ground.config.data.eval_path is None or ground.config.evaluate.where == "workers":
        return "there is no evaluator without data.eval_path, nor with evaluate.where workers"
    step = ground.checkpoint()
    hold = Hold(ground.proofs, "held", "driver_killed", step + 1, 0)
    faults = Faults(train=Hooks(after_step=hold), before_evaluation=KillOnCommit(ground.proofs, "killed-0", step))
    made = _driver(ground, step + 1, faults, ["held", "killed-0"])

    def confirm(run: Ended) -> list[str]:
        again = any(e.step >= step for e in read_evaluations(run.paths))
        return made.confirm(run) + ([] if again else ["nothing was evaluated after it"])

    return replace(made, confirm=confirm)


def _driver(ground: Ground, step: int, faults: Faults, first: list[str]) -> Disturbance:
    """A driver of its own that is killed once some things have happened in its run."""

    def before(config: Config) -> None:
        with tempfile.TemporaryDirectory() as folder:
            with (Path(folder) / "output").open("wb") as output:
                command = driver_command(Path(folder) / "run", config, faults)
                process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
            try:
                deadline_s = time.monotonic() + _DRIVER_S
                while not all(map(ground.proofs.has, first)) and process.poll() is None and time.monotonic() < deadline_s:
                    time.sleep(0.1)
                if process.poll() is None and all(map(ground.proofs.has, first)):
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

    return Disturbance([step], [*first, "driver_killed"], confirm, held={"held": "driver_killed"}, before=before)
