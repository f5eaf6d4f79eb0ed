"""Running the tasks of an ingest: in threads of this process, or as Ray tasks on any CPU of a cluster. Both give results in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ray_app.errors import own_error

_AHEAD = 4
"""Ray tasks per CPU that are asked for before the first of them is waited for."""
_CANCEL_S = 60.0


def run_in_threads(function: Callable[[Any], Any], items: Sequence[Any], threads: int | None = None) -> Iterator[Any]:
    """Calls `function` with every item; what takes long (decoding, compressing, reading) does not hold Python's lock.

    Args:
        function: What to do.
        items: With what.
        threads: How many at a time; not given: one per CPU.
    """
    if len(items) == 1:
        yield function(items[0])
        return
    pool = ThreadPoolExecutor(threads or os.cpu_count(), "ingest")
    try:
        for made in [pool.submit(function, item) for item in items]:
            yield made.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def run_on_cluster(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """Calls `function` with every item in tasks of the Ray cluster that this process is connected to, each on a CPU.

    Ray runs a task again when its worker or node is lost.
    """
    import ray

    task = ray.remote(_call).options(num_cpus=1)
    most = max(_AHEAD, _AHEAD * int(ray.cluster_resources().get("CPU", 1)))
    waiting: deque[Any] = deque()
    try:
        for item in items:
            waiting.append(task.remote(function, item))
            if len(waiting) >= most:
                yield ray.get(waiting.popleft())
        while waiting:
            yield ray.get(waiting.popleft())
    except ray.exceptions.RayTaskError as error:
        raise own_error(error) from error
    finally:
        for left in waiting:
            ray.cancel(left)
        if waiting:  # they write no more when the caller goes on
            ray.wait(list(waiting), num_returns=len(waiting), timeout=_CANCEL_S)


def _call(function: Callable[[Any], Any], item: Any) -> Any:
    return function(item)
