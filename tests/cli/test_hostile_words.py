"""What a user, or a file, may write in place of a path, a name or settings: URLs, YAML, run names, links."""

import json
import os
import subprocess
import time
from contextlib import ExitStack

import pytest

from seqvae.cli.command_line import parse_command_line
from seqvae.cli.inspect_data import InspectSettings, ReportSettings
from seqvae.config.flags import flags_of
from seqvae.config.profiling import MeasuringSettings
from seqvae.config.run import RunSettings
from seqvae.config.training import TrainingSettings
from seqvae.config.yaml_files import MOST_BYTES
from seqvae.console import shell_word
from seqvae.data.parquet import side_tables
from seqvae.errors import DataError, UsageError, run_command
from seqvae.files import is_remote
from seqvae.training.run_directory.resume import open_run
from tests.support.parquet_files import write_splits

URLS = (
    *("http://example.org/a", "https://example.org/a.ckpt", "s3://bucket/a.parquet", "hf://datasets/a/b"),
    *("gs://bucket/a", "file:///etc/passwd", "HTTPS://EXAMPLE.ORG", "abfss://a@b.net/c"),
)


PLACES = {
    *("data_dir", "tokenizer", "label_path", "params_map_path", "variable_embeddings_path", "cache_dir", "output_dir"),
    *("resume", "init_from", "log_dir", "output", "plot_path", "storage_path"),
}
NO_PLACES = {
    *("sequence_column", "id_column", "time_column", "variable_column", "value_column", "label_column", "run_name"),
    *("feature_columns", "missing_values", "endpoint_url"),
    *("strategy", "max_time", "distributed_timeout", "compare", "memory_limit", "local_limit", "ray_workers"),
}


def refusal(words: list[str], schema: type[TrainingSettings] = TrainingSettings) -> str:
    with pytest.raises(UsageError) as caught:
        parse_command_line(schema, words, prog="demo.py", description="")
    return str(caught.value)


# --- URLs and other things that are no paths ------------------------------------------------------------------------


def test_of_every_flag_that_takes_a_text_it_is_known_whether_it_is_a_path():
    texts = {
        flag.name
        for schema in (TrainingSettings, InspectSettings)
        for flag in flags_of(schema).values()
        if str in flag.types
    }
    measuring = {"output", "compare", "memory_limit"}
    assert texts | measuring == PLACES | NO_PLACES


@pytest.mark.parametrize("flag", [*sorted(PLACES - {"output", "plot_path"}), "config"])
def test_a_url_is_refused_before_anything_is_done_with_it(flag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for url in URLS:
        message = "is a URL, and URLs are not fetched: copy it to this machine, and give the path of the copy"
        if not (flag in ("data_dir", "cache_dir", "storage_path") and is_remote(url)):
            assert refusal([f"--{flag}", url]) == f"--{flag} {url} {message}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("group", "name"), [(MeasuringSettings, "output"), (ReportSettings, "plot_path")])
def test_other_commands_do_not_take_urls_for_paths(group, name):
    with pytest.raises(ValueError, match=f"^--{name} s3://a is a URL"):
        group(**{name: "s3://a"})


def test_a_table_is_read_from_this_machine_alone():
    """By itself pyarrow would go to the network."""
    with pytest.raises(DataError, match=r"cannot be read as a table .*local"):
        side_tables.read_labels("s3://bucket/labels.parquet", None, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty: give a path, or leave the flag out"),
        ("a\x1b[2Jb", "'a\\x1b[2Jb' holds control characters or bytes that are no UTF-8"),
        ("a\nb", "'a\\nb' holds control characters"),
        ("\udcff", "'\\udcff' holds control characters or bytes that are no UTF-8"),
        ("~nobody-of-this-name/x", "there is no such home directory; give the path in full"),
    ],
)
@pytest.mark.parametrize("flag", ["data_dir", "output_dir", "resume", "cache_dir"])
def test_what_no_path_could_be_is_refused(flag, text, message):
    assert message in refusal([f"--{flag}={text}"])


# --- YAML -----------------------------------------------------------------------------------------------------------

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
YAML = {
    "run": "seed: !!python/object/apply:os.system ['touch {trace}']",
    "new": "run_name: !!python/object/new:os.mkdir ['{trace}']",
    "name": "run_name: !!python/name:os.system",
    "tag": "run_name: !binary aGk=",
    "class": "logger: {{class_path: os.mkdir, init_args: {{path: '{trace}'}}}}",
    "class words": "class_path: os.mkdir\ninit_args: x",
    "import": "strategy.class_path: os.mkdir",
    "bomb": BOMB,
    "cycle": "seed: &a [*a]",
    "merge": "base: &b {{seed: 1}}\n<<: *b",
    "deep": "seed: " + "[" * 20_000,
    "deep blocks": "- " * 20_000,
    "twice": "seed: 1\nlr: 0.1\nseed: 2",
    "unknown": "learning_rat: 1",
    "null byte": "run_name: a\0b",
    "null byte in quotes": 'data_dir: "a\\0b"',
    "no character": 'run_name: "\\UFFFFFFFF"',
    "no version": "%YAML 1." + "9" * 5000 + "\n---\nseed: 1",
    "huge number": "seed: " + "9" * 5000,
    "huge": "# " + "x" * MOST_BYTES,
    "two": "seed: 1\n---\nseed: 2",
    "list": "- seed",
    "escape": "run_name: \x1b[2J",
}


