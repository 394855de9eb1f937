"""A run's figures: what they are made of, that they come out of every kind of run, and how they become part of a page."""

import json
import math
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.image
import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.colors import to_rgb

from seqvae.monitors import formulas
from seqvae.monitors.drawing import save_posteriors
from seqvae.reports.charts import (
    LOOKS,
    Band,
    Curve,
    active_units,
    aggregate_density,
    bands_of,
    columns_of,
    curves,
    heat_map,
    kl_per_dim,
    kl_per_dim_chart,
    posterior_pca,
    principal_components,
    timeline,
)
from seqvae.reports.draw import CHARTS_OF_POSTERIORS, CHARTS_OF_READINGS, draw_plots, main
from seqvae.reports.figures import COLOUR_MAP, CSS_VARIABLES, FILE, new_figure, page_figure
from seqvae.reports.read_run import MOST_ROWS, read_history, read_posteriors, thin
from seqvae.verdicts import VERDICTS

ROOT = Path(__file__).parent.parent.parent


def a_row(step, *, kl=(0.5, 0.02), **more):
    """A line of posterior.jsonl, with no more fields than it must have."""
    return {
        "step": step,
        "rate": sum(value or 0.0 for value in kl),
        "kl_per_dim": list(kl),
        "active_units": 1,
        "mutual_information": 0.4,
        "mutual_information_cap": 6.93,
        "effective_dimensions": 1.1,
    } | more


def a_complete_row(step, verdict="healthy", use=0.7, **more):
    """One with every field."""
    return a_row(step, kl_weight=0.01 * step, decoder_use=use, decoder_use_error=0.1, verdict=verdict, **more)


