"""Ten programs of the kinds that users of Keras have, each with rows that it trains on.

A program is a function that returns a compiled model, as its author would write it for `Model.fit`. `COLLECTION` has
the columns that go into it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
from keras import layers, ops

WORDS = ("a", "the", "cat", "dog", "bird", "sat", "ran", "flew", "on", "under", "over", "mat", "tree", "roof", "and")
VOCABULARY = len(WORDS) + 1
Columns = dict[str, Any]
register = keras.saving.register_keras_serializable(package="collection")


def get_augmented() -> Any:
    """A small CNN that augments its images in layers."""
    inputs = keras.Input((16, 16, 3))
    x = layers.RandomFlip("horizontal")(inputs)
    x = layers.RandomRotation(0.1)(x)
    x = layers.RandomZoom(0.2)(x)
    x = layers.RandomTranslation(0.1, 0.1)(x)
    x = layers.RandomContrast(0.2)(x)
    x = layers.Rescaling(1 / 255)(x)
    for filters in (4, 8):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization()(x)
        x = layers.Activation("relu")(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Dropout(0.3)(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, layers.Dense(4, activation="softmax")(x))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def get_transfer() -> Any:
    """A frozen base, of separable convolutions with batch normalization, and a head that is trained."""
    base = keras.Sequential([keras.Input((32, 32, 3))], name="base")
    for filters in (4, 8):
        base.add(layers.SeparableConv2D(filters, 3, strides=2, use_bias=False))
        base.add(layers.BatchNormalization())
        base.add(layers.ReLU(6.0))
    base.trainable = False
    inputs = keras.Input((32, 32, 3))
    x = base(layers.Rescaling(1 / 127.5, offset=-1)(inputs), training=False)
    x = layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
    )
    return model


def get_text() -> Any:
    """Texts of any length, of which the data has the numbers of their words."""
    inputs = keras.Input((None,), dtype="int64")
    x = layers.Embedding(VOCABULARY, 8, mask_zero=True)(inputs)
    x = layers.Bidirectional(layers.LSTM(6, dropout=0.1))(x)
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))
    model.compile("rmsprop", "binary_crossentropy", metrics=["accuracy", "AUC"])
    return model


@register
class Tokens(layers.Layer):
    """Embeds tokens and their positions."""

    def __init__(self, length: int, vocabulary: int, width: int, **options: Any) -> None:
        super().__init__(**options)
        self.sizes = {"length": length, "vocabulary": vocabulary, "width": width}
        self.tokens = layers.Embedding(vocabulary, width)
        self.positions = layers.Embedding(length, width)

    def call(self, x: Any) -> Any:
        return self.tokens(x) + self.positions(ops.arange(ops.shape(x)[-1]))

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | self.sizes


@register
class TransformerBlock(layers.Layer):
    """Attention and two dense layers, each added to its input and normalized."""

    def __init__(self, width: int, heads: int, hidden: int, rate: float = 0.1, **options: Any) -> None:
        super().__init__(**options)
        self.sizes = {"width": width, "heads": heads, "hidden": hidden, "rate": rate}
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.dense = keras.Sequential([layers.Dense(hidden, activation="gelu"), layers.Dense(width)])
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.dropouts = [layers.Dropout(rate) for _ in range(2)]

    def call(self, x: Any, training: bool | None = None) -> Any:
        x = self.norms[0](x + self.dropouts[0](self.attention(x, x), training=training))
        return self.norms[1](x + self.dropouts[1](self.dense(x), training=training))

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | self.sizes


def get_transformer() -> Any:
    inputs = keras.Input((12,), dtype="int64")
    x = TransformerBlock(8, 2, 16)(Tokens(12, VOCABULARY, 8)(inputs))
    x = layers.Dropout(0.1)(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(x))
    schedule = keras.optimizers.schedules.CosineDecay(0.0, 20, warmup_target=0.01, warmup_steps=3)
    model.compile(
        keras.optimizers.AdamW(schedule, global_clipnorm=1.0), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def get_two_heads() -> Any:
    """A picture and a table row; what it shows, and what it costs."""
    picture = keras.Input((16, 16, 3), name="picture")
    facts = keras.Input((4,), name="facts")
    x = layers.Conv2D(4, 3, activation="relu")(layers.Rescaling(1 / 255)(picture))
    x = layers.Concatenate()([layers.Flatten()(x), layers.Dense(8, activation="relu")(facts)])
    x = layers.Dense(8, activation="relu")(x)
    model = keras.Model(
        {"picture": picture, "facts": facts},
        {"kind": layers.Dense(4, name="kind")(x), "price": layers.Dense(1, name="price")(x)},
    )
    model.compile(
        "adam",
        loss={"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "price": "mse"},
        loss_weights={"kind": 1.0, "price": 0.2},
        metrics={"kind": "accuracy", "price": ["mae", "mse"]},
    )
    return model


def get_unet() -> Any:
    """Whether each pixel belongs to an object."""
    inputs = keras.Input((16, 16, 1))
    x = layers.Rescaling(1 / 255)(inputs)
    skipped = []
    for filters in (4, 8):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        skipped.append(x)
        x = layers.MaxPooling2D()(layers.BatchNormalization()(x))
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    for skip in reversed(skipped):
        x = layers.Conv2DTranspose(4, 3, strides=2, padding="same", activation="relu")(x)
        x = layers.Concatenate()([x, skip])
    model = keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(x))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy", keras.metrics.BinaryIoU()])
    return model


def get_tabular() -> Any:
    """Numbers that are normalized by what `adapt` has seen, and a category."""
    table = rows_of_table(200)
    numbers = [keras.Input((1,), name=name) for name in ("age", "income")]
    category = keras.Input((1,), name="region", dtype="int64")
    normalized = []
    for number in numbers:
        normalization = layers.Normalization()
        normalization.adapt(table[number.name][:, None])
        normalized.append(normalization(number))
    region = layers.Flatten()(layers.Embedding(5, 3)(category))
    x = layers.Dense(8, activation="relu")(layers.Concatenate()([*normalized, region]))
    model = keras.Model([*numbers, category], layers.Dense(1, activation="sigmoid")(layers.Dropout(0.2)(x)))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc"), "Recall"])
    return model


@register
class Sampling(layers.Layer):
    """Draws a code from its mean and its variance in training, and adds the divergence from a normal distribution."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(7)

    def call(self, inputs: Any, training: bool = False) -> Any:
        mean, log_variance = inputs
        divergence = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
        self.add_loss(0.01 * ops.mean(ops.sum(divergence, axis=1)))
        if not training:
            return mean
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * noise


