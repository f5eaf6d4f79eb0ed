"""What S3 offers and obstore does not, through botocore, which is imported at the first use.

- Credentials of profiles: static ones, those of a single sign-on, of an assumed role or of another program.
- Uploads in parts that replace no object. obstore's conditional put is one request, and S3 takes at most 5 GB in one; a
  checkpoint may be larger.
- A list of the uploads that killed writers have not finished, whose parts use storage until the upload is ended.
- Objects with a slash at the end of the key, by which consoles show folders.
"""

from __future__ import annotations

import errno
import functools
import logging
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

from ray_app.config.import_paths import require

logger = logging.getLogger(__name__)

_PARALLEL_PARTS = 4
_MAX_PARTS = 10_000
_CREDENTIALS_LIFE = timedelta(minutes=5)
"""After this time obstore asks botocore again, which renews credentials that expire."""


def store_config(endpoint: str | None, region: str | None, anonymous: bool) -> dict[str, Any]:
    """Returns the configuration of obstore's `S3Store`, with what the environment and the profile say.

    Raises:
        PermissionError: There are no credentials.
    """
    import botocore.session

    session = botocore.session.get_session()
    profile = session.get_scoped_config()
    environment = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    endpoint = endpoint or environment or profile.get("endpoint_url")
    region = region or os.environ.get("AWS_REGION") or session.get_config_variable("region") or "us-east-1"
    config = {"region": region, "endpoint": endpoint}
    if anonymous:
        return config
    credentials = session.get_credentials()
    if credentials is None:
        raise PermissionError(
            errno.EACCES,
            "no credentials for s3:// were found. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, on"
            " every node, or give the machine a role; ?anonymous=true reads what is public",
        )

    def provide() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_LIFE,
        }

    return config | {"credential_provider": provide}


@functools.cache
def make_client(endpoint: str | None, region: str | None, timeout_s: float, attempts: int) -> Any:
    """Returns the client for a server, one per process; many threads may use it.

    Importing botocore and reading its models takes half a second.
    """
    import botocore.session
    from botocore.config import Config

    is_custom_server = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    config = Config(
        connect_timeout=5,
        read_timeout=timeout_s,
        retries={"mode": "standard", "total_max_attempts": attempts},
        max_pool_connections=32,
        s3={"addressing_style": "path"} if is_custom_server else {},
    )
    region = region or os.environ.get("AWS_REGION")
    return botocore.session.get_session().create_client("s3", region_name=region, endpoint_url=endpoint, config=config)


def client_errors() -> tuple[type[Exception], ...]:
    """Returns the classes of botocore's errors.

    Raises:
        ConfigError: botocore is not installed.
    """
    require("botocore", "s3://")
    from botocore.exceptions import BotoCoreError, ClientError

    return BotoCoreError, ClientError


def put_parts(client: Any, bucket: str, key: str, data: bytes | mmap.mmap, part_bytes: int, if_absent: bool) -> bool:
    """Uploads an object in parts; it appears with the last call, or not at all.

    Returns:
        Whether it was written; False only with `if_absent`, if the object existed.
    """
    from botocore.exceptions import ClientError

    size = max(part_bytes, -(-len(data) // _MAX_PARTS))
    target = {"Bucket": bucket, "Key": key}
    upload = target | {"UploadId": client.create_multipart_upload(**target)["UploadId"]}

    def put_part(number: int) -> dict[str, Any]:
        answer = client.upload_part(**upload, PartNumber=number, Body=data[(number - 1) * size : number * size])
        checksum = {name: answer[name] for name in ("ChecksumCRC32", "ChecksumCRC64NVME") if name in answer}
        return {"PartNumber": number, "ETag": answer["ETag"], **checksum}

    try:
        with ThreadPoolExecutor(_PARALLEL_PARTS) as pool:
            parts = list(pool.map(put_part, range(1, -(-len(data) // size) + 1)))
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}, **condition)
    except BaseException as error:
        end_upload(client, bucket, key, upload["UploadId"])
        if isinstance(error, ClientError) and error.response["Error"]["Code"] == "PreconditionFailed":
            return False
        raise
    return True


def unfinished_uploads(client: Any, bucket: str, prefix: str) -> dict[str, str]:
    """Returns the unfinished uploads of keys with a prefix: the id of each by its key."""
    pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
    return {upload["Key"]: upload["UploadId"] for page in pages for upload in page.get("Uploads", ())}


def end_upload(client: Any, bucket: str, key: str, upload_id: str) -> None:
    """Ends an upload, so that its parts use no storage. If that fails, `unfinished_uploads` still returns it."""
    try:
        client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload_id)
    except client_errors() as error:
        logger.warning("The upload of s3://%s/%s could not be ended: %s", bucket, key, error)
