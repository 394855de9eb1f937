"""environment.json: readable at any time, and nobody's name in it."""

import json
import socket
import subprocess
from pathlib import Path

from seqvae.reports.run_files import ENVIRONMENT, commit_of, environment, write_environment


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *words], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_an_environment_comes_back_as_it_was_written(tmp_path):
    content = environment(["train_optimized.py", "--run_name", "é 1"], device="one CPU")
    write_environment(tmp_path, content)
    assert json.loads((tmp_path / ENVIRONMENT).read_text(encoding="utf-8")) == content
    assert content["command"] == "python train_optimized.py --run_name 'é 1'"
    assert content["device"] == "one CPU"
    assert content["cpu_count"] >= 1
    assert content["packages"]["pyarrow"]
    assert [path.name for path in tmp_path.iterdir()] == ["environment.json"]


def test_an_environment_names_neither_the_host_nor_the_user_nor_their_folders():
    text = json.dumps(environment([str(Path(__file__).parent / "train.py")]))
    words = set(text.replace('"', " ").replace("/", " ").split())
    assert not {socket.gethostname(), Path.home().name} & words
    assert str(Path(__file__).parent.parent.parent) not in text


def test_versions_are_those_of_installed_packages_alone(monkeypatch):
    monkeypatch.setattr("seqvae.reports.run_files.PACKAGES", ("numpy", "no-such-package-at-all"))
    assert set(environment(["train.py"])["packages"]) == {"numpy"}


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
