"""The live line of a notebook's cell, and the signal handlers of its process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from io import StringIO
from pathlib import Path
from typing import cast

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

from ray_app.driver.background import Training
from ray_app.driver.result import Result
from ray_app.driver.run import Run
from ray_app.errors import RunEndedError
from ray_app.process import stop_at_signals
from ray_app.watch.terminal import LiveLine
from tests.support.local_world import make_job, write_images


@pytest.fixture
def publisher() -> Iterator[CapturingDisplayPublisher]:
    """Captures the output that a notebook displays."""
    shell = InteractiveShell.instance()
    before, shell.display_pub = shell.display_pub, CapturingDisplayPublisher()
    yield shell.display_pub
    shell.display_pub = before
    InteractiveShell.clear_instance()


def test_the_live_line_is_displayed_once_and_then_updated(publisher: CapturingDisplayPublisher) -> None:
    line = LiveLine()
    line.show("waiting ...")
    line.show("step 1 of <2>", 0.5)
    line.show("step 1 of <2>", 0.5)
    line.show("step 2 of <2>", 1.0)
    first, second, third = publisher.outputs
    assert [output.get("update", False) for output in (first, second, third)] == [False, True, True]
    assert len({output["transient"]["display_id"] for output in (first, second, third)}) == 1
    assert "<progress" not in first["data"]["text/html"]
    assert '<progress value="0.5000"' in second["data"]["text/html"]
    assert "step 2 of &lt;2&gt;" in third["data"]["text/html"]
    assert third["data"]["text/plain"] == "step 2 of <2>"


def test_the_second_interrupt_ends_the_run_and_handlers_are_restored() -> None:
    interrupted, calls = threading.Event(), []
    before = signal.signal(signal.SIGINT, lambda *_: calls.append("kernel"))
    kernel_handler = signal.getsignal(signal.SIGINT)
    try:
        with stop_at_signals(interrupted):
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupted.is_set()
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is kernel_handler
        os.kill(os.getpid(), signal.SIGINT)
        assert calls == ["kernel"]
    finally:
        signal.signal(signal.SIGINT, before)


def test_watching_an_ended_run_succeeds_only_for_steps_it_made(tmp_path: Path) -> None:
    job = make_job(tmp_path / "run", write_images(tmp_path / "data", [[32]]), logical_workers=1, batch=8)

    class EndedRun:
        """A run that ends at once."""

        def __init__(self) -> None:
            self.job = job

        def run(self) -> Result:
            return Result(tmp_path, {"status": "finished", "steps": 690}, job.task)

    training = Training(cast(Run, EndedRun()), ExitStack(), StringIO(), tmp_path / "slowed")
    training.wait()
    training.watch(step=100)
    assert training.step == 690
    for step, workers in ((691, None), (1, 1)):
        with pytest.raises(RunEndedError):
            training.watch(step=step, workers=workers)


def test_a_run_in_another_thread_installs_no_signal_handler() -> None:
    before, handlers = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with stop_at_signals(threading.Event()):
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [before]
