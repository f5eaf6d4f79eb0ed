"""Lightning modules drawn from a grammar, as configurations of `ray_app` and trained by Lightning's own `Trainer`.

Model, loss, data and schedules are those of `generated_programs`.
"""

from __future__ import annotations

import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torchmetrics

from ray_app.plan.order import Plan
from tests.support import generated_programs as programs
from tests.support import program_search
from tests.support.generated_programs import EVAL_ROWS, ROWS, Ended, Program
from tests.support.program_search import complete, planned_batches, sums

_SHARED = ("loss", "body", "schedule", "batch", "logical_workers", "last_batch", "clip", "epochs", "precision")
HOOKS: dict[str, Any] = {
    "on_train_epoch_start": lambda self: self.net.last.bias.data.add_(0.1),
    "on_before_optimizer_step": lambda self, optimizer: self.net.last.bias.grad.mul_(0.5),
    "on_after_backward": lambda self: self.net.last.bias.grad.zero_(),
    "configure_gradient_clipping": lambda self, optimizer, *limits: self.clip_gradients(optimizer, 0.01, "norm"),
    "lr_scheduler_step": lambda self, schedule, metric: None,
    "backward": lambda self, loss: (2 * loss).backward(),
    "on_validation_epoch_end": lambda self: self.log("val_loss", 3.0),
}
GRAMMAR: dict[str, list[Any]] = {
    "target": ["number", "class", "numbers", "binary", "labels"],
    **{name: programs.GRAMMAR[name] for name in _SHARED},
    # Statistics and counters are in evaluation mode when the module has been made.
    "eval_mode": [False, True],
    "form": ["module", "task", "sum"],
    "batch_as": ["tuple", "dict"],
    "signature": ["index", "alone"],
    "returns": ["tensor", "dict", "one element", "more"],
    "log": [None, "mean", "float", "integer", "metric", "called", "by epoch", "loss"],
    "validation": ["log", "return", "dict", "other", "loss and other"],
    "eval_log": [None, "mean", "metric", "called", "collection", "integer", "by step"],
    "optimizer": [*programs.GRAMMAR["optimizer"], ("SGD", {"lr": 0.01, "maximize": True})],
    "optimized": ["all", "trainable", "groups", "part", "names"],
    "written": ["alone", "list", "dict", "pair"],
    "interval": [{}, {"interval": "epoch"}, {"frequency": 2}, {"monitor": "val_loss", "reduce_on_plateau": True}],
    "accumulate": [False, True],
    "hparams": [False, True],
    "example": [False, True],
    "eval_batch": [EVAL_ROWS, 4, 5],
    "extra": [None, "manual", "two optimizers", "epoch", "step", "index", "none", *HOOKS],
}
RARE = ("interval", "extra")
"""Most of what is drawn of these is refused."""
ALLOWED = {
    "which only Lightning's trainer calls": "a hook may do anything between the trainer's calls.",
    "sets automatic_optimization to False": "its calls of optimizers would not wait for the other workers.",
    "returned 2 optimizers": "several optimizers take turns in a task of one's own.",
    "asks the trainer for": "a step may depend only on its rows.",
    "uses batch_idx": "its value would depend on the workers.",
    "returned no loss": "every row of every step counts.",
    "which is not part of the model": "a loss with parameters is no part of this module.",
    "is not a mean over rows": "one of the models chooses a layer by the rows of a batch.",
    "advances after every step": "a schedule by epochs is refused with the remedy.",
}


def adapt(drawn: Program) -> Program:
    """Returns a drawn program without choices that exclude each other, with the keys of `generated_programs`."""
    program = drawn | {"weights": True}
    # What a batch changes is that of a logical worker's rows, which one process without accumulation does not have.
    program["accumulate"] &= program["body"] not in (*programs.OF_WHOLE_BATCH, "counter")
    if program["body"] in ("complex", "odd") and program["optimizer"][0] == "Adafactor":
        # torch refuses it.
        program["optimizer"] = GRAMMAR["optimizer"][0]
    if program["log"] == "called" and program["eval_log"] == "metric":
        # A metric that a training step has called keeps its rows, which Lightning's evaluation would count, too.
        program["eval_log"] = None
    if program["body"] in programs.OF_WHOLE_BATCH or program["form"] != "module" or program["loss"] > 1:
        program["logical_workers"] = 1
    return complete(program)


