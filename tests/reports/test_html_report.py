"""report.html: what it says of runs of every kind, that nothing in a run's directory can break it, and how it is written."""

import json
import math
import os
import random
import re
import subprocess
import sys
from csv import DictReader
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from seqvae.reports.__main__ import main
from seqvae.reports.compare import comparison_page, path_of
from seqvae.reports.read_run import read_run
from seqvae.reports.run_page import (
    MOST_BYTES,
    bottleneck,
    differing_settings,
    report_page,
    six_numbers,
    survived_rows,
)
from seqvae.reports.story import end_of, story_of
from seqvae.verdicts import VERDICTS, VerdictKind
from tests.support.hostile import NAMES
from tests.support.report_runs import STEPS, event, finished, latents, make_run, reading, write, write_rows

FILES = (
    "config.yaml",
    "environment.json",
    "run.json",
    "metrics.csv",
    "events.jsonl",
    "posterior.jsonl",
    "throughput.jsonl",
)
MORE_FILES = (*FILES, "samples/step-0001000.txt", "plots/posteriors.npz", "evaluation.jsonl")
SECTIONS = (
    *("Loss", "Collapse", "Latents", "Samples against data", "Data quality", "Performance"),
    *("Settings that differ from the defaults", "Environment", "What it survived"),
)
NOW = 1_767_226_000.0


def page_of(directory: Path) -> str:
    return report_page(read_run(directory), NOW)


# --- What it says ---------------------------------------------------------------------------------------------------


def test_a_report_begins_with_the_verdict_and_has_all_sections_in_their_order(tmp_path):
    page = page_of(make_run(tmp_path / "a", end=finished()))
    places = [page.index(f"<h2>{title}</h2>") for title in SECTIONS]
    assert places == sorted(places)
    before = page[: places[0]]
    assert before.index("<h1>The latent carries something, and the decoder uses it.</h1>") < before.index(
        "What to do next"
    )
    assert before.count("<dt>") == 6
    assert "Finished at step 1,000 of 1,000." in before
    assert "<script" not in page
    assert "http://" not in page
    assert "https://" not in page


@pytest.mark.parametrize(
    ("verdict", "tone", "sentence"),
    [
        ("healthy", "good", "The latent carries something"),
        ("partly_collapsed", "fair", "Most latent dimensions are dead"),
        ("collapsed", "bad", "The posterior has collapsed"),
        ("decoder_ignores_z", "bad", "The decoder ignores the latent"),
        ("not_variational", "bad", "The posteriors are next to points"),
        ("cannot_tell", "open", "The readings do not decide yet"),
    ],
)
def test_each_verdict_has_its_sentence_its_evidence_and_its_advice(verdict, tone, sentence, tmp_path):
    story = story_of(read_run(make_run(tmp_path / "a", verdict=verdict, says="rate 2.5")), NOW)
    assert (story.tone, story.verdict) == (tone, verdict.replace("_", " "))
    assert story.sentence.startswith(sentence)
    assert (
        story.why
        == "Since step 480: rate 2.5. At step 1,000: rate 2.00, mutual information 1.50, decoder use 3 ± 0.400."
    )
    assert (story.next[0] == "--free_bits 0.25 (the first nats of each dimension are free)") == (verdict != "healthy")


def test_the_numbers_under_the_verdict_are_those_of_the_tiles_and_not_of_when_it_came(tmp_path):
    says = "the latent carries something and the decoder uses it; rate 7.11, mutual information 1.66, decoder use 23.69 ± 2"
    directory = make_run(tmp_path / "a", says=says)
    run = read_run(directory)
    why = story_of(run, NOW).why
    assert why.startswith(
        "Since step 480: the latent carries something and the decoder uses it. At step 1,000: rate 2.00, "
    )
    assert "23.69" not in why
    for name, value, _ in six_numbers(run)[1:4]:
        assert f"{name.lower()} {value}" in why
    last = [row for row in run.readings if "decoder_use" not in row][-1]
    later = run._replace(readings=[*run.readings, last | {"step": 1010}])
    assert story_of(later, NOW).why.endswith("decoder use 3 ± 0.400 (at step 1,000).")
    before = run._replace(readings=[row for row in run.readings if row["step"] < 500])
    assert "23.69" in story_of(before, NOW).why, "a verdict behind the last reading has no newer numbers"
    assert "<td>the latent carries something and the decoder uses it; rate 7.11" in page_of(directory)


