"""What is trained: the height of a wavy surface from the position on it, by a compiled Keras model."""

import keras
from keras import layers


def get_compiled_model(hidden: int = 64) -> keras.Model:
    """Returns a network of two layers with its optimizer, its loss and its metric.

    Args:
        hidden: Width of the hidden layer.
    """
    model = keras.Sequential([keras.Input((2,)), layers.Dense(hidden, activation="tanh"), layers.Dense(1)])
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=0.01),
        loss="mse",
        metrics=[keras.metrics.MeanAbsoluteError(name="error")],
    )
    return model
