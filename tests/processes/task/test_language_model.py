"""Causal language models of `transformers`: bit-identical training, adapters, shards, and folders that `transformers`
loads.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ray_app.data.dataset import open_dataset
from ray_app.errors import ConfigError, DataError
from ray_app.models.export import load_model, write_export
from ray_app.task import language_model as module
from ray_app.task.language_model import CausalLanguageModel
from ray_app.task.losses import MetricKey, sum_losses
from ray_app.task.metrics import combine, score
from ray_app.task.ragged import Ragged, to_batch
from ray_app.testing import WorkerPool, cache_windows, read_trained_run
from ray_app.train.context import WorkerContext
from ray_app.train.job import Hooks, Job
from ray_app.train.loop import train
from ray_app.train.membership import SingleProcessMembership
from ray_app.train.state.state import TrainingState
from tests.support.bit_identity import assert_bit_identical, train_and_resume
from tests.support.local_world import CPU, make_job
from tests.support.paths import ROOT
from tests.support.shifting_world import KillOnce, train_shifting

WORDS, ROWS = 50, 44
SMALL = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
EMBEDDING = ("num_embeddings", "embedding_dim")
LORA = {"r": 2, "target_modules": ["c_attn"], "lora_dropout": 0.1}


def spec(vocab_size: int = WORDS) -> dict[str, Any]:
    config = {"class_path": "transformers.GPT2Config", "init_args": {**SMALL, "vocab_size": vocab_size}}
    return {"class_path": "transformers.AutoModelForCausalLM.from_config", "init_args": {"config": config}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of different lengths; each counts up."""
    root, random = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)
    texts = [
        [int(t) % WORDS for t in range(first, first + random.integers(1, 24))]
        for first in random.integers(0, WORDS, ROWS)
    ]
    texts[0] = [WORDS - 1, 0]
    pq.write_table(pa.table({"tokens": pa.array(texts, pa.list_(pa.int32()))}), root / "0.parquet", row_group_size=20)
    return root


def job_of(folder: Path, data: Path, task: CausalLanguageModel | None = None, **fields: Any) -> Job:
    fields = {"train__epochs": 2, "checkpoint__every_epochs": None, "checkpoint__every_steps": 3, **fields}
    task = task or CausalLanguageModel(spec())
    return make_job(folder, data, logical_workers=4, batch=12, task=task, data__by_length="tokens", **fields)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("options", "precision"),
    [({}, "fp32"), ({"gradient_checkpointing": True, "lora": LORA}, "bf16"), ({"pack": True}, "fp32")],
)
def test_training_is_bit_identical_for_any_worker_count_a_kill_and_a_resume(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, options: dict[str, Any], precision: str
) -> None:
    job = job_of(tmp_path / "run", data, CausalLanguageModel(spec(), **options), train__precision=precision)
    first = train_and_resume(worker_pool, job, (1, 2, 4), ends=(3, 5))
    assert options or first.steps[-1][1] < first.steps[0][1], "the loss did not fall"
    kill = KillOnce(tmp_path / "killed", step=5, rank=0)
    lost = job_of(tmp_path / "lost", data, CausalLanguageModel(spec(), **options), train__precision=precision)
    outcomes = train_shifting(worker_pool, lost, [[0, 1], [1]], [], Hooks(after_step=kill))
    assert kill.proof.exists()
    assert outcomes[1].trace == ""
    assert read_trained_run(lost).digests == first.digests


