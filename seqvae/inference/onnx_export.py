"""Encoder and decoder as ONNX files, for programs without torch; any number of sequences, of any length.

    encoder.onnx        a batch                              -> mean and logvar of q(z | x), and the latent at the mean
    decoder_step.onnx   latents, and a batch of steps so far -> the parameters of the distribution of each sequence's next step
    onnx.json           what the inputs and outputs mean, settings, symbols or names and moments

A sequence is drawn by calling the decoder once for each step: before the first one the batch has one padded step, and lengths are
0. Values are normalised, as `mean` and `std` of the description say. Each file is compared with the network, at lengths that it was
not made at, before it is kept. Needs the extra `onnx`.

Shapes: B sequences, T steps (S = T + 1), E events of the whole batch, W width, G = 4 W gates, Z latent dimensions,
D features, V variables or ids.
"""

import copy
import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from math import log, log1p
from pathlib import Path
from typing import Any, NamedTuple, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqvae
from seqvae.data.batch import Batch, EventBatch, TokenBatch, VectorBatch
from seqvae.errors import UsageError
from seqvae.files import MADE_BY
from seqvae.inference.saved import refuse_foreign_directory
from seqvae.inference.streaming import new_file
from seqvae.models.likelihoods import UNKNOWN_ID, EventLikelihood, TokenLikelihood, VectorLikelihood
from seqvae.models.priors import Prior
from seqvae.models.vae import SequenceVAE
from seqvae.text import clip, some
from seqvae.training.network import StoredNetwork

CONFIG, ENCODER, DECODER_STEP = "onnx.json", "encoder.onnx", "decoder_step.onnx"
FORMAT = 1
PACKAGES = ("onnx", "onnxruntime", "onnxscript")
LARGEST = 2**31 - 2**20
"""Bytes of weights that a file of this format holds."""
MADE_AT, CHECKED_AT = (3, 7), ((1, 1), (4, 13))
"""Sequences and steps of the example that a graph is made of, and of those that it is checked with."""
TOLERANCE = 1e-3
"""By which a number may differ from the network's, relative to the largest of its kind, or 1."""


VARYING = ("sequences", "steps", "steps_and_next", "events")
"""Dimensions that may have any size; the others are the network's."""


class Port(NamedTuple):
    """An input or output of a file."""

    name: str
    shape: str
    """The names of its dimensions."""
    meaning: str

    @property
    def axes(self) -> list[str]:
        return self.shape.split(", ")


BATCH = {
    "tokens": (Port("tokens", "sequences, steps", "ids, 0 where padded"),),
    "vectors": (
        Port("values", "sequences, steps, features", "normalised; 0 where padded or missing"),
        Port("observed", "sequences, steps, features", "whether a value is there"),
    ),
    "events": (
        Port("gaps", "sequences, steps", "time since the step before; 0 for the first step and where padded"),
        Port("variables", "events", "which variable; events stand in the order of their steps"),
        Port("values", "events", "normalised; 0 where there is none"),
        Port("has_value", "events", "whether the event has a value"),
        Port("event_steps", "events", "the event's step, as sequence * steps + step"),
    ),
}
LENGTHS = Port("lengths", "sequences", "real steps of each sequence")
ENDS = Port("ends", "sequences", "whether an end mark follows the last step")
NEXT_GAP = Port(
    "next_gap", "sequences", "time from the last step to the next, on which its events depend; 0: not drawn yet"
)
NEXT_STEP = {
    "tokens": (Port("log_p", "sequences, ids", "log-probability of each id; the last one is the end mark"),),
    "vectors": (
        Port("mean", "sequences, features", "of the Gaussian of each feature, normalised"),
        Port("logvar", "sequences, features", "its log-variance"),
    ),
    "events": (
        Port(
            "gap_mean", "sequences", "of the Gaussian of (log(gap) - log_gap_mean) / log_gap_std; whatever next_gap is"
        ),
        Port("gap_logvar", "sequences", "its log-variance"),
        Port("present_logit", "sequences, variables", "log-odds that a variable has an event"),
        Port("value_mean", "sequences, variables", "of the Gaussian of its value, normalised"),
        Port("value_logvar", "sequences, variables", "its log-variance"),
    ),
}


class Graph(NamedTuple):
    """A part of a network that becomes a file."""

    file: str
    module: Callable[[SequenceVAE], nn.Module]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


