"""The cluster's job server: submitting, following and asking, over HTTP, also where connections break."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from ray_app.errors import ConfigError
from ray_app.runlog.redaction import redact
from ray_app.submit.options import EndedJob

_CONNECT_S, _ANSWER_S, _UPLOAD_S = 10.0, 60.0, 1800.0
_SILENCE_S = 30.0
"""Without output for so long the connection is made anew: one that is half open would be silent for ever."""
_LOOK_S = 1.0
_LOST = (OSError, RuntimeError, TimeoutError, aiohttp.ClientError, requests.exceptions.RequestException)
_UNABLE = re.compile(r"Request failed with status code 5(?!.*status code 4)", re.DOTALL)
"""How Ray's client begins where a server or what is before it cannot answer now; the head says 500 also for what an
agent refuses (4xx).
"""
_TOKENS = (
    "Set RAY_AUTH_MODE=token and the cluster's token in RAY_AUTH_TOKEN, or a file with it in RAY_AUTH_TOKEN_PATH; for a"
    " cluster without"
    " tokens unset them."
)
_CHATTY = (
    *("dashboard.modules.job.sdk", "dashboard.modules.dashboard_sdk"),
    *("_private.runtime_env.packaging", "_private.runtime_env.working_dir"),
)
"""Loggers of Ray that tell of every ignored file and every connection."""

Show = Callable[[str], None]


class LostContactError(Exception):
    """The cluster does not answer any more."""


class _Client(JobSubmissionClient):
    """Ray's client, which by itself waits for ever for a server that takes the connection and does not answer."""

    def _do_request(self, method: str, endpoint: str, **fields: Any) -> requests.Response:
        wait_s = (
            _UPLOAD_S if method == "PUT" else (_CONNECT_S, _ANSWER_S)
        )  # the time to connect bounds that of sending, too
        return super()._do_request(method, endpoint, **{"timeout": wait_s} | fields)

    def _upload_py_modules_if_needed(self, runtime_env: dict[str, Any]) -> None:
        """Uploads the application whole; Ray would leave out of it what is left out of the working directory, such as
        `/runs`.
        """
        if "py_modules" in runtime_env:
            whole = runtime_env | {"excludes": ["__pycache__"]}
            super()._upload_py_modules_if_needed(whole)
            runtime_env["py_modules"] = whole["py_modules"]


