"""An in-memory client of MLflow's registry, for histories of hundreds of calls."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_ALREADY_EXISTS, RESOURCE_DOES_NOT_EXIST


class LostError(Exception):
    """The connection broke."""


class MemoryClient:
    """Models, versions, tags and aliases in memory. A call can be lost, before or after it took effect.

    Attributes:
        calls_left: Number of calls that succeed before one is lost; below 0: none is lost.
        fails_after_call: Whether the lost call takes effect.
    """

    def __init__(self) -> None:
        self.calls_left, self.fails_after_call = -1, False
        self.models: dict[str, SimpleNamespace] = {}
        self.versions: dict[str, list[SimpleNamespace]] = {}

    def _call(self, act: Any) -> Any:
        self.calls_left -= 1
        if self.calls_left == -1 and not self.fails_after_call:
            raise LostError
        result = act()
        if self.calls_left == -1:
            raise LostError
        return result

    def create_registered_model(self, name: str) -> None:
        def act() -> None:
            if name in self.models:
                raise MlflowException("there is one", RESOURCE_ALREADY_EXISTS)
            self.models[name], self.versions[name] = SimpleNamespace(aliases={}), []

        self._call(act)

    def get_registered_model(self, name: str) -> SimpleNamespace:
        def act() -> SimpleNamespace:
            if name not in self.models:
                raise MlflowException("there is none", RESOURCE_DOES_NOT_EXIST)
            return SimpleNamespace(aliases=dict(self.models[name].aliases))

        return self._call(act)

    def create_model_version(self, name: str, source: str, run_id: str, tags: dict[str, str]) -> SimpleNamespace:
        def act() -> SimpleNamespace:
            version = SimpleNamespace(
                name=name, version=str(len(self.versions[name]) + 1), run_id=run_id, source=source, tags=dict(tags)
            )
            self.versions[name].append(version)
            return _copy(version)

        return self._call(act)

    def stored_version(self, name: str, version: str) -> SimpleNamespace:
        for candidate in self.versions.get(name, []):
            if candidate.version == str(version):
                return candidate
        raise MlflowException("there is none", RESOURCE_DOES_NOT_EXIST)

    def get_model_version(self, name: str, version: str) -> SimpleNamespace:
        return self._call(lambda: _copy(self.stored_version(name, version)))

    def search_model_versions(self, filter_string: str) -> list[SimpleNamespace]:
        conditions = dict(re.findall(r"(name|tags\.`[^`]+`) = '([^']*)'", filter_string))
        tags = {key[6:-1]: value for key, value in conditions.items() if key != "name"}
        versions = [v for v in self.versions.get(conditions["name"], []) if tags.items() <= v.tags.items()]
        return self._call(lambda: [_copy(v) for v in reversed(versions)])

    def set_model_version_tag(self, name: str, version: str, key: str, value: str) -> None:
        self._call(lambda: self.stored_version(name, version).tags.update({key: value}))

    def delete_model_version_tag(self, name: str, version: str, key: str) -> None:
        self._call(lambda: self.stored_version(name, version).tags.pop(key))

    def set_registered_model_alias(self, name: str, alias: str, version: str) -> None:
        self._call(lambda: self.models[name].aliases.update({alias: self.stored_version(name, version).version}))


def _copy(version: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(**vars(version) | {"tags": dict(version.tags)})
