"""Codes against enumeration and a codebook that is computed by loops; what reaches the encoder, and what dead codes become.

Shapes: B sequences, S steps, W width, H codebooks, K codes, D dimensions of each.
"""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from seqvae.config.model import ModelSettings, fsq_levels
from seqvae.config.training import ObjectiveSettings, ReferenceSettings
from seqvae.models.codes import DECAY, IDLE, ROUNDED_UP, SMOOTHING, CodePosterior, GridCodes, LearnedCodes
from seqvae.models.noise import Noise
from seqvae.models.sampling import reconstruct, sample_prior
from tests.support.small_models import KINDS, make_batch, make_vae

CODES: dict[str, Any] = {"latent": "discrete", "codes": 8, "codebooks": 2, "latent_size": 6}


def settings(**changes: Any) -> ModelSettings:
    return ModelSettings(**{**CODES, **changes})


def passing_on(layer: GridCodes | LearnedCodes) -> GridCodes | LearnedCodes:
    """Let the layer take its input for what the encoder writes."""
    with torch.no_grad():
        layer.written.weight.copy_(torch.eye(*layer.written.weight.shape))
        layer.written.bias.zero_()
    return layer.train()


def learned(**changes: object) -> LearnedCodes:
    torch.manual_seed(0)
    layer = passing_on(LearnedCodes(6, settings(**changes)))
    assert isinstance(layer, LearnedCodes)
    return layer


def grid(codes: int, latent_size: int) -> GridCodes:
    """A grid for what comes in, as it comes."""
    size = levels_of(codes)
    layer = passing_on(
        GridCodes(len(size), settings(codebook="fsq", codes=codes, codebooks=1, latent_size=latent_size))
    )
    assert isinstance(layer, GridCodes)
    return layer


def levels_of(codes: int) -> tuple[int, ...]:
    levels = fsq_levels(codes)
    assert levels is not None
    return levels


def all_real(hidden: Tensor) -> Tensor:
    return torch.ones(hidden.shape[:-1], dtype=torch.bool)


# --- A grid ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codes", [2, 7, 12, 60, 512])
def test_every_point_of_a_grid_has_a_code_of_its_own_and_gets_it_back(codes):
    levels, layer = levels_of(codes), grid(codes, 5)
    points = torch.tensor(list(itertools.product(*(torch.linspace(-1, 1, size).tolist() for size in levels))))
    raw = torch.atanh(0.999 * points)
    z, codes_N1, commitment_N = layer.quantise(raw, all_real(raw))
    assert sorted(codes_N1[:, 0].tolist()) == list(range(codes))
    torch.testing.assert_close(z[:, : len(levels)], points, rtol=0, atol=1e-6)
    assert not z[:, len(levels) :].any()
    torch.testing.assert_close(layer.vectors_of(codes_N1), z, rtol=0, atol=0)
    assert not commitment_N.any()


def test_a_grid_takes_the_level_that_is_nearest_to_the_squashed_number():
    layer = grid(40, 2)
    raw = 2 * torch.randn(500, 2)
    z, _, _ = layer.quantise(raw, all_real(raw))
    for place, size in enumerate(levels_of(40)):
        points = torch.linspace(-1, 1, size)
        nearest = points[(torch.tanh(raw[:, place, None]) * (1 + ROUNDED_UP) - points).abs().argmin(dim=1)]
        torch.testing.assert_close(z[:, place], nearest, rtol=0, atol=1e-6)


def test_the_gradient_of_a_grid_is_that_of_the_squashed_number():
    layer = grid(40, 2)
    raw = torch.randn(7, 2, requires_grad=True)
    towards = torch.randn(7, 2)
    (gradient,) = torch.autograd.grad((layer.quantise(raw, all_real(raw)).z * towards).sum(), raw)
    expected = towards * (1 - torch.tanh(raw).square()) * (1 + ROUNDED_UP)
    torch.testing.assert_close(gradient, expected)


