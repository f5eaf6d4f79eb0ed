"""Training programs drawn from a grammar, as configurations of `ray_app` and as the plain PyTorch loops they replace.

A program is a choice for each key of `GRAMMAR`, of which the first is the simplest. `simplest_failing` shrinks one. Its
`form` is a `ModuleTask`, a `Task` with a loss for each row, or a loop of the user's own.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
import torchmetrics
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ray_app.data.arrays import to_column
from ray_app.plan.order import Cursor, Plan
from ray_app.task.base import Batch, Task
from ray_app.task.losses import Losses
from ray_app.task.user_loop import Loop
from tests.support import generated_models
from tests.support.generated_models import CLASSES, FEATURES, POSITIONS, WITH_PARAMETERS, Model, Outputs

Program = dict[str, Any]
ROWS, EVAL_ROWS = 46, 14
OF_WHOLE_BATCH = ("batch norm", "spectral norm", "chosen")
"""Bodies that compute something else with the rows of a logical worker than with those of the whole batch."""

GRAMMAR: dict[str, list[Any]] = {
    "form": ["module", "task", "loop"],
    # What the loss compares: outputs and target of these shapes.
    "target": ["number", "class", "numbers", "binary", "labels", "place classes", "soft"],
    "loss": [0, 1, 2, 3, 4],
    "inputs": ["one", "two", "by name", "integers", "lists"],
    "body": [
        *("linear", "layers", "tied", "batch norm", "counter", "buffer", "frozen", "unused", "gru", "packed", "bag"),
        *generated_models.LAYERS,
    ],
    "outputs": ["tensor", "dict", "object"],
    "optimizer": [
        ("SGD", {"lr": 0.05}),
        ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
        ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
        ("Adam", {"lr": 0.01, "eps": 1e-4}),
        ("AdamW", {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1}),
        ("Adam", {"lr": 0.01, "eps": 1e-4, "amsgrad": True}),
        ("RMSprop", {"lr": 0.005, "eps": 1e-3, "centered": True}),
        ("Adagrad", {"lr": 0.05, "eps": 1e-3}),
        ("Adadelta", {"lr": 1.0, "eps": 1e-3}),
        ("Adamax", {"lr": 0.01, "eps": 1e-3}),
        ("NAdam", {"lr": 0.01, "eps": 1e-3}),
        ("RAdam", {"lr": 0.01, "eps": 1e-3}),
        ("ASGD", {"lr": 0.05}),
        ("Adafactor", {"lr": 0.01}),
    ],
    "groups": [None, "decay", "rate"],
    "schedule": [
        None,
        ("StepLR", {"step_size": 2, "gamma": 0.5}),
        ("CosineAnnealingLR", {"T_max": 6}),
        ("LinearLR", {"start_factor": 0.1, "total_iters": 4}),
        ("OneCycleLR", {"max_lr": 0.02, "cycle_momentum": False}),
        ("ExponentialLR", {"gamma": 0.8}),
        ("CosineAnnealingWarmRestarts", {"T_0": 3}),
        ("PolynomialLR", {"total_iters": 5}),
        ("MultiStepLR", {"milestones": [1, 3], "gamma": 0.3}),
        ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.05, "step_size_up": 2, "cycle_momentum": False}),
    ],
    "batch": [12, 16, 46, 8],
    "logical_workers": [1, 2, 4],
    "last_batch": ["keep", "drop"],
    "clip": [None, 0.5],
    "epochs": [1, 2],
    "precision": ["fp32", "bf16"],
    "ema": [None, 0.9],
    "metric": [False, True],
    # A column with the weight of each row, of a task and a loop.
    "weights": [False, True],
    # Two optimizers that take turns: the consecutive steps of the first one, 0 with one optimizer.
    "turns": [0, 1, 2],
}

LOSSES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "number": [
        ("MSELoss", {}),
        ("L1Loss", {}),
        ("HuberLoss", {"delta": 0.5}),
        ("SmoothL1Loss", {"beta": 0.5}),
        ("TrainedVariance", {}),
    ],
    "numbers": [
        ("MSELoss", {}),
        ("L1Loss", {}),
        ("HuberLoss", {"delta": 0.5}),
        ("PoissonNLLLoss", {"log_input": True}),
        ("LogCosh", {"scale": 2.0}),
    ],
    "class": [
        ("CrossEntropyLoss", {}),
        ("CrossEntropyLoss", {"label_smoothing": 0.1}),
        ("CrossEntropyLoss", {"weight": [1.0, 2.0, 0.5, 3.0]}),
        ("CrossEntropyLoss", {"ignore_index": 1, "weight": [1.0, 2.0, 0.5, 3.0], "label_smoothing": 0.2}),
        ("Centres", {}),
    ],
    "place classes": [
        ("CrossEntropyLoss", {}),
        ("CrossEntropyLoss", {"ignore_index": 0}),
        ("CrossEntropyLoss", {"weight": [1.0, 2.0, 0.5, 3.0]}),
        ("CrossEntropyLoss", {"ignore_index": 2, "label_smoothing": 0.2}),
    ],
    "binary": [
        ("BCEWithLogitsLoss", {}),
        ("BCEWithLogitsLoss", {"pos_weight": [3.0]}),
        ("SoftMarginLoss", {}),
        ("HingeEmbeddingLoss", {}),
    ],
    "labels": [
        ("BCEWithLogitsLoss", {}),
        ("BCEWithLogitsLoss", {"pos_weight": [1.0, 2.0, 3.0, 0.5]}),
        ("MultiLabelSoftMarginLoss", {}),
        ("MultiLabelSoftMarginLoss", {"weight": [1.0, 2.0, 3.0, 0.5]}),
    ],
    "soft": [
        ("CrossEntropyLoss", {}),
        ("CrossEntropyLoss", {"weight": [1.0, 2.0, 0.5, 3.0]}),
        ("KLDivLoss", {"reduction": "batchmean"}),
        ("CrossEntropyLoss", {"label_smoothing": 0.1}),
    ],
}
"""Losses of torch and of `generated_models` with their arguments, by the target."""

METRICS: dict[str, tuple[str, dict[str, Any]]] = {
    "number": ("MeanAbsoluteError", {}),
    "numbers": ("MeanSquaredError", {}),
    "class": ("classification.MulticlassF1Score", {"num_classes": CLASSES, "average": "macro"}),
    "binary": ("classification.BinaryAUROC", {}),
    "labels": ("classification.MultilabelAccuracy", {"num_labels": CLASSES}),
    "place classes": ("classification.MulticlassAccuracy", {"num_classes": CLASSES}),
}
STEPS_OF_LOOP = 50
NAME_OF_LOSS = {"class": "softmax", "place classes": "softmax", "binary": "sigmoid", "labels": "sigmoid"}


def draw(seed: int) -> Program:
    """Returns the program of a seed; half of the choices are the simplest, so that faults do not hide each other."""
    source = random.Random(seed)
    program = {
        name: source.choice(options[: 1 if source.random() < 0.4 else None]) for name, options in GRAMMAR.items()
    }
    # Statistics of a batch are those of a logical worker's rows, which one process without it does not have.
    if program["body"] in OF_WHOLE_BATCH:
        program["logical_workers"] = 1
    if program["body"] == "complex" and program["optimizer"][0] == "Adafactor":
        # torch refuses it.
        program["optimizer"] = GRAMMAR["optimizer"][0]
    if program["body"] == "old weight norm":
        # The plain loop cannot copy its parameters.
        program["ema"] = None
    program["weights"] &= program["form"] != "module"
    program["turns"] *= program["form"] != "loop"
    # bfloat16 rounds scores, so that two rows may change places, which a curve of few rows shows.
    program["metric"] &= program["form"] == "module" and (program["target"], program["precision"]) != ("binary", "bf16")
    while program["batch"] % program["logical_workers"]:
        program["logical_workers"] //= 2
    return program | {"seed": seed}


def simplest_failing(
    program: Program, fails: Callable[[Program], bool], grammar: dict[str, list[Any]] = GRAMMAR
) -> Program:
    """Returns the program with all choices replaced by the simplest ones that still fail."""
    for name, options in grammar.items():
        simpler = program | {name: options[0]}
        if simpler != program and fails(simpler):
            program = simpler
    return program


def assert_none_differs(
    grammar: dict[str, list[Any]], programs: Iterable[Program], difference: Callable[[Program], str]
) -> None:
    """Fails with the simplest program of each difference, of which it lists the choices that are not the simplest."""
    faults: dict[str, Program] = {}
    for program in programs:
        if difference(program):
            simplest = simplest_failing(program, lambda changed: bool(difference(changed)), grammar)
            changed = {name: value for name, value in simplest.items() if [value] != grammar.get(name, [])[:1]}
            faults.setdefault(difference(simplest), changed)
    assert not faults, "\n".join(f"{text}: {program}" for text, program in faults.items())


def model_arguments(program: Program) -> dict[str, Any]:
    """Returns the arguments of the program's model; a divergence compares logarithms of probabilities."""
    logarithms = loss_of(program)[0] == "KLDivLoss"
    target = "soft log" if logarithms else program["target"]
    return {"target": target, **{name: program[name] for name in ("body", "inputs", "outputs")}}