def test_an_entry_in_the_table_of_verdicts_is_all_that_a_report_needs(tmp_path, monkeypatch):
    run = read_run(make_run(tmp_path / "a", verdict="fast_asleep"))
    story = story_of(run, NOW)
    assert (story.tone, story.sentence) == ("open", 'This version of seqvae does not know the verdict "fast asleep"')
    entry = replace(VERDICTS["collapsed"], name="fast_asleep", sentence="It sleeps")
    monkeypatch.setitem(cast(dict[str, VerdictKind], VERDICTS), "fast_asleep", entry)
    story = story_of(run, NOW)
    assert (story.tone, story.sentence) == ("bad", "It sleeps")


def test_that_the_decoder_uses_the_latent_is_said_where_it_is_known(tmp_path):
    unknown = "the latent carries something, and whether the decoder uses it is not known for certain; rate 2"
    story = story_of(read_run(make_run(tmp_path / "a", says=unknown)), NOW)
    assert story.sentence == "The latent carries something; whether the decoder uses it is not known for certain"
    assert story_of(read_run(make_run(tmp_path / "b")), NOW).sentence.endswith("and the decoder uses it")


@pytest.mark.parametrize(
    ("end", "state"),
    [
        (finished(), "Finished at step 1,000 of 1,000."),
        (finished() | {"ended_by": "max_time", "step": 900}, "Finished at step 900 of 1,000, as --max_time says."),
        (event("interrupted", 700), "Interrupted at step 700 of 1,000."),
        (event("stopped", 800, verdict="collapsed"), "Stopped at step 800 of 1,000, as --on_collapse stop says."),
    ],
)
def test_how_a_run_ended_is_said(end, state, tmp_path):
    assert story_of(read_run(make_run(tmp_path / "a", end=end)), NOW).state == state


def test_a_run_without_an_end_is_under_way_or_long_silent(tmp_path):
    run = read_run(make_run(tmp_path / "a"))
    assert run.last_sign is not None
    assert story_of(run, run.last_sign + 60).state.startswith("Under way at step 1,000 of 1,000, as of ")
    assert "probably killed" in story_of(run, run.last_sign + 7200).state


def test_an_error_that_ended_a_run_goes_before_the_posteriors_verdict(tmp_path):
    run = read_run(make_run(tmp_path / "a", end=event("failed", 700, said="RuntimeError: out of paper")))
    story = story_of(run, NOW)
    assert (story.tone, story.verdict, story.sentence) == ("bad", "failed", "The run was ended by an error")
    assert story.why == "RuntimeError: out of paper Until then the verdict was: healthy."
    resumed = [*run.events, event("resumed", 700, checkpoint="last.ckpt")]
    assert end_of(resumed) is None
    assert story_of(run._replace(events=resumed), NOW).verdict == "healthy"


def test_an_unwatched_run_says_what_is_given_up_and_whether_its_kl_looks_like_a_collapse(tmp_path):
    run = read_run(make_run(tmp_path / "a", monitored=False))
    story = story_of(run, NOW)
    assert (story.verdict, story.tone) == ("not watched", "open")
    assert "which gives up the rate, the mutual information and the decoder use" in story.why
    assert run.missing == ()
    assert page_of(tmp_path / "a").count("--disable_metrics_monitoring") >= 3
    faint = [row | {"valid_kl": 0.01} for row in run.validations]
    story = story_of(run._replace(validations=faint), NOW)
    assert story.tone == "fair"
    assert "as little as a collapsed posterior has" in story.why


def ending_on_all(directory: Path, at_the_end: float) -> Path:
    """Make a run whose ELBO has been -160 for long, on 90 of 900 sequences, and whose last validation is on all of them."""
    make_run(directory, end=finished())
    head, *_ = (directory / "metrics.csv").read_text().splitlines()
    rows = [f"{step},0,1,,,,,,,-160,150,10,90" for step in range(100, 1001, 100)]
    rows.append("1000,0,1,2,2,2,1,0.001,9000,,,,")
    write(directory / "metrics.csv", [head, *rows, f"1000,0,1,,,,,,,{at_the_end},110,9,900"])
    return directory


@pytest.mark.parametrize("at_the_end", [-119.0, -201.0])
def test_a_validation_on_all_sequences_is_never_compared_with_those_on_a_part(at_the_end, tmp_path):
    directory = ending_on_all(tmp_path / "a", at_the_end)
    run = read_run(directory)
    (advice,) = story_of(run, NOW).next
    assert advice.startswith("Nothing needs mending, and the validation ELBO had levelled off")
    assert [row["valid_elbo"] for row in run.comparable_validations] == [-160.0] * 10
    assert path_of(run) == [(10.0, 150.0)] * 10
    page = page_of(directory)
    assert "NLL 110 + KL 9, nats per sequence, on all 900 sequences" in page
    for name in ("validation on 90 of 900 sequences", "validation on all 900 sequences", "best on 90 of 900 sequences"):
        assert name in page
    assert "still rose" not in page
    assert "best.ckpt" not in page


