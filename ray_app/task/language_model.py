"""Causal language models, of `transformers` or own modules, trained on rows of tokens."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ray_app.config.import_paths import require
from ray_app.errors import ConfigError
from ray_app.plan.manifest import DataFacts
from ray_app.task.annotations import MetricCollection
from ray_app.task.base import Batch, Rows, Task
from ray_app.task.fields import need_column
from ray_app.task.losses import Losses
from ray_app.task.ragged import LENGTHS, Arrays, Ragged
from ray_app.task.transforms import Spec, instantiate_module

_TARGETS = "targets"
"""The argument of a module that gets the tokens to predict; without it, nanoGPT gives scores of one token only."""
_MAX_LOSS_BYTES = 256 << 20
"""The scores that cross-entropy computes at once have at most this size in float32."""
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""The attributes of models of `transformers` that weight `aux_loss`."""


class CausalLanguageModel(Task):
    """Predicts each token of a row from those before it; loss and perplexity are means over tokens.

    Rows are blocks of one length (`ray-app ingest --pack`), or texts of any length. Texts are padded at their end. No
    attention mask is needed for that, since no token attends to later ones.

    A model of `transformers` is called with all tokens of a row. Another module is called with all but the last one,
    and with the tokens after them as `targets` if it has this argument. It returns the scores, (rows, tokens - 1,
    vocabulary), also as the first of several values, or as `logits` of a dictionary or an object.

    An `aux_loss` that the model returns, such as that of a mixture of experts which balances them, is computed for each
    logical worker and trained on, with the coefficient of the model's configuration (of another module: 1). Evaluations
    leave it out.

    Args:
        model: The factory of the model by its import path, such as `transformers.AutoModelForCausalLM.from_config` with
            a `config`, `transformers.AutoModelForCausalLM.from_pretrained` with a folder of weights, or a module of
            your own. The parameters are converted to float32; `train.precision` says in which precision the model
            computes.
        tokens: Column of lists or arrays of integers.
        max_length: Maximum number of tokens of a row; the end of a longer one is cut off. Default: all are used.
        lora: Arguments of `peft.LoraConfig`, such as `{r: 8, target_modules: [q_proj, v_proj]}`: the model is frozen,
            and small adapters of some of its matrices are trained. Default: all parameters are trained.
        gradient_checkpointing: Whether backward recomputes the activations of each block, which saves memory.
        pack: Whether a training micro-batch of a model of `transformers` has several rows in one sequence, which saves
            padding. Rows do not see each other, and each begins at position 0. Dropout draws other numbers than for
            padded rows. Evaluations pad.
    """

    best_metric: ClassVar[str] = "perplexity"

    def __init__(
        self,
        model: Spec,
        tokens: str = "tokens",
        max_length: int | None = None,
        lora: dict[str, Any] | None = None,
        gradient_checkpointing: bool = False,
        pack: bool = False,
    ) -> None:
        self.model = model
        self.tokens = tokens
        self.max_length = max_length
        self.lora = lora
        self.gradient_checkpointing = gradient_checkpointing
        self.pack = pack
        # The maximum token of the data; -1 as long as it is unknown.
        self.max_token = -1

    def prepare(self, data: DataFacts) -> CausalLanguageModel:
        """Completes the task with the greatest token of the data, if the footers of its files have it.

        Raises:
            ConfigError: `lora` is given, and `peft` is not installed.
            DataError: The data has no column of tokens.
        """
        if self.lora is not None:
            require("peft", "task.init_args.lora")
        prepared = copy.copy(self)
        prepared.max_token = int(need_column(data, self.tokens, ("list", "array"), "tokens").maximum or -1)
        return prepared

    def columns(self) -> list[str]:
        """Returns the column of tokens."""
        return [self.tokens]

    def decode(self, rows: Rows) -> Arrays:
        """Decodes rows to the tokens as a `Ragged`, cut to `max_length`; raises ValueError without integers."""
        values = rows[self.tokens]
        if isinstance(values, np.ndarray):
            values = Ragged.of(values, values.dtype)
        if not isinstance(values, Ragged) or values.values.dtype.kind not in "iu" or values.row_shape:
            raise ValueError("tokens are not integers, or one is missing")
        return {self.tokens: values if self.max_length is None else values.cut(self.max_length)}

    def build_model(self) -> nn.Module:
        """Builds the model, with adapters if `lora` is given.

        Raises:
            ConfigError: The model's vocabulary lacks tokens of the data, `peft` refuses the arguments `lora`, or the
                model is not of `transformers` and needs more than tokens, or cannot do what is configured.
        """
        model: Any = instantiate_module(self.model, "task.init_args.model")
        if not _is_of_transformers(model):
            self._check_module(model)
        elif self.pack and getattr(model.config, "output_router_logits", False):
            raise ConfigError(
                "task.init_args.pack is true, and the model's config has output_router_logits: the loss that balances"
                " experts would count the empty ends of sequences. Leave out one of them."
            )
        if (message := self.describe_unknown_tokens(model)) is not None:
            raise ConfigError(message)
        if self.gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        if self.lora is None:
            return model.float()
        from peft import LoraConfig, get_peft_model

        try:
            return get_peft_model(model.float(), LoraConfig(task_type="CAUSAL_LM", **self.lora))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"task.init_args.lora is {self.lora}: {error}.") from error

    def _check_module(self, model: nn.Module) -> None:
        """Refuses a module that is not of `transformers` if it needs, or is to do, what only these can."""
        name = type(model).__name__
        _, *more = inspect.signature(model.forward).parameters.values()
        is_given = {_TARGETS, *(p.name for p in more if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD))}
        if others := [p.name for p in more if p.default is p.empty and p.name not in is_given]:
            raise ConfigError(
                f"{name}.forward needs {', '.join(others)} besides the tokens; a module that is not of transformers"
                f" receives only the tokens, and the next ones as {_TARGETS}. Give the other arguments default values."
            )
        for argument in ("lora", "gradient_checkpointing", "pack"):
            if getattr(self, argument):
                raise ConfigError(
                    f"task.init_args.{argument} is for models of transformers, but {name} has no save_pretrained."
                    " Leave the field out, and implement it in the module."
                )

    def describe_unknown_tokens(self, model: Any) -> str | None:
        """Returns an error message if the data has tokens that a model's vocabulary lacks, otherwise None."""
        if _is_of_transformers(model):
            vocabulary = model.get_input_embeddings().num_embeddings
        else:
            # Another embedding than that of the tokens may be the largest; `describe_leak` then fails.
            sizes = [one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)]
            vocabulary = max(sizes, default=self.max_token + 1)
        if self.max_token < vocabulary:
            return None
        return (
            f"Column {self.tokens!r} has tokens up to {self.max_token}, but the model knows {vocabulary}, 0 to"
            f" {vocabulary - 1}. Set the config's vocab_size to the tokenizer's, or ingest with the tokenizer of the"
            " model."
        )

    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        """Returns the blocks of the model for `Task.shard_units`: the modules in the outermost `nn.ModuleList`s."""
        if isinstance(model, nn.ModuleList):
            return list(model)
        return [unit for child in model.children() for unit in self.shard_units(child)]

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Runs the model on a batch, and computes the loss of each token but the first from the tokens before it.

        Returns:
            `logits`, (rows, tokens, vocabulary): the scores of the next token. `losses`, (rows,): the sum of the losses
            of a row's tokens. `tokens`, (rows,): the number of these losses, one less than the row has tokens.
        """
        tokens, lengths = batch[self.tokens].long(), batch[self.tokens + LENGTHS]
        outputs = _call(model, tokens, lengths)
        logits = _logits(outputs, tokens)
        computed = {"logits": logits, **_row_losses(token_losses(logits, tokens[:, 1:]), lengths)}
        if model.training and (auxiliary := _auxiliary_loss(model, outputs)) is not None:
            computed["aux_loss"] = auxiliary
        return computed

    def describe_leak(self, model: nn.Module, batch: Batch) -> str | None:
        """Returns an error message if the scores of a token depend on later tokens, which they predict; else None."""
        tokens, lengths = batch[self.tokens].long(), batch[self.tokens + LENGTHS]
        last = tokens.shape[1] - 2
        if last < 1:
            return None
        model.eval()
        if self.pack and (message := self._describe_packing(model, batch)) is not None:
            return message
        others = tokens.clone()
        others[:, last] = torch.where(tokens[:, last] == max(self.max_token, 1), 0, max(self.max_token, 1))
        with torch.no_grad():
            one, other = (_logits(_call(model, rows, lengths), rows)[:, :last].float() for rows in (tokens, others))
        if torch.allclose(one, other, rtol=1e-3, atol=1e-4, equal_nan=True):
            return None
        return (
            f"The scores of {type(model).__name__} for a token depend on later tokens, which it must predict. Mask"
            " later tokens in the attention (is_causal); a model of transformers such as BERT needs is_decoder: true in"
            " its config."
        )

    def _describe_packing(self, model: nn.Module, batch: Batch) -> str | None:
        """Returns an error message if the losses of packed rows are not those of padded rows, otherwise None."""
        try:
            with torch.no_grad():
                packed, padded = (
                    one["losses"].float() for one in (self._pack(model, batch), self.forward(model, batch))
                )
        except (RuntimeError, TypeError, ValueError) as error:
            reason = f"does not accept the mask and the positions of several rows in one sequence ({error})"
        else:
            # A mask that is not used changes the losses of an untrained model little.
            if torch.allclose(packed, padded, rtol=1e-5, atol=1e-5, equal_nan=True):
                return None
            reason = "gives rows of one sequence other losses than alone; it does not use the mask that it gets"
        return (
            f"task.init_args.pack is true, but {type(model).__name__} {reason}. Leave pack out; data.by_length keeps"
            " padding low as well."
        )

    def _pack(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Returns `losses` and `tokens` as `forward` does, computed with several rows in one sequence."""
        tokens, lengths = batch[self.tokens].long(), batch[self.tokens + LENGTHS]
        packed = _pack_rows(tokens, lengths)
        logits = model(
            input_ids=packed.tokens, attention_mask=packed.mask, position_ids=packed.positions, use_cache=False
        ).logits
        losses = functional.pad(token_losses(logits, packed.tokens[:, 1:]), (0, 1))
        return _row_losses(losses.flatten()[packed.indices[:, : tokens.shape[1] - 1]], lengths)

    def training_loss(self, model: nn.Module, batch: Batch) -> Losses:
        """Returns the losses of each row's tokens, plus the weighted `aux_loss` of the batch for each of them."""
        outputs = self._pack(model, batch) if self.pack else self.forward(model, batch)
        losses = self.loss(outputs, batch)
        if "aux_loss" not in outputs:
            return losses
        shares = outputs["aux_loss"] * outputs["tokens"]
        return Losses(losses.values + shares, losses.weights, {"aux_loss": shares})

    def loss(self, outputs: Any, batch: Batch) -> Losses:
        """Returns the sum of the losses of each row's tokens, and the number of these losses as its weight."""
        del batch
        return Losses(outputs["losses"], outputs["tokens"])

    def metrics(self) -> MetricCollection:
        """Makes the perplexity, which is e to the power of the mean loss of a token."""
        from torchmetrics import MetricCollection

        from ray_app.task.metric_classes import Perplexity

        return MetricCollection({"perplexity": Perplexity()})

    def update(self, metrics: MetricCollection, outputs: Any, batch: Batch) -> None:
        """Updates the metrics with the sums of losses and the numbers of tokens of a batch."""
        del batch
        metrics.update(outputs["losses"], outputs["tokens"])

    def predictions(self, outputs: Any, batch: Batch) -> dict[str, npt.NDArray]:
        """Returns how well the model predicts each row.

        `loss` is the mean loss of its tokens, 0 if it has fewer than two; `tokens` is the number of tokens in the mean.
        """
        del batch
        losses, tokens = outputs["losses"].float(), outputs["tokens"]
        return {"loss": (losses / tokens.clamp(min=1)).numpy(), "tokens": tokens.numpy()}

    def export_files(self, model: nn.Module, folder: Path) -> None:
        """Writes config and merged parameters for `transformers`' `from_pretrained(folder)`, of a model of these."""
        if not _is_of_transformers(model):
            return
        if self.lora is not None:
            model = copy.deepcopy(model).merge_and_unload()  # type: ignore[operator]
        model.save_pretrained(folder)  # type: ignore[operator]


