"""The comparison of codebooks, on figures made by hand, and one of its trainings."""

import math

import pytest

from benchmarks.bench import FORMS
from benchmarks.pages import TABLES
from benchmarks.quality import codes
from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import OptimizedSettings

FOUND = {
    "name": "vq, no revival",
    "in_use": 0.119,
    "perplexity": 31.4,
    "dead": 457,
    "codes": 512,
    "verdicts": [
        {"step": 51, "verdict": "healthy"},
        {"step": 102, "verdict": "codebook_collapsed"},
        {"step": 204, "verdict": "codebook_collapsed"},
    ],
    "elbo": -126.421,
    "elbo_by_prior": -124.5,
    "seconds": 61.2,
    "prior_seconds": 4.6,
}


def test_a_row_says_how_codes_were_used_and_when_their_collapse_was_called():
    row = codes.row_of("demo_tokens", FOUND)
    assert row["codes in use, %"] == "11.9"
    assert row["perplexity"] == "31 of 512"
    assert (row["collapse called at step"], row["last verdict"]) == ("102", "codebook_collapsed")
    assert (row["ELBO"], row["ELBO, fitted prior"]) == ("-126.42", "-124.50")
    quiet = codes.row_of("demo_tokens", FOUND | {"verdicts": []})
    assert (quiet["collapse called at step"], quiet["last verdict"]) == ("never", "")


@pytest.mark.parametrize("data", codes.SETS)
@pytest.mark.parametrize("name", codes.CODEBOOKS)
def test_the_flags_of_each_training_are_understood(data, name):
    settings = parse_command_line(OptimizedSettings, codes.flags_of(data, name, 20), prog="test", description="")
    assert settings.model.is_discrete
    assert settings.model.codebook == name.split(",")[0]
    assert settings.model.revive_codes == (name != "vq, no revival")
    assert settings.run.max_steps == 20


def test_the_runner_and_the_pages_know_it():
    assert set(FORMS["codes"].sets) == set(codes.SETS)
    assert "codes" in TABLES


@pytest.mark.slow
def test_a_training_is_measured():
    found = codes.measure("demo_tokens", "fsq", 20)
    assert found["codes"] == 512
    assert 0 < found["in_use"] <= 1
    assert math.isfinite(found["elbo"])
    assert found["elbo_by_prior"] > found["elbo"]
