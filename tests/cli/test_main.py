"""The command `seqvae`: its table of verbs, how fast it answers, and which command its messages name."""

import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

import seqvae
from seqvae.cli.main import TRAIN_DESCRIPTION, VERBS, main
from seqvae.config.training import OptimizedSettings, ReferenceSettings
from seqvae.console import named_command, program
from tests.support.processes import timed

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def command(monkeypatch, capsys):
    """The command, in this process: exit code, stdout, stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["/somewhere/bin/seqvae", *words])
        try:
            code = main()
        except SystemExit as end:
            code = int(end.code or 0)
        return (code, *capsys.readouterr())

    return run


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_names_every_verb(command, word):
    code, out, _ = command(word)
    assert code == 0
    assert all(f"\n  {verb} " in out for verb in VERBS)
    assert max(map(len, out.splitlines())) <= 130


def test_every_verb_has_a_function_that_runs_it():
    for verb in VERBS.values():
        module, _, name = verb.function.partition(".")
        assert callable(getattr(import_module(f"seqvae.cli.{module}"), name))


def test_without_a_word_the_help_is_shown_and_the_exit_code_is_that_of_wrong_usage(command):
    code, out, _ = command()
    assert code == 2
    assert out.startswith("usage: seqvae COMMAND")


def test_the_version_is_printed(command):
    assert command("--version") == (0, f"seqvae {seqvae.__version__}\n", "")


def test_a_misspelled_verb_is_named_with_the_right_one(command):
    code, _, err = command("trian")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("seqvae: 'trian' is no command; did you mean train?")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(command, verb):
    code, out, _ = command(verb, "--help")
    assert code == 0
    assert "usage: " in out


def test_messages_begin_with_the_command_that_was_typed(command):
    assert command("train", "--btach_size", "4")[2] == (
        "seqvae train: --btach_size is not a flag; did you mean --batch_size?\n"
    )
    assert command("encode")[2].endswith("Usage: seqvae encode CHECKPOINT [--flag value ...]\n")


def test_after_a_command_its_name_is_forgotten(command):
    command("train", "--btach_size", "4")
    before = program()
    assert "train" not in before
    with named_command("seqvae train"):
        assert program() == "seqvae train"
    assert program() == before


@pytest.mark.parametrize(
    ("words", "schema", "typed"),
    [((), OptimizedSettings, "seqvae train"), (("--plain",), ReferenceSettings, "seqvae train --plain")],
)
def test_training_has_two_recipes_and_the_command_to_go_on_names_the_right_one(
    command, monkeypatch, words, schema, typed
):
    seen = []
    monkeypatch.setattr("seqvae.training.fit.fit", lambda settings: seen.append((settings, program())))
    assert command("train", "--width", "32", *words)[0] == 0
    ((settings, named),) = seen
    assert (type(settings), settings.model.width, named) == (schema, 32, typed)


@pytest.mark.parametrize(
    ("words", "kind", "decoder"),
    [((), "auto", "transformer"), (("--kind", "vectors", "--width", "32"), "vectors", "parallel")],
)
def test_the_demo_trains_on_its_own_data_by_the_recipe_of_their_kind(command, monkeypatch, words, kind, decoder):
    seen = []
    monkeypatch.setattr("seqvae.training.fit.fit", lambda settings: seen.append((settings, program())))
    assert command("demo", *words)[0] == 0
    ((settings, named),) = seen
    assert (settings.source.kind, settings.model.decoder) == (kind, decoder)
    assert settings.model.width == (32 if words else 64)
    assert (settings.source.label_column, settings.objective.weight_of_labels) == ("label", 0)
    assert named == "seqvae train", "the command to go on, which takes all settings from the run"
    code, _, err = command("demo", "--data_dir", "mine")
    assert (code, err.count("\n")) == (2, 1)
    assert "seqvae train --data_dir" in err


def test_the_flags_of_the_plain_recipe_are_explained_with_its_own_defaults(command):
    assert "(default: 4)" in command("train", "--plain", "--help")[1].partition("--batch_size")[2][:200]
    assert TRAIN_DESCRIPTION.splitlines()[0] in command("train", "--help")[1]


HEAVY = {"torch", "lightning", "numpy", "pandas", "pyarrow", "matplotlib", "jsonargparse"}


@pytest.mark.parametrize(
    ("words", "seconds"),
    [(["-m", "seqvae", "--help"], 0.5), (["-c", "import seqvae"], 0.15)],
    ids=["seqvae --help", "import seqvae"],
)
def test_what_needs_nothing_heavy_imports_nothing_heavy_and_is_there_at_once(words, seconds):
    """Measured: 0.05 and 0.02 s; least of five."""
    taken = []
    for _ in range(5):
        line = [sys.executable, "-X", "importtime", *words]
        done, one = timed(line, env=os.environ | {"PYTHONPATH": str(ROOT)})
        taken.append(one)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert not imported & HEAVY
    assert min(taken) < seconds
