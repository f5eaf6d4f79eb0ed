"""The key of a round of retraining, what it reads again, its record and its configuration, without Ray."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch

from ray_app import load_config
from ray_app.config.config import Config
from ray_app.data import dataset as contents_module
from ray_app.errors import ConfigError, DataError
from ray_app.retrain.gate import find_old_files
from ray_app.retrain.options import RetrainSection, check_section
from ray_app.retrain.rounds import (
    Delivery,
    RetrainPaths,
    Round,
    add_audit_entry,
    make_folder_name,
    make_inputs,
    open_rounds,
    read_audit_entries,
    read_delivery,
)
from tests.support.deliveries import SECTION, VALID, write

CONFIG: Config = load_config(None, **VALID)


@pytest.mark.rest
def test_the_key_of_a_round_changes_with_each_content_that_it_depends_on(tmp_path: Path) -> None:
    for name in ("train", "eval"):
        write(tmp_path / name / "a.parquet", 100, seed=len(name))
        (tmp_path / name / "_dataset.json").write_text(json.dumps({"classes": ["a", "b", "c"], "made_at": "monday"}))
    config = CONFIG.replace(data__path=str(tmp_path / "train"), data__eval_path=str(tmp_path / "eval"))

    def key(section: RetrainSection = SECTION, champion: str = "", **fields: Any) -> tuple[str, str]:
        inputs = make_inputs(config.replace(**fields), section, read_delivery(config), champion)
        return inputs.key, inputs.training_key

    first_key = key()
    assert key(run__storage_path="/else", scaling__min_workers=1) == first_key
    assert key(replace(SECTION, max_psi=9.0, force="x", min_new_rows=7)) == first_key
    stricter_gate = key(replace(SECTION, min_gain=0.1))
    assert stricter_gate[0] != first_key[0]
    assert stricter_gate[1] == first_key[1]
    (tmp_path / "begin.safetensors").write_bytes(safetensors.torch.save({"w": torch.zeros(1)}))
    init_from = {"train__init_from": str(tmp_path / "begin.safetensors")}
    other_keys = [key(**init_from)]
    (tmp_path / "begin.safetensors").write_bytes(safetensors.torch.save({"w": torch.ones(1)}))
    other_keys += [
        key(**init_from),
        key(optimizer={"class_path": "torch.optim.SGD"}),
        key(train__epochs=3),
        key(champion="c"),
        key(replace(SECTION, start="champion")),
    ]
    (tmp_path / "train" / "_dataset.json").write_text(json.dumps({"classes": ["a", "b", "c"], "made_at": "tuesday"}))
    assert key() == first_key
    (tmp_path / "train" / "_dataset.json").write_text(json.dumps({"classes": ["b", "a", "c"]}))
    other_keys.append(key())
    table = pq.read_table(tmp_path / "eval" / "a.parquet")
    labels = table["label"].to_numpy().copy()
    # Shape and class balance stay the same.
    labels[[0, 1]] = labels[[1, 0]]
    pq.write_table(
        table.set_column(2, table.schema.field(2), pa.array(labels)), tmp_path / "eval" / "a.parquet", row_group_size=50
    )
    other_keys.append(key())
    content = bytearray((tmp_path / "eval" / "a.parquet").read_bytes())
    content[20] ^= 1
    (tmp_path / "eval" / "a.parquet").write_bytes(content)
    other_keys.append(key())
    assert len({first_key, *other_keys}) == 1 + len(other_keys)
    with pytest.raises(DataError, match=r"holds no \*.parquet"):
        read_delivery(config.replace(data__eval_path=str(tmp_path / "none")))


def test_new_content_of_the_gate_data_changes_the_key_but_not_the_training_key(tmp_path: Path) -> None:
    for name in ("train", "eval", "gate"):
        write(tmp_path / name / "a.parquet", 100, seed=len(name) * 7 + ord(name[0]))
    config = CONFIG.replace(data__path=str(tmp_path / "train"), data__eval_path=str(tmp_path / "eval"))
    keys = []
    for seed in (1, 2):
        write(tmp_path / "gate" / "a.parquet", 100, seed=seed)
        files = read_delivery(config, gate_path=str(tmp_path / "gate"))
        keys.append(make_inputs(config, SECTION, files, ""))
        assert files == read_delivery(config)
        assert files.find_duplicates() == []
    assert keys[0].training_key == keys[1].training_key
    assert keys[0].key != keys[1].key
    duplicates = read_delivery(config, gate_path=str(tmp_path / "eval")).find_duplicates()
    assert duplicates == ["gate file a.parquet has the content of evaluation file a.parquet"]


def test_the_key_depends_on_the_code_of_the_optimizer_and_of_nested_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "data" / "a.parquet", 100)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "configure_optimizers.py").write_text(
        "import torch\nimport own_rule\n\nclass Own(torch.optim.SGD):\n    pass\n"
    )
    (tmp_path / "own_rule.py").write_text("RATE = 1\n")
    fields = {"data__path": str(tmp_path / "data"), "data__eval_path": str(tmp_path / "data")}
    config = CONFIG.replace(**fields, optimizer={"class_path": "configure_optimizers.Own"})
    nested = CONFIG.replace(
        **fields, task__init_args={"inner": [{"class_path": "configure_optimizers.Own", "init_args": {}}]}
    )
    before = [make_inputs(variant, SECTION, read_delivery(variant), "") for variant in (config, nested)]
    (tmp_path / "own_rule.py").write_text("RATE = 2\n")
    after = [make_inputs(variant, SECTION, read_delivery(variant), "") for variant in (config, nested)]
    for one, other in zip(before, after, strict=True):
        assert one.code != other.code
        assert one.config == other.config


def test_an_unchanged_file_is_not_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    real = contents_module.sha256
    monkeypatch.setattr(contents_module, "sha256", lambda file: hashed.append(file.name) or real(file))
    monkeypatch.setattr(contents_module, "_MIN_AGE_NS", -1)
    for name in ("a", "b"):
        write(tmp_path / "data" / f"{name}.parquet", 100, seed=ord(name))
    config = CONFIG.replace(data__path=str(tmp_path / "data"), data__eval_path=str(tmp_path / "data" / "a.parquet"))
    memory = tmp_path / "memory"
    first = read_delivery(config, memory)
    assert sorted(hashed) == ["a.parquet", "a.parquet", "b.parquet"]
    assert read_delivery(config, memory) == first == read_delivery(config)
    assert sorted(hashed) == ["a.parquet"] * 4 + ["b.parquet"] * 2, "a delivery that is read without a memory used one"
    stat, data = (tmp_path / "data" / "b.parquet").stat(), bytearray((tmp_path / "data" / "b.parquet").read_bytes())
    data[20] ^= 1
    # The length stays the same.
    (tmp_path / "data" / "b.parquet").write_bytes(data)
    os.utime(tmp_path / "data" / "b.parquet", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    hashed.clear()
    changed = read_delivery(config, memory)
    assert hashed == ["b.parquet"]
    assert changed.train["b.parquet"] != first.train["b.parquet"]
    (memory / "train.json").write_text("[")
    assert read_delivery(config, memory) == changed


def test_the_hash_of_a_file_that_was_just_changed_is_not_remembered(tmp_path: Path) -> None:
    """Two changes that keep the length may have the same modification time."""
    write(tmp_path / "data" / "a.parquet", 100)
    config = CONFIG.replace(data__path=str(tmp_path / "data"), data__eval_path=str(tmp_path / "data"))
    read_delivery(config, tmp_path / "memory")
    assert json.loads((tmp_path / "memory" / "train.json").read_text())["files"] == {}


def test_concurrent_audit_entries_are_all_kept(tmp_path: Path) -> None:
    paths = RetrainPaths(tmp_path)
    threads = [threading.Thread(target=add_audit_entry, args=(paths, f"id {i}", "promoted", "", {})) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry["id"] for entry in read_audit_entries(paths)) == sorted(f"id {i}" for i in range(16))


# --- record and configuration


def test_stages_and_audit_entries_are_written_once(tmp_path: Path) -> None:
    paths = RetrainPaths(tmp_path)
    one = Round(paths, "k" * 64)
    assert open_rounds(paths) == []
    first = one.put("decided", {"champion": None})
    assert one.put("decided", {"champion": "7"}) == first
    assert open_rounds(paths) == [one]
    one.put("recorded", {})
    assert open_rounds(paths) == []
    for _ in range(2):
        add_audit_entry(paths, "one", "promoted", "better", {"version": "1"})
        add_audit_entry(paths, "two", "rolled back", "worse", {})
    assert [(entry["id"], entry["what"]) for entry in read_audit_entries(paths)] == [
        ("one", "promoted"),
        ("two", "rolled back"),
    ]
    assert sorted(path.name for path in (tmp_path / "audit").iterdir()) == ["000001.json", "000002.json"]


def test_a_model_name_becomes_a_folder_and_a_run_name() -> None:
    assert make_folder_name("digits") == "digits"
    names = [make_folder_name(name) for name in ("a b", "a-b", "..", "a.b.", "ä" * 256, "-")]
    assert len(set(names)) == len(names)
    for name in names:
        assert name.strip("._-") == name
        load_config(None, **VALID, run__name=RetrainPaths(Path("/x") / name).run_name("f" * 64))


def test_all_mistakes_of_a_retraining_configuration_are_refused_together() -> None:
    check_section(CONFIG, SECTION)
    bad_config = CONFIG.replace(
        tracking__registered_model=None,
        data__eval_path=None,
        run__name="x",
        train__init_from="f",
    )
    bad_section = RetrainSection(force=" ", start="champion", min_rows_ratio=2, confidence=1.0, max_psi=-1)
    with pytest.raises(ConfigError) as caught:
        check_section(bad_config, bad_section)
    messages = [
        "force is empty",
        "min_rows_ratio is 2",
        "confidence is 1.0",
        "max_psi is -1",
        "registered_model is missing",
    ]
    messages += [
        "eval_path is missing",
        "run.name is 'x'",
        "init_from is set, but retrain.start",
    ]
    for text in messages:
        assert text in str(caught.value)
    assert len(str(caught.value).splitlines()) == 9


def test_the_digest_of_a_delivery_depends_only_on_its_content() -> None:
    one = Delivery({"a": "1", "b": "2"}, {"c": "3"})
    assert one.digest == Delivery({"b": "2", "a": "1"}, {"c": "3"}).digest
    assert one.digest != Delivery({"a": "1"}, {"b": "2", "c": "3"}).digest
    assert find_old_files({"moved": "1", "new": "3"}, one.train) == {"moved"}
