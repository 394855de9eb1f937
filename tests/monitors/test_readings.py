"""The window of posteriors, the readings made of it and their file, what a module hands over, and the decoder's probe."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from seqvae.monitors import StepOutputs, Verdict, formulas, read_readings
from seqvae.monitors.contract import check_step_outputs, step_outputs_of
from seqvae.monitors.decoder_use import DecoderUse, decoder_use, posterior_of, z_of_another
from seqvae.monitors.publish import Publisher
from seqvae.monitors.reading import NAME, describe_reading, from_row, to_row
from seqvae.monitors.window import (
    MICRO_BATCHES,
    LastRows,
    PosteriorWindow,
    read,
    take_reading,
    with_decoder_use,
)
from tests.support.tiny_vaes import TinyVAE, make_batches

# --- The window -----------------------------------------------------------------------------------------------------


def numbered(first: int, count: int) -> Tensor:
    return torch.arange(first, first + count).float()[:, None].expand(-1, 2)


@given(capacity=st.integers(1, 9), sizes=st.lists(st.integers(0, 25), max_size=12))
def test_a_ring_holds_the_last_rows_whatever_the_sizes_of_the_pushes(capacity, sizes):
    ring, pushed = LastRows(capacity), 0
    ring.push(numbered(1, 0))
    for size in sizes:
        ring.push(numbered(1 + pushed, size))
        pushed += size
    assert ring.rows_CW is not None
    held = sorted(row for row in ring.rows_CW[:, 0].tolist() if row)
    assert held == list(range(max(1, pushed - capacity + 1), pushed + 1))


def contents(window: PosteriorWindow) -> Tensor:
    """Real posteriors: means, then log-variances."""
    posteriors_CW, _ = rows_of(window)
    return posteriors_CW[posteriors_CW[:, -1] > 0, :-1]


def rows_of(window: PosteriorWindow) -> tuple[Tensor, Tensor]:
    rows = window.rows()
    assert rows is not None
    return rows


def test_padding_is_taken_in_and_left_out_at_the_reading():
    window = PosteriorWindow(12)
    mean_BZ = torch.tensor([[1.0], [math.nan], [3.0]])
    window.push(mean_BZ, -mean_BZ, torch.tensor([True, False, True]), torch.tensor([10.0, math.nan, 30.0]))
    reading = take_reading(window, 1, 0)
    assert contents(window).tolist() == [[1.0, -1.0], [3.0, -3.0]]
    assert (reading.posteriors, reading.nll) == (2, 20.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_posteriors_of_any_precision_are_kept_in_float32(dtype):
    window = PosteriorWindow(4)
    window.push(torch.tensor([[1.5]], dtype=dtype, requires_grad=True), torch.tensor([[-2.0]], dtype=dtype))
    assert contents(window).tolist() == [[1.5, -2.0]]
    assert contents(window).dtype == torch.float32
    assert not contents(window).requires_grad


def test_of_many_posteriors_every_nth_is_taken_and_each_in_its_turn():
    window = PosteriorWindow(16)
    mean_BSZ = torch.arange(12.0).reshape(3, 4, 1)
    mask_BS = torch.tensor([[True] * 4, [True] * 4, [True, True, False, False]])
    for _ in range(3):
        window.push(mean_BSZ, mean_BSZ, mask_BS)
    seen = contents(window)[:, 0].tolist()
    assert seen == [0, 3, 6, 9, 1, 4, 7, 2, 5, 8]  # 12 / 4 allowed = every third; 10 and 11 are padding
    assert take_reading(window, 1, 0).scope == "step"


@given(
    shape=st.one_of(st.tuples(st.integers(1, 200)), st.tuples(st.integers(1, 5), st.integers(1, 40))),
    capacity=st.integers(1, 64),
)
def test_a_micro_batch_never_fills_more_than_its_share(shape, capacity):
    window = PosteriorWindow(capacity)
    window.push(torch.ones(*shape, 1), torch.ones(*shape, 1), None, torch.ones(shape[0]))
    assert 1 <= int(rows_of(window)[1].sum(dim=0)[1]) <= max(1, capacity // MICRO_BATCHES)
    assert 1 <= len(contents(window)) <= max(1, capacity // MICRO_BATCHES)


@pytest.mark.parametrize("shape", [(5, 3), (2000, 3), (5, 7, 3), (5, 700, 3)])
def test_a_push_never_waits_for_the_device(shape):
    """Tensors on the meta device have no values: code that needs one, or a shape that depends on one, fails."""
    window = PosteriorWindow()
    for _ in range(3):
        mean, mask = torch.zeros(shape, device="meta"), torch.zeros(shape[:-1], device="meta", dtype=torch.bool)
        window.push(mean, mean, mask, torch.zeros(shape[0], device="meta"))


@given(before=st.integers(1, 5), after=st.integers(0, 5), size=st.integers(1, 9), by_step=st.booleans())
def test_a_window_goes_on_from_its_state_as_if_it_had_never_stopped(before, after, size, by_step):
    unbroken, resumed = PosteriorWindow(8), PosteriorWindow(8)
    batches = torch.randn((before + after, size, 5, 2) if by_step else (before + after, size, 2))
    for batch in batches[:before]:
        unbroken.push(batch, batch - 1, None, batch.flatten(1).sum(dim=1))
    resumed.load_state_dict(unbroken.state_dict())
    for window in (unbroken, resumed):
        for batch in batches[before:]:
            window.push(batch, batch - 1, None, batch.flatten(1).sum(dim=1))
    assert repr(take_reading(resumed, 7, 1)) == repr(take_reading(unbroken, 7, 1))  # NaN is not itself


def test_a_window_holds_no_more_memory_than_its_rows_and_a_micro_batch_need():
    """None of its blocks is a look into a micro-batch, which would keep all of it."""
    window = PosteriorWindow(20)
    for size in (3, 50, 1, 2, 3, 4_000, 4, 5, 6):
        window.push(torch.ones(size, 2), torch.ones(size, 2), None, torch.ones(size))
        rows_of(window)  # takes in what waits
        for rows, width in ((window._posteriors, 5), (window._nll, 2)):
            assert sum(block.untyped_storage().nbytes() for block in rows._blocks) <= (20 + 6) * width * 4


def test_a_posterior_that_is_changed_in_place_before_it_is_read_is_refused():
    window, mean_BZ = PosteriorWindow(8), torch.zeros(2, 3)
    window.push(mean_BZ, torch.zeros(2, 3))
    mean_BZ.add_(1.0)
    with pytest.raises(ValueError, match="changed in place later: return a copy"):
        window.real_posteriors()


@pytest.mark.parametrize("place", ["logvar", "nll"])
def test_other_tensors_that_are_changed_in_place_are_refused_as_well(place):
    window, pushed = PosteriorWindow(8), {"logvar": torch.zeros(2, 3), "nll": torch.zeros(2)}
    window.push(torch.zeros(2, 3), pushed["logvar"], None, pushed["nll"])
    pushed[place].add_(1.0)
    with pytest.raises(ValueError, match="changed in place later"):
        window.real_posteriors()


def test_large_posteriors_do_not_wait():
    window = PosteriorWindow(8)
    window.push(torch.zeros(64, 500, 64), torch.zeros(64, 500, 64))
    assert not window._waiting


def test_a_learned_kl_weight_takes_no_graph_into_a_reading():
    window = PosteriorWindow(8)
    window.push(torch.ones(2, 1), torch.ones(2, 1))
    reading = take_reading(window, 1, 0, torch.tensor(0.5, requires_grad=True))
    assert reading.kl_weight == 0.5


def test_a_window_keeps_no_graph():
    window = PosteriorWindow(8)
    window.push(
        torch.zeros(2, 3, requires_grad=True) * 2, torch.zeros(2, 3), None, torch.zeros(2, requires_grad=True) * 2
    )
    assert not any(part.requires_grad for part in window.real_posteriors())
    assert not rows_of(window)[1].requires_grad


def test_a_window_knows_whether_its_real_posteriors_are_finite():
    window = PosteriorWindow(8)
    assert window.is_finite()
    window.push(torch.tensor([[1.0], [math.nan]]), torch.zeros(2, 1), torch.tensor([True, False]))
    assert window.is_finite()
    window.push(torch.ones(1, 1), torch.full((1, 1), math.inf))
    assert not window.is_finite()


def test_a_state_is_not_moved_by_what_is_pushed_later():
    window = PosteriorWindow(1)
    window.push(torch.ones(1, 1), torch.ones(1, 1))
    state = window.state_dict()
    window.push(torch.zeros(1, 1), torch.zeros(1, 1))
    assert state["posteriors"][0].tolist() == [1.0, 1.0, 1.0]


# --- Readings -------------------------------------------------------------------------------------------------------


def test_a_reading_is_what_the_formulas_say():
    mean_NZ, logvar_NZ = torch.randn(50, 3).double(), torch.randn(50, 3).double()
    reading = read(mean_NZ, logvar_NZ, step=20, epoch=2)
    kl_Z = formulas.kl_per_dim(mean_NZ, logvar_NZ)
    information = formulas.mutual_information(mean_NZ, logvar_NZ, torch.Generator().manual_seed(20)).item()
    assert (reading.step, reading.epoch, reading.scope, reading.posteriors) == (20, 2, "sequence", 50)
    assert reading.kl_per_dim == pytest.approx(kl_Z.tolist(), rel=1e-5)
    assert reading.rate == pytest.approx(kl_Z.sum().item(), rel=1e-5)
    assert reading.mutual_information == pytest.approx(information, rel=1e-5)
    assert reading.mutual_information_cap == pytest.approx(math.log(50), rel=1e-5)
    assert reading.aggregate_kl == pytest.approx(kl_Z.sum().item() - information, rel=1e-5)
    assert reading.active_units == 3
    assert reading.variance_of_means == pytest.approx(mean_NZ.var(dim=0).tolist(), rel=1e-5)
    assert reading.mean_of_variances == pytest.approx(logvar_NZ.exp().mean(dim=0).tolist(), rel=1e-5)
    assert reading.effective_dimensions == pytest.approx(formulas.effective_dimensions(kl_Z).item(), rel=1e-5)


def test_a_reading_has_what_the_step_adds_and_none_for_what_is_missing():
    window = PosteriorWindow(8)
    window.push(torch.ones(2, 1), torch.ones(2, 1))
    bare = take_reading(window, 1, 0)
    assert (bare.kl_weight, bare.nll, bare.decoder_use) == (None, None, None)
    window.push(torch.ones(2, 1), torch.ones(2, 1), None, torch.tensor([3.0, 5.0]))
    lost_B = torch.tensor([1.0, 2.0, 3.0, 4.0])
    use = DecoderUse(lost_B.sum(), lost_B.square().sum(), torch.tensor(4), torch.tensor(90), torch.tensor(3.0))
    full = take_reading(window, 1, 0, torch.tensor(0.6), use)
    assert (full.decoder_use_sequences, full.decoder_use_steps, full.decoder_use_wins) == (4, 90, 0.75)
    unknown = with_decoder_use(bare, use._replace(steps=torch.tensor(0)))
    assert (unknown.decoder_use, unknown.decoder_use_sequences, unknown.decoder_use_steps) == (2.5, 4, None)
    assert (full.kl_weight, full.nll, full.decoder_use) == (0.6, 4.0, 2.5)
    assert full.decoder_use_error == pytest.approx(float(lost_B.std() / 2), rel=1e-5)


def test_the_error_of_a_decoder_use_of_one_sequence_is_not_known():
    window = PosteriorWindow(8)
    window.push(torch.ones(2, 1), torch.ones(2, 1))
    use = DecoderUse(*torch.tensor([3.0, 9.0, 1.0, 0.0, 1.0]))
    reading = take_reading(window, 1, 0, None, use)
    assert reading.decoder_use == 3.0
    assert reading.decoder_use_error is not None
    assert math.isnan(reading.decoder_use_error)


def test_windows_of_several_processes_are_read_as_one():
    apart, together = (PosteriorWindow(20), PosteriorWindow(20)), PosteriorWindow(40)
    probes = [DecoderUse(*torch.tensor(sums)) for sums in ([6.0, 20.0, 2.0, 30.0, 1.0], [1.0, 9.0, 5.0, 8.0, 3.0])]
    for window, rows_NZ in zip(apart, torch.randn(2, 5, 3).unbind(), strict=True):
        for one in (window, together):
            one.push(rows_NZ, -rows_NZ.abs(), None, rows_NZ.sum(dim=1))
    sent: list[Tensor] = []

    def send(own: Tensor) -> Tensor:
        sent.append(own)
        return own

    for window, probe in zip(apart, probes, strict=True):
        take_reading(window, 9, 1, 0.5, probe, send)
    both = [take_reading(window, 9, 1, 0.5, gather=lambda _: torch.stack(sent)) for window in apart]
    expected = take_reading(together, 9, 1, 0.5, DecoderUse(*torch.tensor([7.0, 29.0, 7.0, 38.0, 4.0])))
    assert both == [expected, expected]


def test_one_posterior_has_no_information_and_no_variance_that_could_be_known():
    reading = read(torch.ones(1, 2), torch.zeros(1, 2), step=1, epoch=0)
    assert (reading.rate, reading.mutual_information, reading.mutual_information_cap) == (1.0, 0.0, 0.0)
    assert reading.active_units is None
    assert all(math.isnan(variance) for variance in reading.variance_of_means)


def test_nothing_but_padding_reads_as_not_known():
    window = PosteriorWindow(4)
    window.push(torch.ones(2, 1), torch.ones(2, 1), torch.zeros(2, dtype=torch.bool), torch.ones(2))
    reading = take_reading(window, 1, 0)
    assert reading.posteriors == 0
    assert all(math.isnan(value) for value in (reading.rate, reading.mutual_information, reading.effective_dimensions))
    assert (reading.active_units, reading.nll) == (None, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_in_one_dimension_leaves_what_is_known_of_the_others(bad):
    mean_NZ, logvar_NZ = torch.randn(10, 2), torch.zeros(10, 2)
    mean_NZ[4, 1] = bad
    reading = read(mean_NZ, logvar_NZ, step=1, epoch=0)
    alone = read(mean_NZ[:, :1], logvar_NZ[:, :1], step=1, epoch=0)
    for per_dim in ("kl_per_dim", "variance_of_means", "mean_of_variances"):
        assert getattr(reading, per_dim)[0] == getattr(alone, per_dim)[0]
    assert not math.isfinite(reading.kl_per_dim[1])
    assert not math.isfinite(reading.rate)
    assert math.isnan(reading.mutual_information)
    assert math.isnan(reading.effective_dimensions)
    assert reading.active_units is None


def test_posteriors_that_are_the_prior_read_as_exactly_nothing():
    window = PosteriorWindow(1024)
    for _ in range(9):
        window.push(torch.zeros(120, 16), torch.zeros(120, 16))
    reading = take_reading(window, 1, 0)
    assert (reading.posteriors, reading.rate, reading.active_units, reading.effective_dimensions) == (1024, 0.0, 0, 0.0)
    assert reading.mutual_information == pytest.approx(0, abs=1e-12)


def test_a_window_of_one_sequence_knows_its_rate_and_no_more():
    window = PosteriorWindow(1)
    for _ in range(3):
        window.push(torch.ones(8, 2), torch.zeros(8, 2), None, torch.ones(8))
    reading = take_reading(window, 1, 0)
    assert (reading.posteriors, reading.rate, reading.mutual_information_cap, reading.nll) == (1, 1.0, 0.0, 1.0)
    assert reading.active_units is None


def test_one_latent_dimension_is_read_like_many():
    reading = read(10.0 * torch.arange(50.0)[:, None], torch.full((50, 1), -4.0), step=1, epoch=0)
    assert (reading.active_units, reading.effective_dimensions) == (1, 1.0)
    assert reading.mutual_information == reading.mutual_information_cap == pytest.approx(math.log(50), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_reads_like_the_same_numbers_in_full(dtype):
    """300 squared and exp(12) are no numbers of float16."""
    mean_NZ = torch.stack((torch.linspace(-300, 300, 100), torch.randn(100)), dim=1).to(dtype)
    logvar_NZ = torch.tensor([12.0, -12.0]).expand(100, 2).to(dtype)
    halved = PosteriorWindow(400)
    halved.push(mean_NZ, logvar_NZ)
    reading = take_reading(halved, 1, 0)
    assert reading == read(mean_NZ.double(), logvar_NZ.double(), step=1, epoch=0)
    assert math.isfinite(reading.mutual_information)
    assert reading.rate > 45_000


def test_precisions_may_change_from_one_micro_batch_to_the_next():
    window = PosteriorWindow(20)
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.float32):
        window.push(torch.ones(2, 1, dtype=dtype), torch.zeros(2, 1), None, torch.ones(2, dtype=dtype))
    reading = take_reading(window, 1, 0)
    assert (reading.posteriors, reading.rate, reading.nll) == (8, 0.5, 1.0)


def test_four_thousand_dimensions_read_exactly_zero_at_collapse():
    reading = read(torch.zeros(64, 4096), torch.zeros(64, 4096), step=1, epoch=0)
    assert (reading.rate, reading.active_units, reading.effective_dimensions) == (0.0, 0, 0.0)
    assert reading.mutual_information == pytest.approx(0, abs=1e-9)


def test_of_a_large_latent_fewer_posteriors_are_read_evenly_and_the_reading_counts_them():
    mean_NZ = torch.arange(1024.0)[:, None] * torch.ones(4096)
    reading = read(mean_NZ, torch.zeros(1024, 4096), step=1, epoch=0)
    assert reading.posteriors == 256
    assert reading.mutual_information == reading.mutual_information_cap == pytest.approx(math.log(256), rel=1e-5)
    assert reading.variance_of_means[0] == pytest.approx(float(mean_NZ[::4, 0].var()), rel=1e-5)


def test_a_line_holds_what_is_known():
    reading = read(torch.ones(1, 2), torch.zeros(1, 2), step=1200, epoch=0)
    assert describe_reading(reading) == "step 1,200  rate 1.00  MI 0.00 of at most 0.00  active units ?/2"
    assert describe_reading(reading._replace(kl_weight=0.5, decoder_use=2.0)).endswith(
        "decoder use 2.00  KL weight 0.50"
    )


# --- The file -------------------------------------------------------------------------------------------------------


HEALTHY = Verdict("healthy", 1, "")


def test_a_row_is_strict_json_and_gives_the_reading_back(tmp_path):
    mean_NZ = torch.randn(10, 2)
    readings = [read(mean_NZ, torch.zeros(10, 2), step=1, epoch=0)._replace(nll=0.1, decoder_use=math.nan)]
    mean_NZ[0, 0] = math.nan
    readings.append(read(mean_NZ, torch.zeros(10, 2), step=2, epoch=0))
    publisher = Publisher(tmp_path, [], verbose=False, draws=False)
    for reading in readings:
        publisher.reading(reading, HEALTHY)
    path = tmp_path / NAME
    rows = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert [row["verdict"] for row in rows] == ["healthy", "healthy"]
    assert rows[0]["decoder_use"] is None
    assert "kl_weight" not in rows[0]
    assert rows[1]["kl_per_dim"][0] is None
    assert [repr(reading) for reading in read_readings(path)] == [repr(reading) for reading in readings]


def test_infinity_comes_back_as_not_a_number():
    reading = read(torch.full((2, 1), math.inf), torch.zeros(2, 1), step=1, epoch=0)
    assert math.isinf(reading.rate)
    assert math.isnan(from_row(to_row(reading)).rate)


def test_rows_beyond_a_step_and_half_a_line_are_dropped(tmp_path):
    publisher, path = Publisher(tmp_path / "new", [], verbose=False, draws=False), tmp_path / "new" / NAME
    publisher.start_after(0, HEALTHY, unprobed=None, stops=False)
    for step in (10, 20, 30):
        publisher.reading(read(torch.ones(2, 1), torch.ones(2, 1), step=step, epoch=0), HEALTHY)
    with path.open("a") as stream:
        stream.write('{"step": 40, "ep')
    publisher.start_after(20, HEALTHY, unprobed=None, stops=False)
    publisher.reading(read(torch.ones(2, 1), torch.ones(2, 1), step=30, epoch=0), HEALTHY)
    assert [reading.step for reading in read_readings(path)] == [10, 20, 30]


# --- What a module hands over ---------------------------------------------------------------------------------------

MEAN = torch.zeros(4, 5, 3)


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ({}, "returned nothing, and no posterior_mean and no posterior_logvar"),
        ({"loss": 1.0, "posterior_mean": MEAN}, 'returned "loss", "posterior_mean", and no posterior_logvar'),
        (None, "a NoneType"),
        (torch.zeros(()), "a Tensor"),
        ((MEAN, MEAN), "a tuple"),
        ({"loss": 1.0, "posterior_mean": None, "posterior_logvar": MEAN}, "posterior_mean that is a NoneType"),
        ({"posterior_mean": MEAN.numpy(), "posterior_logvar": MEAN}, "posterior_mean that is a ndarray, not a tensor"),
        ({"posterior_mean": [0.0], "posterior_logvar": MEAN}, "posterior_mean that is a list"),
        ({"posterior_mean": MEAN.long(), "posterior_logvar": MEAN}, "posterior_mean of torch.int64"),
        ({"posterior_mean": MEAN[0, 0], "posterior_logvar": MEAN[0, 0]}, r"posterior_mean of shape \(3,\)"),
        ({"posterior_mean": MEAN, "posterior_logvar": MEAN[:3]}, r"a posterior_logvar of \(3, 5, 3\)"),
        (StepOutputs(MEAN, MEAN, MEAN[..., 0])._asdict(), "posterior_mask of torch.float32"),
        (StepOutputs(MEAN, MEAN, MEAN[:, 0, 0] == 0)._asdict(), r"\(4,\) where \(4, 5\) is required"),
        ({"posterior_mean": MEAN[..., :0], "posterior_logvar": MEAN[..., :0]}, r"posterior_mean of shape \(4, 5, 0\)"),
        ({"posterior_mean": MEAN[None], "posterior_logvar": MEAN[None]}, r"posterior_mean of shape \(1, 4, 5, 3\)"),
        (StepOutputs(MEAN, MEAN, nll=MEAN.sum().long())._asdict(), "nll of torch.int64"),
        (StepOutputs(MEAN, MEAN, nll=MEAN.sum())._asdict(), r"nll of shape \(\) where \(4,\) is required"),
        (StepOutputs(MEAN, MEAN, nll=MEAN[..., 0])._asdict(), r"nll of shape \(4, 5\) where \(4,\) is required"),
        (
            StepOutputs(MEAN, MEAN, kl_weight=torch.ones(1))._asdict(),
            r"kl_weight of shape \(1,\) where \(\) is required",
        ),
        ({"posterior_mean": MEAN, "posterior_logvar": MEAN, "kl_weight": "1.0"}, "kl_weight that is a str"),
    ],
)
def test_what_is_no_posterior_is_refused_with_what_to_return(outputs, words):
    with pytest.raises(ValueError, match=words) as refused:
        check_step_outputs("module", step_outputs_of("module", outputs, None))
    assert "Let training_step return a dict with" in str(refused.value)


def test_what_a_posterior_may_be_is_taken():
    mask_BS, nll_B = torch.ones(4, 5, dtype=torch.bool), torch.ones(4)
    for outputs in (
        StepOutputs(MEAN, MEAN, mask_BS, nll_B, torch.tensor(0.5)),
        StepOutputs(MEAN[0].half(), MEAN[0].half(), mask_BS[0], None, 1),
        StepOutputs(MEAN[0], MEAN[0]),
        StepOutputs(MEAN[0] / 0, MEAN[0]),  # not a number: that is for the reading to say
    ):
        taken = check_step_outputs("module", step_outputs_of("module", outputs._asdict() | {"loss": 1.0}, None))
        assert all(part is given for part, given in zip(taken, outputs, strict=True))


@pytest.mark.parametrize("returned", [None, {"posterior_mean": MEAN}, (MEAN, MEAN)])
def test_a_function_that_returns_no_step_outputs_is_refused(returned):
    words = f"read_outputs returned a {type(returned).__name__}: let it return seqvae.monitors.StepOutputs"
    with pytest.raises(ValueError, match=words):
        check_step_outputs("module", returned)


# --- Does the decoder listen? ---------------------------------------------------------------------------------------


def test_every_real_sequence_gets_the_z_of_another_real_one():
    mask_B = torch.tensor([True, False, True, True])
    swapped = z_of_another(torch.arange(4.0)[:, None], mask_B).flatten()
    assert swapped[1] == 1
    assert sorted(swapped.tolist()) == [0, 1, 2, 3]
    assert all(swapped[place] != place for place in (0, 2, 3))


def test_the_other_sequence_is_no_neighbour():
    swapped_B = z_of_another(torch.arange(64.0)[:, None], torch.ones(64, dtype=torch.bool)).flatten()
    apart_B = (swapped_B - torch.arange(64.0)).abs()
    assert apart_B.min() > 0
    assert (apart_B == 1).sum() < 8
    assert apart_B.mean() > 10  # a third of 64, where partners are random


def test_every_real_step_gets_a_real_step_of_another_sequence():
    z_BSZ = torch.tensor([[[10.0], [11.0], [12.0]], [[20.0], [-1.0], [-1.0]], [[30.0], [31.0], [-1.0]]])
    swapped_BS = z_of_another(z_BSZ, z_BSZ[..., 0] > 0).squeeze(dim=2)
    repeated = {10: [10, 11, 12], 20: [20, 20, 20], 30: [30, 31, 30]}
    assert sorted(swapped_BS.tolist()) == [*repeated.values()]
    assert all(repeated[own] != given for own, given in zip(repeated, swapped_BS.tolist(), strict=True))


def test_decoder_use_is_the_mean_difference_of_the_definition():
    module, batch = TinyVAE().eval(), make_batches(1)[0]
    lost, squares, count, _, wins = decoder_use(module, batch, posterior_of(module, batch))
    mean, logvar = module.posterior_of(batch)
    z = mean + (0.5 * logvar).exp() * torch.randn(mean.shape, generator=torch.Generator().manual_seed(0))
    other_B = z_of_another(torch.arange(16)[:, None], torch.ones(16, dtype=torch.bool)).flatten().tolist()
    expected_B = torch.cat(
        [
            module.nll_given_z(batch[i : i + 1], z[other, None]) - module.nll_given_z(batch[i : i + 1], z[i, None])
            for i, other in enumerate(other_B)
        ]
    )
    torch.testing.assert_close(lost, expected_B.sum())
    torch.testing.assert_close(squares, expected_B.square().sum())
    assert (count, wins) == (16, (expected_B > 0).sum())


def test_decoder_use_among_several_partners_is_the_mean_over_them_for_each_sequence():
    module, batch = TinyVAE().eval(), make_batches(1)[0]
    posterior = posterior_of(module, batch)
    z = posterior.posterior_mean + (0.5 * posterior.posterior_logvar).exp() * torch.randn(
        posterior.posterior_mean.shape, generator=torch.Generator().manual_seed(0)
    )
    everyone = torch.ones(16, dtype=torch.bool)
    others_KB = torch.stack(
        [z_of_another(torch.arange(16)[:, None], everyone, number).flatten() for number in (1, 2, 3)]
    )
    assert all(len({own, *others}) == 4 for own, others in enumerate(others_KB.T.tolist()))
    own_B = module.nll_given_z(batch, z)
    lost_KB = torch.stack([module.nll_given_z(batch, z[other_B]) - own_B for other_B in others_KB])
    use = decoder_use(module, batch, posterior, partners=3)
    torch.testing.assert_close(use.nll_lost, lost_KB.mean(dim=0).sum())
    torch.testing.assert_close(use.nll_lost_squared, lost_KB.mean(dim=0).square().sum())
    torch.testing.assert_close(use.wins, (lost_KB > 0).float().mean(dim=0).sum())


def test_more_partners_than_there_are_sequences_are_not_asked_for():
    module, batch = TinyVAE().eval(), make_batches(1)[0][:2]
    posterior = posterior_of(module, batch)
    assert decoder_use(module, batch, posterior, partners=3) == decoder_use(module, batch, posterior)


def test_a_decoder_that_does_not_listen_wins_half_of_the_time():
    class DeafVAE(TinyVAE):
        def nll_given_z(self, batch: Any, z: torch.Tensor) -> torch.Tensor:
            return super().nll_given_z(batch, 0 * z)

    module, batch = DeafVAE().eval(), make_batches(1)[0]
    assert decoder_use(module, batch, posterior_of(module, batch), partners=3).wins == 8


@pytest.mark.parametrize("padding", [0, 2])
def test_a_sequence_that_is_alone_has_nothing_to_exchange(padding):
    mask_B = torch.arange(1 + padding) == 0
    batch = torch.ones(1 + padding, 4)
    use = decoder_use(TinyVAE().eval(), batch, StepOutputs(torch.ones(1 + padding, 3), batch[:, :3], mask_B))
    assert use == (0.0, 0.0, 0, 0, 0.0)


def test_padding_has_no_part_in_decoder_use():
    """The posterior of padding is not a number, and the module would spoil every NLL if it got that."""

    class Padded(TinyVAE):
        def nll_given_z(self, batch: Tensor, z: Tensor) -> Tensor:
            return super().nll_given_z(batch, z) + 0 * z.sum()

    batch = make_batches(1)[0]
    module, whole = Padded().eval(), posterior_of(TinyVAE().eval(), batch)
    fringe = torch.full((2, 3), math.nan)
    mean, logvar = (torch.cat((part, fringe)) for part in whole[:2])
    padded = StepOutputs(mean, logvar, torch.arange(18) < 16)
    use = decoder_use(module, torch.cat((batch, torch.ones(2, 4))), padded)
    assert use.sequences == 16
    assert use.nll_lost.isfinite()
    assert use.nll_lost_squared.isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_decoder_gets_a_z_of_the_type_of_the_posterior(dtype):
    given_z: list[Tensor] = []

    class Listening(TinyVAE):
        def nll_given_z(self, batch: Tensor, z: Tensor) -> Tensor:
            given_z.append(z)
            return z.sum(dim=1)

    mean_BZ = torch.ones(4, 3, dtype=dtype)
    use = decoder_use(Listening(), None, StepOutputs(mean_BZ, mean_BZ))
    assert [z.dtype for z in given_z] == [dtype, dtype]
    assert use.nll_lost.dtype == torch.float32


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (torch.tensor(1.0), r"returned shape \(\) for a batch of 16: let it return \(16,\)"),
        (torch.ones(16, 4), r"returned shape \(16, 4\) for a batch of 16: let it return \(16,\)"),
        (3.0, r"returned a float for a batch of 16: let it return \(16,\)"),
    ],
)
def test_a_probe_that_returns_no_nll_for_each_sequence_is_refused(returned, words):
    class Wrong(TinyVAE):
        def nll_given_z(self, batch: Tensor, z: Tensor) -> Any:
            return returned

    batch = make_batches(1)[0]
    with pytest.raises(ValueError, match=f"Wrong.nll_given_z {words}"):
        decoder_use(Wrong(), batch, posterior_of(TinyVAE(), batch))


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned a NoneType, not a tuple of two or three"),
        (MEAN, "returned a Tensor, not a tuple of two or three"),
        ((MEAN,), "returned a tuple, not a tuple of two or three"),
        ((MEAN, MEAN[:3]), r"returned a posterior_mean of shape \(4, 5, 3\) and a posterior_logvar of \(3, 5, 3\)"),
        ((MEAN, MEAN, MEAN[:, 0, 0] == 0), r"returned a posterior_mask of shape \(4,\) where \(4, 5\) is required"),
        ((MEAN.numpy(), MEAN), "returned a posterior_mean that is a ndarray"),
    ],
)
def test_a_posterior_of_that_returns_no_posterior_is_refused(returned, words):
    class Wrong(TinyVAE):
        def posterior_of(self, batch: Tensor) -> Any:
            return returned

    with pytest.raises(ValueError, match=f"Wrong.posterior_of {words}.*: let it return mean and logvar"):
        posterior_of(Wrong(), None)
