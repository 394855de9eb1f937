"""The pages show what the benchmarks printed, and nothing else; the runner keeps what they print."""

import json
import re
import sys

import pytest

from benchmarks import bench, pages

MACHINE = {"date": "2026-01-02", "cores": 2, "bf16_units": False, "memory_gb": 24, "python": "3.11.7"}
STEP = {
    "benchmark": "step",
    "machine": MACHINE,
    "command": "python -m benchmarks.speed.step --short",
    "recipes": {"rows": [{"run": "a|b", "real tokens/s": 12345, "ratio": 6.25}], "peak": 3},
}
LOADING = {
    "benchmark": "loading",
    "machine": MACHINE,
    "command": "python -m benchmarks.speed.loading",
    "build": [
        {"data": name, "seconds": 2.04, "M items": items, "M items/s": 35.1, "peak MB": 1640, "second start s": second}
        for name, items, second in (("small", 1.5, 0.5), ("large", 99.5, 0.031))
    ],
    "against_hf": {"rows": [{"loader": "SeqVAE"}], "ratio": 29.2},
    "gather": {"tokens per batch": 4012, "M real tokens/s": 155},
    "plan": [{"sequences": 1_000_000, "tokens per batch": 4096, "ms": 17.2, "padding efficiency": 0.9996}],
    "worker_memory": [
        {"worker_type": kind, "workers": workers, "MB per worker": megabytes}
        for kind, workers, megabytes in (
            ("thread", 0, 9.0),
            ("thread", 2, 0.5),
            ("process", 0, 9.0),
            ("process", 4, 11.3),
        )
    ],
}


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_a_page_equals_its_stored_figures(page):
    text = page.read_text(encoding="utf-8")
    assert pages.rewritten(text, pages.read_figures()) == text


def test_every_benchmark_has_its_place_on_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in pages.PAGES)
    marked = re.findall(r"<!-- begin: (\S+) -->", text)
    assert sorted(marked) == sorted(pages.BLOCKS)
    assert bench.FORMS.keys() == pages.TABLES.keys()


def test_a_table_names_machine_date_and_command():
    page = "before\n<!-- begin: step -->\nold\n<!-- end: step -->\nafter\n"
    assert pages.rewritten(page, {"step": STEP}) == (
        "before\n<!-- begin: step -->\n"
        "2 CPU cores without bf16 units, 24 GB, Python 3.11.7; 2026-01-02; `python -m benchmarks.speed.step --short`:\n\n"
        "**Training, against the plain recipe and against the machine's own product of matrices**\n\n"
        "| run | real tokens/s | ratio |\n| --- | --- | --- |\n| a\\|b | 12,345 | 6.25 |\n"
        "<!-- end: step -->\nafter\n"
    )


def test_a_page_notes_what_was_not_measured():
    assert "Not measured so far" in pages.rewritten("<!-- begin: step -->\n<!-- end: step -->", {})


def test_a_mark_without_a_benchmark_is_an_error():
    with pytest.raises(KeyError):
        pages.rewritten("<!-- begin: nothing -->\n<!-- end: nothing -->", {})


def test_rows_that_hold_other_rows_are_two_tables():
    report = {"sequences": [{"sequences": 10, "cache s": 1.5, "start": {"sequences": 10, "ms": 2}}]}
    assert pages.markdown(pages.rows_at(report, "sequences")).splitlines()[0] == "| sequences | cache s |"
    assert pages.rows_at(report, "sequences.start") == [{"sequences": 10, "ms": 2}]


def test_the_readme_shows_the_figures_of_loading():
    lines = pages.loading_in_short(LOADING).splitlines()
    assert lines[2:] == [
        "| random batches of 64 from one file, real tokens/s | 29.2 x HF datasets in its fastest form, the same rows |",
        "| gathering batches of 4,012 tokens | 155 M real tokens/s |",
        "| building the cache, small | 2.0 s (35.1 M per second), with a peak of 1,640 MB |",
        "| building the cache, large | 2.0 s (35.1 M per second), with a peak of 1,640 MB |",
        "| a second start, large | 0.03 s |",
        "| plan of an epoch, 10^6 sequences | 17.2 ms |",
        "| padding efficiency, 10^6 log-normal lengths (mean 75), 4,096 tokens per batch | 1.000 |",
        "| memory of a worker thread; of a worker process | 0.5 MB; 11.3 MB |",
    ]


@pytest.fixture
def figures(tmp_path, monkeypatch):
    """Return a directory for figures, and a page with a mark."""
    page = tmp_path / "page.md"
    page.write_text("<!-- begin: step -->\n<!-- end: step -->\n", encoding="utf-8")
    for module in (pages, bench):
        monkeypatch.setattr(module, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(pages, "PAGES", (page,))
    return tmp_path


def test_the_last_line_of_a_benchmark_becomes_its_figures_and_its_table(figures, monkeypatch):
    monkeypatch.setattr(bench, "last_line_of", lambda command: json.dumps(STEP | {"command": "something else"}))
    assert bench.measure("step", full=False)
    kept = json.loads((figures / "figures" / "step.json").read_text(encoding="utf-8"))
    assert kept["command"] == "python -m benchmarks.speed.step --short"
    assert "12,345" in (figures / "page.md").read_text(encoding="utf-8")


def test_a_benchmark_that_fails_leaves_everything_as_it_was(figures, monkeypatch):
    monkeypatch.setattr(bench, "last_line_of", lambda command: None)
    before = (figures / "page.md").read_text(encoding="utf-8")
    assert not bench.measure("step", full=False)
    assert not (figures / "figures").exists()
    assert (figures / "page.md").read_text(encoding="utf-8") == before


def test_of_several_data_sets_each_has_its_place(figures, monkeypatch):
    monkeypatch.setattr(bench, "FORMS", {"results": bench.Form("quality", sets=("one", "two"))})
    for value in (1, 2):
        report = {"machine": MACHINE, "latent": [{"rate": value}]}
        monkeypatch.setattr(
            bench,
            "last_line_of",
            lambda command, report=report: json.dumps(report | {"data": command[command.index("--data") + 1]}),
        )
        assert bench.measure("results", full=True)
    kept = json.loads((figures / "figures" / "results.json").read_text(encoding="utf-8"))
    assert [(one["data"], one["latent"], one["command"]) for one in kept["sets"]] == [
        (data, [{"rate": 2}], f"python -m benchmarks.quality.results --data {data}") for data in ("one", "two")
    ]
    assert pages.rows_at(kept, "sets.latent") == [{"rate": 2}, {"rate": 2}]
    assert pages.provenance(kept) == (
        "2 CPU cores without bf16 units, 24 GB, Python 3.11.7; 2026-01-02; "
        "`python -m benchmarks.quality.results --data one`, `--data two`:"
    )


@pytest.mark.parametrize(("code", "last"), [("print(1); print(2)", "2\n"), ("print(1); raise SystemExit(3)", None)])
def test_the_lines_of_a_benchmark_are_passed_on_and_the_last_is_taken(code, last, capsys):
    assert bench.last_line_of([sys.executable, "-c", code]) == last
    assert capsys.readouterr().out.startswith("1\n")


def test_only_known_benchmarks_are_run(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "ablaton"])
    with pytest.raises(SystemExit) as stop:
        bench.main()
    assert stop.value.code == 2
    assert "there is no benchmark ablaton" in capsys.readouterr().err
