"""A small network shows every microsecond of a framework: a step of this application, a bare loop, Lightning,
Accelerate and Keras.

One worker of one thread, the 784-256-256-10 network, batch 32, 50,000 MNIST-shaped rows from Parquet, fused Adam,
tracking on.

python benchmarks/small_step.py            # needs a quiet machine; about 8 minutes
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.harness import ROOT, Sample, Stopwatch, alternate, ingest_rows, report, run_side, scaled

ROWS, BATCH = scaled(50_000), 32
WARM_UP = -(-ROWS // BATCH)
STEPS = 3 * WARM_UP
_EVALUATED_TOGETHER = 256
KERAS = ROOT / ".venv-keras" / "bin" / "python"


def make_rows() -> tuple[np.ndarray, np.ndarray]:
    """Returns pixels (rows, 28, 28) uint8 and labels (rows,) int64 that can be learned a little."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 10, ROWS)
    pixels = generator.integers(0, 128, (ROWS, 28, 28), dtype=np.uint8)
    pixels[np.arange(ROWS), labels] += 100
    return pixels, labels


def make_parts() -> tuple[Any, Any, list[Any]]:
    """Returns model, optimizer and all batches, presliced, with one thread."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    pixels, labels = make_rows()
    features = torch.from_numpy(pixels).reshape(ROWS, 784).float() / 255
    batches = list(zip(features.split(BATCH), torch.from_numpy(labels).split(BATCH), strict=True))
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3, fused=True), batches


def train_plainly(model: Any, optimizer: Any, batches: list[Any], backward: Callable[[Any], None]) -> None:
    """Trains in a bare loop over presliced tensors."""
    from torch import nn

    step = 0
    while step < STEPS:
        for x, y in batches:
            if step == WARM_UP:
                wall, cpu = time.perf_counter(), time.process_time()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            backward(loss)
            optimizer.step()
            loss.item()
            step += 1
            if step == STEPS:
                break
    print_step_ms(wall, cpu)


def bare() -> None:
    """Runs the bare loop, the base of all ratios."""
    from torch import Tensor

    train_plainly(*make_parts(), Tensor.backward)


def accelerated() -> None:
    """Runs Accelerate's loop over the same tensors, without records."""
    from accelerate import Accelerator  # type: ignore[import-untyped]

    accelerator = Accelerator(cpu=True)
    bare_model, bare_optimizer, batches = make_parts()
    model, optimizer = accelerator.prepare(bare_model, bare_optimizer)
    train_plainly(model, optimizer, batches, accelerator.backward)


