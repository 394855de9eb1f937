"""The command line: what is typed and what stands in files becomes settings; what is wrong is named in one line."""

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import seqvae
from seqvae.cli.command_line import parse_command_line
from seqvae.config.data import BatchSettings, CacheSettings, LengthSettings, LoadingSettings, SourceSettings
from seqvae.config.flags import PRESETS_DIR, flags_of
from seqvae.config.yaml_files import to_flat_dict, to_yaml, values_of
from seqvae.errors import UsageError
from tests.support.processes import timed

ROOT = Path(__file__).parent.parent.parent
COMMANDS = [
    *("train_optimized.py", "train_with_collapse_detection.py", "analyze_performance.py"),
    *("-m seqvae train", "-m seqvae inspect", "-m seqvae evaluate", "-m seqvae encode", "-m seqvae profile"),
]
HEAVY = {"torch", "lightning", "numpy", "pandas", "pyarrow", "matplotlib"}


@dataclass(frozen=True, kw_only=True)
class Demo:
    source: SourceSettings = field(default_factory=SourceSettings)
    lengths: LengthSettings = field(default_factory=LengthSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    batches: BatchSettings = field(default_factory=BatchSettings)
    loading: LoadingSettings = field(default_factory=LoadingSettings)


FLAGS = flags_of(Demo)


def parse(line: str | list[str] = "", presets: Path | None = PRESETS_DIR) -> Demo:
    words = shlex.split(line) if isinstance(line, str) else line
    return parse_command_line(Demo, words, prog="demo.py", description="Shows.", presets=presets)


def message_of(line: str | list[str], presets: Path | None = PRESETS_DIR) -> str:
    with pytest.raises(UsageError) as caught:
        parse(line, presets)
    return str(caught.value)


@pytest.fixture
def yaml_file(tmp_path: Path) -> Callable[..., Path]:
    def write(text: str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


# --- what holds


def test_without_words_the_defaults_hold():
    assert parse() == Demo()


def test_every_flag_can_be_written_with_hyphens():
    for flag in FLAGS.values():
        hyphened = f"--{flag.name.replace('_', '-')}"
        with pytest.raises(UsageError, match=f"^{hyphened} wants"):
            parse([f"{hyphened}=?" if flag.choices or str not in flag.types else hyphened])


def test_a_value_follows_its_flag_or_an_equals_sign():
    assert parse("--batch-size=4") == parse("--batch_size 4") == Demo(batches=BatchSettings(batch_size=4))


def test_an_equals_sign_in_a_value_stays():
    assert parse("--data_dir=a=b").source.data_dir == "a=b"


def test_of_two_flags_with_one_name_the_later_wins():
    assert parse("--batch_size 4 --batch-size 8").batches.batch_size == 8


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("--bucketing", True),
        ("--bucketing true", True),
        ("--bucketing yes", True),
        ("--bucketing=true", True),
        ("--bucketing false", False),
        ("--bucketing no", False),
        ("--no_bucketing", False),
        ("--no-bucketing", False),
        ("--no_bucketing --bucketing", True),
        ("--bucketing --no_bucketing", False),
    ],
)
def test_a_switch_is_turned_on_and_off(line, value):
    assert parse(line).batches.bucketing is value


@pytest.mark.parametrize("text", ["true", "True", "yes", "'true'"])
def test_yaml_turns_a_switch_on(yaml_file, text):
    assert parse(["--config", str(yaml_file(f"pin_memory: {text}"))]).loading.pin_memory is True


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("num_workers", "auto", "auto"),
        ("num_workers", "4", 4),
        ("validation_fraction", ".5", 0.5),
        ("validation_fraction", "1e-3", 0.001),
        ("id_column", "123", "123"),
        ("id_column", "2020-01-01", "2020-01-01"),
        ("id_column", "no", "no"),
        ("id_column", "1:30", "1:30"),
        ("kind", "events", "events"),
    ],
)
def test_a_text_means_the_same_on_the_line_and_in_yaml(yaml_file, name, text, value):
    assert to_flat_dict(parse([f"--{name}", text]))[name] == value
    assert to_flat_dict(parse(["--config", str(yaml_file(f"{name}: {text}"))]))[name] == value


