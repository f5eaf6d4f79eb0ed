"""Malformed configuration files are refused with file, line and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_app import load_config
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


def test_the_shipped_digits_configurations_are_read() -> None:
    for file in (ROOT / "conf").glob("digits*.yaml"):
        load_config(file)
