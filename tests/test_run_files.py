"""environment.json and events.jsonl: readable at any time, whole after a crash, and nobody's name in them."""

import json
import socket
import subprocess
from pathlib import Path

import pytest

from reports.run_files import (
    EVENTS,
    append_event,
    commit_of,
    environment,
    read_environment,
    read_events,
    versions,
    write_environment,
)


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *words], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_an_environment_comes_back_as_it_was_written(tmp_path):
    content = environment(["train_optimized.py", "--run_name", "é 1"], device="one CPU")
    write_environment(tmp_path, content)
    assert read_environment(tmp_path) == content
    assert content["command"] == "python train_optimized.py --run_name 'é 1'"
    assert content["device"] == "one CPU"
    assert content["cpu_count"] >= 1
    assert content["packages"]["pyarrow"]
    assert [path.name for path in tmp_path.iterdir()] == ["environment.json"]


def test_an_environment_names_neither_the_host_nor_the_user_nor_their_folders():
    text = json.dumps(environment([str(Path(__file__).parent / "train.py")]))
    words = set(text.replace('"', " ").replace("/", " ").split())
    assert not {socket.gethostname(), Path.home().name} & words
    assert str(Path(__file__).parent.parent) not in text


def test_versions_are_those_of_installed_packages_alone():
    assert set(versions(["numpy", "no-such-package-at-all"])) == {"numpy"}


def test_the_commit_is_that_of_the_checkout_and_says_whether_it_was_changed(tmp_path):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    git(checkout, "init", "-q")
    (checkout / "code.py").write_text("1")
    git(checkout, "add", "code.py")
    git(checkout, "commit", "-q", "-m", "first")
    commit = git(checkout, "rev-parse", "HEAD")
    assert commit_of(checkout) == commit
    (checkout / "code.py").write_text("2")
    assert commit_of(checkout) == f"{commit}-dirty"
    inside = checkout / "copied"
    inside.mkdir()
    assert commit_of(inside) is None
    assert commit_of(tmp_path) is None


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", "")
    assert commit_of(tmp_path) is None


def test_events_come_back_in_the_order_they_happened(tmp_path):
    assert read_events(tmp_path) == []
    append_event(tmp_path, "started", step=0)
    append_event(tmp_path, "verdict", step=40, verdict="collapsing", evidence={"kl": 0.1})
    first, second = read_events(tmp_path)
    assert (first["event"], first["step"]) == ("started", 0)
    assert (second["verdict"], second["evidence"]) == ("collapsing", {"kl": 0.1})
    assert list(second)[:3] == ["time", "step", "event"]
    assert first["time"] <= second["time"]
    assert second["time"].endswith("Z")


def test_half_a_line_is_not_read_and_gives_way_to_the_next_event(tmp_path):
    append_event(tmp_path, "started", step=0)
    with (tmp_path / EVENTS).open("a") as file:
        file.write('{"time": "2025-01')
    assert [entry["event"] for entry in read_events(tmp_path)] == ["started"]
    append_event(tmp_path, "resumed", step=5)
    assert [entry["event"] for entry in read_events(tmp_path)] == ["started", "resumed"]


@pytest.mark.parametrize(("value", "written"), [(float("nan"), "nan"), (float("-inf"), "-inf"), (0.5, 0.5)])
def test_an_event_is_json_whatever_the_numbers(tmp_path, value, written):
    append_event(tmp_path, "diverged", step=3, loss=value)
    assert read_events(tmp_path)[0]["loss"] == written


def test_a_line_break_in_a_text_stays_within_its_line(tmp_path):
    append_event(tmp_path, "note", step=1, text="two\nlines\u2028 and a half")
    assert (tmp_path / EVENTS).read_text(encoding="utf-8").count("\n") == 1
    assert read_events(tmp_path)[0]["text"] == "two\nlines\u2028 and a half"