def test_grids_have_exactly_as_many_points_as_codes_and_as_few_dimensions_as_can_be():
    fewest: dict[int, int] = {}
    for dimensions in range(1, 7):
        for factors in itertools.combinations_with_replacement(range(2, 9), dimensions):
            fewest.setdefault(math.prod(factors), dimensions)
    for codes in range(2, 600):
        levels = fsq_levels(codes)
        assert (levels is None) == (codes not in fewest)
        if levels is not None:
            assert math.prod(levels) == codes
            assert len(levels) == fewest[codes]
            assert set(levels) <= set(range(2, 9))


# --- Codes that are learned -------------------------------------------------------------------------------------------


def test_a_latent_gets_the_nearest_vector_of_each_codebook_and_a_pull_towards_it():
    layer = learned(commitment=0.5)
    hidden_BSW, mask_BS = torch.randn(4, 5, 6), torch.arange(5) < torch.tensor([5, 3, 1, 0])[:, None]
    z, codes_BSH, commitment_B = layer.quantise(hidden_BSW, mask_BS)
    for row, step, book in itertools.product(range(4), range(5), range(2)):
        own = hidden_BSW[row, step, 3 * book : 3 * book + 3]
        distances_K = [(own - vector).square().sum() for vector in layer.vectors_HKD[book]]
        code = int(codes_BSH[row, step, book])
        assert code == int(torch.stack(distances_K).argmin())
        assert torch.equal(z[row, step, 3 * book : 3 * book + 3], layer.vectors_HKD[book, code])
    paid_B = 0.5 * ((hidden_BSW - z).square().sum(dim=-1) * mask_BS).sum(dim=1)
    torch.testing.assert_close(commitment_B, paid_B)


def test_the_gradient_goes_through_the_choice_and_the_pull_is_on_the_encoder_alone():
    layer = learned(commitment=0.5)
    hidden_BW = torch.randn(9, 6, requires_grad=True)
    towards_BZ = torch.randn(9, 6)
    z, _, commitment_B = layer.quantise(hidden_BW, all_real(hidden_BW))
    (through,) = torch.autograd.grad((z * towards_BZ).sum(), hidden_BW, retain_graph=True)
    torch.testing.assert_close(through, towards_BZ)
    (pull,) = torch.autograd.grad(commitment_B.sum(), hidden_BW)
    torch.testing.assert_close(pull, (hidden_BW - z).detach())
    assert not layer.vectors_HKD.requires_grad


def reference_step(state: dict[str, Any], rows: list[tuple[list[float], int]]) -> None:
    """One update of one codebook's counts, sums and vectors, by the formulas of the paper, entry by entry."""
    size, dimensions = len(state["counts"]), len(state["sums"][0])
    for code in range(size):
        fell = [row for row, own in rows if own == code]
        state["counts"][code] = DECAY * state["counts"][code] + (1 - DECAY) * len(fell)
        for place in range(dimensions):
            total = sum(row[place] for row in fell)
            state["sums"][code][place] = DECAY * state["sums"][code][place] + (1 - DECAY) * total
    whole = sum(state["counts"])
    for code in range(size):
        smooth = (state["counts"][code] + SMOOTHING) / (whole + size * SMOOTHING) * whole
        state["vectors"][code] = [number / smooth for number in state["sums"][code]]


def test_learned_codes_follow_the_moving_averages_of_what_falls_to_them():
    layer = learned(revive_codes=False)
    start = layer.vectors_HKD.double().tolist()
    states: list[dict[str, Any]] = [
        {"counts": [1.0] * 8, "sums": [list(row) for row in book], "vectors": [list(row) for row in book]}
        for book in start
    ]
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        for _ in range(2):  # two micro-batches make a step
            hidden_BSW = torch.randn(3, 4, 6, generator=generator)
            mask_BS = torch.arange(4) < torch.tensor([4, 2, 0])[:, None]
            _, codes_BSH, _ = layer.quantise(torch.where(mask_BS[..., None], hidden_BSW, 1e3), mask_BS)
            for book, state in enumerate(states):
                rows_ND, codes_N = hidden_BSW[mask_BS][:, 3 * book : 3 * book + 3], codes_BSH[mask_BS][:, book]
                state.setdefault("rows", []).extend(zip(rows_ND.tolist(), codes_N.tolist(), strict=True))
        layer.after_step(step)
        for state in states:
            reference_step(state, state.pop("rows"))
        expected_HKD = torch.tensor([state["vectors"] for state in states])
        torch.testing.assert_close(layer.vectors_HKD, expected_HKD, rtol=1e-4, atol=1e-5)


