"""The cost of a call in bytecode operations of Python, which other processes do not influence."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_operations(call: Callable[[], Any]) -> int:
    """Returns the number of bytecode operations of a call, those of loops within an expression included."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        del argument
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    previous_trace = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(previous_trace)
    return count
