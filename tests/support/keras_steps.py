"""Models with a `train_step` of their own, of the kinds that the guides of Keras have."""

import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import torch
from keras import layers, ops


class Vae(keras.Model):
    """Codes of rows with a divergence; the means of the losses are metrics."""

    def __init__(self, tests: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.encoder = keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(4)])
        self.decoder = keras.Sequential([keras.Input((2,)), layers.Dense(8, "relu"), layers.Dense(6)])
        self.noise = keras.random.SeedGenerator(3)
        self.loss_mean = keras.metrics.Mean(name="loss")
        self.divergence_mean = keras.metrics.Mean(name="divergence")
        self.built = True

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_mean, self.divergence_mean]

    def losses_of(self, x: Any, noise: float) -> tuple[Any, Any]:
        mean, log_variance = ops.split(self.encoder(x), 2, axis=1)
        drawn = keras.random.normal(ops.shape(mean), seed=self.noise) * noise
        decoded = self.decoder(mean + ops.exp(0.5 * log_variance) * drawn)
        divergence = -0.5 * ops.mean(1 + log_variance - mean**2 - ops.exp(log_variance))
        return ops.mean((x - decoded) ** 2) + divergence, divergence

    def train_step(self, data: Any) -> dict[str, Any]:
        self.zero_grad()
        loss, divergence = self.losses_of(data, 0.0)
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        self.loss_mean.update_state(loss)
        self.divergence_mean.update_state(divergence)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data: Any) -> dict[str, Any]:
        loss, divergence = self.losses_of(data, 0.0)
        self.loss_mean.update_state(loss)
        self.divergence_mean.update_state(divergence)
        return {metric.name: metric.result() for metric in self.metrics}


def get_vae() -> Any:
    model = Vae()
    model.compile(keras.optimizers.Adam(0.01))
    return model


class Gan(keras.Model):
    """A discriminator with several steps, and a generator that sees the discriminator after them."""

    def __init__(self, rounds: int = 2) -> None:
        super().__init__()
        self.rounds = rounds
        self.discriminator = keras.Sequential(
            [
                keras.Input((6,)),
                layers.SpectralNormalization(layers.Dense(8)),
                layers.LeakyReLU(0.2),
                layers.BatchNormalization(),
                layers.Dense(1),
            ]
        )
        self.generator = keras.Sequential([keras.Input((3,)), layers.Dense(8, "relu"), layers.Dense(6)])
        self.built = True

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_fn = loss_fn
        self.d_mean, self.g_mean = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.d_mean, self.g_mean]

    def train_step(self, data: Any) -> dict[str, Any]:
        rows = data.shape[0]
        for _ in range(self.rounds):
            fake = self.generator(data[:, :3])
            labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))])
            d_loss = self.loss_fn(labels, self.discriminator(ops.concatenate([fake, data]), training=True))
            self.zero_grad()
            d_loss.backward()
            weights = list(self.discriminator.trainable_weights)
            with torch.no_grad():
                self.d_optimizer.apply([weight.value.grad for weight in weights], weights)
        g_loss = self.loss_fn(ops.zeros((rows, 1)), self.discriminator(self.generator(data[:, 3:]), training=True))
        self.zero_grad()
        g_loss.backward()
        weights = list(self.generator.trainable_weights)
        with torch.no_grad():
            self.g_optimizer.apply([weight.value.grad for weight in weights], weights)
        self.d_mean.update_state(d_loss)
        self.g_mean.update_state(g_loss)
        return {"d_loss": self.d_mean.result(), "g_loss": self.g_mean.result()}


def get_gan() -> Any:
    model = Gan()
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), keras.optimizers.SGD(0.1, momentum=0.5), loss)
    return model


