"""Keras programs drawn from a grammar, trained by `Model.fit` and by `ray_app.keras.fit` from the same weights.

A program is a choice for each key of `GRAMMAR`, of which the first is the simplest.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ray_app.errors import ConfigError
from ray_app.keras import evaluate, fit, predict
from ray_app.task.keras.library import import_keras, program_session
from tests.support.program_search import draw_choices

keras = import_keras()
layers, ops = keras.layers, keras.ops
Program = dict[str, Any]
ROWS, VALIDATION_ROWS = 24, 10
FEATURES, CLASSES = 6, 3
LENGTH, WORDS = 5, 9

REFUSALS = ("is a sum over a batch",)
"""Texts of refusals that are right: the loss of a run depends on no division of a batch."""


class Power(keras.losses.Loss):  # type: ignore[name-defined]
    """A loss of the user's, without `get_config`."""

    def __init__(self, power: float = 2.0) -> None:
        super().__init__()
        self.power = power

    def call(self, y_true: Any, y_pred: Any) -> Any:
        y_true = ops.reshape(ops.cast(y_true, y_pred.dtype), ops.shape(y_pred))
        return ops.mean(ops.abs(y_true - y_pred) ** self.power, -1)


class Exceeding(keras.metrics.Metric):  # type: ignore[name-defined]
    """A metric of sums: the share of outputs above a threshold."""

    def __init__(self, threshold: float = 0.1) -> None:
        super().__init__(name="exceeding")
        self.threshold = threshold
        self.above = self.add_variable((), "zeros", name="above")
        self.values = self.add_variable((), "zeros", name="values")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.above.assign_add(ops.sum(ops.cast(y_pred > self.threshold, "float32")))
        self.values.assign_add(ops.cast(ops.size(y_pred), "float32"))

    def result(self) -> Any:
        return self.above / self.values


class Inner(keras.Model):  # type: ignore[name-defined]
    """A model of the user's around another one, which counts its calls in training and adds a loss."""

    def __init__(self, inner: Any, adds_loss: bool) -> None:
        super().__init__()
        self.inner, self.adds_loss = inner, adds_loss
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.calls.assign_add(1.0)
        outputs = self.inner(x, training=training)
        if self.adds_loss:
            self.add_loss(0.1 * ops.mean(ops.square(keras.tree.flatten(outputs)[0])))
        return outputs


class Decaying(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[name-defined]
    def __call__(self, step: Any) -> Any:
        return 0.05 / (1.0 + ops.cast(step, "float32"))


def distance(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.abs(ops.reshape(ops.cast(y_true, y_pred.dtype), ops.shape(y_pred)) - y_pred), -1)


LOSSES: dict[str, list[Callable[[], Any]]] = {
    "number": [
        lambda: "mse",
        lambda: keras.losses.Huber(delta=0.1),
        lambda: distance,
        lambda: Power(3.0),
        keras.losses.LogCosh,
        lambda: keras.losses.MeanAbsoluteError(reduction="sum"),
        lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        keras.losses.Tversky,
    ],
    "numbers": [
        lambda: "mae",
        lambda: keras.losses.CosineSimilarity(axis=0),
        keras.losses.CosineSimilarity,
        lambda: Power(1.5),
    ],
    "class": [
        lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0),
    ],
    "one hot": [
        lambda: keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        lambda: keras.losses.CategoricalFocalCrossentropy(from_logits=True, gamma=1.0),
        keras.losses.CategoricalHinge,
    ],
    "binary": [
        lambda: keras.losses.BinaryCrossentropy(from_logits=True),
        lambda: keras.losses.BinaryFocalCrossentropy(from_logits=True, apply_class_balancing=True),
        keras.losses.Hinge,
        keras.losses.Dice,
    ],
    "per token": [
        lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1),
    ],
}
"""Losses by the targets; "two" and "two by name" have a number and a class."""

