"""Models of `transformers` drawn from a grammar, as configurations of `ray_app` and trained by its `Trainer`."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR

from ray_app.data.arrays import to_column
from ray_app.plan.order import Plan
from ray_app.task.transforms import instantiate
from tests.support import generated_programs as programs
from tests.support import program_search
from tests.support.generated_programs import EVAL_ROWS, ROWS, Ended, Program
from tests.support.program_search import complete, planned_batches, sums

WORDS, LABELS = 20, 3
# The gradient of the biases of keys is 0, and Adagrad would blow up its rounding.
OPTIMIZERS = {"AdamW": "adamw_torch", "SGD": "sgd"}
_BERT = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
_BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_TEXT = _BERT | {"vocab_size": WORDS, "max_position_embeddings": 16, "pad_token_id": 0}
_GPT2 = {"vocab_size": WORDS, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2, "pad_token_id": 0}
_GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "classifier_dropout": 0.0}
_GPT2 |= {"bos_token_id": 1, "eos_token_id": 1}
_LLAMA = {name: value for name, value in _TEXT.items() if "dropout" not in name}
MODELS: dict[str, dict[str, Any]] = {
    "Bert": _TEXT,
    "Electra": _TEXT | {"embedding_size": 8},
    "Albert": _TEXT | {"embedding_size": 8, "classifier_dropout_prob": 0.0},
    "GPT2": _GPT2,
    "Llama": _LLAMA,
    "Qwen2": _LLAMA | {"num_key_value_heads": 2},
    "ViT": _BERT | {"image_size": 8, "patch_size": 4},
}
KINDS = {
    "class": ("SequenceClassification", "CrossEntropy", ["Bert", "Electra", "Albert", "GPT2", "Llama", "Qwen2"]),
    "number": ("SequenceClassification", "MSE", ["Bert", "Albert", "GPT2", "Llama"]),
    "labels": ("SequenceClassification", "BCEWithLogits", ["Bert", "Electra", "GPT2"]),
    "words": ("TokenClassification", "CrossEntropy", ["Bert", "Electra", "GPT2"]),
    "masked": ("MaskedLM", "CrossEntropy", ["Bert", "Electra", "Albert"]),
    "next": ("CausalLM", "", ["GPT2", "Llama", "Qwen2"]),
    "image": ("ImageClassification", "CrossEntropy", ["ViT"]),
}
GRAMMAR: dict[str, list[Any]] = {
    "kind": list(KINDS),
    "model": list(range(6)),
    "rate": [0.003, 0.02],
    "weight_decay": [0.0, 0.3],
    "optim": list(OPTIMIZERS),
    "scheduler": ["constant", "linear", "cosine", "constant_with_warmup", "polynomial"],
    "warmup": [0, 2],
    "smoothing": [0.0, 0.2],
    "clip": [1.0, 0.1, None],
    "accumulate": [False, True],
    **{name: programs.GRAMMAR[name] for name in ("batch", "logical_workers", "last_batch", "epochs", "precision")},
}
RARE = ()
ALLOWED: dict[str, str] = {}


def adapt(program: Program) -> Program:
    """Returns a drawn program without choices that exclude each other."""
    if program["kind"] in ("next", "number", "labels"):
        program["smoothing"] = 0.0
    # Trainer takes means of means over words where the model does not take the number of words.
    program["accumulate"] &= program["kind"] not in ("words", "masked")
    if program["scheduler"] == "polynomial":
        # The schedule of transformers divides by zero where a run is as short as its warmup.
        program["warmup"] = 0
    return complete(program)


def specification(program: Program) -> dict[str, Any]:
    """Returns the model by class path and arguments."""
    purpose, _, names = KINDS[program["kind"]]
    name = names[program["model"] % len(names)]
    problem = {"number": "regression", "labels": "multi_label_classification"}.get(program["kind"])
    outputs = {"num_labels": 1 if program["kind"] == "number" else LABELS} | (
        {"problem_type": problem} if problem else {}
    )
    config = {"class_path": f"transformers.{name}Config", "init_args": MODELS[name] | outputs}
    return {"class_path": f"transformers.AutoModelFor{purpose}.from_config", "init_args": {"config": config}}


def initial_model(program: Program) -> Any:
    torch.manual_seed(program["seed"])
    return instantiate(specification(program), "model")


def make_rows(program: Program, rows: int, seed: int) -> list[dict[str, Any]]:
    """Returns rows: tokens (or pixels) and what is learned of them."""
    source, kind = np.random.default_rng((program["seed"], seed)), program["kind"]
    all_rows: list[dict[str, Any]] = []
    for _ in range(rows):
        tokens = source.integers(1, WORDS, source.integers(3, 12))
        pixels = source.normal(size=(3, 8, 8)).astype(np.float32)
        targets: dict[str, Any] = {
            "class": int(tokens[0] % LABELS),
            "image": int(pixels[0].mean() > 0),
            "number": np.float32(tokens.mean() / 10),
            "labels": np.float32([token in tokens for token in (3, 4, 5)]),
            "words": tokens % LABELS,
            "masked": np.where(source.random(len(tokens)) < 0.5, tokens, -100),
        }
        all_rows.append({"x": pixels if kind == "image" else tokens} | ({"y": targets[kind]} if kind != "next" else {}))
    return all_rows


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> str:
    folder.mkdir(parents=True)
    columns, fields = list[Any](), list[pa.Field]()
    for name in rows[0]:
        values = [row[name] for row in rows]
        is_array = len({np.shape(value) for value in values}) == 1
        field, column = to_column(name, np.stack(values)) if is_array else (name, pa.array(values))
        fields.append(field if is_array else pa.field(name, column.type))
        columns.append(column)
    pq.write_table(pa.Table.from_arrays(columns, schema=pa.schema(fields)), folder / "part.parquet", row_group_size=10)
    return str(folder)


class TrainerRates(LambdaLR):
    """The learning rates of Trainer over all steps of the run."""

    def __init__(self, optimizer: torch.optim.Optimizer, kind: str, warmup: int, total_steps: int = 1) -> None:
        other = torch.optim.SGD([torch.zeros(1)], lr=optimizer.defaults["lr"])
        super().__init__(optimizer, transformers.get_scheduler(kind, other, warmup, total_steps).lr_lambdas[0])


def configuration(program: Program, folder: Path) -> dict[str, Any]:
    """Writes data and initial parameters of a program to a folder, and returns the fields of its configuration."""
    kind = program["kind"]
    rate, decay = program["rate"], program["weight_decay"]
    fields = program_search.configuration(program, folder, initial_model(program))
    train, held_out = (write_rows(folder / str(n), make_rows(program, n, n)) for n in (ROWS, EVAL_ROWS))
    rates = {"kind": program["scheduler"], "warmup": program["warmup"]}
    smoothing = {"label_smoothing": program["smoothing"]} if program["smoothing"] else {}
    arguments: dict[str, Any] = {"model": specification(program), "tokens": "x"}
    if kind != "next":
        inputs = {"pixel_values": "x"} if kind == "image" else {"input_ids": "x", "attention_mask": "x.mask"}
        loss = {"class_path": f"torch.nn.{KINDS[kind][1]}Loss", "init_args": smoothing}
        arguments = {"model": specification(program), "inputs": inputs, "target": "y", "loss": loss, "output": "logits"}
        arguments |= {"classes_last": True} if kind in ("words", "masked") else {}
    task = "language_model.CausalLanguageModel" if kind == "next" else "module.ModuleTask"
    optimizer, options = program["optim"], {"lr": rate, "weight_decay": decay}
    options |= {"eps": 1e-4} if optimizer == "AdamW" else {}
    groups = [{"norms_and_biases": True, "weight_decay": 0.0}]
    return fields | {
        "task": {"class_path": f"ray_app.task.{task}", "init_args": arguments},
        "optimizer": {"class_path": f"torch.optim.{optimizer}", "init_args": options, "groups": groups},
        "schedule": {"class_path": f"{__name__}.TrainerRates", "init_args": rates},
        "data__path": train,
        "data__eval_path": held_out,
    }


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Returns a batch as the collators of `transformers` make it, with labels of -100 for padding."""
    inputs = [torch.as_tensor(row["x"]) for row in rows]
    # Trainer divides by the number of labels, and the first token has nothing before it that predicts it.
    labels = [torch.as_tensor(row["y"] if "y" in row else np.r_[-100, row["x"][1:]]) for row in rows]
    if inputs[0].ndim > 1:
        return {"pixel_values": torch.stack(inputs), "labels": torch.stack(labels)}
    is_list = len({label.shape for label in labels}) > 1
    targets = pad_sequence(labels, batch_first=True, padding_value=-100) if is_list else torch.stack(labels)
    mask = pad_sequence([torch.ones_like(value) for value in inputs], batch_first=True)
    return {"input_ids": pad_sequence(inputs, batch_first=True), "attention_mask": mask, "labels": targets}