def build(program: Program) -> nn.Module:
    """Returns the model of a program; a loss with parameters is a part of it."""
    model = Model(**model_arguments(program))
    if loss_of(program)[0] in WITH_PARAMETERS:
        model.task_loss = make_loss(program)
    return model


def loss_of(program: Program) -> tuple[str, dict[str, Any]]:
    """Returns the class of the loss and its arguments."""
    losses = LOSSES[program["target"]]
    return losses[program["loss"] % len(losses)]


def make_columns(program: Program, rows: int, seed: int) -> dict[str, np.ndarray]:
    """Returns the columns of a data set."""
    source = np.random.default_rng((program["seed"], seed))
    x = source.normal(size=(rows, FEATURES)).astype(np.float32)
    signal = x @ source.normal(size=(FEATURES, CLASSES)) + 0.3 * source.normal(size=(rows, CLASSES))
    sign = {"SoftMarginLoss": -1, "HingeEmbeddingLoss": -1}.get(loss_of(program)[0], 0)
    target: dict[str, np.ndarray] = {
        "number": signal[:, 0].astype(np.float32),
        "numbers": (np.abs(signal) if loss_of(program)[0] == "PoissonNLLLoss" else signal).astype(np.float32),
        "class": signal.argmax(1),
        "binary": np.where(signal[:, 0] > 0, 1, sign).astype(np.float32 if sign else np.int64),
        "labels": (signal > 0).astype(np.float32),
        "place classes": np.stack([np.roll(signal, k, 1).argmax(1) for k in range(POSITIONS)], 1),
        "soft": (np.exp(signal) / np.exp(signal).sum(1, keepdims=True)).astype(np.float32),
    }
    columns = {"y": target[program["target"]]}
    if program["weights"]:
        columns["w"] = source.uniform(0.1, 2.0, rows).astype(np.float32)
    if program["inputs"] == "integers":
        return columns | {"x": source.integers(0, 7, rows)}
    if program["inputs"] == "lists":
        mask = (np.arange(6) < source.integers(1, 7, rows)[:, None]).astype(np.int64)
        return columns | {"x": source.integers(0, 7, (rows, 6)) * mask, "z": mask}
    if program["inputs"] == "one":
        return columns | {"x": x}
    return columns | {"x": x[:, :2].copy(), "z": x[:, 2:].copy()}