@pytest.mark.parametrize("null", ["null", "none", "None"])
def test_null_unsets_a_value_on_the_line(yaml_file, null):
    config = yaml_file("batch_size: 4\nid_column: patient")
    settings = parse(["--config", str(config), "--batch_size", null, "--id_column", null])
    assert (settings.batches.batch_size, settings.source.id_column) == (None, None)


@pytest.mark.parametrize("null", ["null", "~", ""])
def test_null_unsets_a_value_in_yaml(yaml_file, null):
    config = yaml_file(f"batch_size: {null}")
    assert parse(["--preset", "debug", "--config", str(config)]).batches.batch_size is None


def test_a_quoted_null_in_yaml_is_a_text(yaml_file):
    assert parse(["--config", str(yaml_file("id_column: 'null'"))]).source.id_column == "null"


def test_yaml_keys_may_have_hyphens(yaml_file):
    assert parse(["--config", str(yaml_file("batch-size: 4"))]).batches.batch_size == 4


def test_an_empty_config_changes_nothing(yaml_file):
    assert parse(["--config", str(yaml_file("# nothing\n"))]) == Demo()


def test_environment_variables_change_nothing(monkeypatch):
    monkeypatch.setenv("JSONARGPARSE_DEFAULT_ENV", "true")
    monkeypatch.setenv("DEMO_BATCH_SIZE", "7")
    monkeypatch.setenv("BATCH_SIZE", "7")
    assert parse() == Demo()


# --- which one wins


@hypothesis_settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(["preset", "config", "later config", "batch_size", "switch", "stride"]))
def test_the_order_of_the_words_does_not_matter(tmp_path, order):
    (tmp_path / "a.yaml").write_text(
        "batch_size: 10\nnum_workers: 10\nmax_sequence_length: 10\nlong_sequences: split\n"
    )
    (tmp_path / "b.yaml").write_text("batch_size: 20\nnum_workers: 20\n")
    words = {
        "preset": ["--preset", "debug"],
        "config": [f"--config={tmp_path}/a.yaml"],
        "later config": ["--config", f"{tmp_path}/b.yaml"],
        "batch_size": ["--batch_size", "30"],
        "switch": ["--no-bucketing"],
        "stride": ["--window_stride=5"],
    }
    if order.index("config") > order.index("later config"):
        words["config"], words["later config"] = words["later config"], words["config"]
    assert parse([word for part in order for word in words[part]]) == Demo(
        lengths=LengthSettings(max_sequence_length=10, long_sequences="split", window_stride=5),
        batches=BatchSettings(batch_size=30, bucketing=False),
        loading=LoadingSettings(num_workers=20),
    )


def test_the_later_config_wins_over_the_earlier(yaml_file):
    small, large = yaml_file("batch_size: 2", "small.yaml"), yaml_file("batch_size: 64", "large.yaml")
    assert parse(["--config", str(small), "--config", str(large)]).batches.batch_size == 64
    assert parse(["--config", str(large), "--config", str(small)]).batches.batch_size == 2


def test_of_several_presets_the_later_wins_where_both_speak():
    both = parse("--preset debug --preset memory_limited")
    assert (both.lengths.max_sequence_length, both.batches.batch_size) == (500, 2)
    assert parse("--preset none") == Demo()


def test_a_preset_may_hold_settings_of_other_commands(tmp_path):
    (tmp_path / "wide.yaml").write_text("width: 512\nbatch_size: 3\n")
    assert parse("--preset wide", presets=tmp_path) == Demo(batches=BatchSettings(batch_size=3))


def test_without_presets_there_is_no_flag_for_them():
    assert message_of("--preset debug", presets=None) == "--preset is not a flag; --help lists them"