METRICS: dict[str, list[Callable[[], list[Any]]]] = {
    "number": [
        lambda: ["mae"],
        lambda: [keras.metrics.RootMeanSquaredError(), keras.metrics.R2Score()],
        lambda: [distance, Exceeding(0.2)],
    ],
    "numbers": [lambda: ["mse"], lambda: [keras.metrics.CosineSimilarity(axis=1)], lambda: [Exceeding()]],
    "class": [
        lambda: ["accuracy"],
        lambda: [keras.metrics.SparseTopKCategoricalAccuracy(2), "accuracy"],
        lambda: [keras.metrics.SparseCategoricalCrossentropy(from_logits=True)],
    ],
    "one hot": [
        lambda: ["accuracy"],
        lambda: [keras.metrics.F1Score(average="macro"), keras.metrics.OneHotMeanIoU(CLASSES)],
    ],
    "binary": [
        lambda: ["accuracy"],
        lambda: [keras.metrics.AUC(from_logits=True), keras.metrics.Precision(thresholds=0.0)],
        lambda: [keras.metrics.BinaryIoU([1], threshold=0.1), keras.metrics.Recall(thresholds=0.2)],
    ],
    "per token": [lambda: ["accuracy"], lambda: [keras.metrics.SparseCategoricalCrossentropy(from_logits=True)]],
}

OPTIMIZERS: list[Callable[..., Any]] = [
    keras.optimizers.SGD,
    lambda rate, **more: keras.optimizers.SGD(rate, momentum=0.9, nesterov=True, **more),
    lambda rate, **more: keras.optimizers.Adam(rate, epsilon=1e-3, **more),
    lambda rate, **more: keras.optimizers.Adam(rate, epsilon=1e-3, amsgrad=True, **more),
    lambda rate, **more: keras.optimizers.AdamW(rate, epsilon=1e-3, weight_decay=0.2, **more),
    lambda rate, **more: keras.optimizers.RMSprop(rate, epsilon=1e-3, centered=True, momentum=0.5, **more),
    keras.optimizers.Adagrad,
    lambda rate, **more: keras.optimizers.Adadelta(rate, epsilon=1e-3, **more),
    lambda rate, **more: keras.optimizers.Adamax(rate, epsilon=1e-3, **more),
    lambda rate, **more: keras.optimizers.Nadam(rate, epsilon=1e-3, **more),
    keras.optimizers.Ftrl,
    keras.optimizers.Adafactor,
    lambda rate, **more: keras.optimizers.Lamb(rate, epsilon=1e-3, **more),
]
SCHEDULES: list[Callable[[], Any]] = [
    lambda: 0.05,
    lambda: keras.optimizers.schedules.CosineDecay(0.1, 6, warmup_target=0.2, warmup_steps=2),
    lambda: keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5, staircase=True),
    lambda: keras.optimizers.schedules.PiecewiseConstantDecay([1, 3], [0.1, 0.05, 0.01]),
    lambda: keras.optimizers.schedules.PolynomialDecay(0.1, 4, 0.01, power=2.0, cycle=True),
    lambda: keras.optimizers.schedules.InverseTimeDecay(0.1, 2, 0.5),
    Decaying,
]

GRAMMAR: dict[str, list[Any]] = {
    "form": ["functional", "subclass", "adds a loss", "sequential"],
    "inputs": ["features", "float64", "two", "by name", "pixels", "tokens", "masked", "series", "int32", "sequence"],
    "target": ["number", "class", "numbers", "one hot", "binary", "per token", "two", "two by name"],
    # Shape and type of the targets: (rows,), or (rows, 1) where they are one number; as Keras has them, or others.
    "axis": [False, True],
    "target type": ["float32", "float64", "int64", "uint8", "bool"],
    "loss": [0, 1, 2, 3, 4, 5, 6, 7],
    "metrics": ["none", 0, 1, 2, "weighted"],
    "weights": ["none", "rows", "zeros", "column", "classes", "each output"],
    "loss weights": [False, True],
    "body": ["dense", "batch norm", "regularized", "layer norm", "frozen", "spectral", "unit norm", "shared", "nested"],
    "optimizer": list(range(len(OPTIMIZERS))),
    "schedule": list(range(len(SCHEDULES))),
    "update": ["plain", "clipnorm", "clipvalue", "global_clipnorm", "accumulated", "averaged", "undecayed", "scaled"],
    "precision": ["float32", "mixed_bfloat16"],
    "compiled": [{}, {"run_eagerly": True}, {"jit_compile": False}],
    "first epoch": [0, 1],
    "epochs": [2, 1, 4],
    # All rows, or that many in their order.
    "batch": [ROWS, 8, 7],
    "steps": [None, 2, 5],
    "validation": ["none", "data", "split", "weighted", "seldom"],
    "callback": [
        "none",
        "recorder",
        "early",
        "early, best",
        "start late",
        "schedule",
        "plateau",
        "lambda",
        "stop at a step",
        "nan",
        "rate",
        "set back",
    ],
    "then": ["nothing", "evaluate", "predict", "fit", "other rows", "compile", "freeze"],
}
RARE = ("precision", "steps", "body", "compiled")


