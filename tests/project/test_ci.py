"""`.ci/run`: it installs a browser where one is missing and may be installed, and runs the tests in any case."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALLED = ["apt-get -qq update", "apt-get -qq -y install --no-install-recommends chromium"]


@pytest.mark.parametrize(
    ("user", "others", "apt_ends", "ran", "said"),
    [
        (0, ("apt-get",), 0, [*INSTALLED, "make test"], ""),
        (0, ("apt-get", "chromium"), 0, ["make test"], ""),
        (0, ("apt-get",), 100, [INSTALLED[0], "make test"], "chromium cannot be installed"),
        (0, (), 0, ["make test"], ""),
        (1000, ("apt-get",), 0, ["make test"], ""),
    ],
    ids=["root", "root with a browser", "root without a network", "root without apt", "a plain user"],
)
def test_a_browser_is_installed_where_it_is_missing_and_may_be(tmp_path, user, others, apt_ends, ran, said):
    for name in ("bash", "dirname", "timeout"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    for name, then in {"make": "", "apt-get": f"exit {apt_ends}", "chromium": "", "id": f"echo {user}"}.items():
        if name in ("make", "id", *others):
            notes = "" if name == "id" else f'echo "{name} $*" >> {tmp_path / "ran"}\n'
            (tmp_path / name).write_text(f"#!{tmp_path / 'bash'}\n{notes}{then}\n", encoding="utf-8")
            (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [tmp_path / "bash", ROOT / ".ci" / "run"],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (tmp_path / "ran").read_text(encoding="utf-8").splitlines() == ran
    assert said in done.stderr
    assert bool(said) == bool(done.stderr)