# --- what is refused, and in which words


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--batch-szie 4", "--batch-szie is not a flag; did you mean --batch-size?"),
        ("--batch_szie 4", "--batch_szie is not a flag; did you mean --batch_size?"),
        ("--no_pinmemory", "--no_pinmemory is not a flag; did you mean --no_pin_memory?"),
        ("-batch_size 4", "-batch_size is not a flag; did you mean --batch_size?"),
        ("batch_size=4", "batch_size is not a flag; did you mean --batch_size?"),
        ("--no_batch_size", "--no_batch_size is not a flag; did you mean --batch_size?"),
        ("--max_seq 4", "--max_seq is not a flag; --help lists them"),
        ("--xyzzy", "--xyzzy is not a flag; --help lists them"),
        ("xyzzy", "'xyzzy' is not a flag: flags begin with --, values follow them"),
        ("--data_dir a b", "--data_dir takes one value, got 'a' and 'b': put quotes around spaces and patterns"),
        ("--no_pin_memory false", "--no_pin_memory takes no value, got 'false'"),
        ("--no-pin-memory=x", "--no-pin-memory takes no value, got 'x'"),
        ("--print_config=x", "--print_config takes no value, got 'x'"),
        ("--batch_size", "--batch_size wants a whole number, but nothing follows it"),
        ("--batch-size --pin_memory", "--batch-size wants a whole number, but nothing follows it"),
        ("--data_dir --pin_memory", "--data_dir wants a value, but nothing follows it"),
        ("--batch_size four", "--batch_size wants a whole number, got 'four'"),
        ("--batch-size=4.5", "--batch-size wants a whole number, got '4.5'"),
        ("--batch_size 1:30", "--batch_size wants a whole number, got '1:30'"),
        ("--batch_size true", "--batch_size wants a whole number, got 'true'"),
        ("--validation_fraction half", "--validation_fraction wants a number, got 'half'"),
        ("--num_workers many", "--num_workers wants a whole number or auto, got 'many'"),
        ("--pin_memory ture", "--pin_memory wants true or false, got 'ture'"),
        ("--max_sequence_length null", "--max_sequence_length wants a whole number, got 'null'"),
        ("--kind token", "--kind wants auto, tokens, vectors or events, got 'token'; did you mean tokens?"),
        ("--kind xyzzy", "--kind wants auto, tokens, vectors or events, got 'xyzzy'"),
        ("--batch_size 0", "--batch_size must be 1 or more, got 0"),
        ("--batch-size 0", "--batch-size must be 1 or more, got 0"),
        ("--num_workers -1", "--num_workers must be auto, 0 or more, got -1"),
        ("--window-stride 5", "--window-stride needs --long-sequences split"),
        ("--window_stride 5 --no-pin-memory --long_sequences drop", "--window_stride needs --long_sequences split"),
    ],
)
def test_a_mistake_on_the_line_is_named_as_it_was_typed(line, message):
    assert message_of(line) == message


def test_a_misspelled_preset_is_suggested():
    presets = "debug, high_memory, max_speed, memory_limited, recommended or self_healing"
    assert message_of("--preset debgu") == f"--preset wants {presets}, got 'debgu'; did you mean debug?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nbatch_szie: 4", ", line 2: batch_szie is not a setting here; did you mean batch_size?"),
        ("xyzzy: 4", ", line 1: xyzzy is not a setting here; --help lists them"),
        ("no_pin_memory: true", ", line 1: write `pin_memory: false` instead of no_pin_memory"),
        ("preset: debug", ", line 1: preset is no setting; give --preset on the command line"),
        ("batch_size: 4\nkind: auto\nbatch-size: 8", ", line 3: batch_size is there twice, first in line 1; keep one"),
        ("batch_size: four", ", line 1: batch_size wants a whole number, got 'four'"),
        ("kind: token", ", line 1: kind wants auto, tokens, vectors or events, got 'token'; did you mean tokens?"),
        ("pin_memory: null", ", line 1: pin_memory wants true or false, got null"),
        ("batch_size: [4]", ", line 1: batch_size must be one plain value"),
        ("source:\n  kind: auto", ", line 1: source must be one plain value"),
        ("[a, b]: 4", ", line 1: a setting's name must be one word"),
        ("- batch_size", " must hold lines of the form `name: value`"),
        ("batch_size: [4", ", line 1 is not valid YAML: while parsing a flow sequence expected"),
        ("batch_size: 4\n---\nkind: auto", ", line 2 is not valid YAML: expected a single document"),
        ("batch_size: \x01", " is not valid YAML: it holds the character '\\x01'"),
    ],
)
def test_a_mistake_in_a_config_is_named_with_file_and_line(yaml_file, text, message):
    path = yaml_file(text)
    assert message_of(["--config", str(path)]).startswith(f"{path}{message}")


def test_a_refused_value_from_a_file_is_named_with_its_place(yaml_file):
    path = yaml_file("kind: auto\nbatch_size: 0")
    refusal = "--batch_size must be 1 or more, got 0"
    assert message_of(["--config", str(path)]) == f"{refusal} ({path}, line 2: batch_size)"
    assert message_of(["--config", str(path), "--batch_size", "-1"]) == "--batch_size must be 1 or more, got -1"