class Trainer(transformers.Trainer):
    """A Trainer that takes its batches as they are and keeps the loss of each."""

    def get_train_dataloader(self) -> Any:
        self.losses = list[float]()
        return self.train_dataset

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.eval_dataset

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(float(loss))
        return loss


def train_by_tool(program: Program, plan: Plan) -> tuple[Ended, list[dict[str, float]]]:
    """Trains and evaluates a program by Trainer; returns the end, and nothing that batches logged."""
    transformers.logging.set_verbosity_error()
    rows = make_rows(program, ROWS, ROWS)
    batches, parts = planned_batches(program, plan, lambda chosen: collate([rows[row] for row in chosen]))
    held_out: Any = [collate(make_rows(program, EVAL_ROWS, EVAL_ROWS))]
    decay = program["weight_decay"]
    options = {
        "learning_rate": program["rate"],
        "weight_decay": decay,
        "adam_epsilon": 1e-4,
        "optim": OPTIMIZERS[program["optim"]],
    }
    options |= {"lr_scheduler_type": program["scheduler"], "warmup_steps": program["warmup"]}
    options |= {"label_smoothing_factor": program["smoothing"], "max_grad_norm": program["clip"] or 0.0}
    options |= {"num_train_epochs": program["epochs"], "gradient_accumulation_steps": parts, "use_cpu": True}
    options |= {
        "bf16": program["precision"] == "bf16",
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(output_dir=folder, **options)
        trainer = Trainer(initial_model(program), arguments, None, batches, held_out)
        # Trainer 5.23 takes any model with **kwargs for one that divides by the number of labels, and adds up losses
        # of accumulated parts of one that does not.
        trainer.model_accepts_loss_kwargs = program["kind"] == "next"
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    return Ended(trainer.model.state_dict(), sums(trainer.losses, parts), {"loss": loss}), []