def draw(seed: int) -> Program:
    """Returns the program of a seed, in which choices fit each other."""
    return adapt(draw_choices(GRAMMAR, seed, RARE))


def adapt(program: Program) -> Program:
    """Returns a program with the choices that Keras itself takes together."""
    changed = dict(program)
    if changed["target"] == "per token" and changed["inputs"] not in ("tokens", "masked", "series", "sequence"):
        changed["inputs"] = "tokens"
    if changed["update"] == "undecayed":
        changed["optimizer"] = 4
    if changed["callback"] in ("schedule", "plateau", "rate"):
        changed["schedule"] = 0
    if changed["validation"] in ("none", "seldom") and changed["callback"] in ("early, best", "plateau", "start late"):
        changed["validation"] = "data"
    if changed["steps"] is not None and changed["batch"] == ROWS:
        changed["steps"] = None
    if changed["steps"] is not None:
        # Otherwise Keras would make a shorter epoch where the rows end.
        changed["epochs"] = 1
    if changed["form"] == "sequential" and changed["target"].startswith("two"):
        changed["form"] = "functional"
    if changed["form"] == "sequential" and changed["inputs"] in ("two", "by name"):
        changed["form"] = "subclass"
    return changed


def has_classes(program: Program) -> bool:
    return program["target"] in ("class", "binary", "one hot")


def make_rows(program: Program, rows: int, part: int) -> tuple[Any, Any, Any]:
    """Returns x, y and the weights of rows."""
    source = np.random.default_rng((program["seed"], part))
    signal = source.normal(size=(rows, FEATURES)).astype("float32")
    noise = source.normal(size=(rows, 4)).astype("float32")
    tokens = np.where(np.arange(LENGTH) < source.integers(1, LENGTH + 1, rows)[:, None], 1, 0)
    tokens = (tokens * source.integers(1, WORDS, (rows, LENGTH))).astype("int32")
    x = {
        "features": signal,
        "float64": signal.astype("float64"),
        "int32": np.rint(signal * 3).astype("int32"),
        "two": [signal, noise],
        "by name": {"b": signal, "a": noise},
        "pixels": (np.abs(signal[:, :, None, None]) * 60).astype("uint8").repeat(5, 2).repeat(3, 3),
        "tokens": tokens,
        "masked": tokens,
        "sequence": tokens,
        "series": source.normal(size=(rows, LENGTH, 2)).astype("float32"),
    }[program["inputs"]]
    number = (signal.sum(1) * 0.3).astype("float32")
    kind = np.argmax(signal[:, :CLASSES], 1)
    type_ = program["target type"]
    integer = type_ if type_ in ("int64", "uint8") else "int32"
    y: Any = {
        "number": number.astype("float64" if type_ == "float64" else "float32"),
        "numbers": signal[:, :CLASSES].astype("float64" if type_ == "float64" else "float32"),
        "class": kind.astype(integer),
        "one hot": np.eye(CLASSES, dtype="float32")[kind],
        "binary": (number > 0).astype(type_),
        "per token": source.integers(0, CLASSES, (rows, LENGTH)).astype(integer),
        "two": [number, kind.astype(integer)],
        "two by name": {"number": number, "kind": kind.astype(integer)},
    }[program["target"]]
    if program["axis"] and program["target"] in ("number", "binary", "class"):
        y = y[:, None]
    weights = source.uniform(0.5, 2.0, rows).astype("float32")
    if program["weights"] == "zeros":
        weights[::3] = 0
    if program["weights"] == "column":
        weights = weights[:, None]
    elif program["target"] == "per token":
        weights = weights[:, None].repeat(LENGTH, 1)
    if program["weights"] == "each output" and program["target"].startswith("two"):
        weights = keras.tree.map_structure(lambda one: weights * source.integers(0, 3, rows).astype("float32"), y)
    return x, y, weights