def write_rows(folder: Path, columns: dict[str, np.ndarray], has_lists: bool = False) -> str:
    """Writes columns as Parquet with small row groups, without the padding of lists; returns the folder."""
    folder.mkdir(parents=True)
    pairs = [to_column(name, values) for name, values in columns.items() if not has_lists or name not in "xz"]
    if has_lists:
        lists = pa.array([row[mask > 0].tolist() for row, mask in zip(columns["x"], columns["z"], strict=True)])
        pairs.append((pa.field("x", lists.type), lists))
    table = pa.Table.from_arrays([values for _, values in pairs], schema=pa.schema([field for field, _ in pairs]))
    pq.write_table(table, folder / "part-0.parquet", row_group_size=10)
    return str(folder)


def configuration(program: Program, folder: Path) -> dict[str, Any]:
    """Writes data and initial parameters of a program to a folder, and returns the fields of its configuration."""
    here, models = __name__, generated_models.__name__
    loss, loss_arguments = loss_of(program)
    has_lists = program["inputs"] == "lists"
    train = write_rows(folder / "train", make_columns(program, ROWS, 0), has_lists)
    held_out = write_rows(folder / "eval", make_columns(program, EVAL_ROWS, 1), has_lists)
    initial = {name: value.contiguous().clone() for name, value in initial_model(program).state_dict().items()}
    safetensors.torch.save_file(initial, folder / "initial.safetensors")
    metrics = {}
    if program["metric"] and program["target"] in METRICS:
        name, metric_arguments = METRICS[program["target"]]
        metrics = {"score": {"class_path": f"torchmetrics.{name}", "init_args": metric_arguments}}
    second = {"two": ["z"], "by name": ["z"], "lists": ["x.mask"]}.get(program["inputs"], [])
    columns = ["x", *second, "y", *(["w"] * program["weights"])]
    arguments: dict[str, Any] = {
        "model": {"class_path": f"{models}.Model", "init_args": model_arguments(program)},
        "inputs": {"x": "x", "z": "z"} if program["inputs"] == "by name" else ["x", *second],
        "target": "y",
        "loss": {"class_path": f"{'torch.nn' if hasattr(nn, loss) else models}.{loss}", "init_args": loss_arguments},
        **({"output": "scores"} if program["outputs"] != "tensor" else {}),
        **({"metrics": metrics} if metrics else {}),
        # A distance is no score, so a program that scores it says what it is.
        **({"activation": "sigmoid"} if metrics and loss == "HingeEmbeddingLoss" else {}),
    }
    task = "ray_app.task.module.ModuleTask"
    if program["form"] == "task":
        read = [name for name in columns if name != "x.mask"]
        task, arguments = f"{here}.GeneratedTask", {"program": program, "read": read}
    if program["form"] == "loop":
        task, arguments = (
            "ray_app.task.user_loop.LoopTask",
            {
                "train": f"{here}.train_loop",
                "settings": {"program": program},
                "module": {"class_path": f"{here}.build", "init_args": {"program": program}},
                "rows": columns,
                "target": "y",
                "best_metric": "loss",
                "best_mode": "min",
            },
        )
    turns, groups = turns_of(program), groups_of(program)
    schedule = None
    name, options = program["optimizer"]
    optimizer: dict[str, Any] = {"class_path": f"torch.optim.{name}", "init_args": options}
    if program["schedule"] is not None:
        name, options = program["schedule"]
        schedule = {"class_path": f"torch.optim.lr_scheduler.{name}", "init_args": options}
    fields: dict[str, Any] = {"optimizer": optimizer | {"groups": groups}, "schedule": schedule}
    if turns:
        # A pattern must match a parameter of its optimizer, and all optimizers but the last lack `last.*`.
        outer = {"groups": groups, "steps": 1}
        inner = {"groups": groups if program["groups"] == "decay" else [], "steps": program["turns"]}
        turn = optimizer | {"schedule": schedule}
        fields = {
            "optimizers": {
                name: turn | more | {"parameters": turns[name]} for name, more in (("inner", inner), ("outer", outer))
            }
        }
    return ({} if program["form"] == "loop" else fields) | {
        "task": {"class_path": task, "init_args": arguments},
        "data__path": train,
        "data__eval_path": None if program["form"] == "loop" else held_out,
        "data__global_batch_size": program["batch"],
        "data__last_batch": program["last_batch"],
        "scaling__logical_workers": program["logical_workers"],
        "scaling__max_workers": program["logical_workers"],
        "train__epochs": program["epochs"],
        "train__grad_clip_norm": None if program["form"] == "loop" else program["clip"],
        "train__precision": program["precision"],
        "train__ema_decay": program["ema"],
        "train__init_from": str(folder / "initial.safetensors"),
        "evaluate__where": "workers",
        "tracking__enabled": False,
        "run__storage_path": str(folder),
    }