def graphs_of(network: SequenceVAE) -> tuple[Graph, Graph]:
    """Return the two files of a network."""
    batch = (*BATCH[network.kind], LENGTHS)
    steps = "steps_and_next" if network.end_has_latent else "steps"
    of_each = f"sequences, {steps}, latent" if network.latent_per_step else "sequences, latent"
    of = " of each step, and of the end mark" if network.end_has_latent else " of each step"
    decoded = f"sequences, {steps}, decoded" if network.has_step_latents else "sequences, decoded"
    moments = (
        Port("mean", of_each, f"posterior mean{of if network.latent_per_step else ''}; 0 where there is none"),
        Port("logvar", of_each, "its log-variance"),
        Port("latent", decoded, "what the decoder gets for the mean"),
    )
    z = Port("z", "sequences, decoded", "latents")
    if network.has_step_latents:
        z = Port("z", "sequences, steps_and_next, decoded", "latents of the steps so far and of the next")
    to_step = (z, *batch, *((NEXT_GAP,) if network.kind == "events" else ()))
    return (
        Graph(ENCODER, EncoderGraph, (*batch, ENDS) if network.end_has_latent else batch, moments),
        Graph(DECODER_STEP, DecoderStepGraph, to_step, NEXT_STEP[network.kind]),
    )


def write_onnx(directory: Path, network: SequenceVAE, stored: StoredNetwork) -> list[Path]:
    """Write a network into a directory. Each file is complete or absent; onnx.json comes last."""
    refuse_no_onnx(network)
    refuse_foreign_directory(directory, (CONFIG,), (ENCODER, DECODER_STEP))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).unlink(missing_ok=True)
    files: dict[str, Any] = {}
    with ExitStack() as written:  # where one file cannot be made, none is kept
        for graph in graphs_of(network):
            partial = written.enter_context(new_file(directory / graph.file))
            make_file(network, graph, partial)
            types = [str(tensor.dtype).removeprefix("torch.") for tensor in example_inputs(network, graph, *MADE_AT)]
            files[graph.file] = {
                "sha256": hashlib.sha256(partial.read_bytes()).hexdigest(),
                "inputs": [{**port._asdict(), "type": kind} for port, kind in zip(graph.inputs, types, strict=True)],
                "outputs": [{**port._asdict(), "type": "float32"} for port in graph.outputs],
            }
    about = {
        "made_by": MADE_BY,
        "format": FORMAT,
        "version": seqvae.__version__,
        "step": stored.step,
        "files": files,
        "settings": stored.settings,
        "description": asdict(stored.description),
    }
    with new_file(directory / CONFIG) as partial:
        partial.write_text(f"{json.dumps(about, indent=1, ensure_ascii=False)}\n", encoding="utf-8")
    return [directory / name for name in (*files, CONFIG)]


