"""The time to the default's best validation ELBO, on figures made by hand."""

import math

import pytest

from benchmarks.bench import FORMS
from benchmarks.quality import recipe, variants
from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import OptimizedSettings


def run_of(name: str, seed: int, elbos: list[float], second: float = 10.0) -> dict[str, object]:
    seconds = [second * (number + 1) for number in range(len(elbos))]
    return {"name": name, "seed": seed, "elbos": elbos, "seconds": seconds}


def test_the_time_to_an_elbo_lies_on_the_line_between_two_validations():
    run = run_of("default", 0, [-50.0, -40.0, -44.0, -38.0])
    assert recipe.seconds_to(run, -60.0) == 10.0
    assert recipe.seconds_to(run, -42.5) == pytest.approx(17.5)
    assert recipe.seconds_to(run, -39.0) == pytest.approx(35.0)  # from the best so far, not from the dip behind it
    assert recipe.seconds_to(run, -37.0) == math.inf


def test_a_recipe_is_compared_with_the_default_of_the_same_seed():
    runs = [run_of("default", 0, [-50.0, -40.0]), run_of("default", 1, [-60.0, -50.0])]
    runs += [run_of("muon, rate x 1", 0, [-40.0, -35.0]), run_of("muon, rate x 1", 1, [-70.0, -60.0])]
    default, muon = recipe.table(runs)
    assert (default["get to the default's best"], default["times as fast there"]) == ("2 of 2", "1.00 (1.00 to 1.00)")
    assert (muon["get to the default's best"], muon["times as fast there"]) == ("1 of 2", "1.00 (0.00 to 2.00)")
    assert muon["best validation ELBO"] == "-47.50"


def test_the_flags_of_each_recipe_are_understood_and_the_runner_knows_it():
    for _, words in recipe.RECIPES.values():
        parse_command_line(OptimizedSettings, list(words), prog="test", description="")
    assert set(FORMS["recipe"].sets) == set(variants.SETS)
