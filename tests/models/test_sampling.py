"""Drawn sequences follow the likelihoods they are drawn from, and come out in the data's own units.

Shapes: B sequences, T steps, W width, Z latent dimensions, V variables or ids, D features.
"""

import math
from dataclasses import replace
from typing import Any, cast

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqvae.data.batch import Batch, EventBatch, TokenBatch, VectorBatch, to_records
from seqvae.data.description import DataDescription
from seqvae.models.likelihoods import EventLikelihood, TokenLikelihood
from seqvae.models.noise import Noise
from seqvae.models.sampling import evaluating, reconstruct, sample, sample_prior
from seqvae.models.vae import SequenceVAE
from tests.support.small_models import DESCRIPTIONS, KINDS, make_batch, make_vae

MANY = 1000
UNITS = {kind: replace(description, mean=(0.0,) * 3, std=(1.0,) * 3) for kind, description in DESCRIPTIONS.items()}


def noise(count: int = MANY, seed: int = 0) -> Noise:
    return Noise(seed, torch.arange(count))


def draw_many(vae: SequenceVAE, steps: int) -> Any:
    """Sequences from one and the same latent."""
    return sample(vae, torch.full((MANY, 3), 0.5), torch.full((MANY,), steps), noise=noise())


def equal(one: Batch, other: Batch) -> bool:
    return all(torch.equal(a, torch.as_tensor(b)) for a, b in zip(one, other, strict=True) if isinstance(a, Tensor))


# --- Draws follow the likelihood -----------------------------------------------------------------------------------------


def test_ids_come_as_often_as_their_probabilities_say():
    vae = make_vae("tokens")
    likelihood = vae.likelihood
    assert isinstance(likelihood, TokenLikelihood)
    batch = draw_many(vae, steps=1)
    probabilities_V = likelihood.scores(vae.decoder(vae.begin_W[None, None], torch.full((1, 3), 0.5))).softmax(-1)[0, 0]
    drawn_B = torch.where(batch.lengths_B == 0, likelihood.end, batch.tokens_BT[:, 0])
    shares_V = drawn_B.bincount(minlength=6) / MANY
    assert chi_square(shares_V, probabilities_V) < 20.5  # 5 degrees of freedom: exceeded once in 1,000


def chi_square(shares_V: Tensor, probabilities_V: Tensor) -> float:
    return (MANY * (shares_V - probabilities_V).square() / probabilities_V).sum().item()


def test_variables_are_present_as_often_as_their_probabilities_say():
    likelihood, hidden_BW = event_likelihood(), torch.randn(1, 16).expand(MANY, -1)
    present_BV, _ = likelihood.sample(hidden_BW, torch.full((MANY,), 5.0), 1.0, noise())
    scores_V = likelihood.presence(likelihood.condition_on_gaps(hidden_BW, torch.full((MANY,), 5.0)))[0]
    standard_errors_V = (scores_V.sigmoid() * (1 - scores_V.sigmoid()) / MANY).sqrt()
    assert ((present_BV.float().mean(dim=0) - scores_V.sigmoid()).abs() < 4 * standard_errors_V).all()


def test_logarithms_of_gaps_have_the_mean_and_variance_of_the_likelihood():
    likelihood, hidden_BW = event_likelihood(), torch.randn(1, 16).expand(MANY, -1)
    log_gaps_B = likelihood.sample_gap(hidden_BW, 1.0, noise()).log()
    mean_B, logvar_B = likelihood.predict_gaps(hidden_BW)
    scale = likelihood.gap_scale
    standard_B = (log_gaps_B - scale.log_mean) / scale.log_std
    standard_error = (0.5 * logvar_B[0]).exp() / math.sqrt(MANY)
    assert (standard_B.mean() - mean_B[0]).abs() < 4 * standard_error
    assert standard_B.var() == pytest.approx(logvar_B[0].exp().item(), rel=0.1)