def test_parts_of_a_batch_and_steps_that_begin_again_teach_what_the_whole_does():
    whole, parts = learned(), learned()
    hidden_BW = torch.randn(20, 6)
    whole.quantise(hidden_BW, all_real(hidden_BW))
    parts.quantise(hidden_BW, all_real(hidden_BW))
    parts.begin_step()  # there was no room for all of it
    for part_BW in hidden_BW.chunk(3):
        parts.quantise(part_BW, all_real(part_BW))
    for layer in (whole, parts):
        layer.after_step(1)
    torch.testing.assert_close(dict(parts.named_buffers()), dict(whole.named_buffers()))


def test_evaluation_and_passes_without_gradients_teach_nothing():
    layer, hidden_BW = learned(), torch.randn(20, 6)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    with torch.no_grad():
        layer.quantise(hidden_BW, all_real(hidden_BW))
    layer.eval().quantise(hidden_BW, all_real(hidden_BW))
    layer.after_step(1)
    torch.testing.assert_close(dict(layer.named_buffers()), before, rtol=0, atol=0)


def test_nan_and_padding_leave_a_codebook_alone():
    layer, hidden_BW = learned(), torch.full((5, 6), torch.nan)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    layer.quantise(hidden_BW, all_real(hidden_BW))
    layer.after_step(1)
    torch.testing.assert_close(dict(layer.named_buffers()), before, rtol=0, atol=0)


def test_a_dead_code_gets_a_vector_that_the_encoder_has_just_written():
    layer, left = learned(), learned(revive_codes=False)
    for buffer in (layer.vectors_HKD, layer.sums_HKD):
        buffer[:, 3] = 100.0  # nothing falls to it
    left.load_state_dict(layer.state_dict())
    steps = math.floor(IDLE * 8 / 20) + 1
    for step in range(steps):
        hidden_BW = torch.randn(20, 6)
        for one in (layer, left):
            one.quantise(hidden_BW, all_real(hidden_BW))
            one.after_step(step)
    assert (left.vectors_HKD[:, 3] > 50).all()
    assert (left.idle_HK[:, 3] == 20 * steps).all()
    for book in range(2):
        written_ND = hidden_BW[:, 3 * book : 3 * book + 3]
        distances = (written_ND - layer.vectors_HKD[book, 3]).norm(dim=1)
        assert distances.min() < 1e-3  # but for the smoothing
    assert not layer.idle_HK[:, 3].any()
    _, codes_BH, _ = layer.quantise(hidden_BW, all_real(hidden_BW))
    assert all(3 in codes_BH[:, book] for book in range(2))


def test_a_codebook_goes_on_from_its_state_to_the_bit():
    layer, other = learned(), learned()
    batches = [torch.randn(30, 6) for _ in range(12)]
    for step, hidden_BW in enumerate(batches):
        if step == 6:
            other = LearnedCodes(6, settings())
            other.load_state_dict(layer.state_dict())
            passing_on(other)
        for one in (layer, other):
            one.quantise(hidden_BW, all_real(hidden_BW))
            one.after_step(step)
    torch.testing.assert_close(other.state_dict(), layer.state_dict(), rtol=0, atol=0)


def learn_in_process(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=2)

    def total(own: Tensor) -> Tensor:
        torch.distributed.all_reduce(own)
        return own

    for revives in (True, False):
        layer = learned(revive_codes=revives)
        for step, hidden_BW in enumerate(hidden_of_steps()):
            own_BW = hidden_BW[rank::2]
            layer.quantise(own_BW, all_real(own_BW))
            layer.after_step(step, total, rank, 2)
        torch.save(layer.state_dict(), f"{directory}/{revives}{rank}.pt")
    torch.distributed.destroy_process_group()


def hidden_of_steps() -> Tensor:
    return torch.randn(40, 24, 6, generator=torch.Generator().manual_seed(5))


