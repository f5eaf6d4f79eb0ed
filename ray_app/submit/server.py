"""The client of the cluster's job server: submits and follows jobs over HTTP, and survives lost connections."""

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
from ray_app.retry import Retry
from ray_app.runlog.redaction import redact
from ray_app.submit.options import EndedJob

_CONNECT_S = 10.0
_ANSWER_S = 60.0
_UPLOAD_S = 1800.0
_SILENCE_S = 30.0
"""Time without output after which the connection is opened anew, since a half-open one would stay silent for ever."""
_LOOK_S = 1.0
_LOST = (OSError, RuntimeError, TimeoutError, aiohttp.ClientError, requests.exceptions.RequestException)
_REQUEST_ERRORS = (AuthenticationError, OSError, RuntimeError, ValueError)
_UNABLE = re.compile(r"Request failed with status code 5(?!.*status code 4)", re.DOTALL)
"""Matches the errors of Ray's client if the server, or a proxy, cannot answer now.

The head node answers 500 also if an agent refuses a request (4xx); these errors do not match.
"""
_TOKENS = (
    "Set RAY_AUTH_MODE=token and the cluster's token in RAY_AUTH_TOKEN, or a file with it in RAY_AUTH_TOKEN_PATH; for a"
    " cluster without tokens, unset them."
)
_CHATTY = (
    *("dashboard.modules.job.sdk", "dashboard.modules.dashboard_sdk"),
    *("_private.runtime_env.packaging", "_private.runtime_env.working_dir"),
)
"""Loggers of Ray that report every ignored file and every connection."""

_LOST_CONTACT_S = 300.0
"""Seconds without an answer of the cluster after which it is given up; a head node is replaced in less."""

Show = Callable[[str], None]


class LostContactError(Exception):
    """The cluster has not answered for five minutes."""


def _refused(address: str | None, error: AuthenticationError) -> ConfigError:
    return ConfigError(f"{address} refuses the connection: {str(error).splitlines()[0]} {_TOKENS}")


class _Client(JobSubmissionClient):
    """Ray's client with time-outs; by itself it waits for ever for a server that accepts a connection but is silent."""

    def _do_request(self, method: str, endpoint: str, **fields: Any) -> requests.Response:
        # The time to connect would limit the time to send, too, so an upload has one long limit.
        wait_s = _UPLOAD_S if method == "PUT" else (_CONNECT_S, _ANSWER_S)
        return super()._do_request(method, endpoint, **{"timeout": wait_s} | fields)

    def _upload_py_modules_if_needed(self, runtime_env: dict[str, Any]) -> None:
        """Uploads the complete application; Ray would apply the excludes of the working directory, such as `/runs`."""
        if "py_modules" in runtime_env:
            whole = runtime_env | {"excludes": ["__pycache__"]}
            super()._upload_py_modules_if_needed(whole)
            runtime_env["py_modules"] = whole["py_modules"]


