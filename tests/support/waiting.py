"""Waiting for other threads and processes: polls a condition with a deadline, instead of sleeping for a fixed time."""

import socket
import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], message: str = "it did not come true", limit_s: float = 180.0) -> None:
    """Waits until a condition holds; `message` begins the error if it does not hold in time."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{message} within {limit_s:g} s"
        time.sleep(0.02)


def is_closed(connection: socket.socket) -> bool:
    """Returns whether the other end has closed a connection that has no data left."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
