"""What a run writes about itself: the header and run.json when it begins, events.jsonl on the way, its result at the end.

In: settings, data, network, plan and devices; an event, its step and its details. Out: lines for the console, plain types of JSON
for readers without torch, and in events.jsonl a line that anyone can read at any time. The monitor writes its verdicts into the
same file by itself.
"""

import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import numpy as np
from lightning import Callback, Trainer
from torch import nn

from seqvae.config.flags import set_by_presets
from seqvae.config.training import SHARDED, TrainingSettings
from seqvae.data.datamodule import SequenceDataModule
from seqvae.errors import DivergedError, harmless
from seqvae.files import JsonLines
from seqvae.models.codes import CodePosterior
from seqvae.models.vae import SequenceVAE
from seqvae.reports.run_files import EVENTS, LAST, read_events, utc_now
from seqvae.reports.terminal import bin_edges
from seqvae.text import clip, folded, percent, visible, window_width
from seqvae.training.distributed import Devices, ResolvedPrecision
from seqvae.training.objective import resolve_free_bits, resolve_step_free_bits
from seqvae.training.processes import is_first_process
from seqvae.training.risk import describe_risk, features_before
from seqvae.training.schedules import Plan

MOST_REPEATED = 100
"""Events of one kind in a session: what goes wrong at every other step for days shall not fill a disk."""
FINISHED = "finished"
EndedBy = Literal["steps", "max_time", "early_stopping_patience"]

MOST_NAMES = 200
MOST_CLASSES = 100
NAME_WIDTH = 80
"""Characters of a name, which is data and can be of any length."""
UNMONITORED = "off: a posterior collapse will neither be seen nor named, and there will be no posterior.jsonl"

_log = logging.getLogger(__name__)


OF_POSTERIOR = {
    "gaussian": "",
    "batch_norm": ", means normalised over the batch",
    "du": ", means normalised over the batch and variances dropped",
    "flow": ", moved by {layers} coupling layers",
}
"""What a run's header says of --posterior."""


@runtime_checkable
class Describes(Protocol):
    """A callback that describes what it does in a run of `total_steps` optimizer steps."""

    def describe(self, total_steps: int) -> str: ...


def header_lines(
    settings: TrainingSettings,
    data: SequenceDataModule,
    network: nn.Module,
    plan: Plan,
    devices: Devices,
    precision: ResolvedPrecision,
    callbacks: Sequence[Callback],
) -> list[tuple[str, str]]:
    """Return what will run, as names and texts; a line without a name continues the one before."""
    model, objective, compute = settings.model, settings.objective, settings.compute
    parameters = f"{sum(p.numel() for p in network.parameters()) / 1e6:.2f} M parameters"
    described = f"{type(network).__name__}, {parameters}"
    if isinstance(network, SequenceVAE):
        described = (
            f"{model.encoder} encoder, {model.decoder} decoder, {parameters} (width {model.width}, depth {model.depth}), "
            f"{model.described_latent}"
            + OF_POSTERIOR[model.posterior].format(layers=model.flow_layers)
            + ("" if model.prior == "standard" else f", {model.prior} prior")
            + (
                f", {network.posterior.described()} ({model.codebook})"
                if isinstance(network.posterior, CodePosterior)
                else ""
            )
        )
    if objective.target_kl is not None:
        weight = f"steered to {objective.target_kl:g} nats (--target_kl)"
    elif objective.kl_schedule == "constant":
        weight = f"{objective.beta:g}"
    else:
        cycle = f", --kl_cycle {objective.kl_cycle:g}" if objective.kl_schedule == "cyclical" else ""
        weight = (
            f"{objective.kl_schedule} to {objective.beta:g} (--kl_schedule, --kl_warmup {objective.kl_warmup:g}{cycle})"
        )
    shared_by = objective.free_bits_shared_by(model.latent_size)
    together = f", {shared_by} together" if shared_by > 1 else ""
    free_bits = (
        f"{resolve_free_bits(objective, model.latent_scope):g} nats of each dimension free{together} (--free_bits)"
    )
    if model.latent_scope == "both":
        free_bits += f", {resolve_step_free_bits(objective):g} of each of a step's latent (--step_free_bits)"
    steps, optimizer, unit = plan.total_steps, settings.optimizer, data.description.unit
    scaled = (
        f" ({optimizer.base_rate:.3g} at {optimizer.lr_base_tokens:,} {unit}s, --scale_lr)"
        if optimizer.scale_lr
        else ""
    )
    reason = f" in place of {compute.precision}: {precision.reason}" if precision.reason else ""
    shared_out = ""
    if compute.strategy in SHARDED and devices.world > 1:
        shared_out = "; each holds its share of the network (--strategy fsdp), so there are no previews"
    monitoring = [callback.describe(steps) for callback in callbacks if isinstance(callback, Describes)]
    first, *rest = summary_of(settings, data)
    # Nothing is known of networks that are not ours.
    is_known = isinstance(network, SequenceVAE) and not network.has_codes
    risk = [("risk", describe_risk(features_before(settings, data, plan)))] if is_known else []
    nats = f"KL weight {weight}; {free_bits}"
    if model.is_discrete:
        nats = f"{model.codebooks * math.log(model.codes):.3g} nats for the code of each {model.latent_scope}"
        nats += f"; commitment {model.commitment:g} (--commitment)" if model.codebook == "vq" else ""
    bound = "negative ELBO"
    if data.description.classes:
        label = settings.source.label_column or Path(str(settings.source.label_path)).name
        if weight_of_labels := objective.weight_of_labels:
            bound += f" + {weight_of_labels:g} x classification of {label!r} (--label_weight)"
        else:
            nats += f"; {label!r} trains nothing (--label_weight)"
    return [
        ("data", first),
        *(("", line) for line in rest),
        ("model", described),
        ("objective", f"{bound}; {nats}"),
        *risk,
        (
            "training",
            f"{steps:,} optimizer steps ({steps / plan.steps_per_epoch:.3g} epochs), each of {plan.tokens_per_step:,.0f} {unit}s "
            f"in {plan.sequences_per_step:,.3g} sequences on average; lr {plan.lr:.3g}"
            f"{scaled}, {optimizer.lr_schedule}",
        ),
        ("devices", f"{devices}, {precision.precision}{reason}{shared_out}"),
        ("monitoring", "; ".join(monitoring) or UNMONITORED),
    ]


