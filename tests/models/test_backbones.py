"""Backbones: what each encoder and decoder may see, whatever the kind of sequence, and that each computes what it is named for.

Shapes: B sequences, T steps (S: with the end mark), W width, K numbers of a head, Z latent dimensions.
"""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from seqvae.config.model import ModelSettings
from seqvae.models.backbones import Decoder, Encoder, position_waves
from seqvae.models.blocks import BidirectionalBlock, Convolution, ConvolutionBlock, opposite_steps
from seqvae.models.cpu_kernels import HasCpuKernel
from seqvae.models.likelihoods import real_steps
from seqvae.models.vae import SequenceVAE, VAEOutput
from tests.support.small_models import DESCRIPTIONS, KINDS, SMALL, change_step, make_batch, make_vae

ENCODERS = ("transformer", "lstm", "tcn")
DECODERS = ("transformer", "lstm", "tcn", "parallel")
SCOPES = ("sequence", "step")


def settings(**changes: Any) -> ModelSettings:
    return ModelSettings(**{**vars(SMALL), **changes})


def random_z(vae: SequenceVAE, batch: Any) -> Tensor:
    """Draw a z of the shape that the model's posterior has."""
    return torch.randn_like(vae.encode(batch).mean)


def total(output: VAEOutput) -> Tensor:
    """Return a sum that every output of a model is part of."""
    scores = 0 if output.class_scores_BC is None else output.class_scores_BC.square().sum()
    posterior = output.posterior_mean.square() + output.posterior_logvar.square()
    return output.nll_B.sum() + (posterior * output.posterior_mask[..., None]).sum() + scores


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("decoder", DECODERS)
def test_every_parameter_of_every_network_learns(encoder, decoder, kind, scope):
    torch.manual_seed(0)
    model = settings(encoder=encoder, decoder=decoder, latent_scope=scope, word_dropout=0.5)
    vae = SequenceVAE(replace(DESCRIPTIONS[kind], classes=("a", "b")), model).train()
    output = vae(make_batch(kind, [8, 5, 3, 0]))
    total(output).backward()
    gradients = {name: p.grad for name, p in vae.named_parameters() if p.requires_grad}
    assert [
        name for name, grad in gradients.items() if grad is None or not grad.isfinite().all() or not grad.any()
    ] == []
    assert output.nll_B[3] == 0


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("encoder", "decoder", "posterior"),
    [
        ("transformer", "lstm", "gaussian"),
        ("lstm", "tcn", "batch_norm"),
        ("tcn", "parallel", "gaussian"),
    ],
)
def test_no_shape_depends_on_the_data(encoder, decoder, posterior, kind, scope, monkeypatch):
    """Tensors here have a shape and no data: code that looks at data, and would make a GPU wait, fails.

    The kernels for CPUs may look.
    """
    monkeypatch.setattr(HasCpuKernel, "use_kernel", lambda self, tensor: False)
    batch = make_batch(kind, [8, 5, 3])
    with FakeTensorMode() as mode:
        vae = make_vae(kind, encoder=encoder, decoder=decoder, latent_scope=scope, posterior=posterior).train()
        fake = {name: mode.from_tensor(value) for name, value in batch._asdict().items() if isinstance(value, Tensor)}
        total(vae(batch._replace(**fake))).backward()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("encoder", "decoder"), [*zip(ENCODERS, ENCODERS, strict=True), ("lstm", "parallel")])
def test_bf16_is_near_float32_and_keeps_gaussians_in_float32(encoder, decoder, kind):
    vae, batch = make_vae(kind, encoder=encoder, decoder=decoder), make_batch(kind, [8, 5, 3])
    with torch.autocast("cpu", torch.bfloat16):
        posterior = vae.encode(batch)
        nll_B = vae.nll_given_z(batch, posterior.mean)
    expected = vae.encode(batch)
    assert posterior.mean.dtype == posterior.logvar.dtype == nll_B.dtype == torch.float32
    torch.testing.assert_close(posterior, expected, rtol=0.05, atol=0.05)
    torch.testing.assert_close(nll_B, vae.nll_given_z(batch, expected.mean), rtol=0.02, atol=0.2)


# --- Encoders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("encoder", ENCODERS)
def test_padding_changes_no_posterior(encoder, kind, scope):
    vae = make_vae(kind, encoder=encoder, latent_scope=scope)
    tight, loose = vae.encode(make_batch(kind, [6, 4])), vae.encode(make_batch(kind, [6, 4], steps=11))
    for one, other in ((tight.mean, loose.mean), (tight.logvar, loose.logvar)):
        if scope == "step":
            one, other = one * tight.mask[..., None], (other * loose.mask[..., None])[:, : one.shape[1]]
        torch.testing.assert_close(other, one)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_the_encoding_of_a_step_depends_on_every_real_step_and_on_nothing_else(encoder):
    torch.manual_seed(0)
    network, real_BT = Encoder(settings(encoder=encoder)), real_steps(torch.tensor([7, 4]), 7)
    steps_BTW = torch.randn(2, 7, 16, requires_grad=True)
    hidden_BTW = network(steps_BTW, real_BT)
    for step in range(4):
        (gradient_BTW,) = torch.autograd.grad(hidden_BTW[1, step].square().sum(), steps_BTW, retain_graph=True)
        assert (gradient_BTW[1].abs().sum(dim=-1) > 1e-7).tolist() == [True] * 4 + [False] * 3
        assert not gradient_BTW[0].any()


