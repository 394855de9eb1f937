"""The sequence VAE: causal decoders, and nothing that padding or an empty batch could reach.

Shapes: B sequences, T steps (S: with the end mark), V variables, G width of pretrained vectors, Z latent dimensions.
"""

import math

import pytest
import torch

from seqvae.config.model import ModelSettings
from seqvae.models.blocks import AttentionBlock, attention, attention_context, rotate
from seqvae.models.cpu_kernels import Dropout
from seqvae.models.embeddings import PretrainedVectors
from seqvae.models.vae import SequenceVAE
from tests.support.small_models import DESCRIPTIONS, KINDS, NAMES, SMALL, change_step, make_batch, make_vae

# --- What the decoder may see ---------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", KINDS)
def test_the_encoder_sees_the_last_step_and_the_order_of_steps(kind):
    vae, batch = make_vae(kind), make_batch(kind, [6])
    mean_BZ = vae.encode(batch).mean
    assert (vae.encode(change_step(batch, row=0, step=5)).mean - mean_BZ).abs().max() > 1e-4


# --- Padding and empty batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["mean", "max", "last"])
def test_a_posterior_is_made_of_what_pooling_takes_of_the_encoders_vectors(pooling):
    """Neither padding nor the rest of the batch matters; a sequence of length 0 counts as one step."""
    vae, lengths = make_vae("vectors", pooling=pooling), [7, 3, 0, 1]
    batch, padded = make_batch("vectors", lengths), make_batch("vectors", lengths, steps=12)
    with torch.no_grad():
        vectors_BTW = vae.encoder(vae.embedding(batch), torch.arange(7) < batch.lengths_B.clamp(min=1)[:, None])
        found_BW, mask_B = vae.features(batch, vae.embedding(batch))
        of_padded_BW, _ = vae.features(padded, vae.embedding(padded))
    for hidden_TW, length, found_W in zip(vectors_BTW, [7, 3, 1, 1], found_BW, strict=True):
        real_TW = hidden_TW[:length]
        expected = {"mean": real_TW.mean(dim=0), "max": real_TW.amax(dim=0), "last": real_TW[-1]}
        torch.testing.assert_close(found_W, expected[pooling])
    torch.testing.assert_close(of_padded_BW, found_BW)
    assert mask_B.tolist() == [True, True, False, True]


def test_what_pools_nothing_takes_no_pooling():
    with pytest.raises(ValueError, match="--pooling max has no effect with --latent_scope step"):
        ModelSettings(pooling="max", latent_scope="step")


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
    assert output.posterior_mean.isfinite().all()
    (output.nll_B.sum() + output.posterior_mean.sum() + output.posterior_logvar.sum()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in vae.parameters())


@pytest.mark.parametrize(("kind", "steps"), [("tokens", [6, 4, 0]), ("vectors", [5, 3, 0]), ("events", [5, 3, 0])])
def test_predicted_steps_count_the_end_mark_of_tokens(kind, steps):
    assert make_vae(kind)(make_batch(kind, [5, 3, 0])).steps_B.tolist() == steps


# --- Positions and attention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("latent_scope", ["sequence", "step"])
def test_a_sequence_that_is_cut_off_costs_its_steps_and_no_end_mark(latent_scope):
    vae = make_vae("tokens", latent_scope=latent_scope)
    whole = make_batch("tokens", [6, 4])
    cut = whole._replace(ends_B=torch.tensor([False, True]))
    z = torch.randn(2, *([7] if latent_scope == "step" else []), 3)
    expected_BS = vae.decode(whole, z)
    expected_BS[0, 6] = 0.0
    assert torch.equal(vae.decode(cut, z), expected_BS)
    output = vae(cut)
    assert output.steps_B.tolist() == [6, 5]
    if latent_scope == "step":  # nor has it a latent for one
        assert output.posterior_mask.sum(dim=1).tolist() == [6, 5]


@pytest.mark.parametrize("latent_scope", ["sequence", "step"])
def test_where_all_sequences_end_the_flag_changes_no_bit(latent_scope):
    vae = make_vae("tokens", latent_scope=latent_scope)
    batch = make_batch("tokens", [6, 4, 1])
    flagged = batch._replace(ends_B=torch.ones(3).bool())
    for one, other in zip(vae(batch, at_mean=True), vae(flagged, at_mean=True), strict=True):
        assert one is other or torch.equal(one, other)


