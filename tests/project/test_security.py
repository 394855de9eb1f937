"""Nothing that is loaded is run: checkpoints, caches, tables, tokenizers, run directories, figures, the environment."""

import ast
import json
import pickle
import socket
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import train_optimized
from seqvae.config.training import TrainingSettings
from seqvae.data import cache
from seqvae.data.flat_file import META
from seqvae.errors import UsageError, run_command
from seqvae.files import JsonLines
from seqvae.reports import draw
from seqvae.reports.run_files import read_events
from seqvae.training.processes import DECISION, decide_in_first_process
from seqvae.training.run_directory.checkpoint_file import damage_of
from seqvae.training.run_directory.records import result_of_finished
from seqvae.training.schedules import Plan
from tests.support.hostile import CHECKPOINTS, Malice
from tests.support.parquet_files import write, write_splits

ROOT = Path(__file__).parent.parent.parent
OURS = ("seqvae", "monitors", "examples")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **named: Any) -> None:
        pytest.fail(f"asked the network for {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def trace(tmp_path: Path) -> Iterator[Path]:
    """Where a directory is if anything was run."""
    path = tmp_path / "trace"
    yield path
    assert not path.exists(), "something that was loaded was run"


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    tokens = [[number % 5, 1, 2] for number in range(12)]
    later = [[number % 5, 3] for number in range(6)]
    write_splits(tmp_path / "data", train={"tokens": tokens}, valid={"tokens": later})
    return tmp_path / "data"


def end_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """The exit code of a training command and its last words."""
    small = ("--width", "16", "--heads", "2", "--depth", "1", "--precision", "32", "--max_steps", "1")
    monkeypatch.setattr(sys, "argv", ["train_optimized.py", *small, *map(str, words)])
    capsys.readouterr()
    code = run_command(train_optimized.main, "train_optimized.py")
    said = capsys.readouterr().err.split("train_optimized.py: ")[-1]
    return code, said.removesuffix("\n")


# --- Checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", CHECKPOINTS)
def test_a_checkpoint_that_would_run_code_is_refused_wherever_it_comes_from(
    form, tmp_path, trace, data_dir, monkeypatch, capsys
):
    made = tmp_path / "made.ckpt"
    CHECKPOINTS[form](made, trace)
    run = tmp_path / "runs" / "a"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").touch()
    for name in ("last.ckpt", "previous.ckpt", "best.ckpt"):
        (run / "checkpoints" / name).write_bytes(made.read_bytes())
    places = ("--output_dir", run.parent, "--cache_dir", tmp_path / "cache", "--data_dir", data_dir)
    for words in (("--resume", made), ("--resume", run), ("--init_from", made), ("--run_name", "a")):
        code, said = end_of(monkeypatch, capsys, *places, *words)
        assert code == 2
        assert "damaged" in said
        assert "\n" not in said
    assert [path.name for path in run.parent.iterdir()] == ["a"]  # nothing is left behind by those that were refused


def test_no_damage_within_a_pickle_is_more_than_damage(tmp_path):
    """Torch's own unpickler stumbles over some of it in ways of its own."""
    whole, damaged = tmp_path / "whole.ckpt", tmp_path / "damaged.ckpt"
    torch.save({"state_dict": {"w": torch.arange(9.0)}, "origin": {"a": [1, (2,)]}, "global_step": 3}, whole)
    with zipfile.ZipFile(whole) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    random = np.random.default_rng(0)
    for _ in range(300):
        with zipfile.ZipFile(damaged, "w") as archive:
            for name, content in parts.items():
                changed = bytearray(content)
                if name.endswith("data.pkl"):
                    changed[random.integers(len(changed))] = random.integers(256)
                archive.writestr(name, bytes(changed))
        assert damage_of(damaged) in (None, "no checkpoint of ours, or a damaged one")


# --- The cache ------------------------------------------------------------------------------------------------------


def forge(meta: dict[str, Any], what: str) -> str:
    """Change a cache's description, and return what gives it away."""
    entry = meta["splits"]["train"]["arrays"]["tokens"]
    if what == "objects":  # the file's bytes would be taken for addresses
        entry.update(dtype="|O", count=entry["count"] * np.dtype(entry["dtype"]).itemsize // 8)
        return "holds object, not numbers"
    if what == "elsewhere":
        entry["file"] = "../../../secret"
        return "is not the name of a file"
    meta["description"]["__class__"] = "os.system"
    return "unexpected keyword argument"


@pytest.mark.parametrize("what", ["objects", "elsewhere", "words"])
def test_a_forged_cache_is_built_anew(what, load, data_dir, caplog):
    path = load(data_dir).path
    meta = json.loads((path / META).read_text())
    del meta["digest"]
    told = forge(meta, what)
    (path / META).write_text(json.dumps(meta | {"digest": cache._digest(meta)}))
    assert len(load(data_dir).splits["train"]) == 12
    assert told in caplog.text


# --- Tables, tokenizers, Parquet ------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["label_path", "params_map_path", "variable_embeddings_path", "tokenizer"])
@pytest.mark.parametrize("form", ["pickle", "npy", "npz", "parquet"])
def test_a_table_or_tokenizer_that_would_run_code_is_refused(
    flag, form, tmp_path, trace, data_dir, monkeypatch, capsys
):
    if flag in ("params_map_path", "variable_embeddings_path"):
        events = {"id": [1, 1, 2, 2], "time": [0, 1, 0, 1], "variable": ["a"] * 4, "value": [1.0, 2.0, 3.0, 4.0]}
        data_dir = write_splits(tmp_path / "events", train=events, valid=events | {"id": [3, 3, 4, 4]})
    if flag == "tokenizer":
        text = {"text": ["a b", "b c", "c a"]}
        data_dir = write_splits(tmp_path / "text", train=text, valid=text)
    path = tmp_path / f"table.{form}"
    objects = np.array([Malice(trace)], object)
    if form == "npz":
        np.savez(path, objects)
    elif form == "npy":
        np.save(path, objects)
    else:
        path.write_bytes(pickle.dumps(Malice(trace)))
    places = ("--output_dir", tmp_path / "runs", "--cache_dir", tmp_path / "cache", "--data_dir", data_dir)
    code, said = end_of(monkeypatch, capsys, *places, f"--{flag}", path)
    assert code == 3
    assert f"--{flag} {path}: " in said
    assert "\n" not in said


def test_a_type_in_parquet_that_would_be_unpickled_is_not(tmp_path, trace, load):
    metadata = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Malice(trace)),
    }
    schema = pa.schema([pa.field("tokens", pa.list_(pa.int64())), pa.field("x", pa.int64(), metadata=metadata)])
    for split in ("train", "valid"):
        write(tmp_path / f"d/{split}.parquet", {"tokens": [[1]]})
        pq.write_table(pa.table({"tokens": [[1], [2]], "x": [1, 2]}, schema=schema), tmp_path / f"d/{split}.parquet")
    assert len(load(tmp_path / "d").splits["train"]) == 2


