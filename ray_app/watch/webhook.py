"""An observer that posts what happens to a chat or another program."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from ray_app.watch.observer import Observer

_TIMEOUT_S = 10.0


class Webhook(Observer):
    """Posts a line for each epoch, failure and end of a run as JSON, `{"text": ...}`, which Slack, Mattermost and Teams understand.

    Args:
        url: Where to.
    """

    def __init__(self, url: str) -> None:
        self.url, self.run = url, ""

    def post(self, text: str) -> None:
        """Sends a line, with the name of the run before it.

        Raises:
            OSError: It did not arrive.
        """
        body = json.dumps({"text": f"{self.run}: {text}" if self.run else text}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=_TIMEOUT_S).close()

    def begun(self, run: str) -> None:
        """Remembers the name of the run."""
        self.run = run.rstrip("/").rpartition("/")[2]

    def epoch_ended(self, epoch: int, step: int, metrics: dict[str, float]) -> None:
        """Posts the metrics of the epoch."""
        del step
        self.post(f"epoch {epoch + 1}, {', '.join(f'{name} {value:.4f}' for name, value in metrics.items())}")

    def failed(self, reason: str) -> None:
        """Posts what failed; the run may go on."""
        self.post(f"a failure, {reason}")

    def ended(self, status: str, summary: dict[str, Any]) -> None:
        """Posts how the run ended."""
        self.post(f"{status} after {summary['steps']} steps")