def a_run(directory, rows, posteriors=None):
    """A run directory with those readings and (mean_NZ, logvar_NZ)."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "posterior.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    if posteriors is not None:
        mean_NZ, logvar_NZ = posteriors
        save_posteriors(directory, mean_NZ, logvar_NZ, step=400)
    return directory


def test_the_axis_of_nats_goes_below_0_only_where_readings_do(tmp_path):
    for name, use in (("above", 0.7), ("below", -0.3)):
        history = read_history(
            a_run(tmp_path / name, [a_complete_row(step, use=use) for step in (10, 20)]) / "posterior.jsonl"
        )
        assert history is not None
        bottom = timeline(FILE, history).figure.axes[0].get_ylim()[0]
        assert bottom < -0.3 if name == "below" else -0.03 < bottom < 0


def some_posteriors(count=64, dimensions=2, spread=0.8):
    rng = np.random.default_rng(0)
    return spread * rng.standard_normal((count, dimensions)), np.full((count, dimensions), -1.0)


def with_nan(posteriors, *places):
    mean_NZ, logvar_NZ = posteriors
    for place in places:
        mean_NZ[place] = math.nan
    return mean_NZ, logvar_NZ


def grey_of(path):
    """The lightness of the pixels of a PNG."""
    return matplotlib.image.imread(path)[..., :3].mean(axis=2)


NO_POSTERIORS = dict.fromkeys(CHARTS_OF_POSTERIORS, "no plots/posteriors.npz")
ALIKE = (np.full((5, 3), 0.5), np.zeros((5, 3)))
EXPLODED = (np.full((8, 3), 1e30), np.full((8, 3), 1000.0))
COMPLETE = [a_complete_row(20 * step) for step in range(1, 6)]
RUNS = {
    "no reading yet": ([], None),
    "all fields": (COMPLETE, some_posteriors()),
    "one reading of one dimension": ([a_complete_row(20, kl=[0.3])], some_posteriors(dimensions=1)),
    "4,096 dimensions": ([a_row(step, kl=[1e-3] * 4096) for step in (1, 2)], some_posteriors(8, 4096)),
    "required fields alone": ([a_row(20), a_row(40)], None),
    "NaN at the end": (
        [*COMPLETE, a_complete_row(120, "diverged", None, kl=[None, None], rate=None)],
        some_posteriors(),
    ),
    "nothing but NaN": (
        [a_complete_row(20, use=None, kl=[None, None], active_units=None)],
        with_nan(some_posteriors(), ...),
    ),
    "a NaN in one dimension": ([a_complete_row(20, kl=[0.3, None])], with_nan(some_posteriors(), (..., 1))),
    "a NaN in one posterior": (COMPLETE, with_nan(some_posteriors(), 3)),
    "posteriors that are alike": (COMPLETE, ALIKE),
    "posteriors that exploded": ([a_complete_row(20, kl=[1e30] * 3)], EXPLODED),
    "one posterior": (COMPLETE, some_posteriors(1)),
    "more dimensions than posteriors": (COMPLETE, some_posteriors(3, 20)),
    "collapsed, a KL of exactly 0": (
        [a_complete_row(20, "collapsed", 0.0, kl=[0.0, 0.0])],
        some_posteriors(spread=0.0),
    ),
    "a verdict of tomorrow": ([a_complete_row(20), a_complete_row(40, "bored")], None),
    "an error below 0": ([a_complete_row(20), a_complete_row(40) | {"decoder_use_error": -1.0}], some_posteriors()),
}
NOT_DRAWN = {
    "no reading yet": dict.fromkeys(CHARTS_OF_READINGS, "no reading yet") | NO_POSTERIORS,
    "one reading of one dimension": {"posterior_pca.png": "it takes two dimensions that are finite, and there is 1"},
    "required fields alone": NO_POSTERIORS,
    "a verdict of tomorrow": NO_POSTERIORS,
    "nothing but NaN": dict.fromkeys(CHARTS_OF_POSTERIORS, "no posterior is finite"),
    "a NaN in one dimension": {"posterior_pca.png": "it takes two dimensions that are finite, and there is 1"},
    "one posterior": {"posterior_pca.png": "it takes two posteriors that are finite, and there is 1"},
}


@pytest.mark.parametrize("kind", RUNS)
def test_every_run_has_its_figures_or_a_reason_why_not(tmp_path, kind):
    reasons = draw_plots(a_run(tmp_path, *RUNS[kind]))
    assert {name: reason for name, reason in reasons.items() if reason} == NOT_DRAWN.get(kind, {})
    drawn = {path.name for path in (tmp_path / "plots").glob("*.png")}
    assert drawn == {name for name, reason in reasons.items() if reason is None}
    for name in drawn:
        grey = grey_of(tmp_path / "plots" / name)
        assert min(grey.shape) > 200
        assert np.mean(grey > 0.95) > 0.2, f"{name} is all ink"
        assert np.mean(grey < 0.6) > 0.002, f"{name} is blank"
    assert not list((tmp_path / "plots").glob(".*")), "nothing half done is left"


def test_a_figure_that_cannot_be_drawn_any_more_is_removed(tmp_path):
    before = a_run(tmp_path, COMPLETE, some_posteriors(1)) / "plots" / "posterior_pca.png"
    before.write_text("of an earlier run")
    draw_plots(tmp_path)
    assert not before.exists()


def test_a_figure_that_fails_leaves_the_one_before(tmp_path):
    path = tmp_path / "some.png"
    path.write_text("before")
    with pytest.raises(ValueError), new_figure(path, 2, 1):
        raise ValueError("no such colour")
    assert path.read_text() == "before"
    assert [one.name for one in tmp_path.iterdir()] == ["some.png"]


# --- What they are made of --------------------------------------------------------------------------------------------


def test_a_history_is_what_the_file_says(tmp_path):
    rows = [a_complete_row(20, "warming_up"), a_row(40, mutual_information=None), a_complete_row(60, use=None)]
    found = read_history(a_run(tmp_path, rows) / "posterior.jsonl")
    assert found is not None
    np.testing.assert_equal(found.steps_R, [20, 40, 60])
    np.testing.assert_equal(found.kl_RZ, [[0.5, 0.02]] * 3)
    np.testing.assert_equal(found.mutual_information_R, [0.4, math.nan, 0.4])
    np.testing.assert_equal(found.kl_weight_R, [0.2, math.nan, 0.6])
    np.testing.assert_equal(found.probed_steps_P, [20, 60])
    np.testing.assert_equal(found.decoder_use_P, [0.7, math.nan])
    assert found.verdicts == ("warming_up", None, "healthy")
    assert found.starts_at == 0


def test_the_line_that_is_being_written_is_left_out(tmp_path):
    path = a_run(tmp_path, COMPLETE) / "posterior.jsonl"
    path.write_text(path.read_text(encoding="utf-8") + '{"step": 120, "ra', encoding="utf-8")
    found = read_history(path)
    assert found is not None
    assert found.readings_taken == 5


def test_of_a_long_run_as_many_readings_are_drawn_as_a_figure_shows(tmp_path):
    rows = [a_row(step) for step in range(1, 2 * MOST_ROWS + 4)]
    found = read_history(a_run(tmp_path, rows) / "posterior.jsonl")
    assert found is not None
    assert (len(found.steps_R), found.readings_taken, found.steps_R[-1]) == (501, 2003, 2003)
    assert set(np.diff(found.steps_R)[:-1]) == {4}


def test_seldom_probes_survive_the_thinning():
    lines = [b'{"step": %d%s}\n' % (step, b', "decoder_use": 1' if step % 7 == 0 else b"") for step in range(1, 71)]
    assert sum(b"decoder_use" in line for line in thin(lines, most=20)[1]) == 10


def test_dimensions_are_sorted_by_their_last_kl_that_is_a_number():
    found = heat_map(np.array([[9.0, 1.0, 2.0], [0.1, np.nan, 3.0]]))
    np.testing.assert_equal(found.order_Z, [2, 1, 0])
    np.testing.assert_equal(found.kl_GR, [[2.0, 3.0], [1.0, np.nan], [9.0, 0.1]])


def test_rows_of_many_dimensions_are_means_of_neighbours():
    found = heat_map(np.array([[5.0, 4.0, 3.0, 2.0, 1.0]]), most_rows=2)
    np.testing.assert_equal(found.kl_GR, [[4.0], [1.5]])
    assert found.per_row == 3


def test_a_column_of_pixels_shows_the_reading_that_looked_at_its_steps():
    np.testing.assert_equal(columns_of(np.array([10.0, 20.0, 60.0]), 0.0, columns=6), [0, 1, 2, 2, 2, 2])


def test_verdicts_are_in_force_until_the_next():
    bands = bands_of(np.array([20.0, 40.0, 60.0, 80.0]), ["warming_up", None, "healthy", "healthy"])
    assert bands == [Band("warming_up", 20.0, 40.0), Band("healthy", 60.0, math.inf)]


def test_every_verdict_has_its_look():
    assert set(LOOKS) == {kind.tone for kind in VERDICTS.values()}


def test_the_kl_is_that_of_the_formulas():
    mean_NZ, logvar_NZ = some_posteriors(dimensions=5)
    reference = formulas.kl_per_dim(torch.from_numpy(mean_NZ), torch.from_numpy(logvar_NZ))
    np.testing.assert_allclose(kl_per_dim(mean_NZ, logvar_NZ), reference.numpy(), rtol=1e-12)


@pytest.mark.parametrize("shape", [(40, 6), (6, 40)])
def test_principal_components_are_those_of_a_singular_value_decomposition(shape):
    mean_NZ = np.random.default_rng(1).standard_normal(shape) * np.linspace(3, 1, shape[1]) + 2
    _, singular, directions = np.linalg.svd(mean_NZ - mean_NZ.mean(axis=0), full_matrices=False)
    found = principal_components(mean_NZ)
    np.testing.assert_allclose(found.variances_K, singular**2 / (len(mean_NZ) - 1), atol=1e-9)
    np.testing.assert_allclose(np.abs(found.places_N2), np.abs(mean_NZ @ directions[:2].T), atol=1e-9)


def test_posteriors_that_are_the_prior_add_up_to_it():
    places_G = np.linspace(-6, 6, 2001)
    density_G = aggregate_density(np.zeros(3), np.zeros(3), places_G)
    np.testing.assert_allclose(density_G, np.exp(-0.5 * places_G**2) / math.sqrt(2 * math.pi), atol=1e-4)


def test_posteriors_are_stored_as_they_are_and_say_what_was_left_out(tmp_path):
    mean_NZ, logvar_NZ = with_nan(some_posteriors(10, 3), (4, 0), (..., 2))
    save_posteriors(tmp_path, mean_NZ, logvar_NZ, step=7)
    found = read_posteriors(tmp_path / "plots" / "posteriors.npz", most=5)
    kept_N = [0, 2, 5, 7, 9]
    np.testing.assert_array_equal(found.mean_NZ, mean_NZ[kept_N, :2].astype(np.float32))
    assert found.step == 7
    assert found.notes[:2] == ("5 posteriors", "one in 2 of 9")
    assert found.notes[2:] == ("1 left out: not finite", "1 of 3 dimensions left out: not finite")


def test_the_colour_map_only_gets_lighter():
    red, green, blue = colormaps[COLOUR_MAP](np.linspace(0, 1, 256))[:, :3].T
    assert (np.diff(0.2126 * red + 0.7152 * green + 0.0722 * blue) > 0).all()


def test_bands_behind_the_curves_get_darker_as_things_get_worse():
    lightness = [np.mean(to_rgb(LOOKS[tone].behind or "white")) for tone in ("good", "fair", "bad")]
    assert lightness[0] > lightness[1] + 0.03 > lightness[2] + 0.06


def test_figures_need_no_torch():
    code = (
        "import sys; from seqvae.reports import draw;"
        "print([name for name in ('torch', 'lightning', 'matplotlib.pyplot', 'pandas') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True).stdout == b"[]\n"


def test_the_command_says_what_it_drew_and_what_not(tmp_path, capsys):
    main([str(a_run(tmp_path, COMPLETE))])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{tmp_path}/plots/timeline.png"
    assert said[-1] == f"{tmp_path}/plots/posterior_pca.png: not drawn, no plots/posteriors.npz"


def test_the_command_refuses_a_file_that_is_no_run_of_readings(tmp_path):
    with pytest.raises(SystemExit, match=f"^{tmp_path}: a row of posterior.jsonl has no kl_per_dim$"):
        main([str(a_run(tmp_path, [{"step": 1}]))])


# --- Inside a page ------------------------------------------------------------------------------------------------------


def svgs_of(directory):
    """Every kind of chart, as a page includes it."""
    history, posteriors = (
        read_history(directory / "posterior.jsonl"),
        read_posteriors(directory / "plots" / "posteriors.npz"),
    )
    assert history is not None
    lines = [Curve("a", [(0.0, 1.0), (2.0, -3.0)], marks="all"), Curve("b", [(0.0, 2.0)], stroke="--")]
    drawn = [page_figure(chart.__name__, chart, history) for chart in (timeline, active_units, kl_per_dim_chart)]
    drawn += [
        page_figure("pca", posterior_pca, posteriors),
        page_figure("curves", curves, "A & B", lines, y_label="nats"),
    ]
    assert None not in drawn
    return [one for one in drawn if one is not None]


@pytest.mark.parametrize("kind", ["all fields", "NaN at the end", "a verdict of tomorrow"])
def test_a_pages_figures_have_no_inline_style_and_no_colour_of_their_own(tmp_path, kind):
    readings, posteriors = RUNS[kind]
    for drawn in svgs_of(a_run(tmp_path, readings, posteriors or some_posteriors())):
        root = ElementTree.fromstring(drawn.svg)
        for element in root.iter():
            assert element.tag not in ("style", "script", "metadata")
            assert "style" not in element.attrib
            for name in ("fill", "stroke"):
                assert element.get(name, "none") == "none" or element.attrib[name].startswith(("var(--", "url(#"))
        words = {"".join(element.itertext()) for element in root.iter("text")}
        assert words, "text is text"
        assert "http" not in drawn.svg


def test_every_colour_of_the_palette_is_in_the_style_sheet_for_light_and_dark():
    style = (ROOT / "seqvae" / "reports" / "templates" / "style.css").read_text()
    for name in CSS_VARIABLES.values():
        assert style.count(f"--{name}:") == 3, f"{name} in light, dark and print"


def test_a_pages_figures_are_the_same_each_time_and_small(tmp_path):
    directory = a_run(tmp_path, [a_complete_row(20 * step) for step in range(1, 900)], some_posteriors(2048, 16))
    once, again = svgs_of(directory), svgs_of(directory)
    assert once == again
    assert max(len(drawn.svg) for drawn in once) < 60_000


def test_a_verdict_from_a_file_is_text_in_a_figure(tmp_path):
    names = "</text><script>alert(1)</script>", "\x1b[2J$\\frac{$"
    drawn = svgs_of(a_run(tmp_path, [a_complete_row(20, names[0]), a_complete_row(40, names[1])], some_posteriors()))[0]
    assert "<script" not in drawn.svg
    assert "&lt;/text&gt;&lt;script" in drawn.svg
    assert "\\x1b[2J$" in drawn.svg