# --- Run directories and the environment ----------------------------------------------------------------------------

LINES = b'not json\n[1]\n{"event": 5}\n"\\u001b"\n' + b'{"a":' * 5000 + b"}\n" + b'\xff{"step": 1}\n'


def test_foreign_lines_in_a_run_directory_are_passed_over(tmp_path):
    started = {"step": 0, "event": "started", "text": "two\u2028lines\x85 of one event"}
    (tmp_path / "events.jsonl").write_bytes(json.dumps(started, ensure_ascii=False).encode() + b"\n" + LINES)
    assert [event["event"] for event in read_events(tmp_path)] == ["started"]
    lines = JsonLines(tmp_path / "events.jsonl")
    lines.start_after(10)
    assert [row["text"] for row in lines.rows()] == ["two\u2028lines\x85 of one event"]
    assert (tmp_path / "events.jsonl").read_bytes().count(b"\n") == 1


@pytest.mark.parametrize(
    "forged",
    [{}, {"ended_by": "\x1b[2J", "limit": None, "step": 1, "total_steps": 1, "valid_elbo": 1.0, "valid_kl": 1.0}],
)
def test_a_forged_end_is_none(forged, tmp_path):
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "finished", **forged}) + "\n")
    assert result_of_finished(tmp_path, TrainingSettings(), Plan(1, 1, 1.0, 1.0, 1e-3)) is None


