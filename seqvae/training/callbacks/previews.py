"""The callback that shows what a network makes of a few sequences, in a small file after a validation.

In: a fixed validation batch. Out: `samples/step-<n>.txt` for tokens, `samples/step-<n>.png` for vectors and events: originals,
what the decoder makes of their posterior means, and sequences drawn from the prior. It draws with a generator of its own and
leaves the network as it was: training goes on as without it. Which validations are shown follows from their steps alone, so that
a run that was killed and goes on leaves the same files as one that was not. What a full disk has no room for waits in memory. With
--strategy fsdp there are none, as no process has all weights.
"""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.fsdp import FSDPModule

from seqvae.data.batch import Batch, EventBatch, Record, TokenBatch, VectorBatch, part_of, to_records
from seqvae.data.description import DataDescription
from seqvae.errors import harmless
from seqvae.files import DISK_FULL, Patience, replace_file
from seqvae.models.noise import Noise
from seqvae.models.sampling import reconstruct, sample_prior
from seqvae.models.vae import SequenceVAE
from seqvae.monitors.loggers import log_picture, log_text
from seqvae.reports.previews import PreviewRow, Track, preview_page, write_preview_figure
from seqvae.training.module import TrainingModule

SAMPLES = "samples"
"""The folder of previews in a run directory, and their name in loggers."""
MOST_STEPS = 100
"""Steps of each sequence: what a preview has room for."""
MOST_SEQUENCES = 6
MOST_COLUMNS = MOST_ROWS = 4
"""Sequences and features that a figure shows."""
MOST_FILES = 20
"""Files that are kept, and stretches of a run that each have one at most."""
TOKENS_BETWEEN = 500_000
"""Steps of sequences in a stretch at least: a preview takes as long as some thousand of them."""
TITLES = {
    "tokens": "reconstructions drawn from the decoder, at the posterior mean",
    "vectors": "reconstructed from the posterior mean, the decoder's means",
    "events": "values reconstructed from the posterior mean, the decoder's means at the times of the originals",
}