def test_reading_in_both_directions_is_what_a_packed_bidirectional_lstm_does():
    torch.manual_seed(0)
    block, lengths_B = BidirectionalBlock(SMALL), torch.tensor([7, 4, 1])
    steps_BTW = torch.randn(3, 7, 16)
    reference = nn.LSTM(16, 16, batch_first=True, bidirectional=True)
    reference.load_state_dict(
        dict(block.forwards.state_dict())
        | {f"{name}_reverse": value for name, value in block.backwards.state_dict().items()}
    )
    packed = nn.utils.rnn.pack_padded_sequence(block.norm(steps_BTW), lengths_B, batch_first=True)
    both_BTV, _ = nn.utils.rnn.pad_packed_sequence(reference(packed)[0], batch_first=True)
    real_BT = real_steps(lengths_B, 7)
    found_BTW = block(steps_BTW, opposite_steps(real_BT))
    torch.testing.assert_close(found_BTW[real_BT], (steps_BTW + block.out(both_BTV))[real_BT])


# --- Decoders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decoder", DECODERS)
def test_a_later_step_changes_no_earlier_nll(decoder, kind):
    vae, batch = make_vae(kind, decoder=decoder), make_batch(kind, [9, 7])
    z_BZ = random_z(vae, batch)
    before_BS, after_BS = vae.decode(batch, z_BZ), vae.decode(change_step(batch, row=0, step=5), z_BZ)
    torch.testing.assert_close(after_BS[0, :5], before_BS[0, :5], rtol=0, atol=1e-6)
    torch.testing.assert_close(after_BS[1], before_BS[1], rtol=0, atol=1e-6)
    assert (after_BS - before_BS)[0, 5].abs() > 1e-4


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("decoder", DECODERS)
def test_the_latent_reaches_its_step_and_all_later_ones_alone(decoder, scope):
    vae, batch = make_vae("tokens", decoder=decoder, latent_scope=scope), make_batch("tokens", [5])
    z = random_z(vae, batch).requires_grad_()
    for step, nll in enumerate(vae.decode(batch, z)[0]):
        (gradient,) = torch.autograd.grad(nll, z, retain_graph=True)
        if scope == "sequence":
            assert (gradient.abs() > 1e-6).all()
        else:
            assert (gradient[0].abs() > 1e-7).all(dim=1).tolist() == [True] * (step + 1) + [False] * (5 - step)
            assert not gradient[0, step + 1 :].any()


@pytest.mark.parametrize("decoder", ["transformer", "lstm", "tcn"])
def test_a_step_looks_at_all_inputs_up_to_its_own(decoder):
    torch.manual_seed(0)
    network, inputs_BTW = Decoder(settings(decoder=decoder)), torch.randn(1, 9, 16, requires_grad=True)
    assert network.autoregressive
    last_W = network(inputs_BTW, torch.randn(1, 3))[0, -1]
    (gradient_BTW,) = torch.autograd.grad(last_W.square().sum(), inputs_BTW)
    assert (gradient_BTW.abs().sum(dim=-1) > 1e-8).all()


def test_the_parallel_decoder_looks_at_positions_alone():
    torch.manual_seed(0)
    network, z_BZ = Decoder(settings(decoder="parallel")), torch.randn(1, 3)
    inputs_BTW = torch.randn(1, 40, 16)
    others_BTW = torch.cat((inputs_BTW[:, :1], torch.randn(1, 39, 16)), dim=1)
    hidden_BTW = network(inputs_BTW, z_BZ)
    assert not network.autoregressive
    assert torch.equal(network(others_BTW, z_BZ), hidden_BTW)
    assert torch.pdist(hidden_BTW[0]).min() > 0.05


@pytest.mark.parametrize("decoder", DECODERS)
def test_no_step_knows_how_many_follow(decoder):
    vae, longer = make_vae("tokens", decoder=decoder), make_batch("tokens", [9])
    shorter = longer._replace(tokens_BT=longer.tokens_BT[:, :4], lengths_B=torch.tensor([4]))
    z_BZ = random_z(vae, longer)
    torch.testing.assert_close(vae.decode(shorter, z_BZ)[:, :4], vae.decode(longer, z_BZ)[:, :4])


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_prefix_is_decoded_as_in_the_whole(decoder):
    """Drawing sequences step by step rests on this."""
    torch.manual_seed(0)
    network, inputs_BTW, z_BTZ = Decoder(settings(decoder=decoder)), torch.randn(2, 9, 16), torch.randn(2, 9, 3)
    torch.testing.assert_close(network(inputs_BTW[:, :4], z_BTZ[:, :4]), network(inputs_BTW, z_BTZ)[:, :4])


