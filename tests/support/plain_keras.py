"""Keras in a process of its own, without ray_app, as the receiver of an export has it."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

_LOAD = """
import importlib, json, os, sys
os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy
folder, file, inputs, modules = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4:]
for name in modules:
    importlib.import_module(name)
model = keras.saving.load_model(file)
columns = dict(numpy.load(folder + "/x.npz"))
if isinstance(inputs, dict):
    x = {name: columns[column] for name, column in inputs.items()}
else:
    x = [columns[column] for column in inputs] if isinstance(inputs, list) else columns[inputs]
y = model.predict(x, verbose=0)
numpy.savez(folder + "/y.npz", **(y if isinstance(y, dict) else {"predicted": y}))
assert not any(name.split(".")[0] in ("ray", "ray_app") for name in sys.modules), "Keras alone"
assert model.compiled
"""


def predict_by_plain_keras(
    export: Path, columns: dict[str, np.ndarray], inputs: Any, modules: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
    """Returns what `model.keras` of an export predicts in a process with Keras alone, by the names of outputs.

    Args:
        export: The folder of the export.
        columns: The rows of each column.
        inputs: The columns of the inputs, see `KerasTask`.
        modules: Modules with the classes of the model, which the process imports.
    """
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "x.npz", **columns)
        arguments = [folder, str(export / "model.keras"), json.dumps(inputs), *modules]
        subprocess.run([sys.executable, "-c", _LOAD, *arguments], check=True)
        with np.load(Path(folder) / "y.npz") as predicted:
            return dict(predicted)