def validated(directory: Path, elbos: list[float], rates: list[float]) -> str:
    """Make a finished run with these validation ELBOs and learning rates, evenly over 1,000 steps; return what to do next."""
    make_run(directory, end=finished())
    head, *_ = (directory / "metrics.csv").read_text().splitlines()
    rows = [f"{1000 * at // len(rates)},0,1,2,2,2,1,{rate},9000,,,," for at, rate in enumerate(rates, 1)]
    rows += [f"{1000 * at // len(elbos)},0,1,,,,,,,{elbo},150,10,90" for at, elbo in enumerate(elbos, 1)]
    write(directory / "metrics.csv", [head, *rows])
    (advice,) = story_of(read_run(directory), NOW).next
    return advice


COSINE = [0.5 * (1 + math.cos(math.pi * at / 20)) for at in range(1, 21)]


def test_an_elbo_has_levelled_off_only_where_it_did_so_while_the_learning_rate_was_high(tmp_path):
    flat_at_the_end = [-200.0, -180, -170, -165, -162, -161, -160.3, -160.2, -160.1, -160]
    advice = validated(tmp_path / "a", flat_at_the_end, COSINE)
    assert advice.startswith(
        "While the learning rate was high, the validation ELBO still rose (by 18 nats from step 200 to 500)"
    )
    assert advice.endswith("more --max_steps would gain more.")
    flat = [-160.2, -160.1, -160, -160, -160, -159.8, -159, -158.6, -158.5, -158.4]
    advice = validated(tmp_path / "b", flat, COSINE)
    assert "had levelled off while the learning rate was still high: this is what these settings come to." in advice
    for name, elbos, rates in (
        ("c", flat[:3], COSINE),
        ("d", flat, [1.0] * 4 + [0.01] * 16),
        ("e", flat_at_the_end, []),
    ):
        too_short = "Nothing needs mending. The run is too short to tell whether the validation ELBO has levelled off: "
        assert validated(tmp_path / name, elbos, rates) == f"{too_short}more --max_steps would show."


def test_what_is_said_of_the_validations_on_a_part_says_so(tmp_path):
    directory = ending_on_all(tmp_path / "a", -119)
    text = (directory / "metrics.csv").read_text()
    (directory / "metrics.csv").write_text(text.replace("1000,0,1,,,,,,,-160", "1000,0,1,,,,,,,-150"))
    rose = "The validation ELBO still rose at the end (by 10 nats in the last quarter, on 90 of 900 sequences): "
    assert story_of(read_run(directory), NOW).next == (f"{rose}more --max_steps would gain more.",)
    (directory / "metrics.csv").write_text(text.replace("200,0,1,,,,,,,-160", "200,0,1,,,,,,,-150"))
    best = "The best validation was at step 200, by 10 nats, on 90 of 900 sequences: "
    assert story_of(read_run(directory), NOW).next == (f"{best}take checkpoints/best.ckpt rather than last.ckpt.",)


def test_runs_under_way_and_ended_are_compared_by_the_validations_that_both_have(tmp_path):
    ended, other = (ending_on_all(tmp_path / name, -119) for name in ("ended", "other"))
    rows = (other / "metrics.csv").read_text().splitlines()
    write(other / "metrics.csv", rows[:-1])
    page = comparison_page([read_run(ended), read_run(other)], NOW)
    assert "cannot be compared" not in page
    assert "119 on all 900 sequences" in page
    assert "160 on 90 of 900 sequences" in page
    write(other / "metrics.csv", [row.replace(",90", ",45") for row in rows])
    page = comparison_page([read_run(ended), read_run(other)], NOW)
    assert "these runs differ in how many sequences they were validated on" in page


def test_settings_that_differ_are_shown_beside_their_defaults(tmp_path):
    run = read_run(make_run(tmp_path / "a"))
    assert differing_settings(run) == [["--data_dir", "data", "none"], ["--lr", "0.001", "none"]]
    assert differing_settings(run._replace(facts={})) is None


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({}, "Try smaller batches (--tokens_per_batch or --batch_size)."),
        ({"pad_grid": "32"}, "Try --pad_grid 0, or smaller batches"),
        ({"bucketing": "false"}, "Try --bucketing."),
        ({"use_dynamic_padding": "false"}, "Try --use_dynamic_padding."),
    ],
)
def test_padding_is_blamed_on_what_pads(settings, advice, tmp_path):
    run = read_run(make_run(tmp_path / "a"))
    padded = [row | {"padding_share": 0.3} for row in run.throughput]
    assert advice in bottleneck(run._replace(throughput=padded, settings={**run.settings, **settings}))


