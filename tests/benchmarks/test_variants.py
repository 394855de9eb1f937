"""The comparison of variants and the one with another project's code, on figures made by hand."""

import pytest

from benchmarks.bench import VARIANT_SETS
from benchmarks.quality import lagging, variants
from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import OptimizedSettings


def run_of(name: str, seed: int, nll: list[float], rate: float = 2.0) -> dict[str, object]:
    values = {"rate": rate, "decoder use": float("nan")}
    return {"name": name, "seed": seed, "nll_N": nll, "sequences_N": [0, 1], "seconds": 10.0, "values": values}


def test_differences_to_the_default_are_taken_sequence_by_sequence():
    rows = variants.table([run_of("default", 0, [1.0, 5.0]), run_of("muon", 0, [0.5, 4.5], rate=3.0)])
    assert [row["IW-NLL"] for row in rows] == ["3.00", "2.50"]
    assert rows[0]["against the default"] == ""
    assert rows[1]["against the default"] == "-0.50 ± 0.00"
    assert (rows[1]["rate"], rows[1]["decoder use"]) == ("3.00", "")


def test_the_error_of_a_difference_holds_that_of_seeds():
    pairs = [(0, [1.0, 5.0], [0.0, 4.0]), (1, [1.0, 5.0], [1.0, 5.0])]
    runs = [run_of("default", seed, nll) for seed, nll, _ in pairs] + [
        run_of("ema", seed, nll) for seed, _, nll in pairs
    ]
    assert variants.table(runs)[1]["against the default"] == "-0.50 ± 0.50"


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_the_flags_of_each_variant_are_understood(name: str):
    flags = [word.format(fifth=20) for word in variants.VARIANTS[name]]
    parse_command_line(OptimizedSettings, flags, prog="test", description="")


def test_the_runner_knows_all_sets():
    assert set(VARIANT_SETS) == set(variants.SETS)


LOG = """
epoch: 0, iter: 0, avg_loss: 69.3, kl: 0.1, mi: 0.0, recon: 69.1,au 0, time elapsed 0.40s
VAL --- avg_loss: 41.0, kl: 0.5, mi: 0.4, recon: 40.5, nll: 41.0, ppl: 41.6
update best loss
TEST --- avg_loss: 41.2, kl: 0.5, mi: 0.4, recon: 40.7, nll: 41.2, ppl: 42.0
VAL --- avg_loss: 42.0, kl: 0.4, mi: 0.3, recon: 41.6, nll: 42.0, ppl: 45.0
TEST --- avg_loss: 42.2, kl: 0.4, mi: 0.3, recon: 41.8, nll: 42.2, ppl: 45.9
TEST --- avg_loss: 41.2, kl: 0.5, mi: 0.45, recon: 40.7, nll: 41.2, ppl: 42.0
iw nll: 40.9, iw ppl: 40.0
"""


def test_their_time_ends_where_the_kept_model_was_stored():
    lines = [{"seconds": 3.0 + 10 * number, "line": line} for number, line in enumerate(LOG.strip().splitlines())]
    found = lagging.read_theirs("plain", lines)
    assert (found["CPU seconds"], found["IW-NLL"], found["mutual information"]) == (20.0, 40.9, 0.45)
    assert found["setting"] == "2 epochs"


def test_the_shortest_training_that_is_as_good_in_both_figures_counts():
    theirs = {
        "name": "aggressive",
        "setting": "9 epochs",
        "CPU seconds": 600.0,
        "IW-NLL": 36.0,
        "mutual information": 1.0,
    }

    def ours(steps: int, nll: float, information: float) -> dict[str, object]:
        setting = {"name": "plain", "setting": f"{steps} steps", "CPU seconds": steps / 10}
        return {**setting, "IW-NLL": nll, "mutual information": information}

    rows = lagging.compare(
        [theirs], [ours(100, 37.0, 1.2), ours(200, 35.9, 0.9), ours(400, 35.9, 1.0), ours(800, 35, 2)]
    )
    assert (rows[0]["ours"], rows[0]["ratio"]) == ("plain, 400 steps", "15.0")
    assert lagging.compare([theirs], [ours(100, 37.0, 2.0)])[0]["ratio"] == ""
