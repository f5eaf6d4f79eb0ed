"""Import paths of a configuration name classes, functions and attributes of classes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ray_app.config.import_paths import load_class, refuse_hiding_files
from ray_app.config.sections import ClassSpec
from ray_app.errors import ConfigError


def test_import_paths_load_classes_functions_and_attributes_of_classes() -> None:
    assert load_class("torch.optim.AdamW") is load_class(ClassSpec("torch.optim.AdamW")) is torch.optim.AdamW
    # A function of the same name hides this module.
    assert load_class("torchvision.models.googlenet.GoogLeNet").__name__ == "GoogLeNet"
    assert load_class("datetime.datetime.fromisoformat")("2026-11-23").day == 23


@pytest.mark.parametrize(("name", "is_hiding"), [("queue.py", True), ("torch/__init__.py", True), ("train.py", False)])
@pytest.mark.parametrize("by_variable", [False, True])
def test_a_file_that_hides_a_module_from_the_workers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_hiding: bool, by_variable: bool
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "task.py").write_text("")
    (tmp_path / name).write_text("")
    # A built-in module cannot be hidden.
    (tmp_path / "time.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path)) if by_variable else monkeypatch.chdir(tmp_path)
    if not is_hiding:
        return refuse_hiding_files()
    with pytest.raises(ConfigError) as refused:
        refuse_hiding_files()
    module = name.partition(".")[0].partition("/")[0]
    assert str(refused.value).startswith(f"{tmp_path / name} hides the module {module} (")
    return None


def test_copies_of_libraries_that_come_with_ray_hide_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "ray" / "thirdparty_files"
    (copy / "torch").mkdir(parents=True)
    (copy / "torch" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(copy))
    refuse_hiding_files()


def test_the_error_of_an_import_path_is_the_original_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_task_of_mine.py").write_text("import not_there_at_all\n\nclass Mine: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    missing = "No module named 'not_there_at_all'"
    for path, message in {
        **dict.fromkeys(("a_task_of_mine.Mine", "a_task_of_mine.Mine.make", "not_there_at_all.Mine"), missing),
        "torch.optim.AdamV": "has no attribute 'AdamV'",
        "AdamW": "names no module",
    }.items():
        with pytest.raises((ImportError, AttributeError), match=message):
            load_class(path)
    assert "a_task_of_mine" not in sys.modules
