"""moto's S3 server on loopback in its own process, with injected faults between it and its clients.

As a script it serves; `S3Server` starts the script and sends it the faults.
"""

import io
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ray_app.storage.files import to_location
from ray_app.storage.object_stores import ObjectPath
from tests.support.paths import ROOT

BUCKET = "runs"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@dataclass
class FaultRule:
    """A fault.

    Args:
        match: Regular expression of the affected requests, such as `PUT .*COMMIT.json`.
        times: Number of affected requests; -1: all.
        status: Status of the answer; 0: the true answer.
        delay_s: Seconds to wait before the answer.
        done: Whether the server first executes the request, so that only the answer is lost.
        cut: Whether the connection breaks after half of the true answer.
    """

    match: str
    times: int = 1
    status: int = 503
    delay_s: float = 0.0
    done: bool = False
    cut: bool = False


class S3Server:
    """The server's process, and the faults that it injects."""

    module = "tests.support.s3_server"

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.module], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.address = f"127.0.0.1:{int(self._process.stdout.readline())}"
        request = urllib.request.Request(f"http://{self.address}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request, timeout=10).close()

    def path(self, prefix: str) -> ObjectPath:
        """Returns a path on the server, which contains the server's address."""
        location = to_location(f"s3://{BUCKET}/{prefix}?endpoint_override={self.address}&scheme=http")
        assert isinstance(location, ObjectPath)
        return location

    def fail(self, match: str, **how: Any) -> None:
        """Adds a fault, see `FaultRule`."""
        self._control("rule", asdict(FaultRule(match, **how)))

    def reset(self) -> None:
        """Removes all faults and the list of requests."""
        self._control("reset")

    def requests(self, match: str = "") -> list[str]:
        """Returns the matching requests since the last reset, each as `METHOD /path?query`, in their order."""
        return [request for request in self._control("requests") if re.search(match, request)]

    def put(self, prefix: str, content: bytes) -> None:
        """Writes an object."""
        self.path(prefix).put(content, if_absent=False)

    def make_public(self, path: ObjectPath) -> None:
        """Lets everyone read an object without credentials."""
        self._put(path, "?acl", {"x-amz-acl": "public-read"})

    def make_folder_object(self, path: ObjectPath) -> None:
        """Puts an empty object with a trailing slash, by which consoles show a folder."""
        self._put(path, "/", {})

    def _put(self, path: ObjectPath, end: str, headers: dict[str, str]) -> None:
        # moto checks that there is a signature, but not the signature itself.
        signature = {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3"}
        url = f"http://{self.address}/{path.bucket}/{path.key}{end}"
        request = urllib.request.Request(url, b"", headers | signature, method="PUT")
        urllib.request.urlopen(request, timeout=10).close()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()

    def _control(self, command: str, value: Any = None) -> Any:
        with urllib.request.urlopen(
            f"http://{self.address}/-/{command}", data=json.dumps(value).encode(), timeout=10
        ) as answer:
            return json.load(answer)


class _Faulty:
    """A WSGI application that injects the faults of its rules into another one."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self._rules: list[FaultRule] = []
        self._requests: list[str] = []
        self._lock, self._conditional = threading.Lock(), threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path, query = environ["PATH_INFO"], environ.get("QUERY_STRING", "")
        if path.startswith("/-/"):
            length = int(environ.get("CONTENT_LENGTH") or 0)
            return self._answer_control(path[3:], json.loads(environ["wsgi.input"].read(length)), start_response)
        request = f"{environ['REQUEST_METHOD']} {path}" + (f"?{query}" if query else "")
        # The keys of a bulk deletion are in the body.
        if query.startswith("delete"):
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            environ["wsgi.input"] = io.BytesIO(body)
            request += "".join(f" {key}" for key in re.findall("<Key>(.*?)</Key>", body.decode()))
        with self._lock:
            self._requests.append(request)
            rule = next((r for r in self._rules if r.times and re.search(r.match, request)), None)
            if rule is not None:
                rule.times -= 1
        if rule is None:
            return self._ask(environ, start_response)
        if rule.cut:
            return self._halve(self._ask(environ, start_response))
        if rule.done:
            list(self._ask(environ, lambda *_: None))
        time.sleep(rule.delay_s)
        if not rule.status:
            return self._ask(environ, start_response)
        if not rule.done:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(f"{rule.status} Injected", [("Content-Length", "0")])
        return [b""]

    def _halve(self, answer: Iterable[bytes]) -> Iterator[bytes]:
        data = b"".join(answer)
        yield data[: len(data) // 2]
        raise ConnectionError("injected")

    def _ask(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        conditions = ("HTTP_IF_NONE_MATCH", "HTTP_X_GOOG_IF_GENERATION_MATCH")
        # moto checks the condition and then writes, which is not atomic.
        if any(map(environ.get, conditions)):
            with self._conditional:
                return list(self._application(environ, start_response))
        return self._application(environ, start_response)

    def _answer_control(self, command: str, value: Any, start_response: Callable[..., Any]) -> Iterable[bytes]:
        answer = None
        with self._lock:
            if command == "rule":
                self._rules.append(FaultRule(**value))
            elif command == "reset":
                self._rules, self._requests = [], []
            else:
                answer = list(self._requests)
        data = json.dumps(answer).encode()
        start_response("200 OK", [("Content-Length", str(len(data)))])
        return [data]


def serve(adapt: Callable[[Callable[..., Iterable[bytes]]], Callable[..., Iterable[bytes]]] = lambda s3: s3) -> None:
    """Serves on a free port, which it prints, until it is killed or its parent has ended.

    Args:
        adapt: Turns moto's application into that of another server.
    """
    import logging
    import os

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = _Faulty(adapt(DomainDispatcherApplication(create_backend_app)))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)
    print(server.server_port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.5)


if __name__ == "__main__":
    serve()
