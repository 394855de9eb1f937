"""The guided example: the verdict that it reads, the picture, and, slowly, the whole of it as a user types it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.catch_a_collapse.results import draw, last_verdict, with_flag
from seqvae.errors import UsageError

ROOT = Path(__file__).parent.parent.parent
PNG = b"\x89PNG\r\n"


def make_run(folder: Path, verdict: str, rates: list[float]) -> Path:
    folder.mkdir()
    common = {"decoder_use_error": 0.1, "kl_weight": 1.0, "verdict": verdict}
    rows = [
        common
        | {"step": 6 * number, "kl_per_dim": [rate], "rate": rate, "mutual_information": rate / 2, "decoder_use": rate}
        for number, rate in enumerate(rates, start=1)
    ]
    (folder / "posterior.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    verdicts = {"event": "verdict", "evidence": "the rate is gone", "advice": ["--free_bits 0.25 (nats for free)"]}
    events = [{"step": 0, "event": "started"}, {"step": 6, "verdict": "warming_up", **verdicts}]
    events += [{"step": 12, "verdict": verdict, **verdicts}, {"step": 18, "event": "finished"}]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_the_last_verdict_is_the_one_in_force(tmp_path):
    found = last_verdict(make_run(tmp_path / "run", "collapsed", [1.0, 0.1]))
    assert found == ("collapsed", 12, "the rate is gone", ("--free_bits 0.25 (nats for free)",))


def test_a_run_without_monitoring_has_no_verdict(tmp_path):
    with pytest.raises(UsageError, match="holds no verdict"):
        last_verdict(tmp_path)


def test_advice_is_added_where_the_flag_was_not_typed():
    assert with_flag(["--depth", "1"], "--word_dropout", "0.3") == ["--depth", "1", "--word_dropout", "0.3"]


def test_the_picture_is_drawn_and_small_enough_for_a_page(tmp_path):
    first = make_run(tmp_path / "first", "collapsed", [1.0, 0.4, 0.1, 0.0])
    second = make_run(tmp_path / "second", "healthy", [1.0, 2.0, 3.0, 3.1])
    draw(tmp_path / "caught.png", first, second, "--free_bits 0.25")
    assert (tmp_path / "caught.png").read_bytes().startswith(PNG)
    assert (tmp_path / "caught.png").stat().st_size < 150_000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_catches_the_collapse_and_heals_it(tmp_path):
    command = [sys.executable, "-m", "examples.catch_a_collapse", "--output_dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    assert last_verdict(tmp_path / "first").name == "collapsed"
    assert last_verdict(tmp_path / "second").name == "healthy"
    assert "--on_collapse rescue" in done.stdout
    assert (tmp_path / "collapse_caught.png").exists()
