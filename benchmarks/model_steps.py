"""Steps of larger models than `small_step.py` has, each against a bare loop over the same task, and of the language
model of `conf/language_model.yaml` also against the `Trainer` of Hugging Face.

The bare loop has the rows in memory, the kernels and the fused optimizer of ours; it records nothing. All sides train
in one process of one thread. The models: a GRU of 2 layers, a transformer of 6 layers with width 128, both with rows of
128 tokens, and the default network of tables with 40 columns, each with batch 32.

python benchmarks/model_steps.py                          # needs a quiet machine; about 12 minutes
python benchmarks/model_steps.py --model gru --rounds 1
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from benchmarks.harness import ROOT, Sample, Stopwatch, alternate, report, run_side
from ray_app.task.tabular import TabularClassification

_TOKENS, _COLUMNS = 128, 40
_VOCABULARY, _WIDTH = 256, 128


@dataclass(frozen=True)
class Shape:
    """Size of a measurement: rows of a batch, steps before it, and steps that are measured."""

    batch: int
    warm_up: int
    steps: int


SHAPES = {
    "gru": Shape(32, 5, 30),
    "transformer": Shape(32, 2, 12),
    "table": Shape(32, 100, 1200),
    "language_model": Shape(16, 5, 25),
}


class Gru(nn.Module):
    """A language model of a GRU of 2 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.layers = nn.GRU(_WIDTH, _WIDTH, 2, batch_first=True)
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the scores of the next tokens, (rows, tokens, vocabulary)."""
        return self.head(self.layers(self.embedding(tokens))[0])


class Transformer(nn.Module):
    """A language model of 6 transformer layers of width 128, with rows of `_TOKENS` tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(_VOCABULARY, _WIDTH), nn.Embedding(_TOKENS, _WIDTH)
        layer = nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the scores of the next tokens, (rows, tokens, vocabulary)."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        inputs = self.embedding(tokens) + self.positions.weight[:length]
        return self.head(self.layers(inputs, mask=mask, is_causal=True))


class Table(TabularClassification):
    """A classification with the default network, which does not choose the batch."""

    def configuration_fields(self) -> dict[str, Any]:
        """Returns no fields."""
        return {}


def make_data(folder: Path) -> None:
    """Makes the data sets `folder/tokens` and `folder/table`."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, _VOCABULARY, (2048, _TOKENS), dtype=np.int32)
    numbers = generator.normal(size=(20_000, _COLUMNS)).astype(np.float32)
    label = (numbers[:, :5].sum(1) > 0).astype(np.int64)
    tables = {
        "tokens": pa.table({"tokens": pa.FixedSizeListArray.from_arrays(tokens.ravel(), _TOKENS)}),
        "table": pa.table({f"c{i}": numbers[:, i] for i in range(_COLUMNS)} | {"label": label}),
    }
    for name, table in tables.items():
        (folder / name).mkdir()
        pq.write_table(table, folder / name / "rows.parquet")


def make_config(model: str, folder: Path) -> Any:
    """Returns the configuration of a model's training in this process."""
    from ray_app import load_config

    shape, class_path = SHAPES[model], "ray_app.task.language_model.CausalLanguageModel"
    task: dict[str, Any] = {"model": {"class_path": f"benchmarks.model_steps.{model.title()}"}}
    fields: dict[str, Any] = {"optimizer__class_path": "torch.optim.AdamW", "optimizer__init_args": {"lr": 1e-3}}
    if model == "table":
        class_path, task = "benchmarks.model_steps.Table", {"standardize": False}
    base = ROOT / "conf" / "language_model.yaml"
    if model != "language_model":
        base = folder / "base.yaml"
        base.write_text("{}")
        fields |= {"task__class_path": class_path, "task__init_args": task}
    return load_config(
        base,
        run__storage_path=str(folder / "runs"),
        run__name=f"run-{time.time_ns()}",
        data__path=str(folder / ("table" if model == "table" else "tokens")),
        data__eval_path=None,
        data__global_batch_size=shape.batch,
        data__cache="memory",
        train__strategy="single",
        tracking__enabled=False,
        train__epochs=100,
        train__max_steps=shape.warm_up + shape.steps,
        **({} if model == "language_model" else fields),
    )


