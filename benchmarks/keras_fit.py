"""A step of a compiled Keras model here, and in `Model.fit`: the dense network of Keras' guide to several GPUs.

One process of one thread, the 784-256-256-10 network with Adam and an accuracy, batch 32, MNIST-shaped rows.
`Model.fit` has the rows in memory; here they are read from Parquet, and the run records its steps and writes
checkpoints. `ray_app.keras.fit` gets the arrays of `Model.fit`, `KerasTask` a configuration and ingested rows.

python benchmarks/keras_fit.py            # needs a quiet machine; about 8 minutes
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.harness import ROOT, Sample, Stopwatch, alternate, ingest_rows, report, run_side

ROWS, BATCH = (12_800, 32) if "--tiny" not in sys.argv else (128, 32)
EPOCHS = 6
"""The first one is the warm-up."""
KERAS = ROOT / ".venv-keras" / "bin" / "python"
"""An environment with TensorFlow, see benchmarks/requirements.txt."""


def make_rows() -> tuple[np.ndarray, np.ndarray]:
    """Returns pixels (rows, 28, 28) uint8 and labels (rows,) int64."""
    generator = np.random.default_rng(0)
    return generator.integers(0, 256, (ROWS, 28, 28), dtype=np.uint8), generator.integers(0, 10, ROWS)


def get_dense() -> Any:
    """Returns the compiled model of the guide."""
    import keras
    from keras import layers

    inputs = keras.Input(shape=(784,))
    x = layers.Dense(256, activation="relu")(inputs)
    x = layers.Dense(256, activation="relu")(x)
    model = keras.Model(inputs, layers.Dense(10)(x))
    model.compile(
        optimizer=keras.optimizers.Adam(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return model


def fit(backend: str) -> None:
    """Runs `Model.fit` on a backend."""
    os.environ["KERAS_BACKEND"] = backend
    if backend == "torch":
        import torch

        torch.set_num_threads(1)
    else:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    pixels, labels = make_rows()
    x, model = pixels.reshape(ROWS, 784).astype("float32") / 255, get_dense()
    model.fit(x, labels, batch_size=BATCH, epochs=1, verbose=0)
    wall, cpu = time.perf_counter(), time.process_time()
    model.fit(x, labels, batch_size=BATCH, epochs=EPOCHS - 1, verbose=0)
    steps = (EPOCHS - 1) * ROWS // BATCH
    print((time.perf_counter() - wall) / steps * 1e3, (time.process_time() - cpu) / steps * 1e3)


def fit_as_run() -> None:
    """Runs `ray_app.keras.fit` in this process; a run of one epoch is taken off, with what begins and ends each run."""
    import torch

    import ray_app.keras

    torch.set_num_threads(1)
    pixels, labels = make_rows()
    x = pixels.reshape(ROWS, 784).astype("float32") / 255
    with tempfile.TemporaryDirectory() as folder:
        fields = {"run.storage_path": folder, "tracking.enabled": False, "data.cache": "memory"}
        walls, cpus = [], []
        # The first one is the warm-up.
        for epochs in (1, 1, EPOCHS):
            wall, cpu = time.perf_counter(), time.process_time()
            ray_app.keras.fit(get_dense(), x, labels, batch_size=BATCH, epochs=epochs, verbose=0, fields=fields)
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
    steps = (EPOCHS - 1) * ROWS // BATCH
    print((walls[2] - walls[1]) / steps * 1e3, (cpus[2] - cpus[1]) / steps * 1e3)


def ours(rows: str) -> None:
    """Trains the model by a configuration in this process."""
    from rich.console import Console

    from ray_app import run_training
    from ray_app.config.config import Config
    from ray_app.driver.run import Faults
    from ray_app.train.job import Hooks

    with tempfile.TemporaryDirectory() as folder:
        watch = Stopwatch(f"{folder}/watch", ROWS // BATCH, EPOCHS * ROWS // BATCH)
        init_args = {"model": "benchmarks.keras_fit.get_dense", "inputs": "image", "target": "label", "scale": 255}
        config = Config().replace(
            task={"class_path": "ray_app.task.keras.KerasTask", "init_args": init_args},
            data__path=rows,
            data__global_batch_size=BATCH,
            data__cache="memory",
            scaling__max_workers=1,
            train__strategy="single",
            train__epochs=EPOCHS,
            tracking__enabled=False,
            run__storage_path=folder,
        )
        run_training(config, Console(quiet=True), Faults(train=Hooks(after_step=watch)))
        sample = watch.sample()
    print(sample.wall_ms, sample.cpu_ms)


def main() -> None:
    """Measures all sides."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="few rows: shows that it runs")
    parser.add_argument("--side", choices=("torch", "tensorflow", "fit", "ours"))
    parser.add_argument("--rows", help="folder of the rows of the side ours")
    options = parser.parse_args()
    if options.side in ("torch", "tensorflow"):
        fit(options.side)
        return
    if options.side:
        ours(options.rows) if options.side == "ours" else fit_as_run()
        return
    tiny = ["--tiny"] if options.tiny else []
    with tempfile.TemporaryDirectory() as folder:
        ingest_rows(Path(folder), *make_rows())
        command = [sys.executable, __file__, *tiny, "--side"]
        sides: dict[str, Callable[[], Sample]] = {
            "Model.fit, torch": partial(run_side, [*command, "torch"]),
            "ray_app.keras.fit": partial(run_side, [*command, "fit"]),
            "KerasTask": partial(run_side, [*command, "ours", "--rows", f"{folder}/rows"]),
        }
        if KERAS.exists():
            sides["Model.fit, TensorFlow"] = partial(run_side, [str(KERAS), *command[1:], "tensorflow"])
        else:
            print(f"TensorFlow is left out: {KERAS} is not there, see benchmarks/requirements.txt", file=sys.stderr)
        samples = alternate(sides, options.rounds)
    report("Time per step, 784-256-256-10, batch 32, one thread", samples, {"ray_app.keras.fit": 0.9, "KerasTask": 0.9})


if __name__ == "__main__":
    main()