class Distiller(keras.Model):
    """A student that learns from labels and from a teacher, which stays as it is."""

    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher

    def compile(self, optimizer: Any, metrics: Any, student_loss: Any, distillation_loss: Any) -> None:
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss, self.distillation_loss = student_loss, distillation_loss

    def call(self, x: Any) -> Any:
        return self.student(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        expected = self.teacher(x, training=False)
        predicted = self.student(x, training=True)
        student = self.student_loss(y, predicted)
        distilled = self.distillation_loss(ops.softmax(expected / 3, 1), ops.softmax(predicted / 3, 1))
        loss = 0.1 * student + 0.9 * distilled
        self.zero_grad()
        loss.backward()
        weights = self.student.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        results = self.compute_metrics(x, y, predicted, None)
        return results | {"student_loss": student, "distillation_loss": distilled}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        predicted = self.student(x, training=False)
        return self.compute_metrics(x, y, predicted, None) | {"student_loss": self.student_loss(y, predicted)}


def get_distiller(kind: type[Distiller] = Distiller) -> Any:
    networks = [
        keras.Sequential([keras.Input((6,)), layers.Dense(n, "relu"), layers.BatchNormalization(), layers.Dense(3)])
        for n in (4, 16)
    ]
    model = kind(*networks)
    model.compile(
        keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-3),
        ["sparse_categorical_accuracy"],
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        keras.losses.KLDivergence(),
    )
    return model


class ContrastiveKeras(keras.Model):
    """An encoder that learns from two views of a row, and a probe of it that learns from the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(4)])
        self.head = keras.Sequential([keras.Input((4,)), layers.Dense(4)])
        self.probe = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
        self.built = True

    def compile(self, contrastive_optimizer: Any, probe_optimizer: Any, **options: Any) -> None:
        super().compile(**options)
        self.contrastive_optimizer, self.probe_optimizer = contrastive_optimizer, probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_mean = keras.metrics.Mean(name="c_loss")
        self.probe_mean = keras.metrics.Mean(name="p_loss")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")
        self.area = keras.metrics.AUC(name="area", from_logits=True)

    @property
    def metrics(self) -> list[Any]:
        return [self.contrastive_mean, self.probe_mean, self.accuracy, self.area]

    def contrast(self, one: Any, other: Any) -> Any:
        similarities = ops.matmul(ops.normalize(one, axis=1), ops.transpose(ops.normalize(other, axis=1))) / 0.1
        labels = ops.arange(one.shape[0])
        both = [
            keras.losses.sparse_categorical_crossentropy(labels, s, from_logits=True)
            for s in (similarities, ops.transpose(similarities))
        ]
        return ops.mean(both[0] + both[1]) / 2

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        loss = self.contrast(self.head(self.encoder(x * 0.9, training=True)), self.head(self.encoder(x + 0.1)))
        self.zero_grad()
        loss.backward()
        weights = self.encoder.trainable_weights + self.head.trainable_weights
        with torch.no_grad():
            self.contrastive_optimizer.apply([weight.value.grad for weight in weights], weights)
        self.contrastive_mean.update_state(loss)
        logits = self.probe(self.encoder(x, training=False))
        probe_loss = self.probe_loss(y, logits)
        self.zero_grad()
        probe_loss.backward()
        weights = self.probe.trainable_weights
        with torch.no_grad():
            self.probe_optimizer.apply([weight.value.grad for weight in weights], weights)
        self.probe_mean.update_state(probe_loss)
        self.accuracy.update_state(y, logits)
        self.area.update_state(ops.one_hot(y, 3), logits)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        logits = self.probe(self.encoder(x, training=False))
        self.probe_mean.update_state(self.probe_loss(y, logits))
        self.accuracy.update_state(y, logits)
        self.area.update_state(ops.one_hot(y, 3), logits)
        return {metric.name: metric.result() for metric in self.metrics[1:]}


def get_contrastive() -> Any:
    model = ContrastiveKeras()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    model.compile(keras.optimizers.Adam(schedule), keras.optimizers.Adam(0.02))
    return model