def test_a_config_that_cannot_be_read_is_named(tmp_path):
    assert message_of(["--config", f"{tmp_path}/nix.yaml"]) == f"{tmp_path}/nix.yaml: there is no such file"
    assert message_of(["--config", str(tmp_path)]).startswith(f"{tmp_path} cannot be read: ")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert message_of(["--config", f"{tmp_path}/binary.yaml"]) == f"{tmp_path}/binary.yaml is not a text file (UTF-8)"


@pytest.mark.parametrize(
    "text",
    [
        "id_column: !!python/object/apply:os.mkdir [{path}]",
        "id_column: !!python/object/apply:os.mkdir ['{path}']",
        "!!python/object/apply:os.mkdir ['{path}']",
        "id_column: !!python/name:os.mkdir",
        "id_column: {{class_path: os.mkdir, init_args: {{path: '{path}'}}}}",
        "id_column: {{class_path: subprocess.Popen, init_args: {{args: [mkdir, '{path}']}}}}",
    ],
)
def test_yaml_cannot_run_anything(yaml_file, tmp_path, text):
    made = tmp_path / "made"
    message_of(["--config", str(yaml_file(text.format(path=made)))])
    assert not made.exists()


@pytest.mark.parametrize("hint", [Any, object, Callable, dict, list[str], Path, Literal[1], int | dict[str, int], None])
def test_settings_of_other_than_plain_types_cannot_be_flags(hint):
    @dataclass(frozen=True, kw_only=True)
    class Odd:
        """Odd"""

        anything: str | None = None
        """Anything."""

    @dataclass(frozen=True, kw_only=True)
    class Schema:
        odd: Odd = field(default_factory=Odd)

    Odd.__annotations__["anything"] = hint
    with pytest.raises(AssertionError, match="anything: "):
        flags_of(Schema)


def test_two_groups_cannot_share_a_name():
    @dataclass(frozen=True, kw_only=True)
    class Twice:
        first: BatchSettings = field(default_factory=BatchSettings)
        second: BatchSettings = field(default_factory=BatchSettings)

    with pytest.raises(ValueError, match="'--batch_size' already exists"):
        flags_of(Twice)


# --- what is written reads back

_TEXTS = (
    st.none() | st.text() | st.sampled_from(["null", "~", "true", "4", "1e3", "0x1", "a: b", "# c", "\ud800", "\x1b"])
)
_DEMOS = st.builds(
    Demo,
    source=st.builds(
        SourceSettings,
        time_column=_TEXTS,
        id_column=_TEXTS,
        kind=st.sampled_from(["auto", "events"]),
        minimum_count=st.integers(min_value=1),
        validation_fraction=st.floats(0, 1, exclude_min=True, exclude_max=True),
        allow_missing_labels=st.booleans(),
    ),
    batches=st.builds(BatchSettings, batch_size=st.none() | st.integers(min_value=1), bucketing=st.booleans()),
    loading=st.builds(LoadingSettings, num_workers=st.just("auto") | st.integers(min_value=0)),
)


@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(settings=_DEMOS)
def test_settings_written_as_yaml_read_back_equal(tmp_path, settings):
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(settings), encoding="utf-8")
    assert parse(["--config", str(path), "--preset", "debug"]) == settings


def test_yaml_holds_every_setting_under_its_theme():
    text = to_yaml(Demo())
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        *("# Data", "# Sequences", "# Cache", "# Batches", "# Loading")
    ]
    assert [line.partition(":")[0] for line in text.splitlines() if ":" in line] == list(to_flat_dict(Demo()))
    assert "batch_size: null" in text.splitlines()


def test_print_config_prints_what_would_hold_and_leaves(yaml_file, capsys):
    words = ["--print-config", "--preset", "debug", "--id_column", "null:null"]
    with pytest.raises(SystemExit) as left:
        parse(words)
    assert left.value.code == 0
    assert parse(["--config", str(yaml_file(capsys.readouterr().out))]) == parse(words[1:])


# --- help and version


