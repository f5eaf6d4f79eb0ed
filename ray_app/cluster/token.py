"""Ray's private parts (Ray 2.60) that turn token authentication on where Ray does not do it by itself: for `ray.cluster_utils.Cluster`.

- `ray._private.authentication.authentication_token_setup`: what `ray.init(address="local")` calls before it starts a cluster.
- `ray._raylet.Config`, `AuthenticationTokenLoader`: where a process keeps what it has read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ray._private.authentication.authentication_token_setup import (
    AUTH_MODE_ENV_VAR,
    enable_token_auth_by_default,
    ensure_token_if_auth_enabled,
)
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray._raylet import Config as RayConfig  # type: ignore[attr-defined]

from ray_app.process import variables


def require_token() -> None:
    """Lets clusters that this process starts from now on refuse whoever has not the token in `~/.ray/auth_token`, made if need be.

    Ray writes that file for all users of the machine to read; then only its owner may. `RAY_AUTH_MODE=disabled` in the environment is
    respected, as Ray does.
    """
    if enable_token_auth_by_default():
        ensure_token_if_auth_enabled(create_token_if_missing=True)
        with suppress(OSError):  # it is elsewhere, or somebody else's
            (Path.home() / ".ray" / "auth_token").chmod(0o600)


@contextmanager
def mode_put_back() -> Iterator[None]:
    """The time of a connection, after which `RAY_AUTH_MODE` is what it was, also for Ray, which keeps what it has read: on a cluster of
    the other mode every actor died before it ran.
    """
    try:
        with variables(**{AUTH_MODE_ENV_VAR: None}):
            yield
    finally:
        RayConfig.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
