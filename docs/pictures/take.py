"""Takes the pictures of this folder again: `make pictures`. It trains conf/digits.yaml, and needs tmux and Chromium.

The architecture's picture is not among them.
"""

from __future__ import annotations

import base64
import io
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

from mlflow import MlflowClient
from PIL import Image
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.browser import Browser, find_chromium  # noqa: E402

COLUMNS, LINES = 112, 26
LIMIT_S = 300.0
WIDTH, HEIGHT = 1280, 900
COMMAND = "ray-app train --config conf/digits.yaml"
# The picture is taken when MLflow shows at least this number of curves.
PAGE_CURVES = 8
_CURVES = "document.querySelectorAll('.js-plotly-plot .scatterlayer .trace').length"
_SVG = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px; }}
{styles}</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""  # noqa: E501
"""rich's own frame, without the fonts that it would fetch."""


def until(is_there: Callable[[], bool], awaited: str) -> None:
    """Waits until `is_there` returns true.

    Args:
        is_there: Is called until it returns true.
        awaited: Noun for the message of the error.

    Raises:
        TimeoutError: It has not returned true within `LIMIT_S` seconds.
    """
    deadline = time.monotonic() + LIMIT_S
    while not is_there():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {awaited} within {LIMIT_S:g} s")
        time.sleep(0.2)


def trained(folder: Path) -> str:
    """Trains the digits in a real terminal and returns what that shows at the end, with its colors."""
    done = folder / "done"
    arguments = COMMAND.removeprefix("ray-app ")
    command = f"{shlex.quote(sys.executable)} -m ray_app {arguments} --run.name digits --run.storage_path {folder}/runs"
    tmux = ["tmux", "-L", f"pictures-{folder.name}"]
    inside = f"cd {shlex.quote(str(ROOT))}; clear; {command}; touch {done}; sleep {LIMIT_S:g}"
    subprocess.run(
        [*tmux, "-f", "/dev/null", "new-session", "-d", "-x", str(COLUMNS), "-y", str(LINES), inside], check=True
    )
    try:
        until(done.exists, "end of the run")
        screen = subprocess.run(
            [*tmux, "capture-pane", "-p", "-e", "-J"], capture_output=True, text=True, check=True
        ).stdout
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
    return screen.replace(str(folder), "...").rstrip()


def terminal(screen: str, file: Path) -> None:
    """Draws the text of a terminal, with its colors, to a file."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(screen))
    file.write_text(console.export_svg(title=COMMAND, code_format=_SVG, unique_id="terminal"))


def save(browser: Browser, file: Path) -> None:
    """Saves the part of the page that is shown, with few colors, so that the file is small."""
    shot = base64.b64decode(browser.call("Page.captureScreenshot")["data"])
    Image.open(io.BytesIO(shot)).convert("RGB").quantize(128).save(file, optimize=True)


@contextmanager
def mlflow_server(store: str) -> Iterator[str]:
    """MLflow's own server over a store; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        store,
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def answers() -> bool:
        with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health", timeout=LIMIT_S) as answer:
            return answer.status == 200
        return False

    try:
        until(answers, "answer of MLflow's server")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def mlflow_page(browser: Browser, store: str) -> None:
    """Shows the curves of the only run in a store, without what MLflow shows only under the mouse."""
    run = MlflowClient(store).search_runs(["1"])[0].info
    with mlflow_server(store) as address:
        browser.load(
            f"{address}/#/experiments/{run.experiment_id}/runs/{run.run_id}/model-metrics", width=WIDTH, height=HEIGHT
        )
        until(
            lambda: browser.evaluate("document.querySelector('[aria-label=Close]') !== null"),
            "button that closes MLflow's assistant",
        )
        browser.evaluate("document.querySelector('[aria-label=Close]').click()")
        browser.evaluate("document.head.insertAdjacentHTML('beforeend', '<style>.modebar { display: none }</style>')")
        until(
            lambda: browser.evaluate("document.querySelector('[aria-label=Close]') === null"),
            "page without the assistant",
        )
        until(lambda: browser.evaluate(_CURVES) >= PAGE_CURVES, "curves on MLflow's page")
        save(browser, HERE / "mlflow.png")


def main() -> None:
    """Takes all of them."""
    program = find_chromium()
    assert program, "Chromium is needed"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        terminal(trained(folder), HERE / "terminal.svg")
        with Browser(program, folder / "profile") as browser:
            browser.load((folder / "runs" / "digits" / "report.html").as_uri(), width=WIDTH, height=HEIGHT)
            save(browser, HERE / "report.png")
            mlflow_page(browser, f"sqlite:///{folder}/runs/mlflow.db")


if __name__ == "__main__":
    main()