def test_a_rescue_is_told_with_what_it_cost_and_what_stands(tmp_path):
    run = make_run(tmp_path / "a")
    moves = [("healing", 300, "collapsed", 1.5, 0), ("lowering", 350, "alive after 50 steps", 0.75, 50)]
    moves += [("watching", 400, "lost on this course after 50 steps", 1.5, 100)]
    lengths = {"last_step": 1200, "budget_steps": 300}
    rows = [
        event("rescue", step, phase=phase, outcome=outcome, floor=floor, kl_weight=1.0, used_steps=used, **lengths)
        for phase, step, outcome, floor, used in moves
    ]
    with (run / "events.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    text = page_of(run)
    assert "The latent came to life, and the last row stands. 100 of 300 steps were used." in text
    assert "before the rescue (step 300)" in text
    assert "lost on this course after 50 steps" in text
    assert "of 1,200" in text
    assert text.count("alive after 50 steps") == 1  # not once more under what it survived


def test_what_a_run_survived_is_listed_and_much_of_one_kind_is_counted(tmp_path):
    run = read_run(make_run(tmp_path / "a"))
    many = [event("step_skipped", step, said="NaN") for step in range(60)]
    rows, more = survived_rows(run._replace(events=[*many, event("rolled_back", 60, said="back")]))
    assert len(rows) == 41
    assert rows[-1][1:] == ["60", "went back to an earlier checkpoint", "back"]
    assert more == "Left out here: 20 more of step skipped; all stand in events.jsonl."


def test_the_newest_evaluation_of_each_checkpoint_and_split_is_a_table(tmp_path):
    directory = make_run(tmp_path / "a")
    rows = [{"name": "IW-NLL", "value": value, "error": 0.25, "of": "K = 500"} for value in (31.5, 30.5, 99.5)]
    lines = [
        {"time": f"2026-01-01T00:00:0{place}.000Z", "checkpoint": "best.ckpt", "split": split, "rows": [row]}
        for place, (split, row) in enumerate(zip(("test", "test", "valid"), rows, strict=True))
    ]
    assert "Measured on whole splits" not in page_of(directory)
    write_rows(directory / "evaluation.jsonl", lines)
    page = page_of(directory)
    assert "best.ckpt on the test split, 2026-01-01 00:00:01" in page
    assert '<td class="n">30.5</td><td class="n">0.250</td><td>K = 500</td>' in page
    assert "31.5</td>" not in page
    assert "99.5</td>" in page


def test_a_later_evaluation_hides_neither_a_probe_nor_the_numbers_on_other_data(tmp_path):
    directory = make_run(tmp_path / "a")
    rows = [{"name": "ELBO", "value": -31.5, "error": 0.25, "of": "9 sequences"}]
    probe = {"label": "dead", "metric": "AUROC", "rows": [{"features": "means", "score": [0.8125, 0.775, 0.855]}]}
    best = {"checkpoint": "best.ckpt", "step": 1000, "split": "test", "rows": rows}
    write_rows(
        directory / "evaluation.jsonl",
        [
            best | {"data": "other", "rows": [{"name": "ELBO", "value": -77.5}]},
            best | {"data": "mine", "probe": probe | {"rows": [{"features": "means", "score": [0.5, 0.4, 0.6]}]}},
            best | {"data": "mine", "probe": probe},
            best | {"data": "mine", "probe": probe | {"label": "age"}},
            best | {"data": "mine", "rows": [{"name": "ELBO", "value": -30.5}]},
        ],
    )
    page = page_of(directory)
    assert "dead, AUROC: best.ckpt on the test split of mine" in page
    assert "age, AUROC: " in page
    assert page.count("95 %: 0.775 to 0.855") == 2
    assert "95 %: 0.400 to 0.600" not in page
    assert "best.ckpt on the test split of other" in page
    assert "77.5" in page
    assert "30.5" in page
    assert "31.5" not in page


# --- What cannot break it -------------------------------------------------------------------------------------------


def test_names_from_data_are_shown_and_obeyed_by_nobody(tmp_path):
    directory = make_run(tmp_path / "<b>a", names=NAMES, says="".join(NAMES[:4]), verdict="<i>odd")
    page = page_of(directory)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script" not in page
    assert "<i>odd" not in page
    assert "<b>a" not in page
    assert all(character.isprintable() or character == "\n" for character in page)
    compared = comparison_page([read_run(directory)] * 2, NOW)
    assert "<script" not in compared
    assert "<b>a" not in compared


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named_and_the_rest_is_there(name, tmp_path):
    directory = make_run(tmp_path / "a")
    (directory / name).unlink()
    page = page_of(directory)
    assert f"Not there, or not readable: {name}" in page
    assert all(f"<h2>{title}</h2>" in page for title in SECTIONS)


def test_a_directory_in_which_hardly_anything_is_still_has_a_report(tmp_path):
    write(tmp_path / "config.yaml", ["lr: 0.001"])
    page = page_of(tmp_path)
    assert "The posterior has not been read yet" in page
    assert "It has not begun, or left no trace of it." in page


def test_half_a_line_and_lines_of_others_are_passed_over(tmp_path):
    directory = make_run(tmp_path / "a")
    before = read_run(directory)
    with (directory / "posterior.jsonl").open("a") as file:
        file.write('no row\n{"step": "x"}\n[1]\n' + json.dumps(reading(2000, "healthy"))[:100])
    assert read_run(directory).readings == before.readings


def test_numbers_at_the_edge_of_what_a_float_holds_are_left_out(tmp_path):
    directory = make_run(tmp_path / "a")
    for name in ("posterior.jsonl", "throughput.jsonl", "run.json", "metrics.csv"):
        text = (directory / name).read_text()
        (directory / name).write_text(text.replace("2.0", "1e308").replace("0.0", "-1e308").replace("1.5", "-1e308"))
    huge_NZ = np.where(np.arange(12).reshape(6, 2) % 2, 1e308, -1e308)
    np.savez(directory / "plots" / "posteriors.npz", mean_NZ=huge_NZ, logvar_NZ=huge_NZ)
    assert page_of(directory).endswith("</html>\n")
    assert comparison_page([read_run(directory)] * 2, NOW).endswith("</html>\n")


def test_a_very_long_metrics_csv_is_thinned_before_it_is_parsed(tmp_path, monkeypatch):
    directory = make_run(tmp_path / "a")
    head, *rows = (directory / "metrics.csv").read_text().splitlines()
    more = [",".join([str(step), *rows[0].split(",")[1:]]) for step in range(1001, 50_000)]
    last = ",".join(["50000", *rows[-1].split(",")[1:]])
    write(directory / "metrics.csv", [head, *rows, *more, last])
    parsed = []

    def counted(lines):
        found = list(lines)
        parsed.append(len(found))
        return DictReader(found)

    monkeypatch.setattr("seqvae.reports.read_run.csv.DictReader", counted)
    run = read_run(directory)
    assert parsed == [1001, 12]
    assert (run.training[0]["step"], run.training[-1]["step"]) == (20, 49_999)
    assert [row["step"] for row in run.validations] == [*range(100, 1001, 100), 50_000]
    monkeypatch.setattr("seqvae.reports.read_run.MOST_BYTES", 1000)
    tail = read_run(directory)
    assert (tail.training[-1], tail.validations) == (run.training[-1], run.validations[-1:])


@pytest.mark.parametrize("seed", range(8))
def test_whatever_lies_in_the_directory_there_is_a_report(seed, tmp_path):
    """Values of other types, deep nests, huge numbers, cut and overwritten bytes."""
    chance = random.Random(seed)
    directory = make_run(tmp_path / "a")
    write_rows(directory / "evaluation.jsonl", [{"checkpoint": 1, "rows": [{"name": {}, "value": "x"}, 5]}])
    odd: tuple[Any, ...] = (
        None,
        True,
        -1,
        0,
        10**400,
        1e308,
        float("inf"),
        "",
        "x",
        [],
        [None, "x", [1]],
        {},
        {"a": {}},
        [1e308] * 3,
    )

    def spoilt(value):
        if chance.random() < 0.08:
            return chance.choice(odd)
        if isinstance(value, dict):
            return {name: spoilt(one) for name, one in value.items()}
        return [spoilt(one) for one in value] if isinstance(value, list) else value

    for name in MORE_FILES:
        path = directory / name
        content = path.read_bytes()
        if path.suffix in (".json", ".jsonl") and chance.random() < 0.8:
            lines = [json.dumps(spoilt(json.loads(line))) for line in content.splitlines()]
            content = "".join(f"{line}\n" for line in lines).encode()
        elif chance.random() < 0.7:
            place = chance.randrange(len(content))
            content = content[:place] + chance.randbytes(20) + content[place + chance.randrange(200) :]
        path.write_bytes(content)
    page = page_of(directory)
    assert page.endswith("</html>\n")
    assert comparison_page([read_run(directory)] * 2, NOW).endswith("</html>\n")


def test_a_report_stays_small_however_long_the_run_and_whatever_its_picture(tmp_path):
    directory = make_run(tmp_path / "a", names=[f"{'name' * 100}{place}" for place in range(200)], kind="vectors")
    wide = [value / 100 for value in range(512)]
    write_rows(directory / "posterior.jsonl", [reading(step, "healthy") | {"kl_per_dim": wide} for step in range(2000)])
    write_rows(
        directory / "events.jsonl", [event("verdict", step, verdict="healthy", evidence="x" * 5000) for step in STEPS]
    )
    picture = directory / "samples" / "step-0001000.png"
    picture.write_bytes(picture.read_bytes() + bytes(3_000_000))
    assert "All 50 verdicts" in page_of(directory)
    row = event("verdict", 1, verdict="healthy", evidence="x")
    write_rows(directory / "events.jsonl", [row] * 1500)
    assert "The first 200 of 1,500 verdicts" in page_of(directory)
    page = page_of(directory)
    assert len(page.encode()) < MOST_BYTES / 2
    assert "The picture is too large for this page: samples/step-0001000.png" in page


# --- The command ----------------------------------------------------------------------------------------------------


def test_the_command_needs_neither_torch_nor_lightning(tmp_path):
    directory = make_run(tmp_path / "a")
    code = (
        "import sys; from seqvae.reports.__main__ import main; code = main(sys.argv[1:]); "
        "print([name for name in sys.modules if name.partition('.')[0] in ('torch', 'lightning', 'pandas')]); "
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(directory)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(directory / "report.html"), "[]"]
    assert (directory / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert done.stderr == ""


def test_a_comparison_lays_runs_over_one_another(tmp_path):
    good, bad = make_run(tmp_path / "x" / "a", end=finished()), make_run(tmp_path / "y" / "a", verdict="collapsed")
    write(bad / "config.yaml", ["lr: 0.5", "data_dir: data"])
    output = tmp_path / "both.html"
    assert main(["--compare", str(good), str(bad), "--output", str(output)]) == 0
    page = output.read_text(encoding="utf-8")
    assert "x/a: healthy" in page
    assert "y/a: collapsed" in page
    assert "Distortion (reconstruction NLL) against rate" in page
    assert "<tr><td>--lr</td><td>0.001</td><td>0.5</td></tr>" in page
    run = read_run(good)
    assert path_of(run) == [(row["valid_kl"], row["valid_nll"]) for row in run.validations]
    assert path_of(run._replace(validations=[]))[0] == (run.readings[0]["rate"], 30.0)


def test_elbos_of_different_data_are_not_compared(tmp_path):
    one, same, other = (make_run(tmp_path / name) for name in ("one", "same", "other"))
    write(other / "config.yaml", ["lr: 0.001", "data_dir: others"])
    (other / "run.json").write_text((one / "run.json").read_text().replace("900", "800"))
    page = comparison_page([read_run(one), read_run(same)], NOW)
    assert "cannot be compared" not in page
    assert "the lower left is better" in page
    page = comparison_page([read_run(one), read_run(other)], NOW)
    assert (
        "ELBOs of different data cannot be compared: these runs differ in <code>--data_dir</code>, the number of"
        in page
    )
    assert "the lower left is better" not in page


def test_what_is_no_run_is_left_out_with_a_note(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run(Path("a"))
    Path("empty").mkdir()
    assert main(["a", "empty", "nowhere"]) == 0
    said = capsys.readouterr()
    assert said.out == "a/report.html\n"
    assert said.err == (
        "note: empty is no run: it has neither config.yaml nor metrics.csv, and holds no run; it is left out\n"
        "note: nowhere: there is no such directory; it is left out\n"
    )


def test_what_killed_processes_left_is_removed_and_what_others_write_is_not(tmp_path):
    directory = make_run(tmp_path / "a")
    left, fresh = directory / ".report.html.1.partial", directory / ".report.html.2.partial"
    left.touch()
    fresh.touch()
    os.utime(left, (0, 0))
    assert main([str(directory)]) == 0
    assert (directory / "report.html").is_file()
    assert sorted(path.name for path in directory.glob(".*")) == [fresh.name]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nowhere"], 2, "nowhere: there is no such directory"),
        (["empty"], 2, "empty is no run"),
        (["--compare", "a"], 2, "--compare wants 2 to 24 run directories, got 1"),
        (["a", "a", "--output", "b.html"], 2, "--output is for one report"),
        (["a", "--output", "empty"], 2, "--output empty is a directory"),
        (["a", "--output", "missing/b.html"], 6, "missing/b.html: cannot be written (No such file or directory)"),
    ],
)
def test_what_cannot_be_done_is_said_with_its_exit_code(words, code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run(Path("a"))
    Path("empty").mkdir()
    assert main(words) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "a" / "report.html").exists()


def test_wrong_flags_and_help_end_as_everywhere(capsys):
    for words, code in ((["--nonsense"], 2), ([], 2), (["--help"], 0)):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == code
    assert "--compare" in capsys.readouterr().out


# --- Latents at the end of a run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_text", [True, False])
def test_latents_are_drawn_by_class_or_length_with_neighbours_and_moved_dimensions(is_text, tmp_path):
    run = make_run(tmp_path / "a")
    (run / "latents.json").write_text(json.dumps(latents(("red", "blue"), is_text=is_text)))
    page = page_of(run)
    by = "class" if is_text else "length in tokens"
    assert f"Validation sequences in the latent space, by {by}" in page
    assert "<h3>Nearest neighbours</h3>" in page
    assert "blue, 0.500" in page
    if is_text:
        assert "dimension 3" in page
        assert "redredredredredred" in page
    else:
        assert 'aria-label="Dimension 3: red"' in page
        assert page.count('<svg class="spark"') == 6
        assert "red, red</span>" in page, "the name of the feature that a line is of"


def labelled(directory: Path, **more: Any) -> str:
    """Return the page of a run whose latents have the classes 0 and 1 of the label `failed`, and the line of one feature."""
    run = make_run(directory)
    with (run / "config.yaml").open("a") as file:
        file.write("label_column: failed\n")
    found = latents(("0", "1"), is_text=False)
    line = {"id": "a", "class": "1", "points": [[0.0, 1.0], [1.0, 3.0]]}
    steep = line | {"points": [[0.0, 1.0], [1.0, 5.0]]}
    found["walk"] = {"ends": [line, line], "shares": [0, 0.5, 1], "decoded": [line, steep, line]}
    found["neighbours"] = [{"of": line, "nearest": [steep], "distances": [0.5], "name": "pulse"}]
    found |= {"labels": [0, 1] * 30, "classes": ["0", "1"], "of": 232, "feature": "pulse"}
    (run / "latents.json").write_text(json.dumps(found | more))
    return page_of(run)


def test_classes_go_by_the_name_of_their_label_and_lines_by_that_of_their_feature(tmp_path):
    page = labelled(tmp_path / "a")
    assert "Validation sequences in the latent space, by failed" in page
    assert '<span class="key">failed:</span>' in page
    assert "60 of 232 sequences, drawn at random: with 1,770 tokens as many as are encoded here" in page
    assert "A walk from a (failed: 1) to a (failed: 1)" in page
    assert page.count("The lines are pulse.") == 2
    assert "a, failed: 1, pulse</span>" in page
    assert "a, failed: 1, 0.500</span>" in page


def test_lines_that_are_compared_have_one_scale_and_the_ends_of_a_walk_are_called_reconstructions(tmp_path):
    page = labelled(tmp_path / "a")
    walk = page.partition("A walk from")[2].partition("</section>")[0].partition("</div>")[0]
    assert re.findall(r'points="([^"]+)"', walk) == [
        "0,24 96,12",
        "0,24 96,12",
        "0,24 96,0",
        "0,24 96,12",
        "0,24 96,12",
    ]
    for caption in ("0%, reconstruction", "50%", "100%, reconstruction"):
        assert f">{caption}</figcaption>" in walk
    assert "at its ends they are reconstructions of the two" in walk


def test_a_thin_cloud_of_latents_has_axes_of_their_own_scales(tmp_path):
    thin = [[10 * place, math.sin(place)] for place in range(60)]
    assert "the axes have scales of their own" in labelled(tmp_path / "a", places=thin)
    assert "the axes have scales of their own" not in labelled(tmp_path / "b")


def test_whether_classes_differ_in_the_latents_is_answered_with_its_error_and_chance(tmp_path):
    found = {"sequences": 118, "classes": 2, "score": 0.83, "low": 0.75, "high": 0.89}
    page = labelled(tmp_path / "a", told_apart=found)
    assert "Do the classes of &#34;failed&#34; differ in the latents? Yes: " in page
    assert "the nearest mean of a class is a sequence&#39;s own in 83 % of the cases" in page
    assert "(95 %: 75 % to 89 %; by chance 50 %)" in page
    page = labelled(tmp_path / "b", told_apart=found | {"score": 0.55, "low": 0.45, "high": 0.64})
    assert "Not that it shows here" in page
    assert "Do the classes" not in labelled(tmp_path / "c", told_apart=None)


def test_dimensions_at_their_free_bits_are_counted_and_a_rate_there_stands_beside_them(tmp_path):
    run = read_run(make_run(tmp_path / "a"))
    assert six_numbers(run)[4][2].endswith("latest in training; 3 are at the free 0.500 nats")
    assert six_numbers(run)[1][2].endswith("; the free bits alone are 2, 0.500 for each of 4 dimensions")
    clear = [row | {"kl_per_dim": [2.0, 1.0, 0.9, 0.7], "rate": 4.6} for row in run.readings]
    for name, _, below in six_numbers(run._replace(readings=clear)):
        assert "free" not in below, name
    shared = {"sequence": {"nats": 0.5, "shared_by": 2}}
    paired = run._replace(facts={**run.facts, "free_bits": shared})  # of 1.0 and 0.5, and of 0.5 and 0
    assert "; 2 are at the free" in six_numbers(paired)[4][2]
    rescue = event("rescue", 900, floor=0.4, kl_weight=1.0)
    assert "; 1 is at the free 0.100 nats" in six_numbers(run._replace(events=[*run.events, rescue]))[4][2]
    assert "free" not in six_numbers(run._replace(facts={}))[4][2]


@pytest.mark.parametrize(("weight", "trains"), [("null", False), ("0.0", False), ("0.5", True)])
def test_the_report_says_whether_classes_were_trained_on(weight, trains, tmp_path):
    run = make_run(tmp_path / "a")
    (run / "latents.json").write_text(json.dumps(latents(("red", "blue"), is_text=True)))
    (run / "config.yaml").write_text(f"label_weight: {weight}\n")
    assert ("The classes had no part in the training." in page_of(run)) != trains


def test_classes_and_the_walk_are_shown_as_text_or_as_drawings_of_one_scale(tmp_path):
    run = make_run(tmp_path / "a")
    (run / "latents.json").write_text(json.dumps(latents(("red", "blue"), is_text=True)))
    section = page_of(run).partition("<h2>What it learned</h2>")[2].partition("<h2>")[0]
    assert "A walk from red (class: red) to blue" in section
    assert "<tr><td>50%</td><td>blueblueblueblueblueblue</td></tr>" in section
    rows = re.findall(r"<tr><td>(red|blue)</td><td>(\w+)</td><td>(\w+)</td><td>(\w+)</td></tr>", section)
    assert rows == [(name, 6 * "red", 6 * "blue", 6 * "red") for name in ("red", "blue")]
    (run / "latents.json").write_text(json.dumps(latents(("red", "blue"), is_text=False)))
    section = page_of(run).partition("<h2>What it learned</h2>")[2].partition("<h2>")[0]
    drawn = [
        [float(place.split(",")[0]) for place in one.split()]
        for one in re.findall(r'class="sketch".*?<polyline points="([^"]+)"', section)
    ]
    widths = [max(along) - min(along) for along in drawn]
    assert len(drawn) == 2 * 3 + 5
    # The widest of each group fills its sheet, and the others are as much smaller as they are.
    by_class, walk = widths[-6:], widths[:5]
    assert max(by_class) == pytest.approx(60, abs=0.1) == max(walk)
    assert by_class[0] / by_class[1] == pytest.approx(1 / 2, abs=0.01)
    assert by_class[0] / by_class[2] == pytest.approx(1 / 3, abs=0.01)


@pytest.mark.parametrize(
    "change",
    [
        {"by_class": [{"class": 3, "drawn": "x"}], "walk": {"ends": [{}], "decoded": [{}]}},
        {
            "by_class": "x",
            "walk": {"ends": [{}, {}], "shares": ["a"], "decoded": [{"points": [[1, 2]], "is_drawing": True}]},
        },
        {"places": "x"},
        {"places": [[1, 2], ["a", None]]},
        {"lengths": [1e300, None]},
        {"labels": [99, -7], "classes": ["a", "b"]},
        {"neighbours": [3, {"of": 1, "nearest": [{}], "distances": ["a"]}]},
        {"moved": [{"moves": ["x", 1], "decoded": [{"points": [[1]]}, {}]}, {"decoded": [{}]}]},
        {"shares": None, "step": "x", "time_label": 3},
    ],
)
def test_latents_that_are_damaged_are_left_out(change, tmp_path):
    run = make_run(tmp_path / "a")
    (run / "latents.json").write_text(json.dumps(latents(("red",), is_text=False) | change))
    assert "<h2>Latents</h2>" in page_of(run)
