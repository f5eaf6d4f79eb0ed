"""Language models that go on with a text: any of `transformers`, on rows of tokens."""

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

    Rows may be packed (`ray-app ingest --pack`), or texts of any length, which are padded at their end, where no token
    sees it.

    Args:
        model: What makes the model by its import path, such as `transformers.AutoModelForCausalLM.from_config` with a
            `config`, or `transformers.AutoModelForCausalLM.from_pretrained` with a folder of weights; it is trained in
            float32 or as `train.precision` says.
        tokens: Column of lists or arrays of integers.
        max_length: Most tokens of a row that are used, from its beginning; not given: all.
        lora: Arguments of `peft.LoraConfig`, such as `{r: 8, target_modules: [q_proj, v_proj]}`: the model is frozen,
            and trained are small adapters of some of its matrices. Not given: all parameters are trained.
        gradient_checkpointing: Whether what a block computes is computed again in backward and not kept, for memory.
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
        self.model, self.tokens, self.max_length, self.lora = model, tokens, max_length, lora
        self.gradient_checkpointing, self.greatest = gradient_checkpointing, -1

    def prepare(self, data: DataFacts) -> CausalLanguageModel:
        """Remembers the greatest token, if the files say; see `Task.prepare`."""
        if self.lora is not None:
            require("peft", "task.init_args.lora")
        prepared = copy.copy(self)
        prepared.greatest = int(need_column(data, self.tokens, ("list", "array"), "tokens").maximum or -1)
        return prepared

    def columns(self) -> list[str]:
        """The tokens alone."""
        return [self.tokens]

    def decode(self, rows: Rows) -> Arrays:
        """The tokens of each row, ragged."""
        values = rows[self.tokens]
        if isinstance(values, np.ndarray):
            values = Ragged.of(values, values.dtype)
        if not isinstance(values, Ragged) or values.values.dtype.kind not in "iu" or values.row_shape:
            raise ValueError("tokens are no integers, or one is missing")
        return {self.tokens: values if self.max_length is None else values.cut(self.max_length)}

    def build_model(self) -> nn.Module:
        """The model, with adapters if these are asked for.

        Raises:
            ConfigError: It is none of `transformers`, or its vocabulary lacks tokens of the data.
        """
        model = instantiate(self.model, "task.init_args.model")
        if not hasattr(model, "save_pretrained"):
            raise ConfigError(
                f"task.init_args.model makes a {type(model).__name__}; it must make a causal language model of"
                " transformers."
            )
        if (why := self.unknown_tokens(model)) is not None:
            raise ConfigError(why)
        if self.gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        if self.lora is None:
            return model.float()
        from peft import LoraConfig, get_peft_model

        try:
            return get_peft_model(model.float(), LoraConfig(task_type="CAUSAL_LM", **self.lora))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"task.init_args.lora is {self.lora}: {error}.") from error

    def unknown_tokens(self, model: Any) -> str | None:
        """Whether the data has tokens that a model's vocabulary lacks, in words; None if not."""
        if self.greatest < (known := model.get_input_embeddings().num_embeddings):
            return None
        return (
            f"Column {self.tokens!r} has tokens up to {self.greatest}, the model knows {known}, 0 to {known - 1}. Set"
            " the config's vocab_size to that of the tokenizer, or ingest with the tokenizer of the model."
        )

    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        """The blocks: what is in the outermost lists of modules."""
        if isinstance(model, nn.ModuleList):
            return list(model)
        return [unit for child in model.children() for unit in self.shard_units(child)]

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Runs the model.

        Returns:
            `logits`, (rows, tokens, vocabulary), of the token that comes next; the sum of the losses of a row's tokens
            but the first one, `losses`, (rows,), and how many these are, `tokens`, (rows,).
        """
        tokens, lengths = batch[self.tokens].long(), batch[self.tokens + LENGTHS]
        logits = model(input_ids=tokens, use_cache=False).logits
        wanted = tokens[:, 1:]
        losses = functional.cross_entropy(logits[:, :-1].flatten(0, 1), wanted.flatten(), reduction="none").view_as(
            wanted
        )
        counted = torch.arange(1, tokens.shape[1], device=tokens.device) < lengths[:, None]
        return {"logits": logits, "losses": torch.where(counted, losses, 0).sum(1), "tokens": counted.sum(1)}

    def loss(self, outputs: Any, batch: Batch) -> Losses:
        """Of each row the sum over its tokens, which counts as often as there are tokens."""
        del batch
        return Losses(outputs["losses"], outputs["tokens"])

    def metrics(self) -> MetricCollection:
        """The perplexity: e to the mean loss of a token."""
        from torchmetrics import MetricCollection

        from ray_app.task.metric_classes import Perplexity

        return MetricCollection({"perplexity": Perplexity()})

    def update(self, metrics: MetricCollection, outputs: Any, batch: Batch) -> None:
        """See `Task.update`."""
        del batch
        metrics.update(outputs["losses"], outputs["tokens"])

    def predictions(self, outputs: Any, batch: Batch) -> dict[str, npt.NDArray]:
        """Returns how well the model predicts a text: the mean `loss` of its tokens, and the number of `tokens` that
        the mean is over.
        """
        del batch
        losses, tokens = outputs["losses"].float(), outputs["tokens"]
        return {"loss": (losses / tokens.clamp(min=1)).numpy(), "tokens": tokens.numpy()}

    def export_files(self, model: nn.Module, folder: Path) -> None:
        """Writes what `transformers.AutoModelForCausalLM.from_pretrained(folder)` loads: config.json and safetensors,
        adapters added up.
        """
        if self.lora is not None:
            model = copy.deepcopy(model).merge_and_unload()  # type: ignore[operator]
        model.save_pretrained(folder)  # type: ignore[operator]