def make_network(program: Program) -> Any:
    """Returns the network between the inputs and the outputs."""
    inputs: Any
    kind, is_sequence = program["inputs"], program["target"] == "per token"
    if kind in ("two", "by name"):
        inputs = {"b": keras.Input((FEATURES,), name="b"), "a": keras.Input((4,), name="a")}
        inputs = inputs if kind == "by name" else list(inputs.values())
        hidden = layers.Concatenate()(keras.tree.flatten(inputs))
    elif kind == "pixels":
        inputs = keras.Input((FEATURES, 5, 3))
        hidden = layers.Flatten()(layers.Conv2D(2, 2, activation="tanh")(layers.Rescaling(1 / 255)(inputs)))
    elif kind in ("tokens", "masked", "sequence"):
        inputs = keras.Input((LENGTH,), dtype="int32")
        hidden = layers.Embedding(WORDS, 4, mask_zero=kind != "tokens")(inputs)
        if kind == "sequence":
            hidden = layers.Bidirectional(layers.GRU(3, return_sequences=True))(hidden)
        hidden = hidden if is_sequence else layers.GlobalAveragePooling1D()(hidden)
    elif kind == "series":
        inputs = keras.Input((LENGTH, 2))
        hidden = layers.LSTM(4, return_sequences=is_sequence)(inputs)
    else:
        inputs = keras.Input((FEATURES,))
        hidden = inputs
    hidden = add_body(program["body"], hidden)
    outputs: Any
    if program["target"].startswith("two"):
        outputs = {
            "number": layers.Dense(1, name="number", dtype="float32")(hidden),
            "kind": layers.Dense(CLASSES, name="kind", dtype="float32")(hidden),
        }
        outputs = outputs if program["target"] == "two by name" else list(outputs.values())
    else:
        outputs = layers.Dense(1 if program["target"] in ("number", "binary") else CLASSES, dtype="float32")(hidden)
    return keras.Model(inputs, outputs)


def add_body(body: str, hidden: Any) -> Any:
    """Returns hidden values after the layers of a choice."""
    if body == "nested":
        normalization = layers.Normalization(mean=0.1, variance=2.0)
        return keras.Sequential([normalization, layers.Dense(5, activation="relu")], name="nested")(hidden)
    if body == "spectral":
        return layers.SpectralNormalization(layers.Dense(5))(hidden)
    options: dict[str, Any] = {
        "regularized": {"kernel_regularizer": "l2", "activity_regularizer": keras.regularizers.L1(0.01)},
        "unit norm": {"kernel_constraint": keras.constraints.UnitNorm()},
        "frozen": {"trainable": False},
    }.get(body, {})
    dense = layers.Dense(hidden.shape[-1] if body == "shared" else 5, activation="tanh", **options)
    hidden = dense(dense(hidden) if body == "shared" else hidden)
    if body in ("batch norm", "layer norm"):
        hidden = (layers.BatchNormalization if body == "batch norm" else layers.LayerNormalization)()(hidden)
    return hidden


def make_model(program: Program) -> Any:
    """Returns a compiled model with random weights."""
    model = make_network(program)
    if program["form"] == "sequential":
        model = keras.Sequential([keras.Input(model.input_shape[1:], dtype=model.inputs[0].dtype), model])
    elif program["form"] != "functional":
        model = Inner(model, program["form"] == "adds a loss")
        model(keras.tree.map_structure(lambda array: array[:1], make_rows(program, ROWS, 0)[0]))
    update = program["update"]
    more = {
        "clipnorm": {"clipnorm": 0.1},
        "clipvalue": {"clipvalue": 0.05},
        "global_clipnorm": {"global_clipnorm": 0.1},
        "accumulated": {"gradient_accumulation_steps": 2},
        "averaged": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    }.get(update, {})
    optimizer = OPTIMIZERS[program["optimizer"]](SCHEDULES[program["schedule"]](), **more)
    if update == "undecayed":
        optimizer.exclude_from_weight_decay(var_names=["bias"])
    if update == "scaled":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
    model.compile(optimizer=optimizer, **make_losses(program), **program["compiled"])
    return model


