"""Libraries that only some need, and the extra of the package that brings each; no index has the package, so messages say where it is."""

from __future__ import annotations

import importlib.util

from ray_app.errors import ConfigError

EXTRAS = {
    "mlflow": "tracking",
    "tensorboard": "tensorboard",
    "torchvision": "vision",
    "pycocotools": "detection",
    "sklearn": "digits",
    "botocore": "s3",
    "google_crc32c": "tfrecord",
    "tokenizers": "text",
    "peft": "lora",
}
"""The extra, by the name that is imported."""


def require(library: str, asked: str, otherwise: str = "") -> None:
    """Refuses what needs a library that is not installed.

    Args:
        library: The name that is imported.
        asked: What needs it, as the beginning of a sentence.
        otherwise: What else can be done than to install it.

    Raises:
        ConfigError: It is not there.
    """
    if importlib.util.find_spec(library) is None:
        advice = f", or {otherwise}" if otherwise else ""
        raise ConfigError(f'{asked} needs {library}, which is not installed: pip install "PATH_TO_RAY_APP[{EXTRAS[library]}]"{advice}.')
