"""The sequence VAE: proper likelihoods, causal decoders, and nothing that padding or an empty batch could reach.

Shapes: B sequences, T steps (S: with the end mark), V variables or ids, D features, E events, Z latent dimensions.
"""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from models.embeddings import EventEmbedding, GivenVectors, time_features
from models.likelihoods import EventLikelihood, TokenLikelihood, VectorLikelihood, by_rows
from models.segments import spread_to_events, step_offsets, sum_by_step
from models.sequence_vae import SequenceVAE
from models.settings import ModelSettings
from models.transformer import Block, TransformerDecoder, rotary_angles, rotate
from sequences.batches import Batch, EventBatch, TokenBatch, VectorBatch
from sequences.description import DataDescription

KINDS = ("tokens", "vectors", "events")
SMALL = ModelSettings(width=16, depth=2, heads=2, latent_size=3, dropout=0.0)
NAMES = ("<unknown>", "heart rate", "pH")
DESCRIPTIONS = {
    "tokens": DataDescription(kind="tokens", vocabulary_size=5),
    "vectors": DataDescription(kind="vectors", names=NAMES),
    "events": DataDescription(kind="events", names=NAMES),
}


def make_batch(kind: str, lengths: list[int], steps: int | None = None, seed: int = 0) -> Any:
    """Random sequences of the given lengths, padded to `steps`; the same seed gives the same first steps.

    Any, because a test knows which kind of batch it asked for.
    """
    steps = max(*lengths, 1) if steps is None else steps
    generator = torch.Generator().manual_seed(seed)
    lengths_B = torch.tensor(lengths)
    real_BT = torch.arange(steps) < lengths_B[:, None]
    common: dict[str, Any] = {"lengths_B": lengths_B, "sequences_B": torch.arange(len(lengths)), "labels_B": None}
    common |= {"step_tokens": sum(lengths), "position": 0}
    shape = (len(lengths), 50)
    if kind == "tokens":
        tokens_BT = torch.randint(0, 5, shape, generator=generator)[:, :steps] * real_BT
        return TokenBatch(tokens_BT=tokens_BT, **common)
    if kind == "vectors":
        observed_BTD = (torch.rand(*shape, 3, generator=generator) < 0.7)[:, :steps] & real_BT[..., None]
        values_BTD = torch.randn(*shape, 3, generator=generator)[:, :steps] * observed_BTD
        return VectorBatch(values_BTD=values_BTD, observed_BTD=observed_BTD, **common)
    gaps_BT = torch.rand(shape, generator=generator)[:, :steps] * 100 * real_BT
    gaps_BT[:, 0] = 0
    present_BTV = (torch.rand(*shape, 3, generator=generator) < 0.6)[:, :steps] & real_BT[..., None]
    values_BTV = torch.randn(*shape, 3, generator=generator)[:, :steps]
    rows_E, steps_E, variables_E = present_BTV.nonzero(as_tuple=True)
    has_value_E = variables_E != 1
    return EventBatch(
        gaps_BT=gaps_BT,
        variables_E=variables_E,
        values_E=values_BTV[present_BTV] * has_value_E,
        has_value_E=has_value_E,
        steps_E=rows_E * steps + steps_E,
        **common,
    )


def make_vae(kind: str, **changes: Any) -> SequenceVAE:
    torch.manual_seed(0)
    return SequenceVAE(DESCRIPTIONS[kind], ModelSettings(**{**vars(SMALL), **changes})).eval()


def change_step(batch: Batch, row: int, step: int) -> Batch:
    """The same batch, everything different at one step of one sequence."""
    match batch:
        case TokenBatch():
            tokens_BT = batch.tokens_BT.clone()
            tokens_BT[row, step] = (tokens_BT[row, step] + 1) % 5
            return batch._replace(tokens_BT=tokens_BT)
        case VectorBatch():
            values_BTD, observed_BTD = batch.values_BTD.clone(), batch.observed_BTD.clone()
            values_BTD[row, step], observed_BTD[row, step] = 9.0, True
            return batch._replace(values_BTD=values_BTD, observed_BTD=observed_BTD)
        case EventBatch():
            gaps_BT = batch.gaps_BT.clone()
            gaps_BT[row, step] += 77.0
            moved_E = batch.steps_E == row * gaps_BT.shape[1] + step
            return batch._replace(
                gaps_BT=gaps_BT,
                values_E=torch.where(moved_E, 9.0, batch.values_E),
                variables_E=torch.where(moved_E, 2 - batch.variables_E, batch.variables_E),
            )


