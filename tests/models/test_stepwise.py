"""Decoding step by step returns what decoding all at once does, whichever sequences are left out of it.

Shapes: B sequences, T steps, W width, Z latent dimensions.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from seqvae.models.backbones import Decoder
from seqvae.models.noise import Noise
from seqvae.models.sampling import Stepwise, sample, sample_prior
from tests.support.small_models import KINDS, make_vae

DECODERS = ("transformer", "lstm", "tcn", "parallel")
STEPS = 40
"""More than the first room for steps, and more than convolutions of the first four distances reach."""


def all_at_once(vae, z: Tensor, inputs_BTW: Tensor) -> Tensor:
    return vae.decoder(inputs_BTW, z)


@torch.no_grad()
def step_by_step(vae, z: Tensor, inputs_BTW: Tensor, lengths_B: Tensor) -> Tensor:
    read = Stepwise(vae.decoder, vae.begin_W, z, inputs_BTW.shape[1])
    return torch.stack(
        [read(before_BW, step < lengths_B) for step, before_BW in enumerate(inputs_BTW.unbind(1))], dim=1
    )


@pytest.mark.parametrize("scope", ["sequence", "step"])
@pytest.mark.parametrize("decoder", DECODERS)
def test_the_vector_of_each_step_is_the_one_that_it_has_when_the_whole_sequence_is_known(decoder, scope):
    vae = make_vae("vectors", decoder=decoder, latent_scope=scope)
    z = torch.randn(3, STEPS, 3) if scope == "step" else torch.randn(3, 3)
    inputs_BTW = torch.cat((vae.begin_W.expand(3, 1, -1), torch.randn(3, STEPS - 1, 16)), dim=1)
    hidden_BTW = step_by_step(vae, z, inputs_BTW, torch.full((3,), STEPS))
    torch.testing.assert_close(hidden_BTW, all_at_once(vae, z, inputs_BTW), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scope", ["sequence", "step"])
@pytest.mark.parametrize("decoder", DECODERS)
def test_sequences_that_have_ended_change_nothing_for_the_others(decoder, scope):
    vae, lengths_B = make_vae("vectors", decoder=decoder, latent_scope=scope), torch.tensor([3, 40, 0, 17, 21, 2])
    z = torch.randn(6, STEPS, 3) if scope == "step" else torch.randn(6, 3)
    inputs_BTW = torch.cat((vae.begin_W.expand(6, 1, -1), torch.randn(6, STEPS - 1, 16)), dim=1)
    hidden_BTW = step_by_step(vae, z, inputs_BTW, lengths_B)
    real_BT = torch.arange(STEPS) < lengths_B[:, None]
    expected_BTW = all_at_once(vae, z, inputs_BTW)
    torch.testing.assert_close(hidden_BTW[real_BT], expected_BTW[real_BT], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_sequences_that_have_ended_are_left_out_of_the_computation():
    vae = make_vae("tokens")
    read, sizes = Stepwise(vae.decoder, vae.begin_W, torch.randn(8, 3), 6), []
    for going in (8, 7, 6, 5, 1, 0):
        read(vae.begin_W.expand(8, -1), torch.arange(8) < going)
        sizes.append(len(read.pasts[0][0]))
    assert sizes == [8, 8, 8, 5, 1, 1]


def test_convolutions_remember_as_far_as_they_look():
    """520 steps: the farthest convolution of two layers looks back 486."""
    vae, z_BZ = make_vae("vectors", decoder="tcn"), torch.randn(1, 3)
    inputs_BTW = torch.cat((vae.begin_W.expand(1, 1, -1), torch.randn(1, 519, 16)), dim=1)
    hidden_BTW = step_by_step(vae, z_BZ, inputs_BTW, torch.tensor([520]))
    torch.testing.assert_close(hidden_BTW, all_at_once(vae, z_BZ, inputs_BTW), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scope", ["sequence", "step"])
@pytest.mark.parametrize("decoder", ["transformer", "lstm", "tcn"])
@pytest.mark.parametrize("kind", KINDS)
def test_at_temperature_zero_each_step_is_the_most_likely_after_those_that_were_drawn(kind, decoder, scope):
    """The embedding of one step alone, times of events included, is the one that it has in its sequence."""
    vae, lengths_B = make_vae(kind, decoder=decoder, latent_scope=scope), torch.tensor([20, 5, 1])
    z = torch.randn(3, 21, 3) if scope == "step" else torch.randn(3, 3)
    drawn: Any = sample(vae, z, lengths_B, temperature=0, noise=Noise(0, torch.arange(3)))
    before_BTW = vae.embedding(drawn)
    inputs_BTW = torch.cat((vae.begin_W.expand(3, 1, -1), before_BTW), dim=1)[:, : before_BTW.shape[1]]
    hidden_BTW = all_at_once(vae, z[:, : inputs_BTW.shape[1]] if scope == "step" else z, inputs_BTW)
    real_BT = torch.arange(inputs_BTW.shape[1]) < drawn.lengths_B[:, None]
    likelihood: Any = vae.likelihood
    match kind:
        case "tokens":
            assert torch.equal(likelihood.scores(hidden_BTW).argmax(dim=-1)[real_BT], drawn.tokens_BT[real_BT])
        case "vectors":
            torch.testing.assert_close(likelihood.predict(hidden_BTW)[0][real_BT], drawn.values_BTD[real_BT])
        case "events":
            real_BT[:, 0] = False  # the first gap is 0
            mean_BT, _ = likelihood.predict_gaps(hidden_BTW)
            expected_BT = (mean_BT * likelihood.gap_scale.log_std + likelihood.gap_scale.log_mean).exp()
            torch.testing.assert_close(expected_BT[real_BT], drawn.gaps_BT[real_BT])
            hidden_NW = likelihood.condition_on_gaps(hidden_BTW, drawn.gaps_BT).flatten(0, 1)
            values_NV = likelihood.value_moments.of_all(hidden_NW)[..., 0]
            expected_E = values_NV[drawn.steps_E, drawn.variables_E]
            assert drawn.has_value_E.any()
            torch.testing.assert_close(expected_E[drawn.has_value_E], drawn.values_E[drawn.has_value_E])


@pytest.mark.parametrize("decoder", ["transformer", "lstm", "tcn"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_draws_what_it_draws_when_all_steps_are_read_again(kind, decoder, monkeypatch):
    """Sequences that have ended and are left out change nothing in the noise of the others."""
    vae, lengths_B = make_vae(kind, decoder=decoder), torch.tensor([12, 1, 3, 12, 0, 7, 2])
    stepwise: Any = sample_prior(vae, lengths_B, noise=Noise(3, torch.arange(7)))
    monkeypatch.setattr("seqvae.models.sampling.Stepwise", reads_all_again)
    again: Any = sample_prior(vae, lengths_B, noise=Noise(3, torch.arange(7)))
    for one, other in zip(stepwise, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def reads_all_again(decoder: Decoder, begin_W: Tensor, z: Tensor, steps: int) -> Callable[[Tensor, Tensor], Tensor]:
    inputs: list[Tensor] = []

    def read(before_BW: Tensor, going_B: Tensor) -> Tensor:
        inputs.append(before_BW)
        return decoder(torch.stack(inputs, dim=1), z)[:, -1]

    return read