def batches_of(job: Any, batch: int) -> Iterator[dict[str, Tensor]]:
    """Yields the batches of all rows again and again, presliced."""
    from ray_app.data.reader import fetch_in_process, load_all
    from ray_app.task.ragged import to_batch

    arrays = load_all(fetch_in_process, job.source).arrays
    rows = len(next(iter(arrays.values())))
    batches = [to_batch(arrays, slice(low, low + batch)) for low in range(0, rows - batch + 1, batch)]
    while True:
        yield from batches


def prepared_job(model: str, folder: Path) -> Any:
    """Returns the prepared run of a model, with the threads and kernels of ours in this process."""
    from ray_app.preflight.prepare import prepare
    from ray_app.process import keep_freed_memory
    from ray_app.task.environment import set_threads_and_kernels

    job = prepare(make_config(model, folder)).job
    keep_freed_memory()
    set_threads_and_kernels(1, deterministic=True)
    return job


def train_barely(model: str, folder: Path) -> None:
    """Trains a model in a bare loop."""
    from ray_app.task.losses import Losses

    shape, job = SHAPES[model], prepared_job(model, folder)
    network = job.task.build_model().train()
    optimizer: Any = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)
    is_language_model = model == "language_model"
    total = shape.warm_up + shape.steps
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total + 1) if is_language_model else None
    for step, batch in enumerate(islice(batches_of(job, shape.batch), total)):
        if step == shape.warm_up:
            began = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        losses = Losses.of(job.task.training_loss(network, batch))
        loss = losses.values.sum() / losses.row_weights.sum()
        loss.backward()
        if schedule is not None:
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        loss.item()
    print_step_ms(shape, *began)


def train_with_trainer(folder: Path) -> None:
    """Trains the language model with the `Trainer` of Hugging Face."""
    # `transformers` would take the folder `datasets` of a checkout for the library of this name.
    sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT))]
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    shape, job = SHAPES["language_model"], prepared_job("language_model", folder)
    began: list[float] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == shape.warm_up:
                began.extend((time.perf_counter(), time.process_time()))
            if state.global_step == shape.warm_up + shape.steps:
                print_step_ms(shape, *began)

    rows = next(batches_of(job, 2048))["tokens"].long()
    arguments = TrainingArguments(
        str(folder / "trainer"),
        per_device_train_batch_size=shape.batch,
        max_steps=shape.warm_up + shape.steps,
        learning_rate=3e-3,
        weight_decay=0.1,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=10,
        disable_tqdm=True,
    )
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(job.task.build_model(), arguments, train_dataset=data, callbacks=[Watch()])
    # Its lines would follow the result.
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def print_step_ms(shape: Shape, wall: float, cpu: float) -> None:
    """Prints the milliseconds of a step since the warm-up."""
    print((time.perf_counter() - wall) / shape.steps * 1e3, (time.process_time() - cpu) / shape.steps * 1e3)


def train_ours(model: str, folder: Path) -> None:
    """Trains a model with the application in this process."""
    from rich.console import Console

    from ray_app import run_training
    from ray_app.driver.run import Faults
    from ray_app.process import keep_freed_memory
    from ray_app.train.job import Hooks

    keep_freed_memory()
    shape = SHAPES[model]
    watch = Stopwatch(str(folder / f"watch-{time.time_ns()}"), shape.warm_up, shape.warm_up + shape.steps)
    run_training(make_config(model, folder), Console(quiet=True), Faults(train=Hooks(after_step=watch)))
    sample = watch.sample()
    print(sample.wall_ms, sample.cpu_ms)


def main() -> None:
    """Measures all sides."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=SHAPES, action="append")
    parser.add_argument("--side", choices=("bare", "ours", "trainer"))
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.side:
        [model] = options.model
        if options.side == "trainer":
            train_with_trainer(options.folder)
        else:
            (train_ours if options.side == "ours" else train_barely)(model, options.folder)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder)
        for model in options.model or SHAPES:
            command = [sys.executable, __file__, "--folder", name, "--model", model, "--side"]
            names = {"bare loop": "bare", "ours": "ours"}
            if model == "language_model":
                names["Trainer"] = "trainer"
            sides: dict[str, Callable[[], Sample]] = {
                name: partial(run_side, [*command, side]) for name, side in names.items()
            }
            samples = alternate(sides, options.rounds)
            bar = 1 / 0.95 if model == "language_model" else 1.1
            report(f"Step of {model}, batch {SHAPES[model].batch}, one thread", samples, {"ours": bar})
            if "Trainer" in samples:
                report("Against Trainer", {side: samples[side] for side in ("Trainer", "ours")}, {"ours": 1 / 1.05})


if __name__ == "__main__":
    main()