def summary_of(settings: TrainingSettings, data: SequenceDataModule) -> list[str]:
    """Return the lines on the data, without hints at what a preset decided: it has its reasons."""
    of_presets = tuple(f"hint: --{name} " for name in set_by_presets(settings))
    return [line for line in data.summary() if not line.startswith(of_presets)]


def facts_of(
    settings: TrainingSettings,
    data: SequenceDataModule,
    plan: Plan,
    lines: Sequence[tuple[str, str]],
    resume_command: str,
    defaults: dict[str, Any],
) -> dict[str, Any]:
    """Return the content of run.json; `lines` are the header's, of which those with a name are kept.

    `defaults`: what each setting would be if no flag had been given.
    """
    description, counts = data.description, data.data.counts.get("train", {})
    # As they are in the training split, before the length cap; variables that do not occur, like <unknown>, are left out.
    remarks: list[str] = []
    if description.kind == "vectors":
        steps = max(1, counts["steps"])
        remarks = [
            f"{percent(missing / steps)} missing" if missing else "none missing" for missing in counts["missing"]
        ]
    elif description.kind == "events":
        remarks = [f"{count:,} events" if count else "" for count in counts["per_name"]]
    features = [
        {"name": clip(visible(name[:NAME_WIDTH]), NAME_WIDTH), "mean": mean, "std": std, "told": remark}
        for name, mean, std, remark in zip(description.names, description.mean, description.std, remarks, strict=True)
        if remark
    ]
    layout, _, batches, *notes = summary_of(settings, data)
    lengths = {name: data.split(name).lengths_N for name in ("train", "valid", "test") if name in data.data.splits}
    edges = bin_edges(lengths["train"])
    return {
        "total_steps": plan.total_steps,
        "resume_command": resume_command,
        "header": {name: text for name, text in lines if name},
        "defaults": defaults,
        "free_bits": {} if settings.model.is_discrete else free_bits_of(settings),
        "data": {
            "kind": description.kind,
            "layout": layout,
            "batches": batches,
            "splits": [
                {
                    "split": name,
                    "sequences": len(lengths_N),
                    "steps": int(lengths_N.sum(dtype=np.int64)),
                    "mean_length": float(lengths_N.mean()) if len(lengths_N) else None,
                    "longest": int(lengths_N.max()) if len(lengths_N) else None,
                }
                for name, lengths_N in lengths.items()
            ],
            "lengths": {"edges": edges.tolist(), "counts": np.histogram(lengths["train"], edges)[0].tolist()},
            "notes": notes,
            "names": features[:MOST_NAMES],
            "classes": [clip(visible(name[:NAME_WIDTH]), NAME_WIDTH) for name in description.classes[:MOST_CLASSES]],
        },
    }


def free_bits_of(settings: TrainingSettings) -> dict[str, dict[str, float]]:
    """Return the free nats of each dimension of what has a latent, `sequence` or `step`, and how many dimensions share theirs."""
    model, objective = settings.model, settings.objective
    nats = resolve_free_bits(objective, model.latent_scope)
    scope = "step" if model.latent_scope == "step" else "sequence"
    found = {scope: {"nats": nats, "shared_by": objective.free_bits_shared_by(model.latent_size)}}
    if model.latent_scope == "both":
        shared_by = objective.free_bits_shared_by(model.step_latent_size)
        found["step"] = {"nats": resolve_step_free_bits(objective), "shared_by": shared_by}
    return found