@pytest.mark.parametrize("form", ["objects", "bare", "empty", "other"])
def test_posteriors_that_would_run_code_are_refused_by_the_figures(form, tmp_path, trace):
    path = tmp_path / "plots" / "posteriors.npz"
    path.parent.mkdir()
    (tmp_path / "posterior.jsonl").touch()
    objects = np.array([Malice(trace)], object)
    if form == "objects":
        np.savez(path, mean_NZ=objects, logvar_NZ=objects, step=1)
    elif form == "other":
        np.savez(path, something=np.zeros(2))
    else:
        path.write_bytes(pickle.dumps(Malice(trace)) if form == "bare" else b"")
    with pytest.raises(SystemExit, match=r"posteriors\.npz holds no posteriors"):
        draw.main([str(tmp_path)])


@pytest.mark.parametrize("text", ["", "cos\nmkdir\n(S'x'\ntR.", "[1]", '{"directory": {"a": 1}}', "[" * 100_000])
def test_a_decision_in_the_environment_is_data(text, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv(DECISION, text)
    with pytest.raises(UsageError, match=f"{DECISION}, .*: unset it"):
        decide_in_first_process(lambda: pytest.fail("decided anew"), 2)


# --- The source -----------------------------------------------------------------------------------------------------

FORBIDDEN = {
    *("eval", "exec", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads", "pickle.Unpickler"),
    *("marshal.loads", "shelve.open", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "pd.read_pickle"),
    *("torch.jit.load", "torch.hub.load", "urllib.request.urlopen", "socket.create_connection"),
}
WANTED = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
NETWORK = {"requests", "urllib", "http", "ftplib", "fsspec", "s3fs", "huggingface_hub", "dill", "cloudpickle", "joblib"}


def breaches(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [name for name in names if name.partition(".")[0] in NETWORK and name != "urllib.parse"]
        if not isinstance(node, ast.Call):
            continue
        name, given = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
        keyword, value = WANTED.get(name, (None, None))
        if name in FORBIDDEN or given.get("shell") == "True" or (keyword and given.get(keyword) != str(value)):
            found.append(ast.unparse(node))
        if name.startswith("yaml.") and given.get("Loader", "yaml.SafeLoader") != "yaml.SafeLoader":
            found.append(ast.unparse(node))
    return found


def test_nothing_in_the_product_could_run_what_it_loads_or_ask_the_network():
    paths = [*ROOT.glob("*.py"), *(path for folder in OURS for path in (ROOT / folder).rglob("*.py"))]
    assert len(paths) > 100
    found = {path.relative_to(ROOT): breaches(path.read_text(encoding="utf-8")) for path in paths}
    assert set(found.pop(Path("seqvae/inference/hub.py"))) == {"huggingface_hub", "huggingface_hub.errors"}
    assert {path: calls for path, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "source",
    [
        *(
            "torch.load(p)",
            "torch.load(p, weights_only=False)",
            "np.load(p)",
            "np.load(p, allow_pickle=True)",
            "eval(t)",
        ),
        *("yaml.compose(t, Loader=yaml.Loader)", "yaml.load(t)", "subprocess.run(c, shell=True)", "import requests"),
    ],
)
def test_what_the_source_may_not_hold_is_found(source):
    assert breaches(source)
