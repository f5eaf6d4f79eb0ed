"""Programs as users of Keras write them; each function returns a compiled model.

`get_dense` is Keras' guide to several GPUs, `get_linear` TensorFlow's page on `tf.distribute`, and `get_tutorial` the
tutorial on several workers.
"""

import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
from keras import layers, ops


def get_dense() -> Any:
    inputs = keras.Input(shape=(784,))
    x = layers.Dense(256, activation="relu")(inputs)
    x = layers.Dense(256, activation="relu")(x)
    outputs = layers.Dense(10)(x)
    model = keras.Model(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.Adam(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return model


def get_linear() -> Any:
    model = keras.Sequential([layers.Dense(1, input_shape=(1,), kernel_regularizer=keras.regularizers.L2(1e-4))])
    model.compile(loss="mse", optimizer="sgd")
    return model


def get_tutorial() -> Any:
    model = keras.Sequential(
        [
            keras.Input(shape=(28, 28)),
            layers.Reshape(target_shape=(28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(learning_rate=0.001),
        metrics=["accuracy"],
    )
    return model


def get_convolutional(dropout: float = 0.3, policy: str = "float32", optimizer: str = "") -> Any:
    """Batch normalization, dropout, a regularizer and a schedule, for images of 8 by 8 pixels."""
    inputs = keras.Input((8, 8, 1))
    x = layers.Rescaling(1 / 255)(inputs)
    x = layers.Conv2D(4, 3, use_bias=False, kernel_regularizer="l2", dtype=policy)(x)
    x = layers.BatchNormalization(dtype=policy)(x)
    x = layers.Activation("relu", dtype=policy)(x)
    x = layers.Dropout(dropout, dtype=policy)(x)
    x = layers.Flatten()(x)
    outputs = layers.Dense(5, activation="softmax", dtype="float32")(x)
    model = keras.Model(inputs, outputs)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9)
    model.compile(
        optimizer or keras.optimizers.Adam(schedule),
        "sparse_categorical_crossentropy",
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")],
    )
    return model


def get_without_dropout() -> Any:
    return get_convolutional(dropout=0.0)


def get_mixed() -> Any:
    return get_convolutional(policy="mixed_bfloat16")


def get_clipped() -> Any:
    model = get_convolutional()
    model.compile(
        keras.optimizers.Lamb(0.01, global_clipnorm=0.5),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


class Highest(keras.metrics.Metric):
    """The highest score of all rows, which is no sum."""

    def __init__(self, name: str = "highest", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.highest = self.add_variable((), "zeros", name="highest")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.highest.assign(ops.maximum(self.highest, ops.max(y_pred)))

    def result(self) -> Any:
        return self.highest + 0


class MergedHighest(Highest):
    """The same with a rule for two parts of the rows."""

    def merge_state(self, metrics: list[Highest]) -> None:
        for metric in metrics:
            self.highest.assign(ops.maximum(self.highest, metric.highest))


def get_measured(merged: bool = True) -> Any:
    """A classification with metrics of all kinds: means, counts, thresholds, matrices, and one of its own."""
    inputs = keras.Input((8, 8, 1))
    x = layers.Flatten()(layers.Rescaling(1 / 255)(inputs))
    outputs = layers.Dense(5, activation="softmax")(x)
    model = keras.Model(inputs, outputs)
    one_hot = {"sparse_y_true": True, "sparse_y_pred": False}
    model.compile(
        "adam",
        "sparse_categorical_crossentropy",
        metrics=["accuracy", keras.metrics.MeanIoU(5, **one_hot), MergedHighest() if merged else Highest()],
        weighted_metrics=["accuracy"],
    )
    return model


def get_unmerged() -> Any:
    return get_measured(merged=False)


def get_binary() -> Any:
    inputs = keras.Input((8, 8, 1))
    outputs = layers.Dense(1, activation="sigmoid")(layers.Flatten()(layers.Rescaling(1 / 255)(inputs)))
    model = keras.Model(inputs, outputs)
    model.compile(
        "adam", "binary_crossentropy", metrics=["accuracy", "AUC", "Precision", "Recall", keras.metrics.F1Score()]
    )
    return model


def get_frozen() -> Any:
    """A frozen base with batch normalization, and a trained head."""
    base = keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Conv2D(3, 3, name="base_conv"), layers.BatchNormalization(name="base_norm")],
        name="base",
    )
    base.trainable = False
    inputs = keras.Input((8, 8, 1))
    outputs = layers.Dense(5)(layers.Flatten()(base(inputs)))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


class Subclassed(keras.Model):
    """A model of its own class, which is built by its first batch and draws random numbers in its call."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = layers.Flatten()
        self.hidden = layers.Dense(6, activation="relu")
        self.noise = layers.GaussianNoise(0.1)
        self.out = layers.Dense(5)

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = self.noise(self.hidden(self.flatten(x) / 255), training=training)
        if training:
            hidden = hidden + keras.random.normal(ops.shape(hidden), stddev=0.01)
        self.add_loss(1e-3 * ops.mean(ops.square(hidden)))
        return self.out(hidden)


def get_subclassed() -> Any:
    model = Subclassed()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


class Noise(layers.Layer):
    """Adds random numbers, in an evaluation, too."""

    def call(self, x: Any) -> Any:
        return x + keras.random.normal(ops.shape(x), stddev=0.5)


def get_noisy() -> Any:
    inputs = keras.Input((8, 8, 1))
    x = Noise()(layers.Flatten()(layers.Rescaling(1 / 255)(inputs)))
    model = keras.Model(inputs, layers.Dense(5, activation="softmax")(x))
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def get_channels_first() -> Any:
    """A model of which the layers say themselves that channels come first, and which asks for no compiled step."""
    inputs = keras.Input((3, 4, 6))
    x = layers.Flatten(data_format="channels_first")(inputs)
    model = keras.Model(inputs, layers.Dense(5)(x))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True)
    return model


class OwnLoss(keras.Model):
    """A model with a loss of its own, which is called for each micro-batch."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        return super().compute_loss(x, y, y_pred, sample_weight, training) + 0.5 * ops.mean(ops.square(y_pred))


def get_own_loss() -> Any:
    inputs = keras.Input((8, 8, 1))
    model = OwnLoss(inputs, layers.Dense(5)(layers.Flatten()(layers.Rescaling(1 / 255)(inputs))))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


class OwnLoop(keras.Model):
    def fit(self, *arguments: Any, **options: Any) -> Any:
        return super().fit(*arguments, **options)


def get_own_loop() -> Any:
    inputs = keras.Input((8, 8, 1))
    model = OwnLoop(inputs, layers.Dense(5)(layers.Flatten()(inputs)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def get_summed() -> Any:
    inputs = keras.Input((8, 8, 1))
    model = keras.Model(inputs, layers.Dense(5)(layers.Flatten()(inputs)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"))
    return model


def get_uncompiled() -> Any:
    inputs = keras.Input((8, 8, 1))
    return keras.Model(inputs, layers.Dense(5)(layers.Flatten()(inputs)))


def get_two_inputs() -> Any:
    """Two inputs and two outputs by their names, with losses of different weights."""
    image = keras.Input((8, 8, 1), name="picture")
    number = keras.Input((1,), name="number")
    x = layers.Concatenate()([layers.Flatten()(layers.Rescaling(1 / 255)(image)), number])
    x = layers.Dense(6, activation="relu")(x)
    outputs = {
        "kind": layers.Dense(5, activation="softmax", name="kind")(x),
        "size": layers.Dense(1, name="size")(x),
    }
    model = keras.Model({"picture": image, "number": number}, outputs)
    model.compile(
        "adam",
        loss={"kind": "sparse_categorical_crossentropy", "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.01},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )
    return model


def get_plain() -> Any:
    """A classification without random numbers."""
    inputs = keras.Input((8, 8, 1))
    outputs = layers.Dense(5, activation="softmax")(layers.Flatten()(layers.Rescaling(1 / 255)(inputs)))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def get_autoencoder() -> Any:
    """A model that has its loss from add_loss alone."""

    class Reconstruction(layers.Layer):
        def call(self, inputs: Any) -> Any:
            image, decoded = inputs
            self.add_loss(ops.mean(ops.square(image - decoded)))
            return decoded

    image = layers.Rescaling(1 / 255)(inputs := keras.Input((8, 8, 1)))
    code = layers.Dense(4, activation="relu")(layers.Flatten()(image))
    decoded = layers.Reshape((8, 8, 1))(layers.Dense(64)(code))
    model = keras.Model(inputs, Reconstruction()([image, decoded]))
    model.compile("adam")
    return model


def get_callbacks() -> list[Any]:
    """Callbacks that stop and change the learning rate."""
    return [
        keras.callbacks.EarlyStopping("val_accuracy", patience=np.int64(2), mode="max"),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
        keras.callbacks.ProgbarLogger(),
    ]