@pytest.mark.rest
def test_only_adapters_are_trained(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    job = job_of(tmp_path / "run", data, CausalLanguageModel(spec(), lora=LORA), checkpoint__every_steps=1)
    worker_pool.train_to_end(job, 1, cache_windows)
    last = read_trained_run(job).snapshot.model
    worker_pool.train_to_end(
        begun := job_of(tmp_path / "begun", data, CausalLanguageModel(spec(), lora=LORA), train__max_steps=1),
        1,
        cache_windows,
    )
    moved = {
        name for name, value in read_trained_run(begun).snapshot.model.items() if not torch.equal(value, last[name])
    }
    assert moved
    assert moved == {name for name in last if ".lora_" in name}
    assert len(read_trained_run(job).snapshot.optimizer["state"]) == len(moved)


@pytest.mark.rest
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True, "lora": LORA}])
def test_fsdp_by_blocks_is_bit_identical_to_ddp(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    sgd = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.05}}
    task = CausalLanguageModel(spec(), **options)
    plain = worker_pool.train_new_run(job_of(tmp_path / "plain", data, task, optimizer=sgd), 2, cache_windows)
    sharded = worker_pool.train_new_run(
        job_of(tmp_path / "run", data, task, optimizer=sgd, train__strategy="fsdp"), 2, cache_windows
    )
    assert_bit_identical(sharded, plain)


def test_the_shard_units_are_the_transformer_blocks() -> None:
    for lora in (None, LORA):
        task = CausalLanguageModel(spec(), lora=lora)
        assert [type(unit).__name__ for unit in task.shard_units(task.build_model())] == ["GPT2Block"] * 2


def test_packed_rows_have_the_losses_and_the_gradient_of_padded_ones() -> None:
    task = CausalLanguageModel(spec(), pack=True)
    model = task.build_model().eval()
    rows = [np.arange(length) * 7 % WORDS for length in (9, 1, 3, 0, 4, 5, 2, 8)]
    batch = to_batch({"tokens": Ragged.of(rows, np.int32)})
    widths = list[tuple[int, ...]]()
    model.transformer.wte.register_forward_hook(lambda _, tokens, __: widths.append(tuple(tokens[0].shape)))
    values, gradients = [], []
    for losses in (task.training_loss(model, batch), task.compute_loss(model, task.forward(model, batch), batch)):
        model.zero_grad()
        losses.values.sum().backward()
        values.append(losses)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert widths == [(4, 9), (8, 9)]
    assert torch.equal(values[0].weights, values[1].weights)
    torch.testing.assert_close(values[0].values, values[1].values)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "arguments", "words"),
    [
        ("MistralConfig", {"sliding_window": 4}, "other losses than alone"),
        ("MambaConfig", {}, "does not accept the mask"),
    ],
)
def test_a_model_that_does_not_separate_packed_rows_is_refused(
    config: str, arguments: dict[str, Any], words: str
) -> None:
    small = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, **arguments}
    small |= {"intermediate_size": 32, "num_key_value_heads": 2}
    model = {"class_path": f"transformers.{config}", "init_args": small}
    factory = {"class_path": "transformers.AutoModelForCausalLM.from_config", "init_args": {"config": model}}
    task = CausalLanguageModel(factory, pack=True)
    batch = to_batch({"tokens": Ragged.of([np.arange(9), np.arange(3), np.arange(5)], np.int32)})
    assert words in str(task.describe_leak(task.build_model(), batch))


