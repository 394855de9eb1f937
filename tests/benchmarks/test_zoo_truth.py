"""Which runs the zoo holds, which half each belongs to, and what its numbers make of it in truth."""

from collections import Counter

import pytest

from benchmarks.detection.zoo_limits import truth_of
from benchmarks.detection.zoo_species import ALL_DATA, DATA, DECODERS, FREE_DATA, TREATMENTS, all_species
from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import TrainingSettings
from tests.support.zoo_numbers import UNUSED, measured

# --- Species ----------------------------------------------------------------------------------------------------------


def test_both_halves_hold_every_data_set_every_decoder_and_about_as_many_runs() -> None:
    species = all_species()
    sizes = Counter(one.half for one in species)
    assert abs(sizes["tuning"] - sizes["scored"]) <= 0.1 * len(species)
    for half in sizes:
        assert {one.data for one in species if one.half == half} == set(ALL_DATA)
        assert {one.decoder for one in species if one.half == half} == set(DECODERS)


def test_every_treatment_is_in_both_halves() -> None:
    for treatment in TREATMENTS:
        assert {one.half for one in all_species() if one.treatment == treatment} == {"tuning", "scored"}


def test_a_run_is_what_it_is_whichever_data_sets_are_there() -> None:
    assert set(all_species(FREE_DATA)) <= set(all_species())
    assert "weight-1.demo-tokens.lstm" in {one.name for one in all_species() if one.half == "tuning"}


def test_names_and_seeds_tell_all_runs_apart() -> None:
    species = all_species()
    assert len({one.name for one in species}) == len({one.seed for one in species}) == len(species)


def test_the_tuning_half_comes_first() -> None:
    halves = [one.half for one in all_species()]
    assert halves == sorted(halves, key=lambda half: half != "tuning")


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_every_treatment_is_a_command_line_that_parses(treatment: str) -> None:
    species = next(one for one in all_species() if one.treatment == treatment)
    settings = parse_command_line(TrainingSettings, species.words, prog="zoo", description="")
    assert settings.lengths.max_sequence_length == DATA[species.data].longest
    assert settings.run.seed == species.seed


def test_word_dropout_is_what_a_run_has_in_common_with_its_baseline() -> None:
    species = next(one for one in all_species() if one.treatment == "word-dropout-0.6")
    words = species.baseline_words
    assert words[words.index("--word_dropout") + 1] == "0.6"
    assert "word-dropout-0.6" in species.baseline


# --- Truth ------------------------------------------------------------------------------------------------------------


def test_a_latent_that_is_used_in_all_dimensions_is_healthy() -> None:
    assert truth_of(measured()).right == ("healthy",)


def test_no_rate_no_information_no_use_no_gain_is_collapsed() -> None:
    assert truth_of(measured(rate=0.01, mutual_information=0.0, **UNUSED)).right == ("collapsed",)


def test_a_rate_that_nobody_uses_is_ignored_by_the_decoder_however_much_it_tells() -> None:
    assert truth_of(measured(rate=3.0, mutual_information=2.5, **UNUSED)).right == ("decoder_ignores_z",)


@pytest.mark.parametrize(
    "changed",
    [
        {"decoder_use": 0.3, "decoder_use_error": 0.05},
        {"decoder_use": 0.9, "decoder_use_error": 0.3},
        UNUSED | {"rate": 0.45},
        UNUSED | {"rate": 0.2, "mutual_information": 0.25},
        UNUSED | {"rate": 0.01, "mutual_information": 0.0, "gain": 2.0},
        {"mean_of_variances": (0.03,) * 4, "gain": -5.0},
        {"mean_of_variances": (0.01,) * 4, "gain": -0.9},
        {"mutual_information": 0.15},
        {"rate": None},
    ],
)
def test_what_lies_between_the_limits_is_grey(changed: dict[str, object]) -> None:
    truth = truth_of(measured(**changed))
    assert (truth.right, truth.name) == ((), "grey")


def test_narrow_posteriors_that_cost_more_than_they_tell_are_not_variational() -> None:
    narrow = (0.01,) * 4
    assert truth_of(measured(mean_of_variances=narrow, gain=-5.0)).right == ("not_variational",)
    assert truth_of(measured(mean_of_variances=narrow, gain=5.0)).right == ("healthy",)


def test_dead_dimensions_do_not_widen_the_variance_of_the_others() -> None:
    half_dead = measured(
        active_units=2, variance_of_means=(1, 1, 0, 0), mean_of_variances=(0.001, 0.001, 1, 1), gain=-5.0
    )
    assert truth_of(half_dead).right == ("not_variational",)


@pytest.mark.parametrize(
    ("active", "right"),
    [(1, ("partly_collapsed",)), (2, ("healthy", "partly_collapsed")), (3, ("healthy",))],
)
def test_few_active_dimensions_are_partly_collapsed_and_half_of_them_either(
    active: int, right: tuple[str, ...]
) -> None:
    assert truth_of(measured(active_units=active)).right == right


def test_a_gain_no_larger_than_seeds_make_is_none() -> None:
    dead = measured(rate=0.01, mutual_information=0.0, **UNUSED | {"gain": 3.0})
    assert truth_of(dead).right == ()
    assert truth_of(dead, seed_error=2.0).right == ("collapsed",)


def test_nothing_measured_is_diverged() -> None:
    assert truth_of(None).right == ("diverged",)
