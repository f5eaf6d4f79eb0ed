"""Configurations of small runs."""

from pathlib import Path
from typing import Any

from ray_app import load_config
from ray_app.config.config import Config
from tests.support.paths import ROOT


def digits_config(digits: Path, storage: Path, **fields: Any) -> Config:
    """Returns `conf/digits.yaml` for the data of the fixture `digits`, with runs in `storage` that are not tracked."""
    paths = {"data__path": str(digits / "train"), "data__eval_path": str(digits / "eval")}
    defaults = {**paths, "run__storage_path": str(storage), "tracking__enabled": False}
    return load_config(ROOT / "conf" / "digits.yaml", **(defaults | fields))