@pytest.mark.parametrize("columns", [80, 120])
def test_help_explains_every_flag_within_the_terminal(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as left:
        parse("--help --xyzzy")
    text = capsys.readouterr().out
    assert left.value.code == 0
    assert max(len(line) for line in text.splitlines()) <= columns
    words = " ".join(text.split())
    for flag in FLAGS.values():
        assert f"--{'[no_]' if flag.is_switch else ''}{flag.name}" in words
        assert flag.help in words
    assert "--preset {debug,high_memory,max_speed,memory_limited,recommended,self_healing}" in words
    for theme in ("Data:", "Sequences:", "Cache:", "Batches:", "Loading:", "Presets, files, help:"):
        assert theme in text.splitlines()


def test_help_shows_the_defaults_in_force(capsys):
    with pytest.raises(SystemExit):
        parse("-h")
    words = " ".join(capsys.readouterr().out.split())
    assert "--long_sequences says. (default: 1000)" in words
    assert "one shape for all batches. (default: true)" in words
    assert "(default: None)" not in words


def test_version_is_that_of_the_project(capsys):
    with pytest.raises(SystemExit) as left:
        parse("--version")
    assert left.value.code == 0
    assert capsys.readouterr().out == f"seqvae {seqvae.__version__}\n"


_DEMO_COMMAND = """
import sys
from dataclasses import dataclass, field
from seqvae.config.data import BatchSettings, SourceSettings
from seqvae.cli.command_line import parse_command_line
from seqvae.errors import run_command

@dataclass(frozen=True, kw_only=True)
class Demo:
    source: SourceSettings = field(default_factory=SourceSettings)
    batches: BatchSettings = field(default_factory=BatchSettings)

sys.exit(run_command(lambda: print(parse_command_line(Demo, sys.argv[1:], prog="demo.py", description="")), "demo.py"))
"""


@pytest.fixture(params=["demo", *COMMANDS])
def command(request, tmp_path) -> list[str]:
    python = [sys.executable, "-X", "importtime"]
    if request.param == "demo":
        (tmp_path / "demo.py").write_text(_DEMO_COMMAND)
        return [*python, str(tmp_path / "demo.py")]
    return [*python, *(request.param.split() if " " in request.param else [str(ROOT / request.param)])]


@pytest.mark.parametrize("word", ["--help", "--print_config", "--version"])
def test_a_command_answers_at_once_and_imports_nothing_heavy(command, word):
    seconds = []
    for _ in range(3):
        answer, taken = timed([*command, word], env=os.environ | {"PYTHONPATH": str(ROOT)})
        seconds.append(taken)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in answer.stderr.splitlines()}
    assert "jsonargparse" in imported
    assert not imported & HEAVY
    assert min(seconds) < 0.5


# --- presets


def _all_flags() -> set[str]:
    """Return every setting of the product: the groups of plain values in each module of seqvae.config."""
    names: set[str] = set()
    for path in sorted((ROOT / "seqvae" / "config").glob("*.py")):
        module = import_module(f"seqvae.config.{path.stem}")
        for kind in vars(module).values():
            if not (isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.__name__):
                continue
            if not any(is_dataclass(value) for value in values_of(kind()).values()):
                names |= values_of(kind()).keys()
    return names


@pytest.mark.parametrize("path", sorted(PRESETS_DIR.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_preset_sets_known_flags_to_valid_values_and_gives_its_reasons(path):
    parse(f"--preset {path.stem}")
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    for line in lines:
        name, _, rest = line.partition(":")
        assert line.startswith("#") or (name in _all_flags() and " # " in f"{rest} ")


def test_the_presets_are_those_that_are_documented():
    assert [path.stem for path in sorted(PRESETS_DIR.glob("*"))] == [
        *("debug", "high_memory", "max_speed", "memory_limited", "recommended", "self_healing")
    ]


def test_presets_say_what_they_are_named_for():
    assert parse("--preset memory_limited") == Demo(
        lengths=LengthSettings(max_sequence_length=500),
        batches=BatchSettings(batch_size=2),
        loading=LoadingSettings(num_workers=4),
    )
    assert parse("--preset high_memory").batches.tokens_per_batch == 8 * LengthSettings().max_sequence_length
    assert parse("--preset debug") == Demo(
        lengths=LengthSettings(max_sequence_length=100),
        batches=BatchSettings(batch_size=1),
        loading=LoadingSettings(num_workers=2),
    )
