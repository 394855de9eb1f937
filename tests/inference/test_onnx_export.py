"""ONNX files compute what the network does: the posteriors of real batches, and the distribution of each of their steps."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqvae.config.inference import DataChoices
from seqvae.config.model import ModelSettings
from seqvae.data.batch import Batch, EventBatch, TokenBatch, VectorBatch, predicted_steps
from seqvae.data.description import DataDescription
from seqvae.errors import UsageError
from seqvae.inference import onnx_export
from seqvae.inference.model import Model, open_data
from seqvae.inference.onnx_export import CONFIG, DECODER_STEP, ENCODER, PACKAGES, graphs_of, write_onnx
from seqvae.models.likelihoods import EventLikelihood, gap_nll, robust_nll
from seqvae.models.vae import SequenceVAE
from tests.support.trained_models import KINDS, make_checkpoint

NETWORKS = (("transformer", "transformer"), ("lstm", "lstm"), ("tcn", "tcn"), ("lstm", "parallel"))
"""Encoders and decoders, each once."""
SCOPES = ("sequence", "step", "both")
missing = [name for name in PACKAGES if find_spec(name) is None]
needs_onnx = pytest.mark.skipif(bool(missing), reason=f"the extra onnx is not installed: no {', '.join(missing)}")

Run = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Computes the outputs of a file, by name, from its inputs."""


def model_of(directory: Path, kind: str, **changes: Any) -> Model:
    settings = ModelSettings(**{"width": 16, "depth": 2, "heads": 2, "latent_size": 3, **changes})
    return Model.load(make_checkpoint(directory, kind, settings), device="cpu")


