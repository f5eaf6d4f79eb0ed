"""Import paths of the configuration."""

from __future__ import annotations

import importlib
from functools import reduce
from typing import Any

from ray_app.config.sections import ClassSpec


def load_class(spec: ClassSpec | str) -> Any:
    """Imports what a configuration names: a class, a function, or one of a class (`transformers.AutoModel.from_pretrained`).

    Raises:
        ImportError: There is no such module, or something that it needs is missing.
        AttributeError: The module has nothing of this name.
    """
    path = spec if isinstance(spec, str) else spec.class_path
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:cut])
        try:
            return reduce(getattr, parts[cut:], importlib.import_module(module))
        except ModuleNotFoundError as error:
            if cut == 1 or not f"{module}.".startswith(f"{error.name}."):
                raise
    raise ImportError(f"{path!r} names no module; an import path is such as torch.optim.AdamW")
