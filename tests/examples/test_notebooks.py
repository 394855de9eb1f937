"""The notebooks of examples/: their cells run in a kernel from top to bottom, and end in pictures and a number that is good."""

import ast
import io
import re

import pytest

from benchmarks.site_pages import ROOT, notebooks, page_of

# By notebook: what its number is called there, between which bounds it lies, and how many pictures there are.
ENDS = {
    "catch_a_collapse": [("information['before']", -0.1, 0.1), ("information['after']", 0.5, 6.9)],
    "foreign_module": [("information[1]", 1.5, 6.9), ("information[64]", -0.1, 0.1)],
    "icu_stays": [("auroc['latents']", 0.74, 0.95)],
    "molecules": [("shares['valid'][1.0]", 0.25, 1.0), ("shares['valid'][0.4]", 0.5, 1.0), ("information", 1.0, 6.9)],
    "spoken_vowels": [("accuracy['latents']", 0.94, 1.0)],
}
PICTURES = {"catch_a_collapse": 2, "foreign_module": 1, "icu_stays": 2, "molecules": 2, "spoken_vowels": 2}
OF_PUBLISHED_DATA = {"icu_stays", "molecules", "spoken_vowels"}
MAY_BE_MISSING = ("jupytext", "nbclient", "ipykernel", "rdkit", "tokenizers", "sklearn")

each_notebook = pytest.mark.parametrize("script", notebooks(), ids=lambda script: script.stem)


def test_there_are_five():
    assert {script.stem for script in notebooks()} == ENDS.keys() == PICTURES.keys()


@each_notebook
def test_a_notebook_has_a_title_cells_that_compile_and_a_picture_on_its_page(script):
    page = page_of(script.read_text(encoding="utf-8"))
    assert re.match(r"# \w", page)
    cells = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert len(cells) >= 4
    for cell in cells:
        ast.parse(cell)
    assert (ROOT / "docs" / "images" / "examples" / f"{script.stem}.png").stat().st_size > 10_000
    assert f"({script.name})" in (ROOT / "examples" / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@each_notebook
def test_a_notebook_ends_in_pictures_and_a_number(script, tmp_path, request):
    for module in MAY_BE_MISSING:
        pytest.importorskip(module, reason="notebooks need the extra examples")
    from PIL import Image

    from benchmarks.notebooks import pictures, run_notebook

    if script.stem in OF_PUBLISHED_DATA:
        request.getfixturevalue("real_data")
    numbers = [f"float({number})" for number, _, _ in ENDS[script.stem]]
    notebook = run_notebook(script, tmp_path, *numbers)
    for cell, (number, low, high) in zip(notebook.cells[-len(numbers) :], ENDS[script.stem], strict=True):
        found = float(cell["outputs"][0]["data"]["text/plain"])
        assert low <= found <= high, f"{number} is {found}"
    drawn = [Image.open(io.BytesIO(picture)) for picture in pictures(notebook)]
    assert len(drawn) == PICTURES[script.stem]
    for picture in drawn:
        assert picture.width > 400
        assert len(set(picture.convert("L").tobytes())) > 50  # shades: of text and curves, not of an empty sheet