def lightning() -> None:
    """Runs Lightning's `fit` over the same tensors, without logger, checkpoints and bars."""
    import pytorch_lightning as pl
    from torch import nn
    from torch.utils.data import DataLoader

    model, optimizer, batches = make_parts()
    began: list[float] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, number: int) -> Any:
            if self.global_step == WARM_UP:
                began.extend((time.perf_counter(), time.process_time()))
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return optimizer

    quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=STEPS, max_epochs=-1, **quiet)  # type: ignore[arg-type]
    trainer.fit(Module(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    print_step_ms(*began)


def print_step_ms(wall: float, cpu: float) -> None:
    """Prints the milliseconds of a step since the warm-up."""
    steps = STEPS - WARM_UP
    print((time.perf_counter() - wall) / steps * 1e3, (time.process_time() - cpu) / steps * 1e3)


def keras(distributed: bool = False) -> None:
    """Runs Keras `fit` of the same network on `tf.data`, alone or under `MirroredStrategy`."""
    from contextlib import nullcontext

    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    pixels, labels = make_rows()
    data = tf.data.Dataset.from_tensor_slices((pixels.reshape(ROWS, 784).astype("float32") / 255, labels)).cache()
    data = data.shuffle(10_000).batch(BATCH).prefetch(2)
    layers = tf.keras.layers
    with tf.distribute.MirroredStrategy().scope() if distributed else nullcontext():
        model = tf.keras.Sequential(
            [layers.Input((784,)), *(layers.Dense(256, "relu") for _ in range(2)), layers.Dense(10)]
        )
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.Adam(1e-3), loss)
    model.fit(data, epochs=1, verbose=0)
    wall, cpu = time.perf_counter(), time.process_time()
    model.fit(data, epochs=2, verbose=0)
    steps = 2 * -(-ROWS // BATCH)
    print((time.perf_counter() - wall) / steps * 1e3, (time.process_time() - cpu) / steps * 1e3)


class Ours:
    """Runs of the application on one local Ray cluster."""

    def __init__(self, folder: Path) -> None:
        ingest_rows(folder, *make_rows())
        self._folder, self._number = folder, 0

    def measure(self, cache: str, tracking: bool = True) -> Sample:
        """Trains and returns the time of a step in the steady state, epoch ends included."""
        from rich.console import Console

        from ray_app import load_config, run_training
        from ray_app.driver.run import Faults
        from ray_app.train.job import Hooks

        self._number += 1
        watch = Stopwatch(str(self._folder / f"watch-{self._number}"), WARM_UP, STEPS)
        config = load_config(
            ROOT / "conf" / "mnist_dense.yaml",
            run__storage_path=str(self._folder / "runs"),
            run__name=f"run-{self._number}",
            data__path=str(self._folder / "rows"),
            data__eval_path=None,
            data__cache=cache,
            # No other side computes the accuracy in training.
            task__init_args={"features": ["image"], "scale": 255, "train_accuracy": False},
            train__epochs=STEPS * BATCH // ROWS,
            train__max_steps=STEPS,
            tracking__enabled=tracking,
        )
        run_training(config, Console(quiet=True), Faults(train=Hooks(after_step=watch)))
        return watch.sample()


def measure_evaluation(ours: bool) -> None:
    """Measures a pass over all rows: a bare forward loop that counts correct predictions, or the evaluator's pass, in a
    process set up like its actor.
    """
    import torch

    from ray_app.process import keep_freed_memory
    from ray_app.task.metrics import combine, score
    from ray_app.task.tabular import TabularClassification

    torch.set_num_threads(1)
    pixels, labels = make_rows()
    arrays = {"features": pixels.reshape(ROWS, 784).astype("float32") / 255, "label": labels}
    task = TabularClassification(hidden=[256, 256], num_classes=10)
    task.inputs, task.classes = 784, [str(i) for i in range(10)]
    model = task.build_model().eval()
    tensors = [torch.from_numpy(arrays[name]).split(_EVALUATED_TOGETHER) for name in ("features", "label")]

    def bare_pass() -> None:
        right = 0
        with torch.inference_mode():
            for x, y in zip(*tensors, strict=True):
                right += int((model(x).argmax(1) == y).sum())

    def our_pass() -> None:
        combine(task, score(task, model, arrays, _EVALUATED_TOGETHER, torch.device("cpu")))

    if ours:
        keep_freed_memory()
    run = our_pass if ours else bare_pass
    run()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(10):
        run()
    print((time.perf_counter() - wall) * 100, (time.process_time() - cpu) * 100)


def main() -> None:
    """Measures all sides."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    alone: dict[str, Callable[[], None]] = {
        "bare": bare,
        "lightning": lightning,
        "accelerate": accelerated,
        "keras": keras,
        "mirrored": lambda: keras(distributed=True),
        "forward": lambda: measure_evaluation(ours=False),
        "evaluator": lambda: measure_evaluation(ours=True),
    }
    parser.add_argument("--side", choices=alone)
    options = parser.parse_args()
    if options.side:
        alone[options.side]()
        return
    passes = {"bare forward loop": "forward", "evaluator": "evaluator"}
    samples = alternate(
        {name: partial(run_side, [sys.executable, __file__, "--side", side]) for name, side in passes.items()},
        options.rounds,
    )
    report("Evaluation of 50,000 rows, batch 256", samples, {"evaluator": 1.15})
    import logging

    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(Path(folder))
        sides = {
            "bare loop": lambda: run_side([sys.executable, __file__, "--side", "bare"]),
            "cache: memory": lambda: ours.measure("memory"),
            "cache: none": lambda: ours.measure("none"),
            "Lightning": lambda: run_side([sys.executable, __file__, "--side", "lightning"]),
            "Accelerate": lambda: run_side([sys.executable, __file__, "--side", "accelerate"]),
        }
        if KERAS.exists():
            sides["Keras fit"] = lambda: run_side([str(KERAS), __file__, "--side", "keras"])
            sides["Keras MirroredStrategy"] = lambda: run_side([str(KERAS), __file__, "--side", "mirrored"])
        else:
            print(f"Keras is left out: {KERAS} is not there, see benchmarks/requirements.txt", file=sys.stderr)
        samples = alternate(sides, options.rounds)
    report("Time per step, 784-256-256-10, batch 32, one thread", samples, {"cache: memory": 1.15, "cache: none": 1.6})
    for name, bar in {"Lightning": 0.55, "Accelerate": 0.9, "Keras fit": 0.5, "Keras MirroredStrategy": 0.5}.items():
        if name in samples:
            report(f"Against {name}", {side: samples[side] for side in (name, "cache: memory")}, {"cache: memory": bar})
    ray.shutdown()


if __name__ == "__main__":
    main()