class GeneratedTask(Task):
    """The program as a task with one loss for each row, with the row's weight if it has one."""

    def __init__(self, program: Program, read: list[str]) -> None:
        self.program, self.read = program, read

    def columns(self) -> list[str]:
        return self.read

    def targets(self) -> list[str]:
        return [name for name in self.read if name in ("y", "w")]

    def build_model(self) -> nn.Module:
        return build(self.program)

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        if "x_lengths" not in batch:
            return super().forward(model, batch)
        return model(batch["x"], (torch.arange(batch["x"].shape[1]) < batch["x_lengths"][:, None]).long())

    def loss(self, outputs: Any, batch: Batch) -> Losses:
        raise NotImplementedError("the loss may have parameters, which are a part of the model")

    def compute_loss(self, model: nn.Module, outputs: Any, batch: Batch) -> Losses:
        values, weights = row_losses(self.program, model, outputs, batch)
        return Losses(values * weights, weights)

    def predictions(self, outputs: Any, batch: Batch) -> dict[str, Any]:
        return super().predictions(vars(outputs) if isinstance(outputs, Outputs) else outputs, batch)


def train_loop(loop: Loop, program: Program) -> None:
    """Trains the program as a loop of the user's own."""
    [optimizer] = make_optimizers(program, loop.model)
    loop.keep(optimizer, make_schedule(program, optimizer, STEPS_OF_LOOP))
    for step in loop:
        for rows in step:
            inputs = [rows[name] for name in ("x", "z", "x.mask") if name in rows]
            values, weights = row_losses(program, loop.model, loop.model(*inputs), rows)
            step.add(Losses(values * weights, weights))
        if program["clip"] is not None:
            nn.utils.clip_grad_norm_(loop.model.parameters(), program["clip"])
        optimizer.step()