def make_losses(program: Program) -> dict[str, Any]:
    """Returns losses, their weights and metrics for `compile`."""

    def choose(options: dict[str, list[Any]], target: str, number: int) -> Any:
        return options[target][number % len(options[target])]()

    target, number = program["target"], program["metrics"]
    name = "weighted_metrics" if number == "weighted" else "metrics"
    number = 0 if number == "weighted" else number
    parts = {"number": "number", "kind": "class"} if target.startswith("two") else {"": target}
    losses = {key: choose(LOSSES, part, program["loss"]) for key, part in parts.items()}
    metrics = {key: choose(METRICS, part, number) for key, part in parts.items()} if number != "none" else None
    if "" in parts:
        compiled = {"loss": losses[""], name: metrics and metrics[""]}
        return compiled | ({"loss_weights": 0.5} if program["loss weights"] else {})
    is_list = target == "two"
    compiled = {"loss": list(losses.values()) if is_list else losses}
    if program["loss weights"]:
        compiled["loss_weights"] = [0.3, 2.0] if is_list else {"number": 0.3, "kind": 2.0}
    return compiled | {name: metrics and (list(metrics.values()) if is_list else metrics)}


class CallbackRecorder(keras.callbacks.Callback):  # type: ignore[name-defined]
    """Records what callbacks get, and the sum of the weights at the end of each epoch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.records: list[Any] = []
        self.kind = kind

    def on_train_begin(self, logs: Any = None) -> None:
        self.records.append(["begin", sorted(self.params), dict(logs or {})])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.records.append([batch, dict(logs or {})])
        if len(self.records) == 4 and self.kind == "stop at a step":
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        weights = float(sum(np.abs(np.asarray(w, "float64")).sum() for w in self.model.get_weights()))
        self.records.append([epoch, weights, dict(logs or {}), float(self.model.optimizer.learning_rate)])
        if self.kind == "rate":
            self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) / 2
        elif self.kind == "set back":
            self.model.set_weights([0.5 * weight for weight in self.model.get_weights()])

    def on_train_end(self, logs: Any = None) -> None:
        self.records.append(["end", dict(logs or {})])


def make_callbacks(program: Program) -> tuple[list[Any], list[Any]]:
    """Returns callbacks, and a list that they fill with what they get."""
    kinds, kind = keras.callbacks, program["callback"]
    if kind in ("recorder", "stop at a step", "rate", "set back"):
        recorder = CallbackRecorder(kind)
        return [recorder], recorder.records
    records: list[Any] = []
    return {
        "none": [],
        "early": [kinds.EarlyStopping("loss", patience=1, min_delta=0.05)],
        "early, best": [kinds.EarlyStopping("val_loss", patience=1, restore_best_weights=True)],
        "start late": [kinds.EarlyStopping("val_loss", baseline=0.1, start_from_epoch=1)],
        "schedule": [kinds.LearningRateScheduler(lambda epoch, rate: rate * 0.5)],
        "plateau": [kinds.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.5)],
        "lambda": [kinds.LambdaCallback(on_epoch_end=lambda epoch, logs: records.append([epoch, dict(logs)]))],
        "nan": [kinds.TerminateOnNaN()],
    }[kind], records


def fit_options(program: Program) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """Returns x and y, and the other arguments of `fit` without callbacks."""
    x, y, weights = make_rows(program, ROWS, 0)
    x_other, y_other, other_weights = make_rows(program, VALIDATION_ROWS, 1)
    first = program["first epoch"]
    options: dict[str, Any] = {"epochs": program["epochs"] + first, "batch_size": program["batch"], "verbose": 0}
    options |= {"initial_epoch": first}
    if program["batch"] != ROWS:
        options |= {"shuffle": False, "steps_per_epoch": program["steps"]}
    if program["weights"] == "classes":
        options["class_weight"] = {0: 0.5, 1: 2.0}
    elif program["weights"] != "none":
        options["sample_weight"] = weights
    validation = program["validation"]
    if validation == "split":
        options["validation_split"] = 0.25
    elif validation != "none":
        rows = (x_other, y_other, other_weights) if validation == "weighted" else (x_other, y_other)
        options |= {"validation_data": rows, "validation_freq": 2 if validation == "seldom" else 1}
    return (x, y), options


@contextmanager
def precision_of(program: Program) -> Iterator[None]:
    """Sets the policy of a program in a block."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(program["precision"])
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def make_pair(program: Program) -> list[Any]:
    """Returns two models with the same names and weights."""
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(program["seed"])
        with program_session(None):
            models.append(make_model(program))
    models[1].set_weights(models[0].get_weights())
    return models


