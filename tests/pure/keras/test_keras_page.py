"""The two programs of the start page differ by their imports and the call of `fit` alone."""

from tests.support.pages import blocks
from tests.support.paths import ROOT


def test_the_program_of_the_guides_changes_by_imports_and_fit_alone() -> None:
    programs = [block.text for block in blocks(ROOT / "docs/start/keras.md") if block.language == "python"]
    original, ours = (
        [line for line in text.splitlines() if not line.startswith(("import ", "from "))] for text in programs
    )
    assert ours != original
    assert ours == [line.replace("model.fit(", "fit(model, ") for line in original]