def test_the_loss_is_the_mean_over_tokens_without_padding() -> None:
    """The mean over tokens and the perplexity do not depend on the batch size."""
    task = CausalLanguageModel(spec())
    model = task.build_model().eval()
    rows = [[1, 2, 3, 4, 5], [7], [9, 8, 7], []]
    arrays = {"tokens": Ragged.of(rows, np.int32, fill=13)}
    losses = []
    for row in rows:
        logits = model(torch.tensor([row or [0]])).logits[0].log_softmax(-1)
        losses += [-logits[i, row[i + 1]].item() for i in range(len(row) - 1)]
    for size in (4, 1):
        values = combine(task, score(task, model, arrays, size, CPU)).values
        assert values["loss"] == pytest.approx(sum(losses) / 6, rel=1e-5)
        assert values["perplexity"] == pytest.approx(math.exp(values["loss"]), rel=1e-6)
    batch = to_batch(arrays)
    outputs = task.forward(model, batch)
    assert outputs["tokens"].tolist() == [4, 0, 2, 0]
    message = task.predictions({name: value.detach() for name, value in outputs.items()}, batch)
    assert message["loss"][0] == pytest.approx(sum(losses[:4]) / 4, rel=1e-5)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_the_loss_in_parts_has_the_bits_of_the_whole_and_keeps_no_copy_of_the_scores(
    precision: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    scores, labels = torch.randn(3, 8, WORDS).to(precision), torch.randint(0, WORDS, (3, 7))
    logits = scores.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        # Without the scores after the last token.
        losses = functional.cross_entropy(logits[:, :7].flatten(0, 1), labels.flatten(), reduction="none").view(3, 7)
    losses.sum().backward()
    results = [(losses, logits.grad)]
    for positions in (24, 7, 3, 1):
        monkeypatch.setattr(module, "_MAX_LOSS_BYTES", 4 * WORDS * positions)
        logits, saved = scores.clone().requires_grad_(), list[Tensor]()
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t),
            torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16),
        ):
            losses = module.token_losses(logits, labels)
        losses.sum().backward()
        results.append((losses, logits.grad))
        if positions < 24:
            # Only views of the scores are kept.
            memory = logits.untyped_storage().data_ptr()
            assert not [t for t in saved if t.is_floating_point() and t.untyped_storage().data_ptr() != memory]
    for losses, gradient in results:
        assert losses.dtype == torch.float32
        assert torch.equal(losses, results[0][0])
        assert torch.equal(gradient, results[0][1])


def test_gradients_with_gradient_checkpointing_are_bit_identical() -> None:
    gradients = []
    for checkpointing in (False, True):
        task = CausalLanguageModel(spec(), gradient_checkpointing=checkpointing)
        torch.manual_seed(1)
        model = task.build_model().train()
        batch = to_batch({"tokens": Ragged.of([[1, 2, 3, 4], [5, 6]], np.int32)})
        task.loss(task.forward(model, batch), batch).values.sum().backward()
        assert model.is_activation_checkpointing is checkpointing
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.rest
def test_transformers_loads_an_export(lora: dict[str, Any] | None, data: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    task = CausalLanguageModel(spec(), lora=lora).prepare(open_dataset(str(data)).facts)
    model = task.build_model()
    with torch.no_grad():
        for parameter in model.parameters():
            # Adapters begin with zeros, so the test changes all parameters.
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    rows = {"tokens": Ragged.of([[1, 2, 3], [4, 5]], np.int32)}
    source = {"run": "r", "step": 1, "params_digest": ""}
    described = write_export(task, model, rows, tmp_path / "export", source)
    assert {"config.json", "model.safetensors"} <= described["files"].keys()
    batch = to_batch(rows)
    expected = task.forward(model.eval(), batch)["logits"]
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    assert torch.allclose(reloaded(batch["tokens"].long()).logits, expected, atol=1e-5)
    predicted = load_model(tmp_path / "export").predict(
        {name: values.numpy() for name, values in batch.items()}, scores=True
    )
    assert np.allclose(predicted["logits"], expected.detach().numpy(), atol=1e-5)
    reloaded.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    for folder, tolerance in (("export", 1e-5), ("half", 0.05)):
        init_args = {"pretrained_model_name_or_path": str(tmp_path / folder)}
        again = CausalLanguageModel(
            {"class_path": "transformers.AutoModelForCausalLM.from_pretrained", "init_args": init_args}
        )
        begun = again.build_model().eval()
        assert {parameter.dtype for parameter in begun.parameters()} == {torch.float32}
        assert torch.allclose(again.forward(begun, batch)["logits"], expected, atol=tolerance)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (CausalLanguageModel(spec(40)), "has tokens up to 49, but the model knows 40, 0 to 39. Set the config's"),
        (CausalLanguageModel({"class_path": "torch.nn.KLDivLoss"}), "KLDivLoss.forward needs target besides the"),
        (CausalLanguageModel({"class_path": "torch.nn.ReLU"}, lora=LORA), "task.init_args.lora is for models of"),
        (
            CausalLanguageModel({"class_path": "torch.nn.Embedding", "init_args": dict.fromkeys(EMBEDDING, 40)}),
            "has tokens up to 49, but the model knows 40, 0 to 39",
        ),
        (CausalLanguageModel(spec(), lora={"r": 2, "layers": ["c_attn"]}), "unexpected keyword argument 'layers'"),
        (CausalLanguageModel(spec(), lora={"r": 2, "target_modules": ["qkv"]}), "task.init_args.lora is .*qkv.*"),
        (CausalLanguageModel(spec(), tokens="ids"), "has no column 'ids' for the tokens"),
    ],
)
def test_invalid_models_adapters_and_columns_are_refused(task: CausalLanguageModel, message: str, data: Path) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        task.prepare(open_dataset(str(data)).facts).build_model()