class JobServer:
    """A cluster's job server.

    Args:
        address: See `submit.address`.

    Raises:
        ConfigError: The server does not answer, or refuses the credentials.
    """

    def __init__(self, address: str | None) -> None:
        for name in _CHATTY:
            logging.getLogger(f"ray.{name}").setLevel(logging.ERROR)
        if address is not None:
            # Ray prefers this variable to the address that its client gets.
            os.environ["RAY_API_SERVER_ADDRESS"] = address
        configured_address = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
        advice = (
            "Set --submit.address to the dashboard of the head node, such as http://HEAD:8265, and check that it can be"
            " reached from here."
        )
        try:
            _check_listening(configured_address)
            self._client = _Client()
        except AuthenticationError as error:
            raise _refused(configured_address, error) from error
        except (*_LOST, ValueError) as error:
            raise ConfigError(
                f"no job server answers at {configured_address or 'this machine'}: {error} {advice}"
            ) from error
        self.address = self._client.get_address()

    def submit(self, name: str, command: str, runtime_env: dict[str, Any], metadata: dict[str, str]) -> str:
        """Submits a job under the first free id `<name>-<n>`, until the cluster answers; returns the id.

        Raises:
            ConfigError: The cluster refuses the job.
            LostContactError: The cluster did not answer for too long.
        """
        # The id is a part of addresses and of names of files.
        name, sent_ids = re.sub(r"[^A-Za-z0-9._-]", "-", name), list[str]()

        def request() -> str:
            sent_ids.append(sent_ids[0] if sent_ids else self._free_id(name))
            try:
                return self._client.submit_job(
                    entrypoint=command, submission_id=sent_ids[0], runtime_env=runtime_env, metadata=metadata
                )
            except RuntimeError as error:
                # The job of an earlier request has this id; only the answer was lost.
                if "already exists" in str(error) and len(sent_ids) > 1:
                    return sent_ids[0]
                raise

        def raise_if_refused(error: Exception) -> None:
            is_busy = _UNABLE.match(str(error)) and "already exists" not in str(error)
            if not (isinstance(error, OSError) or is_busy):
                raise ConfigError(f"the cluster refuses the job: {redact(str(error))}") from error

        retry = Retry(_LOOK_S, factor=1.0, deadline_s=_LOST_CONTACT_S)
        try:
            return retry.call(request, _REQUEST_ERRORS, "Submitting the job", raise_if_refused)
        except _REQUEST_ERRORS as error:
            raise self._lost_contact_error(error) from error

    def _lost_contact_error(self, error: Exception) -> LostContactError:
        return LostContactError(f"{self.address} has not answered for {_LOST_CONTACT_S:g} s: {error}")

    def _free_id(self, name: str) -> str:
        taken = [job.submission_id for job in self._client.list_jobs() if job.submission_id]
        numbers = [
            int(end) for start, _, end in (one.rpartition("-") for one in taken) if start == name and end.isdecimal()
        ]
        return f"{name}-{max(numbers, default=0) + 1}"

    def follow(self, job_id: str, show: Show, tell: Show) -> EndedJob:
        """Shows the output of a job exactly once until the job has ended, and returns how it ended.

        `tell` shows a line about the connection.

        Raises:
            LostContactError: The cluster did not answer for too long.
        """
        tail = OutputTail(show)
        is_reported = False
        # Not `Retry`: between two failures the loop shows the output of the job, and only silence has a limit.
        while True:
            trouble = tail.read(self._client, job_id)
            try:
                ended = self.ended(job_id)
                tail.heard_s = time.monotonic()
            except AuthenticationError as error:
                raise _refused(self.address, error) from error
            except _LOST as error:
                ended, trouble = None, error
                if time.monotonic() - tail.heard_s > _LOST_CONTACT_S:
                    raise self._lost_contact_error(error) from error
            if ended is not None:
                tail.rest(self._client, job_id)
                return ended
            if trouble is not None and not is_reported:
                tell(f"The connection to {self.address} is lost, trying again: {type(trouble).__name__}")
            is_reported = trouble is not None
            time.sleep(_LOOK_S)

    def ended(self, job_id: str) -> EndedJob | None:
        """Returns how a job ended, or None while it runs."""
        try:
            info = self._client.get_job_info(job_id)
        except RuntimeError as error:
            # A new head node does not know the jobs of the old one.
            if "status code 404" in str(error):
                return EndedJob("UNKNOWN")
            raise
        if not info.status.is_terminal():
            return None
        return EndedJob(info.status.value, info.driver_exit_code, info.message or "", info.error_type)


class OutputTail:
    """Shows the output of a job without repetitions, although the server always sends it from the start."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._num_shown = 0
        self.heard_s = time.monotonic()

    def read(self, client: JobSubmissionClient, job_id: str) -> Exception | None:
        """Shows new output until the connection ends or is silent; returns the error that broke it, or None."""
        try:
            asyncio.run(self._read(client, job_id))
        except _LOST as error:
            return error
        return None

    async def _read(self, client: JobSubmissionClient, job_id: str) -> None:
        chunks = client.tail_job_logs(job_id)
        num_received = 0
        with suppress(StopAsyncIteration, TimeoutError):
            while True:
                # `wait_for` of Python 3.11 may lose a Ctrl-C.
                async with asyncio.timeout(_SILENCE_S):
                    chunk = await anext(chunks)
                self.heard_s = time.monotonic()
                self._take(chunk, num_received)
                num_received += len(chunk)

    def rest(self, client: JobSubmissionClient, job_id: str) -> None:
        """Shows the remaining output of a job that has ended, if the node of its driver still exists."""
        with suppress(*_LOST):
            self._take(client.get_job_logs(job_id), 0)

    def _take(self, chunk: str, start: int) -> None:
        new = chunk[max(0, self._num_shown - start) :]
        if new:
            self._show(new)
            self._num_shown += len(new)


def _check_listening(address: str | None) -> None:
    """Checks that a server listens, since Ray's client would wait for ever for a silent host; raises `OSError`."""
    parts = urlsplit(address or "")
    if parts.scheme in ("http", "https") and parts.hostname:
        socket.create_connection(
            (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)), _CONNECT_S
        ).close()