def get_autoencoder() -> Any:
    """A variational autoencoder, which adds a loss in a layer."""
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, strides=2, padding="same", activation="relu")(inputs)
    x = layers.Flatten()(x)
    code = Sampling()([layers.Dense(3, name="mean")(x), layers.Dense(3, name="log_variance")(x)])
    x = layers.Reshape((4, 4, 4))(layers.Dense(64, activation="relu")(code))
    outputs = layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="sigmoid")(x)
    model = keras.Model(inputs, outputs)
    model.compile("adam", "binary_crossentropy", metrics=["mse"])
    return model


@register
class Distance(layers.Layer):
    """The Euclidean distance of two codes, shape (rows, 1)."""

    def call(self, inputs: Any) -> Any:
        first, second = inputs
        return ops.sqrt(ops.sum(ops.square(first - second), axis=1, keepdims=True) + 1e-7)


@register
def contrastive(y_true: Any, y_pred: Any) -> Any:
    """Pulls pairs of one kind together, and pushes others apart up to a distance of 1."""
    y_true = ops.cast(y_true, y_pred.dtype)
    return ops.mean(y_true * ops.square(y_pred) + (1 - y_true) * ops.square(ops.maximum(1 - y_pred, 0)), axis=-1)


def get_siamese() -> Any:
    """One encoder for two pictures."""
    encoder = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(4, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(4),
        ],
        name="encoder",
    )
    left, right = keras.Input((8, 8, 1), name="left"), keras.Input((8, 8, 1), name="right")
    model = keras.Model([left, right], Distance()([encoder(left), encoder(right)]))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), contrastive, metrics=["mae"])
    return model