class Module(pl.LightningModule):
    """A program as a Lightning module."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        if program["hparams"]:
            self.save_hyperparameters()
        if program["example"]:
            self.example_input_array = torch.zeros(2, programs.FEATURES)
        self.program, self.net = program, programs.Model(**programs.model_arguments(program))
        if program["eval_mode"]:
            self.net.eval()
        self.metric, mean = torchmetrics.MeanAbsoluteError(), torchmetrics.MeanMetric()
        self.collection = torchmetrics.MetricCollection({"a": self.metric.clone(), "b": mean}, prefix="c_")
        self.automatic_optimization = program["extra"] != "manual"

    def forward(self, x: torch.Tensor, w: torch.Tensor | None = None) -> Any:
        return self.net(x)

    def log_of(self, how: str | None, outputs: torch.Tensor, loss: torch.Tensor) -> None:
        """Logs the mean absolute output in one of the ways of Lightning."""
        error, zeros = outputs.detach().abs().mean(), torch.zeros_like(outputs)
        match how:
            case "mean" | "float" | "by step" | "by epoch":
                value = float(error) if how == "float" else error
                self.log("part/error", value, on_step=how != "by epoch", on_epoch=how != "mean", prog_bar=True)
            case "integer":
                self.log("three", 3)
            case "metric":
                self.metric.update(outputs, zeros)
                self.log("metric", self.metric, on_step=self.training, on_epoch=not self.training)
            case "called":
                self.log("metric", self.metric(outputs, zeros))
            case "collection":
                self.collection["a"].update(outputs, zeros)
                self.collection["b"].update(error, len(outputs))
                self.log_dict(self.collection)
            case "loss":
                self.log("loss", 2 * loss)

    def compute(self, batch: Any, form: str) -> Any:
        fields = batch if isinstance(batch, dict) else dict(zip("xyw", batch, strict=True))
        loss, outputs, _ = programs.compute_loss(self.program | {"form": form}, self.net, fields)
        return loss, outputs

    def training_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        extra, form, returns = (self.program[name] for name in ("extra", "form", "returns"))
        loss, outputs = self.compute(batch, "module" if form == "sum" else form)
        loss = loss * len(outputs) if form == "sum" else loss
        self.log_of(self.program["log"], outputs, loss)
        if extra in ("epoch", "step"):
            loss = loss * (1 + (self.current_epoch if extra == "epoch" else self.global_step))
        if (extra == "index" and batch_idx > 0) or (extra == "none" and loss > 0.1):
            return None
        if extra == "manual":
            self.manual_backward(loss)
            self.optimizers().step()
        if returns in ("dict", "more"):
            return {"loss": loss} | ({"outputs": outputs.detach()} if returns == "more" else {})
        return loss[None] if returns == "one element" else loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss, outputs = self.compute(batch, "module")
        how = self.program["validation"]
        if self.program["loss"] > 1:
            # Weights of classes make a batch's loss no mean over its rows, which is refused.
            loss = outputs.square().mean()
        self.log("loss" if how == "loss and other" else "val_loss", loss)
        self.log_of(self.program["eval_log"], outputs, loss)
        return {"return": loss, "dict": {"loss": loss}, "other": 2 * loss, "loss and other": 2 * loss}.get(how)

    def configure_optimizers(self) -> Any:
        net, program = self.net, self.program
        name, options = program["optimizer"]
        parameters: dict[str, Any] = {
            "trainable": filter(lambda p: p.requires_grad, self.parameters()),
            "groups": [{"params": list(net.first.parameters())}, {"params": list(net.last.parameters()), "lr": 0.003}],
            "part": net.last.parameters(),
            "names": self.named_parameters(),
        }
        optimizer = getattr(torch.optim, name)(parameters.get(program["optimized"], self.parameters()), **options)
        if program["extra"] == "two optimizers":
            return [optimizer, torch.optim.SGD(net.last.parameters(), lr=0.1)], []
        schedule = programs.make_schedule(program, optimizer, 30)
        if schedule is None:
            forms = {"list": [optimizer], "dict": {"optimizer": optimizer}, "pair": ([optimizer], [])}
            return forms.get(program["written"], optimizer)
        settings = {"scheduler": schedule, "interval": "step", **program["interval"]}
        both = {"optimizer": optimizer, "lr_scheduler": settings}
        return {"list": [both], "pair": ([optimizer], [settings])}.get(program["written"], both)


def build(program: Program) -> Module:
    """Builds a program, with one of the hooks or with steps of one argument."""
    methods = {name: hook for name, hook in HOOKS.items() if name == program["extra"]}
    if program["signature"] == "alone":
        methods["training_step"] = lambda self, batch: Module.training_step(self, batch, 0)
        methods["validation_step"] = lambda self, batch: Module.validation_step(self, batch, 0)
    built: Module = type("Changed", (Module,), methods)(program) if methods else Module(program)
    return built


def initial_module(program: Program) -> Module:
    torch.manual_seed(program["seed"])
    return build(program)


def configuration(program: Program, folder: Path) -> dict[str, Any]:
    """Writes data and initial parameters of a program to a folder, and returns the fields of its configuration."""
    batch = {name: name for name in "xyw"} if program["batch_as"] == "dict" else list("xyw")
    module = {"class_path": f"{__name__}.build", "init_args": {"program": program}}
    arguments = {"module": module, "batch": batch, "target": "y"}
    task = {"class_path": "ray_app.task.lightning.LightningTask", "init_args": arguments}
    fields = program_search.configuration(program, folder, initial_module(program))
    return fields | {"task": task, "evaluate__batch_size": program["eval_batch"]}


def make_batch(program: Program, rows: int, seed: int, chosen: np.ndarray) -> Any:
    columns = programs.to_tensors(programs.make_columns(program, rows, seed))
    batch = {name: columns[name][chosen] for name in "xyw"}
    return batch if program["batch_as"] == "dict" else tuple(batch.values())


class Recorder(pl.Callback):
    """Records the loss and the logged values of each batch."""

    def __init__(self) -> None:
        self.losses, self.logged = list[float](), list[dict[str, float]]()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if module.program["logical_workers"] > 1:
            # Documented in docs/own-task.md: a missing gradient counts as zeros, so weight decay and momentum act.
            for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is None):
                p.grad = torch.zeros_like(p) if p.requires_grad else None

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.logged.append(_values(trainer.logged_metrics, "_step", "_epoch"))


def _values(logged: Any, kept: str, dropped: str) -> dict[str, float]:
    named = {n.replace("/", ".").removesuffix(kept): float(v) for n, v in logged.items() if not n.endswith(dropped)}
    # Our record has the step's own loss.
    return {name: value for name, value in named.items() if not (kept == "_step" and name == "loss")}


def train_by_tool(program: Program, plan: Plan) -> tuple[Ended, list[dict[str, float]]]:
    """Trains and evaluates a program by Lightning's Trainer; returns the end, and what each batch logged."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    batches, parts = planned_batches(program, plan, partial(make_batch, program, ROWS, 0))
    chunks = np.split(np.arange(EVAL_ROWS), range(program["eval_batch"], EVAL_ROWS, program["eval_batch"]))
    module, recorder = initial_module(program), Recorder()
    off = ("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary")
    options: dict[str, Any] = {**dict.fromkeys(off, False), "accelerator": "cpu", "devices": 1, "log_every_n_steps": 1}
    options |= {"max_epochs": program["epochs"], "accumulate_grad_batches": parts, "gradient_clip_val": program["clip"]}
    precision: Any = "bf16-mixed" if program["precision"] == "bf16" else "32-true"
    # Lightning's inference mode refuses a derivative in the forward.
    trainer = pl.Trainer(precision=precision, callbacks=[recorder], inference_mode=False, **options)
    trainer.fit(module, batches)
    held_out = program_search.Epochs([[make_batch(program, EVAL_ROWS, 1, chunk) for chunk in chunks]])
    [values] = trainer.validate(module, held_out, verbose=False)
    ended = Ended(module.state_dict(), sums(recorder.losses, parts), _values(values, "_epoch", "_step"))
    # A value of an epoch alone has none of a step.
    return ended, recorder.logged if parts == 1 and program["log"] != "by epoch" else []