def difference(program: Program) -> str:
    """Returns how the two trainings of a program differ; empty if they do not, or if Keras refuses it, too."""
    program = adapt(program)
    with precision_of(program), tempfile.TemporaryDirectory() as folder:
        try:
            theirs, ours = make_pair(program)
            theirs_values = _train(program, theirs, theirs.fit)
        except Exception:
            return ""
        fields = {"run.storage_path": folder, "tracking.enabled": False}
        try:
            ours_values = _train(
                program, ours, lambda *arguments, **options: fit(ours, *arguments, fields=fields, **options)
            )
        except ConfigError as error:
            return "" if any(text in str(error) for text in REFUSALS) else f"refused: {error}"
        except Exception as error:
            return f"crash: {type(error).__name__}: {error}"
    return compare_values(ours_values, theirs_values, 0.03 if program["precision"] != "float32" else 1e-3)


def _train(program: Program, model: Any, fit_model: Callable[..., Any]) -> dict[str, Any]:
    """Trains a model, and returns everything that the user sees of it."""
    rows, options = fit_options(program)
    callbacks, records = make_callbacks(program)
    history = fit_model(*rows, callbacks=callbacks, **options)
    values: dict[str, Any] = {"history": dict(history.history), "epoch": list(history.epoch), "callback": records}
    x, y, _ = make_rows(program, VALIDATION_ROWS, 2)
    # The run has no checkpoint with the average of the optimizer, with which Keras ends training.
    is_ours = hasattr(history, "result") and program["update"] != "averaged"
    if program["then"] == "evaluate":
        options = {"batch_size": 4, "verbose": 0, "return_dict": True}
        values["evaluate"] = evaluate(history, x, y, **options) if is_ours else model.evaluate(x, y, **options)
    elif program["then"] == "predict":
        values["predict"] = predict(history, x) if is_ours else model.predict(x, verbose=0)
    elif program["then"] != "nothing":
        if program["then"] == "other rows":
            rows = make_rows(program, ROWS, 3)[:2]
        elif program["then"] in ("compile", "freeze"):
            network = model if program["form"] == "functional" else model.layers[-1]
            network.layers[-1].trainable = program["then"] == "compile"
            with program_session(None):
                model.compile("adam", **make_losses(program))
        callbacks, values["callback again"] = make_callbacks(program)
        values["history again"] = dict(fit_model(*rows, callbacks=callbacks, **options).history)
        values["iterations"] = int(model.optimizer.iterations)
    values["weights"] = model.get_weights()
    for course in (values["history"], values.get("history again", {})):
        if not np.isfinite(course.get("loss", 0)).all():
            # Keras makes the step that `TerminateOnNaN` ends training at, and goes on with weights that are no numbers.
            return {name: len(numbers) for name, numbers in course.items()}
    return values


def compare_values(ours: Any, theirs: Any, tolerance: float, path: str = "") -> str:
    """Returns the first difference of two structures; empty if there is none."""
    if isinstance(theirs, dict):
        if list(ours) != list(theirs):
            return f"{path} has {list(ours)}, of Keras {list(theirs)}"
        pairs = [(f"{path} {key}", ours[key], value) for key, value in theirs.items()]
    elif isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            return f"{path} has {len(ours)} values, of Keras {len(theirs)}"
        pairs = [(f"{path} {number}", a, b) for number, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    elif isinstance(theirs, str):
        return "" if ours == theirs else f"{path} is {ours}, of Keras {theirs}"
    else:
        one, other = np.asarray(ours, "float64"), np.asarray(theirs, "float64")
        if one.shape != other.shape or not np.allclose(one, other, tolerance, tolerance, equal_nan=True):
            text = f"{ours}, of Keras {theirs}" if one.ndim == 0 else f"of {one.shape}, of Keras {other.shape}"
            return f"{path} is {text}"
        return ""
    return next((text for name, a, b in pairs if (text := compare_values(a, b, tolerance, name))), "")