def refuse_no_onnx(network: SequenceVAE) -> None:
    """Refuse what cannot be exported, and an environment that cannot export."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise UsageError(f'ONNX needs {some(missing)}: pip install "seqvae[onnx]"')
    if network.has_codes:
        raise UsageError(
            "an ONNX file of latents that are codes is not written so far: export this network as safetensors"
        )
    if sum(weight.numel() for weight in network.parameters()) * 4 > LARGEST:
        raise UsageError("an ONNX file holds 2 GB of weights at most: export this network as safetensors")


# --- The graphs -------------------------------------------------------------------------------------------------------


class EncoderGraph(nn.Module):
    """From a batch to the posterior."""

    def __init__(self, network: SequenceVAE) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        batch = batch_of(self.network.kind, inputs[: 1 + len(BATCH[self.network.kind])])
        if self.network.end_has_latent:
            assert isinstance(batch, TokenBatch)
            batch = batch._replace(ends_B=inputs[-1])
        encoding = self.network.encoding(batch)
        latents = self.network.draw(encoding, encoding.posterior.mean.new_zeros)
        mask = encoding.posterior.mask[..., None]
        of_z = encoding.mask_BS[..., None] if latents.z.dim() == 3 else mask
        moments = ((latents.posterior.mean, mask), (latents.posterior.logvar, mask), (latents.z, of_z))
        zero = torch.zeros((), dtype=torch.float32)
        return tuple(torch.where(is_there, numbers, zero) for numbers, is_there in moments)


class DecoderStepGraph(nn.Module):
    """From latents and the steps so far to the distribution of the next one."""

    def __init__(self, network: SequenceVAE) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        network = self.network
        z, *of_batch = inputs
        next_gap_B = of_batch.pop() if network.kind == "events" else z
        batch = batch_of(network.kind, of_batch)
        steps_BTW = network.embedding(batch)
        if network.likelihood.extra_steps == 0:  # what is decoded ends with the step behind those that came
            steps_BTW = F.pad(steps_BTW, (0, 0, 0, 1))
        hidden_BSW = network.decode_hidden(steps_BTW, z)
        places_B1W = batch.lengths_B[:, None, None].expand(-1, 1, hidden_BSW.shape[2])
        hidden_BW = hidden_BSW.gather(1, places_B1W).squeeze(1)
        match network.likelihood:
            case TokenLikelihood() as likelihood:
                return (log_p_of(likelihood, hidden_BW),)
            case VectorLikelihood() as likelihood:
                return likelihood.predict(hidden_BW)
            case EventLikelihood() as likelihood:
                known_BW = likelihood.condition_on_gaps(hidden_BW, next_gap_B)
                logit_BV = present_logit_of(likelihood, known_BW)
                return (*likelihood.predict_gaps(hidden_BW), logit_BV, *likelihood.predict_values(known_BW))
            case unreachable:
                assert_never(unreachable)


def log_p_of(likelihood: TokenLikelihood, hidden_BW: Tensor) -> Tensor:
    """Return the log-probability of each id and of the end mark, with the share of <unknown>, (B, V)."""
    log_p_BV = likelihood.scores(hidden_BW).float().log_softmax(dim=-1)
    if share := likelihood.unknown_share:
        known_BV = log_p_BV + log1p(-share)
        is_unknown_V = torch.arange(known_BV.shape[1]) == UNKNOWN_ID
        log_p_BV = torch.where(is_unknown_V, torch.logaddexp(known_BV, torch.tensor(log(share))), known_BV)
    return log_p_BV


def present_logit_of(likelihood: EventLikelihood, hidden_BW: Tensor) -> Tensor:
    """Return the log-odds that each variable has an event, with the share of <unknown>, (B, V)."""
    logit_BV = likelihood.presence(hidden_BW).float()
    if share := likelihood.unknown_share:
        absent_BV = log1p(-share) + F.logsigmoid(-logit_BV)
        present_BV = torch.logaddexp(log1p(-share) + F.logsigmoid(logit_BV), torch.tensor(log(share)))
        is_unknown_V = torch.arange(logit_BV.shape[1]) == UNKNOWN_ID
        logit_BV = torch.where(is_unknown_V, present_BV - absent_BV, logit_BV)
    return logit_BV


def batch_of(kind: str, inputs: Sequence[Tensor]) -> Batch:
    """Return a batch from the inputs of a file: the first of them, then what else a batch of this kind holds, then lengths."""
    first, *others, lengths_B = inputs
    rest: dict[str, Any] = {"sequences_B": lengths_B, "labels_B": None, "step_tokens": 1.0, "position": 0}
    match kind:
        case "tokens":
            return TokenBatch(first, lengths_B, **rest)
        case "vectors":
            (observed_BTD,) = others
            return VectorBatch(first, observed_BTD, lengths_B, **rest)
    variables_E, values_E, has_value_E, steps_E = others
    return EventBatch(first, lengths_B, variables_E, values_E, has_value_E, steps_E, **rest)


class OnnxLSTM(nn.Module):
    """An LSTM of torch's as ONNX has it, which reads any length; torch's exporter would write each step of the example down."""

    into_1GW: Tensor
    kept_1GW: Tensor
    bias_1G: Tensor

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        self.width = lstm.hidden_size
        weights = {name: in_order_of_onnx(weight.detach())[None] for name, weight in lstm.named_parameters()}
        self.register_buffer("into_1GW", weights["weight_ih_l0"])
        self.register_buffer("kept_1GW", weights["weight_hh_l0"])
        self.register_buffer("bias_1G", torch.cat((weights["bias_ih_l0"], weights["bias_hh_l0"]), dim=1))

    def forward(self, steps_BTW: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, None]:
        sequences, length = steps_BTW.shape[:2]
        zero_1BW = steps_BTW.new_zeros(1, sequences, self.width)
        before = (zero_1BW, zero_1BW) if state is None else state
        inputs = (steps_BTW.transpose(0, 1), self.into_1GW, self.kept_1GW, self.bias_1G, None, *before)
        shape = (length, 1, sequences, self.width)
        (read_T1BW,) = torch.onnx.ops.symbolic_multi_out(
            "LSTM", inputs, {"hidden_size": self.width}, dtypes=(steps_BTW.dtype,), shapes=(shape,)
        )
        return read_T1BW.squeeze(1).transpose(0, 1), None


def in_order_of_onnx(gates: Tensor) -> Tensor:
    """Return what torch has as input, forget, cell and output gate as input, output, forget and cell."""
    entered, forgotten, cell, out = gates.chunk(4)
    return torch.cat((entered, out, forgotten, cell))


# --- Making and checking a file ---------------------------------------------------------------------------------------


def make_file(network: SequenceVAE, graph: Graph, path: Path) -> None:
    """Write one file, and compare what it computes with the network."""
    reference = copy.deepcopy(network).cpu().float().eval()
    reference.use_torch_operations()
    reference.prior = Prior()  # what the KL is to is in neither file
    to_export = copy.deepcopy(reference)
    for module in list(to_export.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.LSTM):
                setattr(module, name, OnnxLSTM(child))
    example = example_inputs(network, graph, *MADE_AT)
    axes = [{place: axis for place, axis in enumerate(port.axes) if axis in VARYING} for port in graph.inputs]
    try:
        with torch.no_grad(), _quiet():
            program = torch.onnx.export(
                graph.module(to_export).eval(),
                example,
                dynamo=True,
                dynamic_shapes=(tuple(axes),),
                input_names=[port.name for port in graph.inputs],
                output_names=[port.name for port in graph.outputs],
                verbose=False,
            )
            assert program is not None
            for node in program.model.graph.all_nodes():
                node.metadata_props.clear()  # lines of our source, with paths of this machine
            program.save(str(path), external_data=False)
    except torch.onnx.OnnxExporterError as error:
        raise UsageError(f"{graph.file}: this network cannot be written as ONNX ({_reason(error)})") from error
    check_file(graph, graph.module(reference), network, path)


def check_file(graph: Graph, module: nn.Module, network: SequenceVAE, path: Path) -> None:
    """Refuse a file that computes something else than the network, for other numbers and lengths of sequences."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    for place in (MADE_AT, *CHECKED_AT):
        inputs = example_inputs(network, graph, *place)
        with torch.no_grad():
            expected = module(*inputs)
        names = {port.name: tensor.numpy() for port, tensor in zip(graph.inputs, inputs, strict=True)}
        used = {one.name for one in session.get_inputs()}
        found = session.run(None, {name: array for name, array in names.items() if name in used})
        for port, one, other in zip(graph.outputs, expected, found, strict=True):
            scale = max(1.0, float(one.abs().max()))
            off = float((one - torch.from_numpy(other)).abs().max()) if one.shape == other.shape else float("inf")
            if not off <= TOLERANCE * scale:
                raise UsageError(
                    f"{graph.file}: {port.name} of {place[0]} sequences of {place[1]} steps differs by {off:.2g} from what the "
                    "network computes, so that the file was not kept"
                )


