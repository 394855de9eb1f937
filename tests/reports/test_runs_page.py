"""The index of a directory of runs: what it shows of each, in which orders, and how it stays up to date while they go on."""

import json
import os
import re
from pathlib import Path

import pytest

from seqvae.reports import runs_page as index
from seqvae.reports.__main__ import main, write_report
from seqvae.reports.read_run import Run, read_run
from seqvae.reports.runs_page import (
    SUMMARY,
    Summary,
    read_summary,
    settings_apart,
    state_of,
    summary_of,
    write_runs_page,
)
from seqvae.reports.study_page import write_study
from seqvae.text import MINUS
from tests.support.hostile import NAMES
from tests.support.made_studies import made_study
from tests.support.report_runs import event, finished, make_run

NOW = 1_767_226_000.0


@pytest.fixture
def runs(tmp_path) -> Path:
    """Return a directory of three runs that differ in their verdict, ELBO and settings, beside what is no run."""
    root = tmp_path / "runs"
    for place, (name, verdict) in enumerate((("b", "healthy"), ("a", "collapsed"), ("c #1", "healthy"))):
        run = make_run(root / name, verdict=verdict, end=finished() if name != "a" else None)
        with (run / "config.yaml").open("a") as file:
            file.write(f"beta: {4 if name == 'a' else 1}\nseed: {place}\n")
        with (run / "metrics.csv").open("a") as file:
            file.write(f"1001,0,100,,,,,,,{-20.0 - place},20,2.0,90\n")
    (root / "cache").mkdir()
    return root


def order_of(page: str, anchor: str) -> list[str]:
    """Return the names of the runs in one of the page's tables."""
    table = re.search(rf'<div class="order" id="{anchor}">.*?</table>', page, flags=re.DOTALL)
    assert table is not None
    return re.findall(r'<a href="\./[^"]*/report\.html">([^<]*)</a>', table[0])


def test_each_run_has_its_verdict_its_numbers_and_a_spark_line_in_every_order(runs, capsys):
    assert main([str(runs)]) == 0
    assert capsys.readouterr().out == f"{runs / 'index.html'}\n"
    page = (runs / "index.html").read_text(encoding="utf-8")
    assert order_of(page, "by-name") == ["a", "b", "c #1"]
    assert order_of(page, "by-verdict") == ["a", "b", "c #1"]
    assert order_of(page, "by-elbo") == ["b", "a", "c #1"]
    assert sorted(order_of(page, "by-start")) == ["a", "b", "c #1"]
    assert 'href="./c%20%231/report.html"' in page
    heads = re.findall(r'<th[^>]*><a href="#(by-[a-z]+)">', page)
    assert {*heads} == {*re.findall(r'class="order" id="([^"]*)"', page)}
    assert page.count(f"{MINUS}21.00") == len(set(heads))
    sparks = re.findall(r'<polyline id="(\w+)" points="([^"]*)"', page)
    assert {name for name, _ in sparks} == {f"{letter}{place}" for letter in "er" for place in range(3)}
    assert all(2 < len(points.split()) <= index.MOST_POINTS for _, points in sparks)
    assert {*re.findall(r'<use href="#(\w+)"', page)} == {name for name, _ in sparks}
    assert "<script" not in page
    assert "--beta 4" in page
    assert "--beta 1" not in page.partition("<details>")[0]


def test_settings_of_most_runs_are_not_repeated_and_those_of_a_half_are(runs):
    one, *_ = [summary_of(read_run(runs / "a"), NOW)]
    settings = [{"lr": "1", "run_name": str(place), "beta": beta} for place, beta in enumerate("4411")]
    made = [one._replace(name=str(place), settings=dict(each)) for place, each in enumerate(settings)]
    apart, shared = settings_apart(made)
    assert apart == {"0": ["--beta 4"], "1": ["--beta 4"], "2": ["--beta 1"], "3": ["--beta 1"]}
    assert shared == []
    unknown = one._replace(name="none", settings={})
    apart, shared = settings_apart([*made[1:], unknown])
    assert apart == {"1": ["--beta 4"], "2": [], "3": [], "none": []}
    assert shared == [["--beta", "1"]]


def test_how_far_a_run_got_is_said_of_the_moment_the_page_is_written(runs):
    summary = summary_of(read_run(runs / "a"), NOW)._replace(last_sign=NOW - 60, total_steps=2000)
    assert state_of(summary, NOW) == "1,001 of 2,000, under way"
    assert state_of(summary, NOW + 7200) == "1,001 of 2,000, silent for 2 h 1 min"
    assert state_of(summary._replace(end="stopped"), NOW + 7200) == "stopped at 1,001"


