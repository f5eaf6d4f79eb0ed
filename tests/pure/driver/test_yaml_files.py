"""Malformed configuration files are refused with file, line and remedy."""

from pathlib import Path

import pytest

from ray_app import load_config
from ray_app.driver.parsing import parse_with_sections
from ray_app.errors import ConfigError
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "train: {epochs: 3}\ndata: {path: x}\ntrain: {max_steps: 5}\n",
            "has 'train' twice in one section, in lines 1 and 3",
        ),
        ("data:\n  path: x\n  path: y\n", "has 'path' twice in one section, in lines 2 and 3"),
        ("data:\n\tpath: x\n", "line 2: found character '\\t' that cannot start any token. YAML is indented by blanks"),
        ("data: [1\n", "line 2: expected ',' or ']', but got '<stream end>'"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line_and_the_remedy(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "my run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(file) in str(caught.value)
    assert message in str(caught.value)


def test_integer_keys_of_a_configuration_stay_integers(tmp_path: Path) -> None:
    file, stored = tmp_path / "weighted.yaml", tmp_path / "config.yaml"
    file.write_text(WEIGHTED)
    config = load_config(file, data__path=str(tmp_path))
    assert config.task is not None
    assert config.task.init_args["class_weight"] == {0: 1.0, 255: 2.5}
    stored.write_text(config.to_yaml())
    assert load_config(stored) == config
    arguments = [f"--config={file}", "--task.init_args.class_weight={0: 0.5, 7: 1.0}", f"--data.path={tmp_path}"]
    parsed, _ = parse_with_sections(arguments, {}, "ray-app train")
    assert parsed.task is not None
    assert parsed.task.init_args["class_weight"] == {0: 0.5, 7: 1.0}


WEIGHTED = """
task:
  class_path: ray_app.task.keras.KerasTask
  init_args:
    model: {class_path: keras.layers.Flatten}
    inputs: [image]
    target: label
    class_weight: {0: 1.0, 255: 2.5}
"""


def test_the_shipped_digits_configurations_are_read() -> None:
    for file in (ROOT / "conf").glob("digits*.yaml"):
        load_config(file)


@pytest.mark.parametrize("text", ["true", "null", "007", "1e3", "[1]", "{a: 1}", "12:30:00"])
def test_a_text_in_the_arguments_of_a_class_stays_a_text(tmp_path: Path, text: str) -> None:
    metric = {"class_path": "torchmetrics.MeanMetric", "init_args": {"name": text, "names": [text], "number": 12}}
    arguments = {"inputs": ["x"], "target": "y", "metrics": {"m": metric}}
    arguments |= {name: {"class_path": f"torch.nn.{one}"} for name, one in [("model", "Identity"), ("loss", "MSELoss")]}
    task = {"class_path": "ray_app.task.module.ModuleTask", "init_args": arguments}
    config = load_config(task=task, data__path="x")
    assert config.task.init_args["metrics"]["m"] == metric
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    assert load_config(file) == config