def initial_model(program: Program) -> nn.Module:
    """Returns the model as both sides begin with it."""
    torch.manual_seed(program["seed"])
    return build(program)


@dataclasses.dataclass
class Ended:
    """What a training ends with.

    Args:
        state: The model's state, with an average of the parameters that average.
        losses: The mean loss of each step.
        evaluation: The mean loss, and `score` if there is a metric, on the evaluation rows.
    """

    state: dict[str, Tensor]
    losses: list[float]
    evaluation: dict[str, float]


def batches(plan: Plan, epochs: int) -> Iterator[np.ndarray]:
    """Yields the rows of each step: those of all logical workers."""
    for cursor in (Cursor.at(step, plan.steps_per_epoch) for step in range(epochs * plan.steps_per_epoch)):
        order = plan.epoch(cursor.epoch)
        yield np.concatenate([order.rows_at(v, cursor.step) for v in range(plan.logical_workers)])


def train_plainly(program: Program, plan: Plan) -> Ended:
    """Trains a program as a PyTorch user writes it: one process, whole batches, the loss as it is."""
    model = initial_model(program)
    optimizers = make_optimizers(program, model)
    steps = STEPS_OF_LOOP if program["form"] == "loop" else program["epochs"] * plan.steps_per_epoch
    # The optimizer of each step.
    turns = ([0] * program["turns"] + [len(optimizers) - 1]) * steps
    schedules = [make_schedule(program, one, turns[:steps].count(i)) for i, one in enumerate(optimizers)]
    columns = to_tensors(make_columns(program, ROWS, 0))
    average, losses = copy.deepcopy(model) if program["ema"] else model, list[float]()
    for step, rows in enumerate(batches(plan, program["epochs"])):
        turn = turns[step]
        moved = [p for group in optimizers[turn].param_groups for p in group["params"]]
        model.train()
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=program["precision"] == "bf16"):
            loss = compute_loss(program, model, {name: values[rows] for name, values in columns.items()})[0]
        loss.backward()
        if program["logical_workers"] > 1:
            # Documented in docs/own-task.md: a missing gradient counts as zeros, so weight decay and momentum act.
            for p in (p for p in moved if p.grad is None):
                p.grad = torch.zeros_like(p)
        if program["clip"] is not None:
            nn.utils.clip_grad_norm_(moved, program["clip"])
        optimizers[turn].step()
        if (schedule := schedules[turn]) is not None:
            schedule.step()
        losses.append(loss.item())
        if program["ema"] is not None:
            decay = min(program["ema"], (1 + step) / (10 + step))
            for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                if ours.is_floating_point() or ours.is_complex():
                    ours.data.lerp_(theirs.data, 1 - decay)
    if program["ema"] is not None:
        for name, buffer in model.named_buffers():
            average.get_buffer(name).copy_(buffer)
    result = average if program["ema"] else model
    return Ended(result.state_dict(), losses, evaluate_plainly(program, result))


def to_tensors(columns: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(values) for name, values in columns.items()}


