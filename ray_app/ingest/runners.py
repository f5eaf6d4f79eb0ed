"""Running the tasks of an ingest: in threads of this process, or as Ray tasks on any CPU of a cluster. Both give results in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from ray_app.errors import without_addresses

_AHEAD = 4
"""Ray tasks per CPU that are asked for before the first of them is waited for."""
_CANCEL_S = 60.0
_MOST_CHARS = 500


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

    A task whose node is lost is run again, and so is one whose process dies, three times in all.

    Raises:
        ProcessDiedError: The process of a task died again and again.
    """
    import ray

    from ray_app.data.read.attempts import Attempts

    task = ray.remote(_call).options(num_cpus=1, max_retries=0)
    most = max(_AHEAD, _AHEAD * int(ray.cluster_resources().get("CPU", 1)))
    waiting: deque[Attempts] = deque()
    try:
        for item in items:
            what = f"while it ingested {without_addresses(str(item))[:_MOST_CHARS]}"
            waiting.append(Attempts(partial(task.remote, function, item), partial(str, what)))
            if len(waiting) >= most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        references = [left.reference for left in waiting]
        for reference in references:
            ray.cancel(reference)
        if references:  # they write no more when the caller goes on
            ray.wait(references, num_returns=len(references), timeout=_CANCEL_S)


def _call(function: Callable[[Any], Any], item: Any) -> Any:
    return function(item)
