"""Errors of an object store are reported soon, in one clear message: the cause, the answer, and the remedy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ray_app.storage import object_stores
from ray_app.storage.files import list_files, put_atomic
from ray_app.storage.object_stores import ObjectPath
from tests.support.azure_server import KEY, AzureServer
from tests.support.gcs_server import GoogleServer
from tests.support.s3_server import S3Server

MAX_S = 30
STORES = ("s3", "gs", "az")
REQUESTS: dict[str, Callable[[ObjectPath], object]] = {
    "read": lambda folder: (folder / "a").read_bytes(),
    "list": list_files,
    "put": lambda folder: put_atomic(folder / "a", b"1"),
    "create": lambda folder: put_atomic(folder / "a", b"1", if_absent=True),
}


@pytest.fixture(params=STORES)
def folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectPath]:
    monkeypatch.setattr(object_stores, "_TIMEOUT_S", 1)
    object_stores.open_store.cache_clear()
    yield request.getfixturevalue(f"{request.param}_folder")
    object_stores.open_store.cache_clear()


@contextmanager
def expect_refusal(kind: type[OSError], pattern: str) -> Iterator[None]:
    start_s = time.monotonic()
    with pytest.raises(OSError, match=pattern) as caught:
        yield
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start_s < MAX_S


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_missing_bucket_is_reported(folder: ObjectPath, request_: str) -> None:
    with expect_refusal(
        OSError, r"//nothing-here/.*: the bucket does not exist \(404 \w+ .*\)\. Create it, or correct"
    ):
        REQUESTS[request_](replace(folder, bucket="nothing-here"))


@pytest.mark.rest
@pytest.mark.parametrize("request_", REQUESTS)
def test_an_unreachable_server_is_reported(folder: ObjectPath, request_: str) -> None:
    unreachable = replace(folder, query=["endpoint_override=127.0.0.1:9&scheme=http", "_name=one"][0])
    if folder.scheme == "az":
        unreachable = replace(unreachable, query=f"{unreachable.query}&account_name=one")
    with expect_refusal(TimeoutError, r"the server does not answer \(.*\)\. Check the address and the network"):
        REQUESTS[request_](unreachable)


@pytest.mark.rest
@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("server", ["s3", "gs"])
def test_a_server_that_times_out_is_reported(
    request: pytest.FixtureRequest, server: str, request_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_stores, "_TIMEOUT_S", 0.25)
    process: S3Server | GoogleServer = request.getfixturevalue(f"{server}_server")
    process.fail(".*", times=-1, delay_s=1)
    try:
        with expect_refusal(TimeoutError, r"the server does not answer \(.*time-out\)\. Check the address"):
            REQUESTS[request_](process.path("folder"))
    finally:
        process.reset()


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_refused_key_is_reported(s3_server: S3Server, s3_folder: ObjectPath, request_: str) -> None:
    s3_server.fail(".*", times=-1, status=403)
    with expect_refusal(PermissionError, r"access is refused \(403\)\. Check the credentials \(AWS_ACCESS_KEY_ID and"):
        REQUESTS[request_](s3_folder)


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_wrong_azure_key_is_reported(az_server: AzureServer, request_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY.replace("E", "F"))
    object_stores.open_store.cache_clear()
    with expect_refusal(PermissionError, r"access is refused \(403 AuthorizationFailure Server failed to authenticate"):
        REQUESTS[request_](az_server.path("wrong"))
    object_stores.open_store.cache_clear()


@pytest.mark.parametrize("request_", REQUESTS)
def test_missing_credentials_are_reported(
    folder: ObjectPath, request_: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither the environment nor a profile nor the machine's role provides credentials."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "GOOGLE_BEARER_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("AZURE_STORAGE_KEY", raising=False)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with expect_refusal(PermissionError, r"no credentials (for s3:// )?were found.* (AWS_|GOOGLE_|AZURE_)"):
        REQUESTS[request_](folder)


def test_credentials_of_a_profile_are_used(
    s3_server: S3Server, s3_folder: ObjectPath, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The profile may name a program, which botocore runs."""
    program = tmp_path / "keys.sh"
    program.write_text('#!/bin/sh\necho \'{"Version": 1, "AccessKeyId": "test", "SecretAccessKey": "test"}\'\n')
    program.chmod(0o755)
    (tmp_path / "config").write_text(f"[profile mine]\nregion = eu-west-1\ncredential_process = {program}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    object_stores.open_store.cache_clear()
    assert put_atomic(s3_folder / "a", b"1")
    object_stores.open_store.cache_clear()
    config = object_stores._OBJECT_STORES["s3"].config({})
    assert config["region"] == "eu-west-1"
    assert config["credential_provider"]()["access_key_id"] == "test"


def test_a_missing_profile_is_reported(s3_folder: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "absent")
    object_stores.open_store.cache_clear()
    with expect_refusal(
        PermissionError, r"no credentials were found .*The config profile \(absent\) could not be found"
    ):
        list_files(s3_folder)


@pytest.mark.parametrize("scheme", STORES)
def test_a_public_object_needs_no_credentials(
    request: pytest.FixtureRequest, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder: ObjectPath = request.getfixturevalue(f"{scheme}_folder")
    put_atomic(folder / "a", b"1")
    if scheme != "az":
        request.getfixturevalue(f"{scheme}_server").make_public(folder / "a")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "GOOGLE_BEARER_TOKEN", "AZURE_STORAGE_KEY"):
        monkeypatch.delenv(name, raising=False)
    public = replace(folder / "a", query=f"{folder.query}&anonymous=true")
    if scheme == "az":
        # The container is not public.
        with expect_refusal(PermissionError, "access is refused"):
            public.read_bytes()
    else:
        assert public.read_bytes() == b"1"
