"""The page of a study."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from seqvae.errors import UsageError
from seqvae.reports.study_page import Study, read_study, study_page, write_study
from tests.support.made_studies import SPACE, made_study

NOW = 1.8e9


def test_each_trial_is_a_row_that_leads_to_its_report_the_front_first():
    study = made_study(20)
    page = study_page(study, NOW)
    links = re.findall(r'<a href="./(trial-\d+)/report.html">\1</a>( ★)?', page)
    assert len(links) == 20
    assert [name for name, star in links if star] == [name for name, _ in links[: len(study.front)]]
    assert {name for name, star in links if star} == {one.name for one in study.front}
    assert "20 of 24 trials: 16 finished, 2 collapsed, 1 failed, 1 unfinished" in page
    assert "out of memory" in page


def test_the_front_and_what_each_setting_did_are_drawn_for_both_objectives():
    page = study_page(made_study(objectives=("ELBO", "probe of label")), NOW)
    titles = re.findall(r'aria-label="([^"]*)"', page)
    assert titles[0] == "ELBO and probe of label of each trial"
    assert titles[1:] == [f"{one} over --{name}" for name in SPACE for one in ("ELBO", "probe of label")]
    for drawn in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        ElementTree.fromstring(drawn)
    assert "<script" not in page


def test_a_study_that_has_just_begun_has_a_page():
    page = study_page(made_study()._replace(trials=()), NOW)
    assert "No trial has ended yet." in page
    assert "0 of 24 trials: none yet" in page


def test_names_from_outside_are_text():
    study = made_study(3)
    odd = study.trials[0]._replace(name="<b>", verdict="<i>")
    page = study_page(study._replace(name="<script>", trials=(odd,)), NOW)
    assert "<script>" not in page
    assert '<a href="./%3Cb%3E/report.html">&lt;b&gt;</a>' in page


def test_a_study_is_read_back_as_it_was_written(tmp_path):
    study: Study = made_study()
    write_study(tmp_path, study)
    assert read_study(tmp_path) == study
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(UsageError, match="is damaged"):
        read_study(tmp_path)
    with pytest.raises(UsageError, match="holds no study"):
        read_study(tmp_path / "elsewhere")
