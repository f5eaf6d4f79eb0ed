"""`fit`, `evaluate` and `predict` with the arguments and results of `keras.Model`, as runs of this package.

Importing this package makes PyTorch the backend of Keras, so it is imported before Keras. It refuses a process in which
Keras runs on another backend.
"""

from ray_app.keras.fit import History, evaluate, fit, predict
from ray_app.keras.strategies import (
    CentralStorageStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ParameterServerStrategy,
)
from ray_app.task.keras.library import import_keras

__all__ = [
    "CentralStorageStrategy",
    "History",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "evaluate",
    "fit",
    "predict",
]

import_keras()