def example_inputs(network: SequenceVAE, graph: Graph, sequences: int, steps: int) -> tuple[Tensor, ...]:
    """Return made inputs of a file, for sequences of several lengths, one of which has all steps; only decoders meet none."""
    random = torch.Generator().manual_seed(1000 * sequences + steps)
    likelihood = network.likelihood
    events = sequences * steps + 2
    sizes = {"sequences": sequences, "steps": steps, "steps_and_next": steps + 1, "events": events}
    sizes["decoded"] = network.decoder.latent.in_features
    if isinstance(likelihood, VectorLikelihood):
        sizes["features"] = len(likelihood.valued_D)
    limits = {"event_steps": sequences * steps, "lengths": steps + 1}
    limits["tokens"] = likelihood.end if isinstance(likelihood, TokenLikelihood) else 0
    limits["variables"] = len(likelihood.valued_V) if isinstance(likelihood, EventLikelihood) else 0
    made = []
    for port in graph.inputs:
        shape = [sizes[axis] for axis in port.axes]
        if port.name in limits:
            least = int(port.name == "lengths" and graph.file == ENCODER)
            tensor = torch.randint(least, limits[port.name], shape, generator=random)
        elif port.name in ("observed", "has_value", "ends"):
            tensor = torch.rand(shape, generator=random) < 0.7
        elif port.name in ("gaps", "next_gap"):
            tensor = torch.rand(shape, generator=random)
        else:
            tensor = torch.randn(shape, generator=random)
        if port.name == "event_steps":
            tensor = tensor.sort().values
        if port.name == "lengths":
            tensor[-1] = steps
        made.append(tensor)
    return tuple(made)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's exporter from writing about its own work."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _reason(error: BaseException) -> str:
    """Return the first line of the error that an error came from in the end."""
    while error.__cause__ is not None:
        error = error.__cause__
    return clip(next(iter(str(error).splitlines()), type(error).__name__), 200)