# --- What the decoder may see ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_step_changes_no_earlier_output(kind):
    vae, batch, z_BZ = make_vae(kind), make_batch(kind, [9, 7]), torch.randn(2, 3)
    changed = change_step(batch, row=0, step=5)
    before_BS, after_BS = vae.decode(batch, z_BZ), vae.decode(changed, z_BZ)
    torch.testing.assert_close(after_BS[0, :5], before_BS[0, :5], rtol=0, atol=1e-6)
    torch.testing.assert_close(after_BS[1], before_BS[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_changes_its_own_and_later_outputs(kind):
    vae, batch, z_BZ = make_vae(kind), make_batch(kind, [9, 7]), torch.randn(2, 3)
    difference_S = (vae.decode(change_step(batch, row=0, step=5), z_BZ) - vae.decode(batch, z_BZ))[0].abs()
    assert (difference_S[5:9] > 1e-4).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_latent_changes_every_step(kind):
    vae, batch = make_vae(kind), make_batch(kind, [6, 6])
    difference_BS = vae.decode(batch, torch.zeros(2, 3)) - vae.decode(batch, torch.ones(2, 3))
    assert (difference_BS.abs() > 1e-5).all()


def test_every_decoder_layer_is_told_the_latent():
    decoder = TransformerDecoder(SMALL)
    decoder(torch.randn(2, 4, 16), torch.randn(2, 3)).square().sum().backward()
    gradient = decoder.latent.weight.grad
    assert gradient is not None
    assert all(layer.abs().sum() > 0 for layer in gradient.chunk(SMALL.depth))


@pytest.mark.parametrize("kind", KINDS)
def test_the_encoder_sees_the_last_step_and_the_order_of_steps(kind):
    vae, batch = make_vae(kind), make_batch(kind, [6])
    mean_BZ = vae.encode(batch).mean_BZ
    assert (vae.encode(change_step(batch, row=0, step=5)).mean_BZ - mean_BZ).abs().max() > 1e-4


# --- Padding and empty batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind):
    vae, z_BZ = make_vae(kind), torch.randn(2, 3)
    tight, loose = make_batch(kind, [6, 4]), make_batch(kind, [6, 4], steps=11)
    torch.testing.assert_close(vae.encode(loose), vae.encode(tight))
    torch.testing.assert_close(vae.decode(loose, z_BZ).sum(1), vae.decode(tight, z_BZ).sum(1))


@pytest.mark.parametrize("kind", KINDS)
def test_padded_steps_cost_nothing(kind):
    vae = make_vae(kind)
    nll_BS = vae.decode(make_batch(kind, [6, 4], steps=11), torch.randn(2, 3))
    counted = 1 if kind == "tokens" else 0
    assert not nll_BS[0, 6 + counted :].any()
    assert not nll_BS[1, 4 + counted :].any()


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_has_no_weight_and_finite_gradients(kind):
    vae = make_vae(kind).train()
    output = vae(make_batch(kind, [0]))
    assert output.nll_B.tolist() == [0.0]
    assert output.steps_B.tolist() == [0]
    assert output.posterior_mean_BZ.isfinite().all()
    (output.nll_B.sum() + output.posterior_mean_BZ.sum() + output.posterior_logvar_BZ.sum()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in vae.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_learns(kind):
    vae = make_vae(kind, word_dropout=0.5).train()
    output = vae(make_batch(kind, [8, 5, 3]))
    (output.nll_B.sum() + output.posterior_logvar_BZ.sum()).backward()
    assert [name for name, p in vae.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize(("kind", "steps"), [("tokens", [6, 4, 0]), ("vectors", [5, 3, 0]), ("events", [5, 3, 0])])
def test_predicted_steps_count_the_end_mark_of_tokens(kind, steps):
    assert make_vae(kind)(make_batch(kind, [5, 3, 0])).steps_B.tolist() == steps


# --- Proper likelihoods ---------------------------------------------------------------------------------------------


def test_token_sequences_up_to_a_length_and_those_longer_have_probability_one():
    torch.manual_seed(0)
    vae = SequenceVAE(DataDescription(kind="tokens", vocabulary_size=2), SMALL).eval()
    longest, z_1Z = 4, torch.randn(1, 3)
    first_hidden_W = vae.decoder(vae.begin_W.expand(1, 1, -1), z_1Z)[0, 0]
    assert isinstance(vae.likelihood, TokenLikelihood)
    nothing = vae.likelihood.scores(first_hidden_W).softmax(dim=-1)[vae.likelihood.end]
    ended = [torch.exp(-score_all_words(vae, length, z_1Z).sum(dim=1)).sum() for length in range(1, longest + 1)]
    longer = torch.exp(-score_all_words(vae, longest + 1, z_1Z)[:, :-1].sum(dim=1)).sum()
    assert (nothing + sum(ended) + longer).item() == pytest.approx(1, abs=1e-5)


def score_all_words(vae: SequenceVAE, length: int, z_1Z: Tensor) -> Tensor:
    """-log p of each step of each of the 2^length words, the end mark last."""
    words_BT = torch.tensor(list(itertools.product(range(2), repeat=length)))
    lengths_B = torch.full((len(words_BT),), length)
    batch = TokenBatch(words_BT, lengths_B, lengths_B, None, step_tokens=1, position=0)
    return vae.decode(batch, z_1Z.expand(len(words_BT), -1)).detach()


def test_feature_densities_are_those_of_independent_gaussians():
    torch.manual_seed(0)
    likelihood, batch = VectorLikelihood(3, 8), make_batch("vectors", [4])
    hidden_BTW = torch.randn(1, 4, 8)
    mean_BTD, raw_BTD = likelihood.moments(hidden_BTW).chunk(2, dim=-1)
    gaussians = torch.distributions.Normal(mean_BTD, torch.exp(3.5 * torch.tanh(raw_BTD / 7)))
    expected_BT = -(gaussians.log_prob(batch.values_BTD) * batch.observed_BTD).sum(dim=-1)
    torch.testing.assert_close(likelihood(hidden_BTW, batch), expected_BT)


def test_a_missing_value_has_no_say_in_the_likelihood():
    likelihood, batch = VectorLikelihood(3, 8), make_batch("vectors", [4])
    hidden_BTW = torch.randn(1, 4, 8)
    poisoned_BTD = torch.where(batch.observed_BTD, batch.values_BTD, 100.0)
    torch.testing.assert_close(
        likelihood(hidden_BTW, batch._replace(values_BTD=poisoned_BTD)), likelihood(hidden_BTW, batch), rtol=0, atol=0
    )


def test_gaps_are_log_normal():
    torch.manual_seed(0)
    likelihood, batch = EventLikelihood(3, 8), make_batch("events", [6])
    hidden_BTW = torch.randn(1, 6, 8)
    mean_BT, raw_BT = likelihood.gap_moments(hidden_BTW).unbind(dim=-1)
    expected_BT = -torch.distributions.LogNormal(mean_BT, torch.exp(3.5 * torch.tanh(raw_BT / 7))).log_prob(
        batch.gaps_BT.clamp(min=1 / 60)
    )
    torch.testing.assert_close(likelihood.gap_nll(hidden_BTW, batch), expected_BT)


def test_the_sets_that_a_step_may_hold_have_probability_one():
    torch.manual_seed(0)
    likelihood, hidden_1W = EventLikelihood(4, 8), torch.randn(1, 8)
    subsets_NV = torch.tensor(list(itertools.product([False, True], repeat=4)))
    nll_N = likelihood.bernoulli(hidden_1W.expand(len(subsets_NV), -1), subsets_NV)
    assert torch.exp(-nll_N).sum().item() == pytest.approx(1, abs=1e-5)


def test_an_event_twice_in_a_step_is_present_once():
    torch.manual_seed(0)
    likelihood, batch = EventLikelihood(3, 8), make_batch("events", [5])
    doubled = batch._replace(
        variables_E=batch.variables_E.repeat_interleave(2), steps_E=batch.steps_E.repeat_interleave(2)
    )
    hidden_NW = torch.randn(5, 8)
    torch.testing.assert_close(likelihood.presence_nll(hidden_NW, doubled), likelihood.presence_nll(hidden_NW, batch))


def test_the_likelihood_of_a_step_is_that_of_its_gap_its_variables_and_their_values():
    """Held against a loop over the steps and events of one sequence."""
    torch.manual_seed(0)
    likelihood, batch = EventLikelihood(3, 8), make_batch("events", [5])
    hidden_BTW = torch.randn(1, 5, 8)
    nll_T = likelihood(hidden_BTW, batch)[0]
    for step in range(5):
        features = torch.cat((hidden_BTW[0, step], time_features(batch.gaps_BT[0, step])))
        hidden_W = hidden_BTW[0, step] + likelihood.after_gap(features)
        mine_E = batch.steps_E == step
        logits_V = likelihood.presence(hidden_W)
        present_V = torch.isin(torch.arange(3), batch.variables_E[mine_E]).float()
        expected = -torch.distributions.Bernoulli(logits=logits_V).log_prob(present_V).sum()
        expected += likelihood.gap_nll(hidden_BTW, batch)[0, step] if step > 0 else 0
        for variable, value, has_value in zip(
            batch.variables_E[mine_E], batch.values_E[mine_E], batch.has_value_E[mine_E], strict=True
        ):
            mean_weight, logvar_weight = likelihood.value_moments(variable).chunk(2)
            code = likelihood.value_code(hidden_W)
            mean, raw = torch.stack((code @ mean_weight, code @ logvar_weight)) + likelihood.value_bias(variable)
            gaussian = torch.distributions.Normal(mean, torch.exp(3.5 * torch.tanh(raw / 7)))
            expected -= gaussian.log_prob(value) * has_value
        torch.testing.assert_close(nll_T[step], expected)


def test_scores_in_slices_equal_scores_at_once(monkeypatch):
    torch.manual_seed(0)
    likelihood, hidden_NW = TokenLikelihood(40, 8), torch.randn(600, 8, requires_grad=True)
    targets_N = torch.randint(0, 41, (600,))
    whole_N = likelihood.cross_entropy(hidden_NW, targets_N)
    (whole_gradient,) = torch.autograd.grad(whole_N.square().sum(), likelihood.scores.weight)
    monkeypatch.setattr("models.likelihoods.SCORES_AT_ONCE", 1)
    sliced_N = by_rows(likelihood.cross_entropy, 41, hidden_NW, targets_N)
    (sliced_gradient,) = torch.autograd.grad(sliced_N.square().sum(), likelihood.scores.weight)
    torch.testing.assert_close(sliced_N, whole_N)
    torch.testing.assert_close(sliced_gradient, whole_gradient, rtol=1e-4, atol=1e-4)


# --- Events, times, positions ---------------------------------------------------------------------------------------


def test_the_order_of_the_events_in_a_step_changes_nothing():
    torch.manual_seed(0)
    embedding, batch = EventEmbedding(3, 16), make_batch("events", [6, 4])
    order = torch.argsort(batch.steps_E * 10 - batch.variables_E)
    shuffled = batch._replace(
        **{name: getattr(batch, name)[order] for name in ("variables_E", "values_E", "has_value_E", "steps_E")}
    )
    torch.testing.assert_close(embedding(shuffled), embedding(batch))


def test_a_value_swapped_between_two_variables_changes_the_set():
    torch.manual_seed(0)
    embedding, batch = EventEmbedding(3, 16), make_batch("events", [1])
    pair = {"variables_E": torch.tensor([0, 2]), "has_value_E": torch.tensor([True, True])}
    pair |= {"steps_E": torch.tensor([0, 0]), "values_E": torch.tensor([-1.0, 1.0])}
    batch = batch._replace(**pair)
    swapped = batch._replace(values_E=torch.tensor([1.0, -1.0]))
    assert (embedding(swapped) - embedding(batch)).abs().max() > 0.1


def test_a_value_of_zero_is_not_a_missing_value():
    torch.manual_seed(0)
    embedding, batch = EventEmbedding(3, 16), make_batch("events", [3])
    zeros_E = torch.zeros_like(batch.values_E)
    measured = embedding(batch._replace(values_E=zeros_E, has_value_E=torch.ones_like(batch.has_value_E)))
    unmeasured = embedding(batch._replace(values_E=zeros_E, has_value_E=torch.zeros_like(batch.has_value_E)))
    assert (measured - unmeasured).abs().max() > 0.1


def test_sums_by_step_equal_a_loop_and_spreading_is_their_adjoint():
    torch.manual_seed(0)
    steps_E = torch.tensor([0, 0, 1, 3, 3, 3])
    offsets = step_offsets(steps_E, 5)
    events_ER, steps_NR = torch.randn(6, 2), torch.randn(5, 2, requires_grad=True)
    expected_NR = torch.stack([events_ER[steps_E == step].sum(dim=0) for step in range(5)])
    torch.testing.assert_close(sum_by_step(events_ER, offsets), expected_NR)
    spread_ER = spread_to_events(steps_NR, steps_E, offsets)
    assert torch.equal(spread_ER, steps_NR[steps_E])
    (spread_ER * events_ER).sum().backward()
    torch.testing.assert_close(steps_NR.grad, expected_NR)


@pytest.mark.parametrize("minutes", [1 / 60, 1.0, 60.0, 24 * 60.0, 30 * 24 * 60.0])
def test_time_features_tell_a_time_from_one_a_tenth_longer(minutes):
    distance = (time_features(torch.tensor(minutes)) - time_features(torch.tensor(1.1 * minutes))).norm()
    assert distance > 0.3


def test_products_of_rotated_vectors_depend_on_their_distance_alone():
    rotary = rotary_angles(torch.zeros(1, 30, 16), heads=2)
    query_K, key_K = torch.randn(2, 8)
    queries_TK, keys_TK = rotate(query_K.expand(30, 8), rotary), rotate(key_K.expand(30, 8), rotary)
    products_TT = queries_TK @ keys_TK.T
    torch.testing.assert_close(products_TT.diagonal(3), products_TT[0, 3].expand(27), rtol=0, atol=1e-4)
    assert products_TT.diagonal(3)[0] != products_TT.diagonal(4)[0]


def test_causal_attention_is_the_softmax_of_scaled_products_over_the_steps_so_far():
    torch.manual_seed(0)
    block, hidden_BTW = Block(ModelSettings(width=8, heads=1, depth=1, dropout=0.0)), torch.randn(1, 5, 8)
    rotary = rotary_angles(hidden_BTW, heads=1)
    query_TK, key_TK, value_TK = block.query_key_value(hidden_BTW)[0].chunk(3, dim=-1)
    scores_TT = rotate(query_TK, rotary) @ rotate(key_TK, rotary).T / math.sqrt(8)
    weights_TT = scores_TT.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf).softmax(dim=-1)
    expected_TW = block.attention_out(weights_TT @ value_TK)
    torch.testing.assert_close(block.attend(hidden_BTW, rotary, None)[0], expected_TW)


# --- Settings -------------------------------------------------------------------------------------------------------


def test_word_dropout_acts_in_training_alone():
    vae, batch, z_BZ = make_vae("tokens", word_dropout=0.5), make_batch("tokens", [40]), torch.zeros(1, 3)
    assert torch.equal(vae.decode(batch, z_BZ), vae.decode(batch, z_BZ))
    vae.train()
    assert not torch.equal(vae.decode(batch, z_BZ), vae.decode(batch, z_BZ))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [({"width": 0}, "--width"), ({"width": 12, "heads": 4}, "--width"), ({"dropout": 1.0}, "--dropout")],
)
def test_impossible_models_are_refused_by_flag(changes, flag):
    with pytest.raises(ValueError, match=flag):
        ModelSettings(**changes)


@pytest.mark.parametrize("frozen", [True, False])
def test_given_vectors_of_variables_are_where_training_starts_and_frozen_ones_where_it_stays(frozen):
    torch.manual_seed(0)
    vectors_VG = 7 * torch.randn(len(NAMES), 5)
    vae = SequenceVAE(DESCRIPTIONS["events"], SMALL, GivenVectors(vectors_VG, frozen))
    (table_VG,) = [value for name, value in vae.named_parameters() if name.endswith("vectors_VG")]
    assert torch.equal(table_VG, vectors_VG)
    vae(make_batch("events", [5, 3])).nll_B.sum().backward()
    assert (table_VG.grad is None) == frozen
    assert table_VG.requires_grad != frozen


def test_given_vectors_tell_variables_apart_on_the_scale_of_drawn_ones():
    torch.manual_seed(0)
    drawn, given = EventEmbedding(1000, 64), EventEmbedding(1000, 64, GivenVectors(30 * torch.randn(1000, 300), True))
    spread = [module.variable_and_slope(torch.arange(1000)).std().item() for module in (drawn, given)]
    assert spread[1] == pytest.approx(spread[0], rel=0.1)