class Shown(NamedTuple):
    """The contents of a preview, as plain data."""

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
        tokens_per_batch: float,
    ) -> None:
        """`batch` holds a few validation sequences; MOST_SEQUENCES of them and MOST_STEPS of each are used.

        `tokens_per_batch`: the mean of training batches.
        """
        self.description = description
        self.batch = beginning(batch, MOST_SEQUENCES, MOST_STEPS)
        self.seed = seed
        self.tokens_per_batch = tokens_per_batch
        self._tried_step = -1
        """The step of the last preview of this session, written or not."""
        self._waiting: dict[int, Shown] = {}
        """Previews that are not written yet, by their steps."""
        self._has_reported = False
        self._patience = Patience("samples")

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        directory = Path(trainer.default_root_dir) / "samples"
        # The end of a run is always shown, also where the last validation is one of those during training.
        is_end = trainer.state.fn == TrainerFn.VALIDATING or trainer.global_step == trainer.max_steps
        if self._tried_step == trainer.global_step or not (is_end or self._is_due(trainer, directory)):
            return
        if not math.isfinite(trainer.callback_metrics["valid_elbo"]):
            return  # there are no probabilities to draw from; Progress ends the session
        assert isinstance(pl_module, TrainingModule)
        assert isinstance(pl_module.network, SequenceVAE)
        if isinstance(pl_module.network, FSDPModule):
            return
        self._tried_step = trainer.global_step
        self._waiting[trainer.global_step] = draw_preview(pl_module.network, self.batch, self.description, self.seed)
        try:
            self._write(trainer)
        except OSError as error:  # a run is worth more than its pictures
            if error.errno in DISK_FULL:
                if not self._patience.should_retry(str(error.strerror)):
                    raise
            else:
                self._waiting.clear()
                if not self._has_reported:
                    print(harmless(f"note: samples cannot be written ({error}); training goes on without"), flush=True)
                    self._has_reported = True
        else:
            self._patience.succeeded()

    def on_save_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write previews that still wait, if they can be written by now: a run that goes on from here does not draw them again."""
        with suppress(OSError):
            self._write(trainer)

    def _write(self, trainer: lightning.Trainer) -> None:
        """Write the previews that wait, the oldest first, and hand them to the loggers."""
        for step in sorted(self._waiting):
            path = write_preview(Path(trainer.default_root_dir) / SAMPLES, step, self._waiting[step], self.description)
            del self._waiting[step]
            if path is None:
                continue
            for logger in trainer.loggers:
                if path.suffix == ".txt":
                    log_text(logger, SAMPLES, path.read_text(encoding="utf-8"), step)
                else:
                    log_picture(logger, SAMPLES, path, step)

    def _is_due(self, trainer: lightning.Trainer, directory: Path) -> bool:
        """Return whether this is the first validation of its stretch of the run. The files say what was shown before: those of
        later steps are of a session that was killed, or went astray."""
        tokens_per_step = self.tokens_per_batch * trainer.accumulate_grad_batches * trainer.world_size
        stretch = max(trainer.max_steps / MOST_FILES, TOKENS_BETWEEN / tokens_per_step)
        step, shown = trainer.global_step, [self._tried_step, *self._waiting, *files_by_step(directory)]
        return max((one for one in shown if one < step), default=-1) // stretch < step // stretch


def draw_preview(network: SequenceVAE, batch: Batch, description: DataDescription, seed: int) -> Shown:
    """Return originals, reconstructions and samples as long as the originals; tokens find their end themselves.

    The same seed draws the same latents each time, so that what changes from preview to preview is the network.
    """
    device = network.begin_W.device
    batch = move_data_to_device(batch, device)
    noise = Noise(seed, torch.arange(len(batch.lengths_B), device=device))
    is_text = isinstance(batch, TokenBatch)
    lengths_B = torch.full_like(batch.lengths_B, MOST_STEPS) if is_text else batch.lengths_B
    samples = sample_prior(network, lengths_B, noise=noise)
    # Means are held against values at a glance; the most likely token of each step soon goes in circles.
    temperature = 1.0 if is_text else 0.0
    reconstructions = reconstruct(network, batch, temperature=temperature, noise=noise, values_only=True)
    return Shown(*(to_records(one, description) for one in (batch, reconstructions, samples)))


def write_preview(directory: Path, step: int, shown: Shown, description: DataDescription) -> Path | None:
    """Write the file of a step, whole or not at all, and return its path; None: there is nothing to draw. Of older previews keep
    the newest.
    """
    rows = [] if description.kind == "tokens" else preview_rows(shown, description)
    if description.kind != "tokens" and not rows:
        return None
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
            write_preview_figure(partial, rows, title=title, time_label=time_label)
    files = files_by_step(directory)
    for old in sorted(files)[:-MOST_FILES]:
        files[old].unlink(missing_ok=True)
    return path


def files_by_step(directory: Path) -> dict[int, Path]:
    """Return the previews in a directory by their steps."""
    steps = {path: path.stem.removeprefix("step-") for path in directory.glob("step-*")}
    return {int(step): path for path, step in steps.items() if step.isdecimal()}


def preview_rows(shown: Shown, description: DataDescription) -> list[PreviewRow]:
    """Return a row for each of the features that the originals have most values of, in the order of the data; x and y make one
    drawing.

    Where these originals have none, the samples count; where those have none either, there is no row.
    """
    plane = description.plane
    tracks = [[tracks_of(record, description) for record in records[:MOST_COLUMNS]] for records in shown]

    def frequent_in(group: Sequence[dict[str, Track]]) -> set[str]:
        values = Counter({name: sum(len(by_name[name].values) for by_name in group) for name in description.names})
        return {name for name, count in values.most_common(MOST_ROWS) if count}

    originals, _, samples = tracks
    frequent = frequent_in(originals) or frequent_in(samples)
    names = [name for name in description.names if name in frequent and name not in (plane or ())]
    rows = [PreviewRow(name, False, *([by_name[name] for by_name in group] for group in tracks)) for name in names]
    if plane is None:
        return rows
    drawings = [[drawing_of(record, plane) for record in records[:MOST_COLUMNS]] for records in shown]
    return [PreviewRow(f"{plane[1]} over {plane[0]}", True, *drawings), *rows]


def tracks_of(record: Any, description: DataDescription) -> dict[str, Track]:
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


def drawing_of(record: Any, plane: tuple[str, str]) -> Track:
    """Return the places of a record of `to_records` in a plane, as far as they are known: x takes the place of the time."""
    places = [place for values in record if math.isfinite(sum(place := (values[plane[0]], values[plane[1]])))]
    return Track([x for x, _ in places], [y for _, y in places])


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