@dataclass(frozen=True)
class _PackedRows:
    """Rows of a micro-batch in sequences that are as long as its longest row.

    Args:
        tokens: (sequences, length).
        positions: The position of each token in its row, of the same shape.
        mask: What is added to the scores of attention, (sequences, 1, length, length): 0 where a token may see another,
            the least float32 elsewhere.
        indices: The index in the flattened `tokens` of each token of a row, (rows, longest row); of padding, any.
    """

    tokens: Tensor
    positions: Tensor
    mask: Tensor
    indices: Tensor


def _pack_rows(tokens: Tensor, lengths: Tensor) -> _PackedRows:
    """Puts padded rows, (rows, tokens), into few sequences: the longest row first, each where it fits first."""
    count, length = tokens.shape
    free, starts = list[int](), [0] * count
    sizes: list[int] = lengths.tolist()
    for row in sorted(range(count), key=lambda row: -sizes[row]):
        sequence = next((i for i, capacity in enumerate(free) if capacity >= sizes[row]), len(free))
        if sequence == len(free):
            free.append(length)
        starts[row] = (sequence + 1) * length - free[sequence]
        free[sequence] -= sizes[row]
    steps = torch.arange(length, device=tokens.device)
    indices, is_token = torch.tensor(starts, device=tokens.device)[:, None] + steps, steps < lengths[:, None]
    rows = torch.arange(count, device=tokens.device)[:, None].expand_as(indices)
    # What is left of a sequence is like one more row, since each token has to see one.
    fields = [torch.full((len(free) * length,), fill, device=tokens.device) for fill in (0, 0, -1)]
    for field, values in zip(fields, (tokens, steps.expand_as(indices), rows), strict=True):
        field[indices[is_token]] = values[is_token]
    packed, positions, row_of = (field.view(len(free), length) for field in fields)
    is_seen = (row_of[:, :, None] == row_of[:, None, :]).tril()
    mask = torch.where(is_seen, 0.0, torch.finfo(torch.float32).min)[:, None]
    return _PackedRows(packed, positions, mask, indices.clamp(max=packed.numel() - 1))