class LeakyModel(nn.Module):
    """A language model that sees the next token, with an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Embedding(WORDS, WORDS)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"logits": self.scores(tokens.roll(-1, 1)), "aux_loss": self.scores.weight.square().mean()}


def test_the_gpt_of_the_page_trains_as_in_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "conf")
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, WORDS, (12, 9)))
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"tokens": pa.array(tokens.tolist(), pa.list_(pa.int64()))}), tmp_path / "data/0.parquet")
    task = CausalLanguageModel({"class_path": "own_gpt.GPT", "init_args": {"vocabulary": WORDS, "positions": 8}})
    fields = {"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}}, "train__epochs": 5}
    job = make_job(tmp_path / "run", tmp_path / "data", logical_workers=2, batch=12, task=task, **fields)
    train(WorkerContext(job, SingleProcessMembership(2, lambda: False), cache_windows, CPU, Hooks()))
    plain = TrainingState(job.config, job.task, CPU, 5).model
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(5):
        optimizer.zero_grad()
        plain(tokens[:, :-1], tokens[:, 1:])[1].backward()
        optimizer.step()
    for name, value in read_trained_run(job).snapshot.model.items():
        assert torch.allclose(value, plain.state_dict()[name], atol=1e-5), name
    batch = to_batch({"tokens": Ragged.of([[5], []], np.int32)})
    assert job.task.loss(job.task.forward(plain, batch), batch).values.tolist() == [0, 0]
    assert task.describe_leak(plain, to_batch({"tokens": Ragged.of(tokens.numpy(), np.int64)})) is None


def test_a_model_that_sees_later_tokens_is_refused_and_its_auxiliary_loss_is_trained_on() -> None:
    task, model = CausalLanguageModel({"class_path": f"{__name__}.LeakyModel"}), LeakyModel()
    batch = to_batch({"tokens": Ragged.of([[1, 2, 3, 4], [5, 6]], np.int32)})
    assert "for a token depend on later tokens" in str(task.describe_leak(model, batch))
    losses = task.training_loss(model.train(), batch)
    added = losses.values - task.forward(model, batch)["losses"]
    assert torch.allclose(added, model.scores.weight.square().mean() * torch.tensor([3, 1]))
    assert torch.allclose(losses.metrics["aux_loss"], added)
    assert "aux_loss" not in task.forward(model.eval(), batch)


def test_a_mixture_of_experts_trains_on_what_transformers_trains_on() -> None:
    """Also without padding: the experts are balanced for the tokens of the rows alone."""
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "output_router_logits": True}
    config = {"class_path": "transformers.MixtralConfig", "init_args": {**sizes, **heads, "router_aux_loss_coef": 3.0}}
    factory = "transformers.AutoModelForCausalLM.from_config"
    task = CausalLanguageModel({"class_path": factory, "init_args": {"config": config}})
    model = task.build_model().train()
    batch = to_batch({"tokens": Ragged.of([[1, 2, 3, 4], [5, 6]], np.int32)})
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    labels = batch["tokens"].long().masked_fill(mask == 0, -100)
    expected = model(input_ids=batch["tokens"].long(), attention_mask=mask, labels=labels).loss
    sums = sum_losses(task, task.training_loss(model, batch))
    assert sums.loss / sums.weight == pytest.approx(expected.item(), rel=1e-5)
    assert sums.metrics[MetricKey("aux_loss")] / sums.weight > 1