@pytest.mark.parametrize("decoder", DECODERS)
def test_every_decoder_layer_gets_the_latent(decoder):
    network = Decoder(settings(decoder=decoder))
    network(torch.randn(2, 4, 16), torch.randn(2, 3)).square().sum().backward()
    gradient = network.latent.weight.grad
    assert gradient is not None
    assert all(layer.abs().sum() > 0 for layer in gradient.chunk(SMALL.depth))


# --- One latent for each step ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_predicted_step_has_a_latent_and_nothing_else_has(kind):
    vae = make_vae(kind, latent_scope="step")
    output = vae(make_batch(kind, [5, 3, 0]))
    assert torch.equal(output.posterior_mask.sum(dim=1), output.steps_B)
    assert output.posterior_mean.shape == (*output.posterior_mask.shape, 3)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_the_latent_of_the_end_mark_knows_the_sequence_and_is_known_to_it(encoder):
    vae, batch = make_vae("tokens", encoder=encoder, latent_scope="step"), make_batch("tokens", [5])
    mean_BSZ = vae.encode(batch).mean
    moved_BSZ = vae.encode(change_step(batch, row=0, step=4)).mean
    assert (moved_BSZ - mean_BSZ)[0, 5].abs().max() > 1e-5
    with torch.no_grad():
        vae.end_W.add_(torch.randn(16))
    assert ((vae.encode(batch).mean - mean_BSZ)[0].abs().amax(dim=1) > 1e-5).all()


# --- The pieces -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("distance", [1, 3, 27])
def test_a_convolution_is_torchs_dilated_one(distance, causal):
    torch.manual_seed(0)
    convolution, steps_BTW = Convolution(SMALL, distance, causal=causal), torch.randn(2, 11, 16)
    kernel = convolution.around.weight.unflatten(1, (-1, 16)).transpose(1, 2)
    padding = (2 * distance, 0 if causal else 2 * distance)
    inputs_BWT = F.pad(convolution.norm(steps_BTW).transpose(1, 2), padding)
    around_BTW = F.conv1d(inputs_BWT, kernel, convolution.around.bias, dilation=distance).transpose(1, 2)
    expected_BTW = steps_BTW + convolution.out(F.gelu(around_BTW))
    torch.testing.assert_close(convolution(steps_BTW, None), expected_BTW)


def test_two_blocks_of_convolutions_see_729_steps():
    blocks = [ConvolutionBlock(SMALL, layer, causal=True) for layer in range(2)]
    steps_BTW = torch.randn(1, 800, 16, requires_grad=True)
    hidden_BTW: Tensor = steps_BTW
    for block in blocks:
        hidden_BTW = block(hidden_BTW, None)
    (gradient_BTW,) = torch.autograd.grad(hidden_BTW[0, -1].square().sum(), steps_BTW)
    assert gradient_BTW[0].any(dim=-1).nonzero().flatten().tolist() == list(range(800 - 729, 800))


def test_waves_distinguish_a_thousand_positions():
    assert torch.pdist(position_waves(1000, 16, torch.device("cpu"))).min() > 0.3


# --- Memory and compilation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", DECODERS)
def test_gradient_checkpointing_changes_neither_loss_nor_gradients(decoder):
    encoder = "transformer" if decoder == "parallel" else decoder
    batch, losses, gradients = make_batch("vectors", [8, 5, 3]), [], []
    for checkpointing in (False, True):
        vae = make_vae("vectors", encoder=encoder, decoder=decoder, dropout=0.3).train()
        if checkpointing:
            vae.use_gradient_checkpointing()
        torch.manual_seed(1)
        loss = total(vae(batch))
        loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad for p in vae.parameters() if p.requires_grad])
    assert losses[0] == losses[1]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


def test_gradient_checkpointing_keeps_less():
    def kept(checkpointing: bool) -> int:
        vae, sizes = make_vae("vectors").train(), []
        if checkpointing:
            vae.use_gradient_checkpointing()

        def count(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            vae(make_batch("vectors", [30, 30]))
        return sum(sizes)

    assert kept(True) < 0.3 * kept(False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch 2.13 warns of what its own compiler does
@pytest.mark.parametrize("architecture", ["transformer", "tcn"])
def test_compiled_layers_keep_names_and_numbers_and_are_compiled_once_for_all_lengths(architecture):
    batches = [make_batch("tokens", [steps] * sequences) for sequences, steps in ((9, 20), (7, 31), (40, 3), (3, 47))]
    vae = make_vae("tokens", encoder=architecture, decoder=architecture).train()
    compiled = copy.deepcopy(vae)
    compiled.compile_inner("default")
    assert list(compiled.state_dict()) == list(vae.state_dict())
    torch._dynamo.reset()
    graphs = []
    for batch in batches:
        mean, expected = compiled.encode(batch).mean, vae.encode(batch).mean
        torch.testing.assert_close(mean, expected, rtol=1e-4, atol=1e-5)
        z_BZ = torch.randn(len(expected), 3)
        torch.testing.assert_close(
            compiled.nll_given_z(batch, z_BZ), vae.nll_given_z(batch, z_BZ), rtol=1e-4, atol=1e-4
        )
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs == [graphs[0]] * len(batches)