def _row_losses(losses: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """Returns the sum of the losses of each row's tokens but the first, and their number; (rows, tokens - 1) is padded.

    The losses beyond the length of a row are of padding.
    """
    is_token = torch.arange(1, losses.shape[1] + 1, device=losses.device) < lengths[:, None]
    return {"losses": torch.where(is_token, losses, 0).sum(1), "tokens": is_token.sum(1)}


def _is_of_transformers(model: Any) -> bool:
    return hasattr(model, "save_pretrained")


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross-entropy of each label, (rows, labels), from the scores at its position.

    Many scores are processed in parts, and a part again in backward, so that no copy of all scores in float32 exists:
    with a vocabulary of 128,000 tokens that of 8,000 positions has 4 GB. The bits do not depend on the parts.
    """
    length = labels.shape[1]
    if logits.shape[1] > length:
        # All scores are read where they are, since a part of them would be copied; further losses are left out below.
        labels = functional.pad(labels, (0, logits.shape[1] - length))
    at_once = max(1, _MAX_LOSS_BYTES // (4 * logits.shape[-1]))
    if labels.numel() <= at_once:
        flat = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return flat.view_as(labels)[:, :length]
    parts = [
        checkpoint(functional.cross_entropy, *part, reduction="none", use_reentrant=False, preserve_rng_state=False)
        for one in zip(logits.unbind(), labels, strict=True)
        for part in zip(one[0].split(at_once), one[1].split(at_once), strict=True)
    ]
    return torch.cat(parts).view_as(labels)[:, :length]


def _call(model: Any, tokens: Tensor, lengths: Tensor) -> Any:
    """Calls a model with tokens, (rows, tokens), as it takes them; see `CausalLanguageModel`."""
    if _is_of_transformers(model):
        options: dict[str, Tensor] = {}
        if getattr(model.config, "output_router_logits", False):
            # What is padding must not count as tokens that the experts share.
            mask = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
            options["attention_mask"] = mask.long()
        return model(input_ids=tokens, use_cache=False, **options)
    # A row of one token has nothing to predict, and a module may not take rows without tokens.
    tokens = tokens if tokens.shape[1] > 1 else functional.pad(tokens, (0, 2 - tokens.shape[1]))
    if _takes_targets(type(getattr(model, "_orig_mod", model))):  # type: ignore[arg-type]
        return model(tokens[:, :-1], **{_TARGETS: tokens[:, 1:]})
    return model(tokens[:, :-1])


@lru_cache(8)
def _takes_targets(kind: Any) -> bool:
    return _TARGETS in inspect.signature(kind.forward).parameters


def _logits(outputs: Any, tokens: Tensor) -> Tensor:
    """Returns the scores of a model's outputs; raises ConfigError if there are none."""
    logits = _part(outputs, "logits") if not isinstance(outputs, list | tuple) else outputs[0]
    logits = outputs if isinstance(outputs, Tensor) else logits
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[1] < tokens.shape[1] - 1:
        shape = f" of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else ""
        raise ConfigError(
            f"The language model returned a {type(outputs).__name__}{shape} for tokens of shape {tuple(tokens.shape)};"
            " it must return the scores of the next token for each token except the last, (rows, tokens - 1,"
            " vocabulary): alone, first of several values, or as logits of a dictionary or an object."
        )
    return logits


def _part(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def _auxiliary_loss(model: Any, outputs: Any) -> Tensor | None:
    """Returns the weighted `aux_loss` that a model has computed; None without one, or if its weight is unknown."""
    loss = _part(outputs, "aux_loss")
    weights = (getattr(model, name, None) for name in _COEFFICIENTS)
    weight = next((one for one in weights if one is not None), None if _is_of_transformers(model) else 1)
    return None if weight is None or not isinstance(loss, Tensor) else weight * loss
