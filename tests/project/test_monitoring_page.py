"""The lines that docs/monitoring.md quotes are those that the detector draws, and its remedies those that a verdict proposes."""

import re
from dataclasses import replace

import pytest

from benchmarks.detection.verdict_pictures import CADENCE, SHOWN, recorded
from seqvae.config.monitoring import Watch
from seqvae.config.training import OptimizedSettings, ReferenceSettings
from seqvae.monitors.reading import Reading
from seqvae.monitors.rules import OF_SEQUENCES, OF_STEPS
from seqvae.training.risk import describe_risk
from seqvae.verdicts import VERDICTS, advice_on
from tests.support.documents import ROOT, tables, text_of
from tests.support.risk_features import KNOWN

PAGE = ROOT / "docs" / "monitoring.md"
T = OF_SEQUENCES


def rows(heading: str) -> dict[str, str]:
    """By what stands first."""
    (table,) = [table for table in tables(text_of(PAGE)) if table.heading == heading]
    return {line.split("|")[1].strip(): line for line in table.lines[2:]}


@pytest.mark.parametrize(
    ("reading", "said"),
    [
        ("rate", f"well above {T.faint_rate:g} |"),
        (
            "rate",
            f"below {T.faint_rate:g} plus {T.restless_rate:g} per dimension, no dimension above {T.faint_dimension:g}",
        ),
        ("mutual_information", f"above {T.clear_information:g} | below {T.faint_information:g} |"),
        ("decoder_use", f"above {T.clear_use:g}, and {T.clear_use_errors:g} standard errors from 0"),
        ("decoder_use", f"below {T.no_use:g}, or within {T.no_use_errors:g} standard errors above that"),
        ("active_units", f"varies by {T.dead_variance:g} or more"),
        ("variance_of_means", f"active dimensions below {T.narrow_variance:g}"),
    ],
)
def test_lines_of_readings_are_the_thresholds(reading, said):
    (row,) = [row for name, row in rows("What a reading says").items() if name.startswith(f"`{reading}`")]
    assert said in row


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ("healthy", f"information above {T.clear_information:g}, or decoder use above {T.clear_use:g}"),
        ("healthy", f"and {T.clear_use_errors:g} standard errors"),
        ("collapsing", f"less than {T.falling_share:g} of its peak"),
        ("collapsed", f"rate below {T.faint_rate:g} plus {T.restless_rate:g} per dimension"),
        ("collapsed", f"information below {T.faint_information:g}, no dimension above {T.faint_dimension:g}"),
        ("decoder_ignores_z", f"a rate of {T.paid_rate:g} or more"),
        ("decoder_ignores_z", f"below {T.no_use:g} or within {T.no_use_errors:g} standard errors above that"),
        ("not_variational", f"variances below {T.narrow_variance:g}"),
    ],
)
def test_lines_of_verdicts_are_the_thresholds(verdict, said):
    assert said in rows("Verdicts")[f"`{verdict}`"]


def test_half_is_written_as_half():
    assert T.many_dead == 0.5
    assert "more than half" in rows("Verdicts")["`partly_collapsed`"]


def test_lines_of_a_latent_of_each_step_are_on_the_page():
    tenth = ("faint_rate", "restless_rate", "faint_dimension", "paid_rate")
    changed = {name: getattr(T, name) / 10 for name in tenth} | {"clear_information": 0.2, "faint_information": 0.1}
    assert vars(replace(T, **changed)) == pytest.approx(vars(OF_STEPS))
    assert "a tenth" in text_of(PAGE)
    assert "0.2 and 0.1 for the information" in " ".join(text_of(PAGE).split())


def test_every_number_of_a_reading_is_explained():
    named = set(re.findall(r"`(\w+)`", " ".join(rows("What a reading says"))))
    not_read = {"step", "epoch", "scope", "posteriors", "mutual_information_cap"}
    assert named == set(Reading._fields) - not_read


def test_every_verdict_stands_with_the_remedies_that_it_proposes():
    shown = rows("Verdicts")
    assert set(shown) == {f"`{name}`" for name in VERDICTS}
    for name in VERDICTS:
        flags = re.findall(r"--\w+", " ".join(advice_on(name, active=3)))
        assert {flag for flag in flags if flag not in shown[f"`{name}`"]} == set(), name


@pytest.mark.parametrize(
    ("command", "watch", "fast"),
    [
        ("train_with_collapse_detection.py", ReferenceSettings.WATCH, ReferenceSettings.FAST_WATCH),
        ("train_optimized.py", OptimizedSettings.WATCH, OptimizedSettings.FAST_WATCH),
    ],
)
def test_how_closely_is_what_the_commands_say(command, watch, fast):
    lines = list(rows_in_order("How closely to watch"))
    at = next(place for place, line in enumerate(lines) if f"`{command}`" in line)
    for line, expected in ((lines[at], watch), (lines[at + 1], fast)):
        assert numbers(line)[:3] == [
            expected.monitor_every_n_steps,
            expected.plot_every_n_steps,
            expected.monitor_window,
        ]
        assert words_on_probes(expected) in line


def rows_in_order(heading: str) -> list[str]:
    (table,) = [table for table in tables(text_of(PAGE)) if table.heading == heading]
    return table.lines[2:]


def numbers(line: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", line)]


def words_on_probes(watch: Watch) -> str:
    return {1: "at each reading", 4: "at each fourth, and on suspicion", None: "on suspicion"}[
        watch.probe_every_n_readings
    ]


def test_the_line_on_the_risk_is_the_one_of_these_settings():
    assert f"\nrisk        {describe_risk(KNOWN._replace(final_weight=4.0))}\n" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("verdict", SHOWN)
def test_a_picture_of_a_verdict_is_of_a_run_that_gets_it(verdict):
    assert f"`{verdict}` (" in text_of(PAGE)
    assert f"(images/verdicts/{verdict}.png)" in text_of(PAGE)
    assert verdict in [name for _, name in recorded(verdict).watched(CADENCE).changes]


def test_every_verdict_has_a_picture():
    elsewhere = {"asleep": "asleep_and_awake.png", "collapsed": "dead.png", "cannot_tell": "verdicts/healthy.png"}
    elsewhere["codebook_collapsed"] = "verdicts/codebook_collapsed.png"
    assert SHOWN.keys() | elsewhere.keys() == VERDICTS.keys()
    assert all(f"(images/{name})" in text_of(PAGE) for name in elsewhere.values())