def in_torch(model: Model) -> tuple[Run, Run]:
    """What the files are made of, before they are."""
    network = model.network.eval()

    def run_of(number: int) -> Run:
        graph = graphs_of(network)[number]
        module = graph.module(network)

        def run(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            with torch.no_grad():
                outputs = module(*(inputs[port.name] for port in graph.inputs))
            return dict(zip((port.name for port in graph.outputs), outputs, strict=True))

        return run

    return run_of(0), run_of(1)


def in_onnxruntime(directory: Path) -> tuple[Run, Run]:
    import onnxruntime

    about = json.loads((directory / CONFIG).read_text())["files"]

    def run_of(name: str) -> Run:
        session = onnxruntime.InferenceSession(directory / name, providers=["CPUExecutionProvider"])
        names = [port["name"] for port in about[name]["outputs"]]
        used = [one.name for one in session.get_inputs()]
        assert set(used) <= {port["name"] for port in about[name]["inputs"]}

        def run(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            outputs = session.run(names, {name: inputs[name].numpy() for name in used})
            return dict(zip(names, map(torch.from_numpy, outputs), strict=True))

        return run

    return run_of(ENCODER), run_of(DECODER_STEP)


def real_batch(model: Model) -> Batch:
    """Sequences of 1 to 9 steps."""
    return open_data(model, DataChoices(split="test")).split("test").gather(np.arange(12))


def as_inputs(batch: Batch) -> dict[str, Tensor]:
    match batch:
        case TokenBatch():
            named = {"tokens": batch.tokens_BT, "ends": torch.ones_like(batch.lengths_B, dtype=torch.bool)}
        case VectorBatch():
            named = {"values": batch.values_BTD, "observed": batch.observed_BTD}
        case EventBatch():
            events = {"variables": batch.variables_E, "values": batch.values_E, "has_value": batch.has_value_E}
            named = {"gaps": batch.gaps_BT, **events, "event_steps": batch.steps_E}
    return {**named, "lengths": batch.lengths_B}


def first_steps(batch: Batch, steps: int) -> Batch:
    """The batch as it was after so many steps, padded to one where there are none; nothing is left of what came later."""
    width = max(steps, 1)
    changed: dict[str, Any] = {"lengths_B": batch.lengths_B.clamp(max=steps)}
    for name, value in batch._asdict().items():
        if "_BT" in name:
            changed[name] = value[:, :width] * (steps > 0)
    if isinstance(batch, EventBatch):
        rows_E, steps_E = batch.steps_E // batch.gaps_BT.shape[1], batch.steps_E % batch.gaps_BT.shape[1]
        kept_E = steps_E < steps
        events = {name: getattr(batch, name)[kept_E] for name in ("variables_E", "values_E", "has_value_E")}
        changed |= {**events, "steps_E": rows_E[kept_E] * width + steps_E[kept_E]}
    return batch._replace(**changed)


def nll_of_step(model: Model, batch: Batch, step: int, found: dict[str, Tensor]) -> Tensor:
    """-log p of what came at a step, (B,), by the parameters that the decoder step returned."""
    if isinstance(batch, TokenBatch):
        ids_B = F.pad(batch.tokens_BT, (0, 1))[:, step].masked_fill(
            batch.lengths_B == step, found["log_p"].shape[1] - 1
        )
        return -found["log_p"].gather(1, ids_B[:, None]).squeeze(1)
    if isinstance(batch, VectorBatch):
        nll_BD = robust_nll(batch.values_BTD[:, step], found["mean"], found["logvar"])
        return (nll_BD * batch.observed_BTD[:, step]).sum(dim=1)
    likelihood, here_E = model.network.likelihood, batch.steps_E % batch.gaps_BT.shape[1] == step
    assert isinstance(likelihood, EventLikelihood)
    rows_E, variables_E = batch.steps_E[here_E] // batch.gaps_BT.shape[1], batch.variables_E[here_E]
    present_BV = torch.zeros_like(found["present_logit"])
    present_BV[rows_E, variables_E] = 1.0
    nll_B = F.binary_cross_entropy_with_logits(found["present_logit"], present_BV, reduction="none").sum(dim=1)
    of_events = (found[name][rows_E, variables_E] for name in ("value_mean", "value_logvar"))
    nll_E = robust_nll(batch.values_E[here_E], *of_events) * batch.has_value_E[here_E]
    gap_B = gap_nll(batch.gaps_BT[:, step], found["gap_mean"], found["gap_logvar"], likelihood.gap_scale)
    return nll_B.index_add(0, rows_E, nll_E) + gap_B * (step > 0)


def hold_against_network(model: Model, encoder: Run, decoder_step: Run) -> None:
    """Read a batch step by step, and compare posteriors and NLL with what the network has of the whole batch at once."""
    network, batch = model.network, real_batch(model)
    with torch.no_grad():
        expected = network.latents(batch, at_mean=True)
        nll_BS = network.decode(batch, expected.z)
    found = encoder(as_inputs(batch))
    of_posterior = expected.posterior.mask[..., None]
    of_z = of_posterior if expected.steps is None else expected.steps.relative.mask[..., None]
    for name, tensor, is_there in (
        ("mean", expected.posterior.mean, of_posterior),
        ("logvar", expected.posterior.logvar, of_posterior),
        ("latent", expected.z, of_z),
    ):
        torch.testing.assert_close(found[name], tensor * is_there, atol=1e-4, rtol=1e-4)
    z = F.pad(expected.z, (0, 0, 0, 1)) if network.has_step_latents else expected.z
    steps_B = predicted_steps(batch)
    for step in range(int(steps_B.max())):
        so_far = as_inputs(first_steps(batch, step))
        if isinstance(batch, EventBatch):
            so_far["next_gap"] = batch.gaps_BT[:, step]
        so_far["z"] = z[:, : max(step, 1) + 1] if network.has_step_latents else z
        came_B = step < steps_B
        nll_B = nll_of_step(model, batch, step, decoder_step(so_far))
        torch.testing.assert_close(nll_B[came_B], nll_BS[came_B, step], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("kind", KINDS)
def test_step_by_step_comes_to_the_likelihood_of_whole_sequences(kind, scope, tmp_path):
    model = model_of(tmp_path, kind, latent_scope=scope, decoder="parallel" if scope == "step" else "transformer")
    hold_against_network(model, *in_torch(model))


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_log_probabilities_of_ids_and_the_end_mark_are_those_of_a_distribution(share):
    description = DataDescription(kind="tokens", vocabulary_size=5, unknown_share=share)
    likelihood: Any = SequenceVAE(description, ModelSettings(width=8, heads=1, depth=1)).likelihood
    log_p_BV = onnx_export.log_p_of(likelihood, torch.randn(7, 8))
    torch.testing.assert_close(log_p_BV.exp().sum(dim=1), torch.ones(7))
    assert bool((log_p_BV[:, 0].exp() >= share).all())


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize(("encoder", "decoder"), NETWORKS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_files_of_every_network_compute_what_it_does(kind, encoder, decoder, tmp_path):
    model = model_of(tmp_path / "run", kind, encoder=encoder, decoder=decoder)
    directory = model.export_onnx(tmp_path / "onnx")
    hold_against_network(model, *in_onnxruntime(directory))
    assert str(Path(onnx_export.__file__).parent).encode() not in (directory / DECODER_STEP).read_bytes()


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changes", [{"latent_scope": "step", "posterior": "batch_norm"}, {"latent_scope": "both"}, {"prior": "vamp"}]
)
def test_so_do_those_of_other_latents(kind, changes, tmp_path):
    model = model_of(tmp_path / "run", kind, **changes)
    hold_against_network(model, *in_onnxruntime(model.export_onnx(tmp_path / "onnx")))


@needs_onnx
@pytest.mark.slow
def test_so_do_those_of_many_variables(tmp_path):
    names = tuple(f"v{number}" for number in range(300))
    many = (1.0,) * len(names)
    description = DataDescription(kind="events", names=names, mean=many, std=many, valued=(True,) * len(names))
    network = SequenceVAE(description, ModelSettings(width=16, heads=2, depth=1)).eval()
    stored = model_of(tmp_path / "run", "events").stored._replace(description=description)
    assert [path.name for path in write_onnx(tmp_path, network, stored)] == [ENCODER, DECODER_STEP, CONFIG]


@needs_onnx
@pytest.mark.slow
def test_files_of_one_model_take_the_place_of_anothers_and_stand_beside_a_saved_model(tmp_path):
    one, other = (model_of(tmp_path / name, "vectors", latent_size=size) for name, size in (("a", 2), ("b", 3)))
    one.save(tmp_path / "m")
    one.export_onnx(tmp_path / "m")
    other.export_onnx(tmp_path / "m")
    hold_against_network(other, *in_onnxruntime(tmp_path / "m"))
    assert Model.load(tmp_path / "m").settings["latent_size"] == 2


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["data", "numbers"])
def test_a_network_that_cannot_be_exported_is_refused_in_a_line(trouble, tmp_path, monkeypatch):
    model = model_of(tmp_path / "run", "vectors", depth=1)
    if trouble == "data":
        forward = model.network.decoder.forward

        def depends_on_data(inputs: Tensor, z: Tensor) -> Tensor:
            return forward(inputs, z) if bool(z.sum() > 0) else forward(inputs, -z)

        monkeypatch.setattr(type(model.network.decoder), "forward", lambda _, inputs, z: depends_on_data(inputs, z))
    else:
        monkeypatch.setattr(onnx_export, "TOLERANCE", -1.0)
    with pytest.raises(UsageError) as caught:
        model.export_onnx(tmp_path / "onnx")
    assert "cannot be written as ONNX" in str(caught.value) or "was not kept" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "onnx").iterdir())


def test_without_the_extra_the_command_to_install_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_export, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r'ONNX needs onnx, onnxruntime, onnxscript: pip install "seqvae\[onnx\]"'):
        model_of(tmp_path / "run", "tokens").export_onnx(tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


def test_what_a_file_cannot_hold_and_files_of_others_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_export, "find_spec", lambda name: name)
    model = model_of(tmp_path / "run", "tokens")
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / ENCODER).write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"holds encoder\.onnx, which is of no export of ours"):
        model.export_onnx(tmp_path / "onnx")
    monkeypatch.setattr(onnx_export, "LARGEST", 1000)
    with pytest.raises(UsageError, match="2 GB of weights at most"):
        model.export_onnx(tmp_path / "other")
