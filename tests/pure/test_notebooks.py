"""The stored outputs of notebooks; `tests/own_cluster/test_notebook.py` executes the notebooks."""

from io import BytesIO
from pathlib import Path

import nbformat
import pytest
from PIL import Image

from tests.support.notebooks import NOTEBOOKS, ROOT, has_bar, outputs, pictures


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_stored_notebook_has_outputs_of_all_cells_and_no_local_path(path: Path) -> None:
    text = path.read_text()
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(Image.open(BytesIO(picture)).convert("L").getextrema() != (255, 255) for picture in pictures(notebook))
    assert pictures(notebook)
    assert has_bar(notebook)
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs(notebook))
    assert "def " not in "".join(cell.source for cell in cells if not cell.source.startswith("%%writefile"))
    assert not any(folder in text for folder in ("/home/", "/root/", "/Users/", "/tmp/", str(ROOT)))