def get_forecast() -> Any:
    """The next two values of a series from a window of it."""
    inputs = keras.Input((24, 3))
    x = layers.Conv1D(4, 5, padding="causal", activation="relu")(inputs)
    x = layers.GRU(6, return_sequences=True, recurrent_dropout=0.1)(x)
    x = layers.LayerNormalization()(layers.GRU(6)(x))
    model = keras.Model(inputs, layers.Dense(2)(x))
    model.compile(
        keras.optimizers.Nadam(0.01, clipnorm=1.0),
        keras.losses.Huber(),
        metrics=["mae", keras.metrics.RootMeanSquaredError(), keras.metrics.R2Score()],
    )
    return model


def rows_of_table(rows: int) -> Columns:
    rng = np.random.default_rng(3)
    age, income = rng.uniform(18, 80, rows), rng.lognormal(10, 1, rows)
    region = rng.integers(0, 5, rows)
    bought = (age / 80 + np.log(income) / 12 + region / 5 + rng.normal(0, 0.2, rows) > 1.9).astype(np.int64)
    return {"age": age.astype(np.float32), "income": income.astype(np.float32), "region": region, "bought": bought}


def rows_of_text(rows: int) -> Columns:
    """Returns sentences as the numbers of their words, as `TextVectorization` makes them."""
    rng = np.random.default_rng(4)
    numbers = {word: number + 1 for number, word in enumerate(WORDS)}
    sentences = [" ".join(rng.choice(WORDS, rng.integers(3, 12))) for _ in range(rows)]
    tokens = [[numbers[word] for word in sentence.split()] for sentence in sentences]
    return {"tokens": tokens, "label": np.array([int("cat" in sentence) for sentence in sentences])}


def rows_of_fixed_text(rows: int) -> Columns:
    tokens = [(one + [0] * 12)[:12] for one in rows_of_text(rows)["tokens"]]
    return {"tokens": np.array(tokens), "label": np.arange(rows) % 3}


def rows_of_pictures(size: int, rows: int, **labels: Any) -> Columns:
    image = np.random.default_rng(5).integers(0, 256, (rows, size, size, 3), dtype=np.uint8)
    return {"image": image, **labels}


def rows_of_masks(rows: int) -> Columns:
    image = np.random.default_rng(6).integers(0, 256, (rows, 16, 16), dtype=np.uint8)
    return {"image": image, "mask": (image > 127).astype(np.uint8)}


def rows_of_pairs(rows: int) -> Columns:
    left, right = np.random.default_rng(7).integers(0, 256, (2, rows, 8, 8), dtype=np.uint8)
    return {"left": left, "right": right, "same": np.arange(rows) % 2}


def rows_of_series(rows: int) -> Columns:
    time = np.arange(rows)[:, None, None] + np.arange(26)[None, :, None]
    series = np.sin(time * np.array([0.2, 0.5, 0.9])).astype(np.float32)
    return {"past": series[:, :24], "future": series[:, 24:, 0]}


def rows_of_two_heads(rows: int) -> Columns:
    facts = np.random.default_rng(8).normal(size=(rows, 4)).astype(np.float32)
    return rows_of_pictures(16, rows, facts=facts, kind=np.arange(rows) % 4, price=facts.sum(1))


@dataclass(frozen=True)
class Program:
    """A program of the collection.

    Args:
        rows: Makes so many rows for it.
        inputs: `init_args.inputs` of its task.
        target: `init_args.target`.
    """

    rows: Callable[[int], Columns]
    inputs: str | list[str] | dict[str, str] = "image"
    target: str | dict[str, str] = "label"


COLLECTION = {
    "get_augmented": Program(lambda rows: rows_of_pictures(16, rows, label=np.arange(rows) % 4)),
    "get_transfer": Program(lambda rows: rows_of_pictures(32, rows, label=np.arange(rows) % 2)),
    "get_text": Program(rows_of_text, "tokens"),
    "get_transformer": Program(rows_of_fixed_text, "tokens"),
    "get_two_heads": Program(
        rows_of_two_heads, {"picture": "image", "facts": "facts"}, {"kind": "kind", "price": "price"}
    ),
    "get_unet": Program(rows_of_masks, "image", "mask"),
    "get_tabular": Program(rows_of_table, ["age", "income", "region"], "bought"),
    "get_autoencoder": Program(
        lambda rows: {"image": rows_of_masks(rows)["image"][:, :8, :8, None].astype(np.float32) / 255}, "image", "image"
    ),
    "get_siamese": Program(rows_of_pairs, ["left", "right"], "same"),
    "get_forecast": Program(rows_of_series, "past", "future"),
}