@pytest.mark.slow
def test_two_processes_learn_one_codebook(tmp_path: Path):
    spawn(learn_in_process, (str(tmp_path),), nprocs=2)
    for revives in (True, False):
        one, other = (torch.load(tmp_path / f"{revives}{rank}.pt") for rank in (0, 1))
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    alone = learned(revive_codes=False)
    for step, hidden_BW in enumerate(hidden_of_steps()):
        alone.quantise(hidden_BW, all_real(hidden_BW))
        alone.after_step(step)
    torch.testing.assert_close(one, alone.state_dict(), rtol=1e-4, atol=1e-5)


# --- In a network -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scope", ["sequence", "step"])
@pytest.mark.parametrize("codebook", ["vq", "fsq"])
def test_a_network_of_codes_decodes_from_the_vectors_of_its_codes(kind, scope, codebook):
    network = make_vae(kind, latent_scope=scope, codebook=codebook, **CODES)
    batch = make_batch(kind, [5, 3, 0])
    output = network(batch)
    assert output.codes.shape == (*output.posterior_mask.shape, 2)
    assert (output.codes >= 0).all()
    assert (output.codes < 8).all()
    assert isinstance(network.posterior, CodePosterior)
    assert torch.equal(network.posterior.vectors_of(output.codes), output.posterior_mean)
    torch.testing.assert_close(network.nll_given_z(batch, output.codes), output.nll_B)
    torch.testing.assert_close(network(batch).nll_B, output.nll_B, rtol=0, atol=0)  # nothing is drawn
    torch.testing.assert_close(output.kl, torch.full((*output.posterior_mask.shape, 1), 2 * math.log(8)))
    assert reconstruct(network, batch, noise=Noise(0, torch.arange(3))).lengths_B.shape == (3,)
    drawn = sample_prior(network, torch.tensor([4, 2]), noise=Noise(0, torch.arange(2)))
    assert len(drawn.lengths_B) == 2


def test_a_training_step_moves_the_encoder_by_decoder_and_commitment():
    network = make_vae("tokens", **CODES).train()
    output = network(make_batch("tokens", [5, 3]))
    (output.nll_B.sum() + output.commitment_B.sum()).backward()
    assert isinstance(network.posterior, CodePosterior)
    assert network.posterior.written.weight.grad is not None
    assert network.posterior.written.weight.grad.any()
    assert all(weight.grad is not None for weight in network.encoder.parameters())


# --- What is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"codebooks": 4}, "--latent_size must be a multiple of --codebooks"),
        ({"posterior": "batch_norm"}, "--posterior batch_norm is for Gaussian latents"),
        ({"prior": "mixture"}, "--prior mixture is for Gaussian latents"),
        ({"codebook": "fsq", "commitment": 1.0}, "--commitment 1.0 is for --codebook vq"),
        ({"codebook": "fsq", "revive_codes": False}, "--revive_codes false is for --codebook vq"),
        ({"codebook": "fsq", "codes": 509}, "take 504 or 512"),
        ({"codebook": "fsq", "codes": 4096}, "raise --latent_size to 8"),
        ({"latent": "gaussian"}, "--codebooks 2 needs --latent discrete"),
        ({"codes": 1}, "--codes must be 2 or more"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes, reason):
    changes = {"codes": 512, **changes} if changes.get("latent") == "gaussian" else changes
    with pytest.raises(ValueError, match=reason):
        settings(**changes)


@pytest.mark.parametrize(
    "changes", [{"beta": 0.5}, {"free_bits": 0.2}, {"target_kl": 3.0}, {"kl_schedule": "cyclical"}, {"kl_warmup": 0.5}]
)
def test_weights_of_the_kl_are_refused_where_it_is_a_constant(changes):
    with pytest.raises(ValueError, match="has no meaning with --latent discrete"):
        ReferenceSettings(model=settings(), objective=ObjectiveSettings(**changes))


def test_what_is_in_force_anyway_may_be_said():
    objective = ObjectiveSettings(beta=1.0, free_bits=0.0, kl_schedule="constant")
    assert ReferenceSettings(model=settings(), objective=objective).model.is_discrete
    plain = ReferenceSettings()
    with pytest.raises(ValueError, match="--on_collapse rescue steers the KL"):
        replace(plain, model=settings(), monitoring=replace(plain.monitoring, on_collapse="rescue"))
