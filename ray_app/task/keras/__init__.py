"""Programs of Keras as tasks: a compiled `keras.Model` trains with its own loss, metrics and optimizer.

`library` imports Keras with the backend torch and has all of its private names, `program` calls the user's function,
`module` makes the model an `nn.Module`, `optimizer` and `metrics` make Keras' arithmetic that of PyTorch's classes, and
`task` joins them. Importing this package chooses the backend, since a user's program imports Keras later.
"""

from ray_app.task.keras.library import choose_backend
from ray_app.task.keras.program import make_module
from ray_app.task.keras.task import KerasTask

__all__ = ["KerasTask", "make_module"]

choose_backend()