def test_variables_that_never_had_a_value_are_drawn_without_one():
    likelihood = event_likelihood()
    present_BV, values_BV = likelihood.sample(torch.randn(200, 16), torch.ones(200), 1.0, noise(200))
    assert present_BV.any(dim=0).all()
    assert (~values_BV.isnan()).any(dim=0).tolist() == [True, False, True]
    assert values_BV[~present_BV].isnan().all()


def event_likelihood() -> EventLikelihood:
    torch.manual_seed(0)
    likelihood = EventLikelihood(DESCRIPTIONS["events"], 16)
    return likelihood.eval().requires_grad_(False)


def test_drawn_vectors_cost_their_entropy():
    vae = make_vae("vectors")
    batch = draw_many(vae, steps=3)
    nll_B = vae.decode(batch, torch.full((MANY, 3), 0.5)).detach().sum(dim=1)
    assert isinstance(batch, VectorBatch)
    half_log_variances_B = nll_B - 0.5 * 9 * math.log(2 * math.pi)
    squares_B = half_log_variances_B - gaussian_floor(vae, batch)  # half of a chi-square with 9 degrees of freedom
    assert squares_B.mean().item() == pytest.approx(4.5, abs=4 * math.sqrt(4.5 / MANY))


def gaussian_floor(vae: SequenceVAE, batch: VectorBatch) -> Tensor:
    """Half the sum of the log-variances that the model predicts along each sequence."""
    inputs_BTW = torch.cat((vae.begin_W.expand(len(batch.lengths_B), 1, -1), vae.embedding(batch)), dim=1)[:, :-1]
    likelihood: Any = vae.likelihood
    return 0.5 * likelihood.predict(vae.decoder(inputs_BTW, torch.full((MANY, 3), 0.5)))[1].detach().sum(dim=(1, 2))


def test_drawn_tokens_cost_as_much_as_the_mean_over_all_sequences():
    """Of two steps at most, all of which can be listed."""
    vae = make_vae("tokens")
    z_1Z, two = torch.full((1, 3), 0.5), torch.cartesian_prod(torch.arange(5), torch.arange(5))
    pairs = TokenBatch(two, torch.full((25,), 2), torch.arange(25), None, step_tokens=1, position=0)
    nll_BS = vae.decode(pairs, z_1Z.expand(25, -1)).detach()[:, :2]
    probabilities_B = torch.exp(-nll_BS.sum(dim=1))
    expected = (probabilities_B * nll_BS.sum(dim=1)).sum() / probabilities_B.sum()
    drawn = draw_many(vae, steps=2)
    full_B = drawn.lengths_B == 2
    drawn_nll_B = vae.decode(drawn, z_1Z.expand(MANY, -1)).detach()[:, :2].sum(dim=1)[full_B]
    assert full_B.float().mean().item() == pytest.approx(probabilities_B.sum().item(), abs=0.06)
    assert drawn_nll_B.mean().item() == pytest.approx(
        expected.item(), abs=4 * drawn_nll_B.std().item() / math.sqrt(full_B.sum())
    )


