"""The callback that shows what a network makes of a few sequences, in a small file after a validation.

In: a fixed validation batch. Out: `samples/step-<n>.txt` for tokens, `samples/step-<n>.png` for vectors and events: originals,
their reconstructions from the posterior means, and sequences drawn from the prior. It draws with a generator of its own and
leaves the network as it was: training goes on as without it.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.trainer.states import TrainerFn

from seqvae.data.batch import Batch, EventBatch, Record, TokenBatch, VectorBatch, part_of, to_records
from seqvae.data.description import DataDescription
from seqvae.errors import harmless
from seqvae.files import DISK_FULL, Patience, replace_file
from seqvae.models.sampling import reconstruct, sample_prior
from seqvae.models.vae import SequenceVAE
from seqvae.reports.previews import PreviewRow, Track, preview_page, write_preview_figure
from seqvae.training.module import TrainingModule

MOST_STEPS = 100
"""Steps of each sequence: what a preview has room for."""
MOST_SEQUENCES = 6
MOST_COLUMNS = MOST_ROWS = 4
"""Sequences and features that a figure shows."""
MOST_FILES = 20
TITLES = {
    "tokens": "reconstructed from the posterior mean, the most likely token at each step",
    "vectors": "reconstructed from the posterior mean",
    "events": "values reconstructed from the posterior mean, at the times of the originals",
}
SHARE_OF_TIME = 0.02
"""Share of the time that previews may take: a validation that comes too soon for that goes without."""


class Shown(NamedTuple):
    """What a preview consists of, as plain data."""

    originals: list[Record]
    reconstructions: list[Record]
    samples: list[Record]


class Previews(lightning.Callback):
    """Callback that previews a `SequenceVAE` in a `TrainingModule`."""

    def __init__(
        self,
        description: DataDescription,
        *,
        batch: Batch,
        seed: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`batch` holds a few validation sequences; MOST_SEQUENCES of them and MOST_STEPS of each are used."""
        self.description = description
        self.batch = beginning(batch, MOST_SEQUENCES, MOST_STEPS)
        self.seed = seed
        self.clock = clock
        self._not_before = -math.inf
        self._has_reported = False
        self._patience = Patience("samples")

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        started = self.clock()
        is_end = trainer.state.fn == TrainerFn.VALIDATING  # the end of a run is always shown
        if not is_end and started < self._not_before:
            return
        if not math.isfinite(trainer.callback_metrics["valid_elbo"]):
            return  # there are no probabilities to draw from; Progress ends the session
        assert isinstance(pl_module, TrainingModule)
        assert isinstance(pl_module.network, SequenceVAE)
        shown = draw_preview(pl_module.network, self.batch, self.description, self.seed)
        try:
            write_preview(Path(trainer.default_root_dir) / "samples", trainer.global_step, shown, self.description)
        except OSError as error:  # a run is worth more than its pictures
            if error.errno in DISK_FULL:
                if not self._patience.should_retry(str(error.strerror)):
                    raise
            elif not self._has_reported:
                print(harmless(f"note: samples cannot be written ({error}); training goes on without"), flush=True)
                self._has_reported = True
        else:
            self._patience.succeeded()
        now = self.clock()
        self._not_before = now + (now - started) / SHARE_OF_TIME


def draw_preview(network: SequenceVAE, batch: Batch, description: DataDescription, seed: int) -> Shown:
    """Return originals, reconstructions and samples as long as the originals; tokens find their end themselves.

    The same seed draws the same latents each time, so that what changes from preview to preview is the network.
    """
    device = network.begin_W.device
    batch = move_data_to_device(batch, device)
    generator = torch.Generator(device).manual_seed(seed)
    is_text = isinstance(batch, TokenBatch)
    lengths_B = torch.full_like(batch.lengths_B, MOST_STEPS) if is_text else batch.lengths_B
    samples = sample_prior(network, lengths_B, generator=generator)
    reconstructions = reconstruct(network, batch, generator=generator, values_only=True)
    return Shown(*(to_records(one, description) for one in (batch, reconstructions, samples)))


def write_preview(directory: Path, step: int, shown: Shown, description: DataDescription) -> None:
    """Write the file of a step, whole or not at all; of older previews keep the newest."""
    directory.mkdir(exist_ok=True)
    path = directory / f"step-{step:07}.{'txt' if description.kind == 'tokens' else 'png'}"
    title = f"Step {step:,}: {TITLES[description.kind]}"
    with replace_file(path) as partial:
        if description.kind == "tokens":
            texts = [
                [record if isinstance(record, str) else " ".join(map(str, record)) for record in records]
                for records in shown
            ]
            partial.write_text(preview_page(title, *texts), encoding="utf-8")
        else:
            is_timed = description.kind == "events"
            time_label = f"{description.time_unit} since the first step" if is_timed else "step"
            write_preview_figure(partial, preview_rows(shown, description), title=title, time_label=time_label)
    steps = {file: file.stem.removeprefix("step-") for file in directory.glob(f"step-*{path.suffix}")}
    ours = [file for file, number in steps.items() if number.isdecimal()]
    for old in sorted(ours, key=lambda file: int(steps[file]))[:-MOST_FILES]:
        old.unlink(missing_ok=True)


def preview_rows(shown: Shown, description: DataDescription) -> list[PreviewRow]:
    """Return a row for each of the features that the originals have most values of, in the order of the data."""
    tracks = [[_tracks_of(record, description) for record in records[:MOST_COLUMNS]] for records in shown]
    seen = Counter({name: sum(len(by_name[name].values) for by_name in tracks[0]) for name in description.names})
    frequent = {name for name, values in seen.most_common(MOST_ROWS) if values}
    names = [name for name in description.names if name in frequent]
    return [PreviewRow(name, *([by_name[name] for by_name in group] for group in tracks)) for name in names]


def _tracks_of(record: Any, description: DataDescription) -> dict[str, Track]:
    """Return the values that a record of `to_records` has of each feature."""
    if description.kind == "vectors":
        points = [(step, name, value) for step, values in enumerate(record) for name, value in values.items()]
    else:
        points = [(event["time"], event["variable"], event["value"]) for event in record]
    tracks = {name: Track([], []) for name in description.names}
    for time_of, name, value in points:
        if not math.isnan(value):
            tracks[name].times.append(time_of)
            tracks[name].values.append(value)
    return tracks


def beginning(batch: Batch, sequences: int, steps: int) -> Batch:
    """Return the first sequences of a batch, and the first steps of each."""
    batch = part_of(batch, 0, sequences)
    whole_B = batch.lengths_B <= steps
    batch = batch._replace(lengths_B=batch.lengths_B.clamp(max=steps))
    match batch:
        case TokenBatch():
            ends_B = whole_B if batch.ends_B is None else whole_B & batch.ends_B
            return batch._replace(tokens_BT=batch.tokens_BT[:, :steps], ends_B=ends_B)
        case VectorBatch():
            observed_BTD = batch.observed_BTD[:, :steps]
            return batch._replace(values_BTD=batch.values_BTD[:, :steps], observed_BTD=observed_BTD)
        case EventBatch():
            length = batch.gaps_BT.shape[1]
            rows_E, within_E = batch.steps_E // length, batch.steps_E % length
            kept_E = within_E < steps
            return batch._replace(
                gaps_BT=batch.gaps_BT[:, :steps],
                steps_E=(rows_E * min(steps, length) + within_E)[kept_E],
                variables_E=batch.variables_E[kept_E],
                values_E=batch.values_E[kept_E],
                has_value_E=batch.has_value_E[kept_E],
            )
