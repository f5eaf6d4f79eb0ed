"""The cases of a test that `make test` runs; the others are marked `rest`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def only_quick(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Returns cases for `parametrize`; those that are not `quick` are marked `rest`."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.rest) for case in cases]