# --- Arguments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["sequence", "step"])
@pytest.mark.parametrize("decoder", ["transformer", "lstm", "tcn", "parallel"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_network_draws_finite_sequences_of_the_requested_lengths(kind, decoder, scope):
    vae, lengths_B = make_vae(kind, decoder=decoder, latent_scope=scope), torch.tensor([4, 1, 6])
    batch = sample_prior(vae, lengths_B, noise=noise(3))
    assert (batch.lengths_B <= lengths_B).all() if kind == "tokens" else torch.equal(batch.lengths_B, lengths_B)
    kept = batch._replace(lengths_B=batch.lengths_B.clamp(min=1))
    assert vae.encode(kept).mean.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_temperature_zero_leaves_nothing_to_chance(kind):
    vae, batch = make_vae(kind), make_batch(kind, [6, 3])
    one, other = (reconstruct(vae, batch, noise=noise(2, seed)) for seed in (1, 2))
    assert equal(one, other)


@pytest.mark.parametrize("scope", ["sequence", "step"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_sequences_draw_the_same_alone_and_beside_any_others(kind, scope, lengths):
    vae, lengths_B = make_vae(kind, latent_scope=scope), torch.tensor(lengths)
    together = to_records(sample_prior(vae, lengths_B, noise=noise(len(lengths))), UNITS[kind])
    for row, record in enumerate(together):
        alone = sample_prior(vae, lengths_B[row : row + 1], noise=Noise(0, torch.tensor([row])))
        pd.testing.assert_frame_equal(pd.DataFrame(to_records(alone, UNITS[kind])[0]), pd.DataFrame(record), rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_draws_the_same_and_training_noise_is_left_alone(kind):
    vae = make_vae(kind)
    torch.manual_seed(7)
    one, other = (sample_prior(vae, torch.tensor([6, 3]), noise=noise(2, seed=3)) for _ in range(2))
    after = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(1), after)
    assert equal(one, other)


def test_drawing_leaves_no_gradients_and_each_module_in_its_mode():
    vae = make_vae("vectors", dropout=0.5).train()
    vae.encoder.eval()
    before = [module.training for module in vae.modules()]
    one, other = (reconstruct(vae, make_batch("vectors", [5]), noise=noise(1)) for _ in range(2))
    assert [module.training for module in vae.modules()] == before
    assert equal(one, other)
    assert not one[0].requires_grad


def test_modes_come_back_after_an_error():
    vae = make_vae("tokens").train()
    with pytest.raises(KeyError), evaluating(vae):
        raise KeyError
    assert vae.training


@pytest.mark.parametrize("kind", ["vectors", "events"])
def test_a_reconstruction_is_as_long_as_its_original(kind):
    assert reconstruct(make_vae(kind), make_batch(kind, [6, 2]), noise=noise(2)).lengths_B.tolist() == [6, 2]


def endless_vae() -> SequenceVAE:
    vae = make_vae("tokens")
    likelihood = vae.likelihood
    assert isinstance(likelihood, TokenLikelihood)
    with torch.no_grad():
        likelihood.scores.bias[likelihood.end] = -100.0
    return vae


def test_a_reconstruction_is_the_same_alone_and_beside_a_longer_sequence():
    vae = endless_vae()
    alone = reconstruct(vae, make_batch("tokens", [6]), noise=noise(1))
    beside = reconstruct(vae, make_batch("tokens", [6, 40]), noise=noise(2))
    length = int(alone.lengths_B[0])
    assert beside.lengths_B.tolist() == [length, 2 * 40 + 8]
    assert torch.equal(beside[0][:1, :length], alone[0])


def test_a_sequence_that_is_cut_off_is_reconstructed_as_far_as_it_goes():
    batch = make_batch("tokens", [6, 6, 0])._replace(ends_B=torch.tensor([False, True, False]))
    assert reconstruct(endless_vae(), batch, noise=noise(3)).lengths_B.tolist() == [6, 20, 0]


def test_tokens_end_at_their_end_mark():
    vae = make_vae("tokens")
    likelihood = vae.likelihood
    assert isinstance(likelihood, TokenLikelihood)
    with torch.no_grad():
        likelihood.scores.bias[likelihood.end] = 100.0
    batch = sample_prior(vae, torch.tensor([9, 9]), noise=noise(2))
    assert batch.lengths_B.tolist() == [0, 0]


def test_drawn_tokens_that_found_no_end_are_cut_off():
    vae = make_vae("tokens")
    batch = sample_prior(vae, torch.tensor([3] * 200), noise=noise(200))
    assert isinstance(batch, TokenBatch)
    assert batch.ends_B is not None
    assert torch.equal(batch.ends_B, batch.lengths_B < 3)
    assert 0 < batch.ends_B.sum() < 200


def test_drawn_events_stand_in_the_order_of_their_steps_within_their_sequence():
    batch = sample_prior(make_vae("events"), torch.tensor([7, 3, 5]), noise=noise(3))
    assert isinstance(batch, EventBatch)
    assert (batch.steps_E.diff() >= 0).all()
    assert (batch.steps_E % 7 < batch.lengths_B[batch.steps_E // 7]).all()
    assert not batch.gaps_BT[:, 0].any()
    assert (batch.gaps_BT[0, 1:] > 0).all()


# --- The data's own units ------------------------------------------------------------------------------------------------


def tokens(*sequences: list[int]) -> TokenBatch:
    length = max(map(len, sequences))
    tokens_BT = torch.tensor([ids + [0] * (length - len(ids)) for ids in sequences])
    lengths_B = torch.tensor([len(ids) for ids in sequences])
    return TokenBatch(tokens_BT, lengths_B, lengths_B, None, step_tokens=1, position=0)


def text(tokenizer: str | None, *symbols: str) -> DataDescription:
    return DataDescription(kind="tokens", vocabulary_size=len(symbols), symbols=symbols, tokenizer=tokenizer)


def test_ids_become_the_text_they_stand_for():
    words, letters = text("words", "<unknown>", "so", "it"), text("characters", "<unknown>", "C", "=")
    assert to_records(tokens([1, 2], [0]), words) == ["so it", "<unknown>"]
    assert to_records(tokens([1, 2, 1], []), letters) == ["C=C", ""]
    assert to_records(tokens([*"é".encode(), 255, 65]), text("bytes")) == ["é\ufffdA"]
    assert to_records(tokens([4, 0], [2]), text(None)) == [[4, 0], [2]]


def test_a_tokenizer_file_decodes_as_its_library_does():
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    description = text(tokenizer.to_str(), "a", "b", "ab")
    ids = tokenizer.encode("abab").ids
    assert to_records(tokens(ids), description) == [tokenizer.decode(ids)]


def test_vectors_get_their_units_back_and_missing_values_are_nan():
    description = DataDescription(kind="vectors", names=("heart rate", "pH"), mean=(80.0, 7.4), std=(10.0, 0.1))
    values_BTD = torch.tensor([[[1.0, -2.0], [0.0, 0.0], [9.0, 9.0]]])
    observed_BTD = torch.tensor([[[True, True], [True, False], [False, False]]])
    batch = VectorBatch(values_BTD, observed_BTD, torch.tensor([2]), torch.tensor([0]), None, 2, 0)
    ((first, second),) = cast(Any, to_records(batch, description))
    assert first == pytest.approx({"heart rate": 90.0, "pH": 7.2})
    assert second == pytest.approx({"heart rate": 80.0, "pH": math.nan}, nan_ok=True)


def test_events_get_their_units_back_and_their_times_added_up():
    names = ("<unknown>", "heart rate", "visit")
    description = DataDescription(kind="events", names=names, mean=(0.0, 80.0, 0.0), std=(1.0, 10.0, 1.0))
    batch = EventBatch(
        gaps_BT=torch.tensor([[0.0, 5.0, 0.5], [0.0, 2.0, 0.0]]),
        lengths_B=torch.tensor([3, 2]),
        variables_E=torch.tensor([1, 2, 1, 1]),
        values_E=torch.tensor([1.0, 0.0, -1.0, 0.0]),
        has_value_E=torch.tensor([True, False, True, True]),
        steps_E=torch.tensor([0, 2, 2, 4]),
        sequences_B=torch.arange(2),
        labels_B=None,
        step_tokens=5,
        position=0,
    )
    first, second = cast(Any, to_records(batch, description))
    assert first[0] == {"time": 0.0, "variable": "heart rate", "value": 90.0}
    assert first[1] == pytest.approx({"time": 5.5, "variable": "visit", "value": math.nan}, nan_ok=True)
    assert first[2] == {"time": 5.5, "variable": "heart rate", "value": 70.0}
    assert second == [{"time": 2.0, "variable": "heart rate", "value": 80.0}]