class JobServer:
    """A cluster's job server.

    Args:
        address: See `submit.address`.
        lost_contact_s: See `submit.lost_contact_s`.

    Raises:
        ConfigError: It does not answer, or refuses us.
    """

    def __init__(self, address: str | None, lost_contact_s: float) -> None:
        for name in _CHATTY:
            logging.getLogger(f"ray.{name}").setLevel(logging.ERROR)
        if address is not None:
            os.environ["RAY_API_SERVER_ADDRESS"] = address  # Ray prefers this to what it is given
        self._lost_contact_s = lost_contact_s
        asked = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
        advice = (
            "Give the dashboard of the head node, --submit.address http://HEAD:8265, and check that it can be reached"
            " from here."
        )
        try:
            _refuse_silence(asked)
            self._client = _Client()
        except AuthenticationError as error:
            raise ConfigError(f"{asked} refuses us: {str(error).splitlines()[0]} {_TOKENS}") from error
        except (*_LOST, ValueError) as error:
            raise ConfigError(f"no job server answers at {asked or 'this machine'}: {error} {advice}") from error
        self.address = self._client.get_address()

    def submit(self, name: str, command: str, runtime_env: dict[str, Any], metadata: dict[str, str]) -> str:
        """Submits a job under the first free id `<name>-<n>` and returns that; tries again while the cluster does not
        answer.

        Raises:
            ConfigError: The cluster refuses it.
            LostContactError: It did not answer for too long.
        """
        began_s, job_id, sent = time.monotonic(), "", 0
        while True:
            try:
                job_id = job_id or self._free_id(name)
                sent += 1
                return self._client.submit_job(
                    entrypoint=command, submission_id=job_id, runtime_env=runtime_env, metadata=metadata
                )
            except (AuthenticationError, OSError, RuntimeError, ValueError) as error:
                is_lost = isinstance(error, OSError)
                is_taken = not is_lost and "already exists" in str(error)
                if is_taken and sent > 1:  # only the answer was lost
                    return job_id
                if is_taken or not (is_lost or _UNABLE.match(str(error))):
                    raise ConfigError(f"the cluster does not take the job: {redact(str(error))}") from error
                if time.monotonic() - began_s > self._lost_contact_s:
                    raise LostContactError(
                        f"{self.address} has not answered for {self._lost_contact_s:g} s: {error}"
                    ) from error
            time.sleep(_LOOK_S)

    def _free_id(self, name: str) -> str:
        taken = [job.submission_id for job in self._client.list_jobs() if job.submission_id]
        numbers = [
            int(end) for start, _, end in (one.rpartition("-") for one in taken) if start == name and end.isdecimal()
        ]
        return f"{name}-{max(numbers, default=0) + 1}"

    def follow(self, job_id: str, show: Show, tell: Show) -> EndedJob:
        """Shows what a job prints until it has ended, each piece once, however often the connection breaks.

        Args:
            job_id: The job.
            show: Takes pieces of its output.
            tell: Takes lines about the connection.

        Raises:
            LostContactError: The cluster did not answer for too long.
        """
        tail = _Tail(show)
        told = False
        while True:
            trouble = tail.read(self._client, job_id)
            try:
                ended = self.ended(job_id)
                tail.heard_s = time.monotonic()
            except AuthenticationError as error:
                raise ConfigError(f"{self.address} refuses us: {str(error).splitlines()[0]} {_TOKENS}") from error
            except _LOST as error:
                ended, trouble = None, error
                if time.monotonic() - tail.heard_s > self._lost_contact_s:
                    raise LostContactError(
                        f"{self.address} has not answered for {self._lost_contact_s:g} s: {error}"
                    ) from error
            if ended is not None:
                tail.rest(self._client, job_id)
                return ended
            if trouble is not None and not told:
                tell(f"The connection to {self.address} is lost, trying again: {type(trouble).__name__}")
            told = trouble is not None
            time.sleep(_LOOK_S)

    def ended(self, job_id: str) -> EndedJob | None:
        """How a job ended; None while it has not."""
        try:
            info = self._client.get_job_info(job_id)
        except RuntimeError as error:
            if "status code 404" in str(error):  # a new head that has not kept the jobs of the old one
                return EndedJob("UNKNOWN")
            raise
        if not info.status.is_terminal():
            return None
        return EndedJob(info.status.value, info.driver_exit_code, info.message or "", info.error_type)


class _Tail:
    """What of a job's output was shown, and when it was last heard of; the server always begins at its beginning."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._shown = 0
        self.heard_s = time.monotonic()

    def read(self, client: JobSubmissionClient, job_id: str) -> Exception | None:
        """Shows what is new until the connection ends or is silent; returns what broke it, if something did."""
        try:
            asyncio.run(self._read(client, job_id))
        except _LOST as error:
            return error
        return None

    async def _read(self, client: JobSubmissionClient, job_id: str) -> None:
        chunks = client.tail_job_logs(job_id)
        seen = 0
        with suppress(StopAsyncIteration, TimeoutError):
            while True:
                async with asyncio.timeout(_SILENCE_S):  # wait_for of Python 3.11 may lose a Ctrl-C
                    chunk = await anext(chunks)
                self.heard_s = time.monotonic()
                self._take(chunk, seen)
                seen += len(chunk)

    def rest(self, client: JobSubmissionClient, job_id: str) -> None:
        """Shows what is still missing of a job that has ended; as far as the node that ran it is there."""
        with suppress(*_LOST):
            self._take(client.get_job_logs(job_id), 0)

    def _take(self, chunk: str, start: int) -> None:
        new = chunk[max(0, self._shown - start) :]
        if new:
            self._show(new)
            self._shown += len(new)


def _refuse_silence(address: str | None) -> None:
    """Ray's client waits for ever for a host that does not answer.

    Raises:
        OSError: Nothing listens there.
    """
    parts = urlsplit(address or "")
    if parts.scheme in ("http", "https") and parts.hostname:
        socket.create_connection(
            (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)), _CONNECT_S
        ).close()
