"""Causal language models of `transformers`, trained on rows of tokens."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from ray_app.config.import_paths import require
from ray_app.errors import ConfigError
from ray_app.plan.manifest import DataFacts
from ray_app.task.annotations import MetricCollection
from ray_app.task.base import Batch, Losses, Rows, Task
from ray_app.task.fields import need_column
from ray_app.task.ragged import LENGTHS, Arrays, Ragged
from ray_app.task.transforms import Spec, instantiate


class CausalLanguageModel(Task):
    """Predicts each token of a row from those before it; loss and perplexity are means over tokens.

    Rows are blocks of one length (`ray-app ingest --pack`), or texts of any length. Texts are padded at their end. No
    attention mask is needed for that, since no token attends to later ones.

    Args:
        model: The factory of the model by its import path, such as `transformers.AutoModelForCausalLM.from_config` with
            a `config`, or `transformers.AutoModelForCausalLM.from_pretrained` with a folder of weights. The parameters
            are converted to float32; `train.precision` says in which precision the model computes.
        tokens: Column of lists or arrays of integers.
        max_length: Maximum number of tokens of a row; the end of a longer one is cut off. Default: all are used.
        lora: Arguments of `peft.LoraConfig`, such as `{r: 8, target_modules: [q_proj, v_proj]}`: the model is frozen,
            and small adapters of some of its matrices are trained. Default: all parameters are trained.
        gradient_checkpointing: Whether backward recomputes the activations of each block, which saves memory.
    """

    best_metric: ClassVar[str] = "perplexity"

    def __init__(
        self,
        model: Spec,
        tokens: str = "tokens",
        max_length: int | None = None,
        lora: dict[str, Any] | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        self.model = model
        self.tokens = tokens
        self.max_length = max_length
        self.lora = lora
        self.gradient_checkpointing = gradient_checkpointing
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
            ConfigError: The model is not one of `transformers`, its vocabulary lacks tokens of the data, or `peft`
                refuses the arguments `lora`.
        """
        model = instantiate(self.model, "task.init_args.model")
        if not hasattr(model, "save_pretrained"):
            raise ConfigError(
                f"task.init_args.model makes a {type(model).__name__}; it must make a causal language model of"
                " transformers."
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

    def describe_unknown_tokens(self, model: Any) -> str | None:
        """Returns an error message if the data has tokens that a model's vocabulary lacks, otherwise None."""
        if self.max_token < (vocabulary := model.get_input_embeddings().num_embeddings):
            return None
        return (
            f"Column {self.tokens!r} has tokens up to {self.max_token}, the model knows {vocabulary}, 0 to"
            f" {vocabulary - 1}. Set the config's vocab_size to that of the tokenizer, or ingest with the tokenizer of"
            " the model."
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
        logits = model(input_ids=tokens, use_cache=False).logits
        labels = tokens[:, 1:]
        losses = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="none")
        # Labels beyond the length of a row are padding.
        is_token = torch.arange(1, tokens.shape[1], device=tokens.device) < lengths[:, None]
        loss_sums = torch.where(is_token, losses.view_as(labels), 0).sum(1)
        return {"logits": logits, "losses": loss_sums, "tokens": is_token.sum(1)}

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
        """Writes config and merged parameters for `transformers`' `from_pretrained(folder)`."""
        if self.lora is not None:
            model = copy.deepcopy(model).merge_and_unload()  # type: ignore[operator]
        model.save_pretrained(folder)  # type: ignore[operator]