class RunEvents:
    """Writer of a run's events; only the first process writes and logs."""

    def __init__(self, directory: Path, *, writes: bool = True) -> None:
        self.directory = directory
        self.writes = writes
        self._lines = JsonLines(directory / EVENTS)
        self._counts: dict[str, int] = {}

    def note(self, event: str, step: int, **fields: Any) -> None:
        """Write an event; `fields` are in types of JSON."""
        if self.writes:
            self._lines.append({"time": utc_now(), "step": step, "event": event, **fields})

    def start_after(self, event: str, step: int) -> None:
        """Remove the events of this name beyond a step, which a run that goes on from there makes again."""
        if self.writes:
            self._lines.drop(lambda row: row.get("event") == event and row["step"] > step)

    def survived(self, event: str, step: int, message: str, **fields: Any) -> None:
        """Write and log something that did not end the run."""
        count = self._counts[event] = self._counts.get(event, 0) + 1
        if count > MOST_REPEATED:
            return
        self.note(event, step, said=message, **fields)
        if self.writes:
            more = " (the last time that this is reported)" if count == MOST_REPEATED else ""
            _log.warning("step %s: %s%s", f"{step:,}", message, more)

    def finish(self) -> None:
        """Raise an error where lines still wait that cannot be written."""
        self._lines.finish()


class RunResult(NamedTuple):
    """The outcome of a run."""

    directory: Path
    valid_elbo: float
    """In nats per sequence, at weight 1, with one sample for each sequence of the whole validation split."""
    valid_kl: float


def result_of(
    trainer: Trainer, plan: Plan, settings: TrainingSettings, ended_by: EndedBy, events: RunEvents
) -> RunResult:
    """Return the result after the last validation; print and note it."""
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if not math.isfinite(metrics["valid_elbo"]):
        found = f"the validation ELBO is {metrics['valid_elbo']}"
        events.note("diverged", trainer.global_step, said=found)
        raise DivergedError(f"{found}: training diverged. Lower --lr.")
    result = RunResult(events.directory, metrics["valid_elbo"], metrics["valid_kl"])
    if trainer.is_global_zero:
        early = f" after step {trainer.global_step:,} of {plan.total_steps:,}, as --{ended_by} says"
        message = (
            f"done{'' if ended_by == 'steps' else early}: validation ELBO {result.valid_elbo:.3f} nats per sequence, on "
            f"{metrics['valid_sequences']:,.0f} sequences (NLL {metrics['valid_nll']:.3f}, KL {result.valid_kl:.3f}); "
            f"{events.directory / 'checkpoints' / LAST}"
        )
        print(folded(harmless(message), window_width(sys.stdout)), flush=True)
        events.note(
            FINISHED,
            trainer.global_step,
            total_steps=plan.total_steps,
            ended_by=ended_by,
            limit=_limit_of(settings, ended_by),
            valid_elbo=result.valid_elbo,
            valid_kl=result.valid_kl,
        )
    return result


def result_of_finished(directory: Path, settings: TrainingSettings, plan: Plan) -> RunResult | None:
    """Return and print the result of a run that has nothing left to do; None for a run that goes on.

    Anyone may have written to the file, so the event is checked to be as `result_of` writes it.
    """
    events = read_events(directory)
    last = events[-1] if events else {}
    if (
        last.get("event") != FINISHED
        or last.get("ended_by") not in get_args(EndedBy)
        or not all(isinstance(last.get(name), int) for name in ("step", "total_steps"))
        or not all(isinstance(last.get(name), float) for name in ("valid_elbo", "valid_kl"))
    ):
        return None
    ended_by: EndedBy = last["ended_by"]
    if ended_by == "steps":
        is_extended, flag = plan.total_steps > last["total_steps"], "larger --max_epochs or --max_steps"
    else:
        is_extended, flag = last.get("limit") != _limit_of(settings, ended_by), f"larger --{ended_by}"
    if is_extended:
        return None
    if is_first_process():
        message = (
            f"{directory} is finished (step {last['step']:,} of {last['total_steps']:,}, validation ELBO "
            f"{last['valid_elbo']:.3f}): nothing left to do. A {flag} goes on, another --run_name starts over."
        )
        print(harmless(message))
    return RunResult(directory, last["valid_elbo"], last["valid_kl"])


def _limit_of(settings: TrainingSettings, ended_by: EndedBy) -> str | int | None:
    """Return the value of the flag that ended a run before its last step."""
    early = {"max_time": settings.run.max_time, "early_stopping_patience": settings.validation.early_stopping_patience}
    return early.get(ended_by)