def test_a_report_renews_the_index_beside_it_from_what_the_other_runs_left_there(runs, monkeypatch):
    write_report(runs / "a")
    assert not (runs / "index.html").exists(), "there is one where it was asked for"
    write_runs_page(runs)
    assert "collapsed</span>" in (runs / "index.html").read_text(encoding="utf-8")
    read: list[Path] = []

    def read_and_note(directory: Path) -> Run:
        read.append(directory)
        return read_run(directory)

    monkeypatch.setattr(index, "read_run", read_and_note)
    with (runs / "a" / "events.jsonl").open("a") as file:
        file.write(json.dumps(event("failed", 900, said="out of paper")) + "\n")
    write_report(runs / "a")
    page = (runs / "index.html").read_text(encoding="utf-8")
    assert "failed at 1,001" in page
    assert "collapsed</span>" not in page
    assert read == [], "no other run's files were read"


def test_what_another_run_writes_meanwhile_is_not_lost(runs, monkeypatch):
    write_runs_page(runs)
    render = index.runs_page
    times: list[int] = []

    def render_late(*arguments):
        """Let run b end when its summary has been read already."""
        times.append(len(times))
        if len(times) == 1:
            content = json.loads((runs / "b" / SUMMARY).read_text())
            (runs / "b" / SUMMARY).write_text(json.dumps(content | {"end": "interrupted"}))
            os.utime(runs / "b" / SUMMARY, (NOW, NOW))
        return render(*arguments)

    monkeypatch.setattr(index, "runs_page", render_late)
    index.renew_runs_page(runs / "a")
    assert "interrupted at" in (runs / "index.html").read_text(encoding="utf-8")
    assert times == [0, 1]


def test_the_command_reads_runs_again_that_wrote_something_since(runs):
    write_runs_page(runs)
    with (runs / "b" / "events.jsonl").open("a") as file:
        file.write(json.dumps(event("interrupted", 1001)) + "\n")
    os.utime(runs / "b" / SUMMARY, (NOW, NOW))
    index.renew_runs_page(runs / "a")
    assert "interrupted" not in (runs / "index.html").read_text(encoding="utf-8")
    write_runs_page(runs)
    assert "interrupted at 1,001" in (runs / "index.html").read_text(encoding="utf-8")


def test_a_summary_is_read_back_as_it_was_and_a_damaged_one_is_made_again(runs):
    run = read_run(runs / "a")
    summary: Summary = index.write_summary(run, NOW)
    assert read_summary(runs / "a") == summary
    for content in ("", "[]", "{}", '{"elbo": 3}', json.dumps(summary._asdict() | {"step": "x"}), "\0" * 9):
        (runs / "a" / SUMMARY).write_text(content)
        assert read_summary(runs / "a") is None
    index.write_runs_page(runs)
    assert read_summary(runs / "a") is not None


def test_another_page_of_that_name_stays(runs, capsys):
    (runs / "index.html").write_text("mine")
    write_report(runs / "a")
    assert main([str(runs)]) == 2
    assert "index.html is no index of runs, and is left as it is" in capsys.readouterr().err
    assert (runs / "index.html").read_text() == "mine"


def test_the_page_of_a_study_is_written_again_and_an_index_leads_to_it(runs, capsys):
    write_study_in = runs / "study"
    write_study_in.mkdir()
    page = write_study(write_study_in, made_study(3))
    before = page.read_text(encoding="utf-8")
    page.unlink()
    assert main([str(write_study_in), str(runs)]) == 0
    capsys.readouterr()
    cut = "<footer>"
    assert page.read_text(encoding="utf-8").partition(cut)[0] == before.partition(cut)[0]
    assert '<a href="./study/index.html">study</a>' in (runs / "index.html").read_text(encoding="utf-8")


def test_runs_and_an_index_among_what_a_shell_matches(runs, capsys):
    write_runs_page(runs)
    assert main([str(path) for path in sorted(runs.iterdir())]) == 0
    out, err = capsys.readouterr()
    assert [Path(line).parent.name for line in out.splitlines()] == ["a", "b", "c #1"]
    assert err.count("note:") == 1
    assert "cache is no run: it has neither config.yaml nor metrics.csv, and holds no run; it is left out" in err
    assert main([str(runs), "--output", "a.html"]) == 2
    assert main(["--compare", str(runs)]) == 2
    assert main([str(runs / "index.html")]) == 2


def test_names_from_outside_are_text(tmp_path):
    run = make_run(tmp_path / "runs" / "a<b>&", names=NAMES, says="<script>")
    with (run / "config.yaml").open("a") as file:
        file.write("seed: '<script>'\n")
    make_run(tmp_path / "runs" / "b")
    page = write_runs_page(tmp_path / "runs").read_text(encoding="utf-8")
    assert "<script" not in page
    assert '<a href="./a%3Cb%3E%26/report.html">a&lt;b&gt;&amp;</a>' in page


def test_of_many_runs_the_newest_are_listed(runs, monkeypatch):
    monkeypatch.setattr(index, "MOST_LISTED", 2)
    page = write_runs_page(runs).read_text(encoding="utf-8")
    assert len(order_of(page, "by-name")) == 2
    assert "1 older runs are left out" in page
