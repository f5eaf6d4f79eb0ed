"""A real headless Chromium that is controlled over its DevTools pipe, without a driver program or a websocket."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")
_ANSWER_S = 60.0
_OFFLINE = "MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"


def find_chromium() -> str | None:
    """Returns the path of the browser on PATH, or None."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Browser:
    """One browser with one page.

    Args:
        program: The browser's executable.
        profile: The folder of its profile, which no other browser uses.
    """

    def __init__(self, program: str, profile: Path) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--hide-scrollbars",
            f"--host-resolver-rules={_OFFLINE}",
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
        ]
        # The ends of the pipe must be the descriptors 3 and 4; dash has no descriptors above 9, so this is bash.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", program, *flags],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number = 0
        self._rest = b""
        self.events = list[dict[str, Any]]()
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command of the DevTools protocol and returns its answer; appends earlier messages to `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | (
            {"sessionId": self._session} if self._session else {}
        )
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _ANSWER_S
        while True:
            answer = self._next(deadline)
            if answer.get("id") != self._number:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            else:
                return dict(answer["result"])

    def load(self, url: str, *, width: int = 1200, height: int = 900, scheme: str = "light") -> None:
        """Loads a page for a screen of this size and colour scheme, and waits until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", media="", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + _ANSWER_S
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next(deadline))

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression on the page, to which the page's policy does not apply."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def requested_urls(self) -> list[str]:
        """Returns the URLs requested since the page was loaded, its own included, without `data:` URLs."""
        urls = [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in urls if not url.startswith("data:")]

    def print(self, path: Path) -> None:
        """Saves the printed page as PDF (A4)."""
        pdf = self.call(
            "Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=True, preferCSSPageSize=True
        )
        path.write_bytes(base64.b64decode(pdf["data"]))

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("the browser does not answer" if not ready else "the browser is gone")
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))


FIND_OVERFLOWING_ELEMENTS = """(() => {
  const width = document.documentElement.clientWidth, found = [];
  for (const element of document.querySelectorAll("main *")) {
    if (element.closest(".scroll") && !element.matches(".scroll")) continue;
    const box = element.getBoundingClientRect();
    if (box.width && (box.right > width + 0.5 || box.left < -0.5)) found.push(element.tagName + "." + element.className + " " + box.right);
  }
  return found;
})()"""  # noqa: E501
FIND_LOW_CONTRAST_ELEMENTS = """(() => {
  const channel = v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = color => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
                          return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const behind = element => { for (let e = element; e; e = e.parentElement) {
    const color = rgba(getComputedStyle(e).backgroundColor); if (color[3] === 255) return color; } return [255, 255, 255, 255]; };
  const found = [];
  for (const element of document.querySelectorAll("main *")) {
    const own = [...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || element.tagName === "title" || !element.getBoundingClientRect().width) continue;
    const style = getComputedStyle(element), isDrawn = element instanceof SVGElement;
    const [a, b] = [light(rgba(isDrawn ? style.fill : style.color)), light(behind(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) found.push([element.outerHTML.slice(0, 80), contrast]);
  }
  return found;
})()"""  # noqa: E501


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium on PATH; `.ci/run` shows how to install one")
    with Browser(program, tmp_path_factory.mktemp("profile")) as running:
        yield running