def comparable(program: Program, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Returns outputs and target in the shapes that torch's losses take."""
    outputs = outputs["scores"] if program["outputs"] == "dict" else getattr(outputs, "scores", outputs)
    if program["target"] in ("number", "binary"):
        return outputs.squeeze(1).float(), batch["y"].float()
    return outputs.float(), batch["y"]


def make_loss(program: Program, **more: str) -> nn.Module:
    name, arguments = loss_of(program)
    tensors = {name: torch.tensor(value) for name, value in arguments.items() if isinstance(value, list)}
    if name in WITH_PARAMETERS:
        more = {}
    loss: nn.Module = getattr(nn if hasattr(nn, name) else generated_models, name)(**arguments | tensors | more)
    return loss


def row_losses(program: Program, model: nn.Module, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Returns the mean loss of each row, and its weight."""
    loss: Any = getattr(model, "task_loss", None) or make_loss(program, reduction="none")
    values = loss(*comparable(program, outputs, batch))
    means = values.flatten(1).mean(1) if values.ndim > 1 else values
    return means, batch["w"] if "w" in batch else torch.ones_like(means)


def compute_loss(program: Program, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns loss, outputs and target."""
    outputs = model(**{name: batch[name] for name in ("x", "z") if name in batch})
    compared = comparable(program, outputs, batch)
    if program["form"] == "module" and loss_of(program)[0] not in WITH_PARAMETERS:
        return make_loss(program)(*compared), *compared
    values, weights = row_losses(program, model, outputs, batch)
    return (values * weights).sum() / weights.sum(), *compared


def evaluate_plainly(program: Program, model: nn.Module) -> dict[str, float]:
    """Returns the loss, and the metric if there is one, on all evaluation rows at once."""
    if program["form"] == "loop":
        return {}
    model.eval()
    with torch.no_grad():
        loss, outputs, target = compute_loss(program, model, to_tensors(make_columns(program, EVAL_ROWS, 1)))
    values = {"loss": float(loss)}
    if program["metric"] and program["target"] in METRICS:
        name, arguments = METRICS[program["target"]]
        module: Any = torchmetrics.classification if name.startswith("classification.") else torchmetrics
        metric = getattr(module, name.removeprefix("classification."))(**arguments)
        target = target.int() if program["target"] == "binary" else target
        values["score"] = float(metric(probabilities(program, outputs), target))
    return values


def probabilities(program: Program, outputs: Tensor) -> Tensor:
    """Returns outputs as a user gives them to torchmetrics."""
    kind = NAME_OF_LOSS.get(program["target"])
    return outputs.softmax(1) if kind == "softmax" else outputs.sigmoid() if kind == "sigmoid" else outputs


def group_change(program: Program) -> dict[str, float]:
    """Returns the options of the program's group of parameters."""
    return {"weight_decay": 0.3} if program["groups"] == "decay" else {"lr": program["optimizer"][1]["lr"] / 4}


def groups_of(program: Program) -> list[dict[str, Any]]:
    """Returns the groups of the program's optimizer in a configuration."""
    names = {None: None, "decay": {"norms_and_biases": True}, "rate": {"names": ["last.*"]}}[program["groups"]]
    return [] if names is None else [{**names, **group_change(program)}]


def turns_of(program: Program) -> dict[str, list[str]]:
    """Returns the names of the parameters of each optimizer that has its turn; empty with one optimizer."""
    if not program["turns"]:
        return {}
    parts: dict[str, list[str]] = {"inner": [], "outer": []}
    for name, p in initial_model(program).named_parameters():
        if p.requires_grad:
            parts["inner" if name.startswith(("first", "middle", "embedding")) else "outer"].append(name)
    return parts


def make_optimizers(program: Program, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Returns the optimizer with its groups, or those that take turns."""
    name, options = program["optimizer"]
    parts = list(turns_of(program).values()) or [["*"]]
    return [getattr(torch.optim, name)(list(make_groups(program, model, patterns)), **options) for patterns in parts]


def make_groups(program: Program, model: nn.Module, patterns: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the groups of the parameters that patterns name."""
    of_group: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, p in model.named_parameters():
        if p.requires_grad and any(fnmatch(name, pattern) for pattern in patterns):
            kinds = {None: False, "decay": p.ndim <= 1, "rate": name.startswith("last.")}
            of_group[kinds[program["groups"]]].append(p)
    yield {"params": of_group[False]}
    if of_group[True]:
        yield {"params": of_group[True], **group_change(program)}


def make_schedule(program: Program, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler | None:
    """Returns the schedule, which moves after each step."""
    if program["schedule"] is None:
        return None
    name, options = program["schedule"]
    if name == "OneCycleLR":
        options = options | {"total_steps": steps}
    schedule: LRScheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **options)
    return schedule