def test_products_of_rotated_vectors_depend_on_their_distance_alone():
    context = attention_context(torch.zeros(1, 30, 16), heads=2)
    query_K, key_K = torch.randn(2, 8)
    queries_TK, keys_TK = rotate(query_K.expand(30, 8), context), rotate(key_K.expand(30, 8), context)
    products_TT = queries_TK @ keys_TK.T
    torch.testing.assert_close(products_TT.diagonal(3), products_TT[0, 3].expand(27), rtol=0, atol=1e-4)
    assert products_TT.diagonal(3)[0] != products_TT.diagonal(4)[0]


def test_causal_attention_is_the_softmax_of_scaled_products_over_the_steps_so_far():
    torch.manual_seed(0)
    block, hidden_BTW = AttentionBlock(ModelSettings(width=8, heads=1, depth=1, dropout=0.0)), torch.randn(1, 5, 8)
    context = attention_context(hidden_BTW, heads=1)
    packed_BTX = block.queries_keys_values(hidden_BTW)
    query_TK, key_TK, value_TK = packed_BTX[0].chunk(3, dim=-1)
    scores_TT = rotate(query_TK, context) @ rotate(key_TK, context).T / math.sqrt(8)
    weights_TT = scores_TT.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf).softmax(dim=-1)
    for use_kernel in (True, False):
        context = attention_context(hidden_BTW, heads=1, use_kernel=use_kernel)
        torch.testing.assert_close(attention(packed_BTX, context, heads=1)[0], weights_TT @ value_TK)


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
def test_pretrained_vectors_of_variables_are_where_training_starts_and_frozen_ones_where_it_stays(frozen):
    torch.manual_seed(0)
    vectors_VG = 7 * torch.randn(len(NAMES), 5)
    vae = SequenceVAE(DESCRIPTIONS["events"], SMALL, PretrainedVectors(vectors_VG, frozen))
    (table_VG,) = [value for name, value in vae.named_parameters() if name.endswith("vectors_VG")]
    assert torch.equal(table_VG, vectors_VG)
    vae(make_batch("events", [5, 3])).nll_B.sum().backward()
    assert (table_VG.grad is None) == frozen
    assert table_VG.requires_grad != frozen


@pytest.mark.parametrize("share", [0.1, 0.5, 0.97])
def test_dropout_keeps_the_mean_and_sets_its_share_to_zero_in_training_alone(share):
    torch.manual_seed(0)
    dropout, ones = Dropout(share), torch.ones(999, 1001, requires_grad=True)
    dropped = dropout(ones)
    assert (dropped == 0).float().mean().item() == pytest.approx(share, abs=3e-3)
    torch.testing.assert_close(dropped[dropped > 0].unique(), torch.tensor([1 / (1 - share)]))
    dropped.sum().backward()
    assert ones.grad is not None
    assert torch.equal(ones.grad, dropped.detach())
    assert torch.equal(dropout.eval()(ones), ones)


def test_dropout_falls_on_every_number_independently():
    torch.manual_seed(0)
    kept = (Dropout(0.5)(torch.ones(100_000, 8)) > 0).float()
    torch.testing.assert_close(torch.corrcoef(kept.T), torch.eye(8), rtol=0, atol=0.02)
    assert not torch.equal(kept[0::2], kept[1::2])


def test_the_seed_of_torch_decides_on_what_dropout_falls():
    dropout, ones = Dropout(0.5), torch.ones(1000)
    torch.manual_seed(7)
    first, second = dropout(ones), dropout(ones)
    torch.manual_seed(7)
    assert torch.equal(dropout(ones), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("encoder", "decoder"), [("transformer", "lstm"), ("lstm", "transformer"), ("tcn", "parallel")]
)
def test_heads_must_divide_the_width_where_there_is_attention(encoder, decoder):
    with pytest.raises(ValueError, match="--heads"):
        ModelSettings(width=20, heads=4, encoder=encoder, decoder=decoder)


def test_heads_matter_to_nothing_but_attention():
    assert ModelSettings(width=20, heads=4, encoder="lstm", decoder="tcn").width == 20


def test_an_odd_width_is_refused():
    with pytest.raises(ValueError, match="--width"):
        ModelSettings(width=21, encoder="lstm", decoder="lstm")
