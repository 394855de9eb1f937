"""The container's recipe names what is there, and the citation says what the package says; no image is built."""

import re
import tomllib

import pytest
import yaml

import seqvae
from tests.support.documents import ROOT, text_of

RECIPE = text_of(ROOT / "Dockerfile")
PROJECT = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]


def test_all_that_is_copied_is_there_and_let_through():
    copied = {
        name for line in re.findall(r"^COPY (?!--from)(.+)", RECIPE, flags=re.MULTILINE) for name in line.split()[:-1]
    }
    let_through = set(re.findall(r"^!(\S+)", text_of(ROOT / ".dockerignore"), flags=re.MULTILINE))
    assert copied == let_through
    assert [name for name in copied if not (ROOT / name).exists()] == []
    needed = {"pyproject.toml", "seqvae", PROJECT["readme"], *PROJECT["license-files"], "constraints.txt"}
    assert needed <= copied


def test_the_extras_installed_exist():
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', RECIPE)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()


def test_torch_is_pinned_to_one_version():
    """The recipe takes the one line that begins so."""
    assert len(re.findall(r"^torch==", text_of(ROOT / "constraints.txt"), flags=re.MULTILINE)) == 1
    assert "grep '^torch==' constraints.txt" in RECIPE


def test_the_command_runs_as_a_user_without_rights():
    last_stage = RECIPE.rpartition("\nFROM ")[2]
    instructions = [line.split()[0] for line in last_stage.splitlines()[1:] if re.match(r"[A-Z]", line)]
    assert re.search(r"^USER seqvae$", last_stage, flags=re.MULTILINE)
    assert instructions.index("USER") < instructions.index("ENTRYPOINT")
    assert "RUN" not in instructions[instructions.index("USER") :]


def test_the_python_of_the_image_is_one_that_the_package_is_for():
    (version,) = re.findall(r"^ARG PYTHON=(\S+)$", RECIPE, flags=re.MULTILINE)
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]


def test_the_citation_says_what_the_package_says():
    citation = yaml.safe_load(text_of(ROOT / "CITATION.cff"))
    assert str(citation["version"]) == seqvae.__version__
    assert citation["abstract"] == PROJECT["description"]
    assert (citation["license"], citation["keywords"]) == (PROJECT["license"], PROJECT["keywords"])
    assert all(author["name"] in text_of(ROOT / "LICENSE") for author in citation["authors"])


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda form: form.stem
)
def test_a_form_for_issues_can_be_shown(form):
    """A form without these keys, or with two fields of one id, is not offered at all."""
    content = yaml.safe_load(text_of(form))
    if form.stem == "config":
        assert isinstance(content["blank_issues_enabled"], bool)
        return
    assert {"name", "description", "body"} <= content.keys()
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
