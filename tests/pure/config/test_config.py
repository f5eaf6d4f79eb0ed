"""The configuration: its checks, the fields that its digest covers, and its YAML."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_app.config.checks import check_config
from ray_app.config.config import (
    SECTIONS,
    Config,
    check_same_config,
    default_tracking_uri,
    digest,
    flatten,
    from_dict,
    from_yaml,
    result_fields,
)
from ray_app.config.import_paths import OptimizerSpec
from ray_app.config.sections import ClassSpec
from ray_app.errors import ConfigError, RunExistsError

VALID = Config(
    task=ClassSpec("ray_app.task.image.ImageClassification", {"model_args": {"dropout": 0.2}}),
    optimizer=OptimizerSpec("torch.optim.SGD", {"lr": 0.1}),
).replace(data__path="data/digits", run__name="digits", scaling__max_workers=4, scaling__logical_workers=4)


def problems(**fields: Any) -> list[str]:
    """Returns the lines of the error for a configuration with these values; empty if it is accepted."""
    try:
        check_config(VALID.replace(**fields))
    except ConfigError as error:
        first, *lines = str(error).splitlines()
        assert first == "The configuration is refused:"
        assert lines
        assert all(line.startswith("  - ") and line.endswith(".") for line in lines)
        return [line.removeprefix("  - ") for line in lines]
    return []


def test_a_valid_configuration_is_accepted() -> None:
    assert problems() == []


def test_the_error_of_a_batch_below_the_logical_workers_names_the_nearest_valid_size() -> None:
    [message] = problems(data__global_batch_size=3)
    assert message.endswith("the nearest valid values are 4.")


def test_the_batch_is_checked_against_the_workers_if_logical_workers_are_unset() -> None:
    [message] = problems(scaling__logical_workers=None, scaling__max_workers=3)
    assert "not divisible by the 3 logical workers; the nearest valid values are 30 or 33." in message
    assert problems(scaling__logical_workers=None, scaling__max_workers=8) == []


@given(st.integers(1, 500), st.integers(1, 64))
@settings(deadline=None)
def test_the_error_of_a_batch_size_names_the_nearest_valid_sizes(batch: int, logical_workers: int) -> None:
    fields = {"scaling__logical_workers": logical_workers, "scaling__max_workers": 1}
    messages = problems(**fields, data__global_batch_size=batch)
    assert bool(messages) == bool(batch % logical_workers)
    if messages:
        named_sizes = [int(n) for n in messages[0].removesuffix(".").rpartition("are ")[2].split(" or ")]
        valid_sizes = [
            n for n in range(max(1, batch - logical_workers + 1), batch + logical_workers) if n % logical_workers == 0
        ]
        assert named_sizes == valid_sizes
        assert all(problems(**fields, data__global_batch_size=n) == [] for n in named_sizes)


@pytest.mark.parametrize(
    "name",
    [
        "../other",
        "..",
        "a/b",
        "/tmp/x",
        "",
        ".hidden",
        "-x",
        " a",
        "a ",
        "a.",
        "a\n",
        "a\\b",
        "a\u00a0b",
        "ü" * 65,
        "~root",
        "a\x00",
    ],
)
def test_a_run_name_that_is_not_a_plain_directory_name_is_refused(name: str) -> None:
    [message] = problems(run__name=name)
    words = name if name.isidentifier() else repr(name)
    assert message == (
        f"run.name is {words}; use 1 to 128 bytes of letters and digits of any language, '.', '_', '-' and blanks,"
        " with a letter or digit first and no blank or '.' last."
    )


@pytest.mark.parametrize("name", ["a", "digits-2024.01_b", "0", "a" * 128, "a..b", "Größe 1", "हिन्दी", "模型", None])
def test_valid_run_names_are_accepted(name: str | None) -> None:
    assert problems(run__name=name) == []


def test_all_problems_are_reported_together() -> None:
    assert (
        len(
            problems(train__epochs=0, run__name="..", data__path="", scaling__min_workers=9, data__global_batch_size=30)
        )
        == 5
    )


# --- the digest


def changes_digest(**fields: Any) -> bool:
    """Returns whether these values change the digest."""
    return digest(VALID.replace(**fields), "m") != digest(VALID, "m")


@pytest.mark.parametrize(
    "fields",
    [
        {"run__name": "other"},
        {"run__storage_path": "/mnt/x"},
        {"run__changed": "refuse"},
        {"run__ray_address": "auto"},
        {"run__branch_from": "runs/a"},
        {"data__path": "elsewhere"},
        {"data__eval_path": "test"},
        {"data__cache": "memory"},
        {"data__cache": "disk", "data__cache_dir": "/scratch", "data__cache_gb": 5.0},
        {"data__on_bad_row": "skip", "data__max_bad_rows": 7},
        {"data__prefetch_windows": 3},
        {"train__init_from": "parameters.safetensors"},
        {"data__read_task_mb": 1.0},
        {"data__reader_threads": 4},
        {"scaling__max_workers": 2},
        {"scaling__min_workers": 2},
        {"scaling__cpus_per_worker": 2},
        {"scaling__resize_interval_s": 1.0},
        {"scaling__standby_workers": 1},
        {"scaling__evict_straggler_after_s": 60.0},
        {"scaling__load_balancing": "speed"},
        {"failure__sdc_check_rate": 0.01},
        {"checkpoint__every_steps": 7, "checkpoint__every_epochs": None, "checkpoint__keep_last": 5},
        {"failure__max_failures": 1, "failure__step_timeout_s": 1.0},
        {"failure__heartbeat_timeout_s": 1.0, "failure__recovery": "restart", "checkpoint__snapshot_every_steps": 1},
        {
            "evaluate__metric": "loss",
            "evaluate__mode": "min",
            "evaluate__batch_size": 1,
            "evaluate__max_rows": 9,
            "evaluate__half": "report",
            "evaluate__fixed_batches": True,
            "evaluate__workers": 3,
        },
        {"evaluate__num_cpus": 2, "evaluate__num_gpus": 1, "evaluate__label_selector": {"zone": "a"}},
        {
            "tracking__enabled": False,
            "tracking__every_steps": 3,
            "tracking__uri": "http://x",
            "tracking__experiment": "e",
        },
        {"tracking__registered_model": "m", "tracking__tensorboard": True},
        {"evaluate__where": "workers", "evaluate__max_pending": 3, "evaluate__min_delta": 0.1},
        {"train__servers": 3, "train__server_label_selector": {"zone": "a"}},
        {"train__backend": "gloo", "train__bucket_mb": 1.0, "scaling__label_selector": {"zone": "a"}},
        {"train__peer_replica": True},
        {"train__capture": True},
        {"train__profile_steps": [5, 7]},
        {"observers": [{"class_path": "my.Observer", "init_args": {}}]},
    ],
    ids=str,
)
def test_fields_that_do_not_affect_the_result_leave_the_digest(fields: dict[str, Any]) -> None:
    assert not changes_digest(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 1},
        {"optimizer__init_args": {"lr": 0.2}},
        {"optimizer__class_path": "torch.optim.Adam"},
        {"schedule": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1}}},
        {"task__init_args": {"model_args": {"dropout": 0.3}}},
        {"task__init_args": {}},
        {"scaling__threads_per_worker": 2},
        {"scaling__logical_workers": 8},
        {"scaling__gpus_per_worker": 1},
        {"data__global_batch_size": 64},
        {"data__shuffle_window_rows": 99},
        {"data__last_batch": "drop"},
        {"data__shard": "file"},
        {"data__shuffle": False},
        {"data__balance_by": "kind"},
        {"data__by_length": "tokens"},
        {"data__path": [{"path": "a", "weight": 3}, {"path": "b", "weight": 1}]},
        {"data__fold": 1},
        {"data__folds": 4},
        {"data__fold_by": "patient"},
        {"data__fold_by_class": "label"},
        {"data__fold_by_time": "date"},
        {"train__epochs": 2},
        {"train__max_steps": 10},
        {"train__reduction": "overlapped"},
        {"train__reducer": "my.Reducer"},
        {"train__precision": "bf16"},
        {"train__grad_clip_norm": 1.0},
        {"train__steps_per_epoch": 10},
        {"train__ema_decay": 0.9},
        {"train__freeze": ["features.*"]},
        {"train__compile": True},
        {"train__channels_last": True},
        {"train__cpu_offload": True},
        {"train__strategy": "local_sgd"},
        {"train__local_steps": 5},
        {"train__outer_lr": 0.7},
        {"train__outer_momentum": 0.9},
        {"train__staleness": 2},
        {"train__init_digest": "d" * 64},
        {"run__branch_point": f"5-{64 * 'd'}"},
        {"evaluate__patience": 3},
        {"optimizer__groups": [{"names": ["*.bias"], "lr": 0.1}]},
    ],
    ids=str,
)
def test_fields_that_affect_the_result_change_the_digest(fields: dict[str, Any]) -> None:
    assert changes_digest(**fields)


def test_with_early_stopping_evaluation_and_checkpoint_fields_change_the_digest() -> None:
    judged = VALID.replace(evaluate__patience=3, data__eval_path="test")
    for fields in (
        {"evaluate__metric": "loss"},
        {"evaluate__mode": "min"},
        {"evaluate__min_delta": 0.1},
        {"evaluate__where": "workers"},
        {"evaluate__batch_size": 7},
        {"evaluate__half": "selection"},
        {"checkpoint__every_steps": 7},
        {"checkpoint__every_epochs": 3},
    ):
        assert digest(judged.replace(**fields), "m") != digest(judged, "m"), fields


def test_each_field_is_tested_to_change_the_digest_or_not() -> None:
    """A new field must be added to one of the two tests above."""
    both = (
        test_fields_that_do_not_affect_the_result_leave_the_digest,
        test_fields_that_affect_the_result_change_the_digest,
    )
    marks = [mark for test in both for mark in test.pytestmark]
    tested = {
        name.split("__init_args")[0].split("__class_path")[0]
        for mark in marks
        for fields in mark.args[1]
        for name in fields
    }
    fields = {f"{section}__{field.name}" for section, kind in SECTIONS.items() for field in dataclasses.fields(kind)}
    assert tested == fields | {"seed", "task", "optimizer", "optimizer__groups", "schedule", "observers"}


def test_the_manifest_digest_changes_the_digest() -> None:
    assert digest(VALID, "m") != digest(VALID, "other")


def test_the_digest_has_logical_workers_also_if_they_are_unset() -> None:
    unset = VALID.replace(scaling__logical_workers=None)
    assert digest(unset, "m") == digest(VALID, "m")
    assert digest(unset.replace(scaling__max_workers=2), "m") != digest(VALID, "m")


def test_fields_at_their_default_are_not_in_the_digest() -> None:
    """Otherwise a field that a later version adds would change digests; the digest below must never change."""
    assert result_fields(Config(), "m") == {
        "manifest": "m",
        "scaling.logical_workers": 1,
        "scaling.threads_per_worker": 1,
    }
    assert result_fields(VALID, "m") == {
        "manifest": "m",
        "scaling.logical_workers": 4,
        "scaling.threads_per_worker": 1,
        "task.class_path": "ray_app.task.image.ImageClassification",
        "task.init_args.model_args.dropout": 0.2,
        "optimizer.class_path": "torch.optim.SGD",
        "optimizer.init_args.lr": 0.1,
    }
    assert digest(Config(), "m") == "f1ceab64dd46be7db0fd597c48052c18f26975ce40e5afc28e0a7ea3e28e0f9b"


def test_a_run_with_another_configuration_is_refused_with_a_diff() -> None:
    old, new = (
        result_fields(VALID, "aaa"),
        result_fields(VALID.replace(optimizer__init_args={"lr": 0.2}, train__epochs=3), "bbb"),
    )
    check_same_config("digits", old, dict(old))
    with pytest.raises(RunExistsError) as caught:
        check_same_config("digits", old, new)
    first, *diff, last = str(caught.value).splitlines()
    assert first == "The run 'digits' exists with another configuration or other data:"
    assert sorted(diff) == [
        "+ manifest: bbb",
        "+ optimizer.init_args.lr: 0.2",
        "+ train.epochs: 3",
        "- manifest: aaa",
        "- optimizer.init_args.lr: 0.1",
    ]
    assert "Nothing was changed" in last
    assert "another run.name" in last


# --- YAML and replace


def test_a_configuration_survives_yaml() -> None:
    schedule = ClassSpec("torch.optim.lr_scheduler.StepLR", {"step_size": 3})
    for config in (
        Config(),
        VALID,
        dataclasses.replace(VALID, schedule=schedule),
        VALID.replace(run__name="größe-1", train__epochs=7),
    ):
        again = from_yaml(config.to_yaml())
        assert again == config
        assert digest(again, "m") == digest(config, "m")


def test_yaml_with_some_fields_is_completed_by_defaults() -> None:
    text = yaml.safe_dump({"seed": 5, "train": {"epochs": 3}, "optimizer": {"class_path": "torch.optim.SGD"}})
    assert from_yaml(text) == Config().replace(seed=5, train__epochs=3, optimizer={"class_path": "torch.optim.SGD"})


def test_replace_changes_only_the_named_fields() -> None:
    config = VALID.replace(seed=9, train__epochs=3, data__cache="memory", optimizer__init_args__lr=0.5)
    assert flatten(config.to_dict()) == flatten(VALID.to_dict()) | {
        "seed": 9,
        "train.epochs": 3,
        "data.cache": "memory",
        "optimizer.init_args.lr": 0.5,
    }
    assert VALID.seed == 0
    assert VALID.optimizer.init_args == {"lr": 0.1}, "replace() changed the original configuration"


@pytest.mark.parametrize("fields", [{"train__epoch": 3}, {"trian__epochs": 3}, {"speed": 1}])
def test_an_unknown_field_of_replace_is_an_error(fields: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, KeyError), match=r"epoch\b|trian|speed"):
        VALID.replace(**fields)


def test_a_configuration_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        VALID.train.epochs = 3


def test_from_dict_does_not_change_its_input() -> None:
    values = VALID.to_dict()
    from_dict(values)
    assert values == VALID.to_dict()


def test_the_tracking_database_is_next_to_the_runs_by_default() -> None:
    assert default_tracking_uri(Config().replace(run__storage_path="/mnt/runs")) == "sqlite:////mnt/runs/mlflow.db"
    assert default_tracking_uri(Config().replace(tracking__uri="http://host:5000")) == "http://host:5000"


def test_a_field_without_a_value_is_refused_with_its_default() -> None:
    with pytest.raises(ConfigError, match=r"scaling\.max_workers is empty; set a value, or remove the line for the"):
        check_config(Config().replace(task__class_path="a.B", data__path="x", scaling__max_workers=None))
