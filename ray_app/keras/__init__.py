"""`fit`, `evaluate` and `predict` with the arguments and results of `keras.Model`, as runs of this package.

Importing this package makes PyTorch the backend of Keras, so it is imported before Keras. It refuses a process in which
Keras runs on another backend.
"""

from ray_app.cli.launch import TFConfigClusterResolver
from ray_app.keras.fit import History, evaluate, fit, predict
from ray_app.keras.strategies import (
    CentralStorageStrategy,
    CommunicationOptions,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ParameterServerStrategy,
    TPUStrategy,
    get_strategy,
    has_strategy,
)
from ray_app.task.keras.library import import_keras

__all__ = [
    "CentralStorageStrategy",
    "CommunicationOptions",
    "History",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "TFConfigClusterResolver",
    "TPUStrategy",
    "evaluate",
    "fit",
    "get_strategy",
    "has_strategy",
    "predict",
]

import_keras()