@pytest.mark.parametrize("what", YAML)
def test_yaml_is_data_and_anything_else_is_refused_in_a_line(what, tmp_path, capsys):
    path, trace = tmp_path / "c.yaml", tmp_path / "trace"
    path.write_text(YAML[what].format(trace=trace) if "{trace}" in YAML[what] else YAML[what].replace("{{", "{"))
    started = time.process_time()

    def main() -> None:
        parse_command_line(TrainingSettings, ["--config", str(path)], prog="", description="")

    code = run_command(main, "demo.py")
    message = capsys.readouterr().err
    assert code == 2
    assert message.count("\n") == 1
    assert message.startswith(f"demo.py: {path}") or f"({path}, line" in message
    assert message.rstrip("\n").isprintable()
    assert len(message) < 500 + len(str(path))
    assert not trace.exists()
    assert time.process_time() - started < 5


def test_an_endless_file_is_no_settings_file():
    assert refusal(["--config", "/dev/zero"]) == "/dev/zero is no settings file: it is longer than 100,000 bytes"


# --- Names of runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "...", " ", "a/b", "../a", "/etc", "a\\b", "a\0b", "a\nb", "a\x1b[2J", "a\x7f", "\x85"),
        *("\udcff", "x" * 256, "\u00e9" * 128, "-x", "--x", "~", "~root", "s3://a"),
    ],
)
def test_a_name_that_is_no_directorys_is_refused(name):
    with pytest.raises(ValueError, match=r"^--run_name "):
        RunSettings(run_name=name)


@pytest.mark.parametrize(
    "name",
    [
        *("a b", " a ", "a.", ".a", "$HOME", "it's", 'say "so"', "; touch x", "`touch x`", "$(touch x)", "a&b|c>d*?"),
        *("体温", "体\u3000温", "\u202eb", "👩\u200d🔬", "é" * 127, "!!", "#a", "a\u2028b", "{a,b}", "%s%n"),
    ],
)
def test_a_name_of_other_characters_is_a_directory_right_there_and_safe_to_paste(name, tmp_path):
    with ExitStack() as held:
        start = open_run(RunSettings(output_dir=str(tmp_path), run_name=name), "tokens", held)
    assert [os.fsencode(path.name) for path in tmp_path.iterdir()] == [os.fsencode(name)]
    word = shell_word(start.directory)
    assert word.isprintable()
    echoed = subprocess.run(
        ["bash", "-c", f"printf %s {word}"], capture_output=True, check=True, env={"LC_ALL": "C"}, cwd=tmp_path
    )
    assert echoed.stdout == os.fsencode(start.directory)


# --- Links ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["checkpoints", "plots", "samples", "metrics.csv", "config.yaml"])
def test_what_a_link_in_a_run_leads_to_is_not_cleared(name, tmp_path):
    run, elsewhere = tmp_path / "runs" / "a", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("seed: 0")
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(elsewhere if "." not in name else elsewhere / "precious")
    with ExitStack() as held:
        open_run(RunSettings(output_dir=str(run.parent), run_name="a"), "tokens", held)
    assert list(run.iterdir()) == []
    assert (elsewhere / "precious").read_text() == "seed: 0"


@pytest.mark.parametrize("inside", [False, True])
def test_what_a_link_in_the_cache_leads_to_is_never_removed(inside, load, tmp_path, caplog):
    columns = {"tokens": [[1, 2], [3]]}
    directory = write_splits(tmp_path / "d", train=columns, valid=columns)
    path, elsewhere = load(directory).path, tmp_path / "elsewhere"
    target = path / "train" if inside else path
    target.rename(elsewhere)
    (elsewhere / "precious").touch()
    target.symlink_to(elsewhere)
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | {"digest": "none"}))
    rebuilt = load(directory).path  # in its place
    assert not rebuilt.is_symlink()
    assert (elsewhere / "precious").exists()
    if not inside:
        path.rename(tmp_path / "kept")
        path.symlink_to(elsewhere)
    write_splits(tmp_path / "d", train={"tokens": [[5], [6]]}, valid=columns)
    assert load(directory).path != path  # beside it, and that one is outdated
    assert not path.is_symlink()
    assert (elsewhere / "precious").exists()
