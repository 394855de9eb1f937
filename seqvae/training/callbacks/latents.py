"""What the latents of a run look like: `latents.json`, which the report draws, and the callback that writes it at the run's end.

In: up to MOST_SEQUENCES validation sequences, chosen once. Out: where each lies in the plane in which their latents differ most,
or in which their classes lie furthest apart; what is drawn for each class, what is decoded on the way from one sequence to another
and while a single dimension of a latent is moved, the nearest neighbours of five, and how well the latents tell classes apart. It
all takes at most MOST_STEPS steps of the encoder, fewer in a short run, and some dozens of short sequences of the decoder. It draws
with a noise of its own, so that training goes on as without it. With --strategy fsdp there is none, as no process has all weights.

Shapes: N sequences, Z latent dimensions, M latents that are decoded.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from seqvae.data.batch import Record, to_records
from seqvae.data.dataset import SequenceSet
from seqvae.data.description import DataDescription
from seqvae.errors import harmless
from seqvae.files import replace_file
from seqvae.models.noise import Noise
from seqvae.models.sampling import evaluating, sample
from seqvae.models.vae import SequenceVAE, mean_over_steps
from seqvae.reports.charts import principal_components
from seqvae.reports.previews import Track
from seqvae.reports.run_files import LATENTS
from seqvae.text import brief, visible
from seqvae.training.callbacks.previews import beginning, drawing_of, tracks_of
from seqvae.training.module import TrainingModule

MOST_SEQUENCES, PER_BATCH = 512, 32
MOST_STEPS, LEAST_STEPS = 2**15, 2**13
"""Real steps that are encoded."""
SHARE_OF_RUN = 0.005
"""Of the steps of training that are encoded here at most; without a backward pass they cost a third of theirs."""
ANCHORS, NEIGHBOURS = 5, 3
MOST_DIMENSIONS, MOST_DECODED = 4, 60
"""Dimensions that are moved, and the steps that are decoded."""
WALK = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Places on the way from one sequence to another, as shares of it."""
MOST_CLASSES, LEAST_OF_CLASS, DRAWN_FOR_CLASS = 8, 5, 2
"""Classes that are shown, the sequences that one needs, and what is drawn for each."""
SEQUENCES_PER_DIMENSION = 10
"""So many sequences for each dimension of the latent make a plane that tells classes apart trustworthy."""
FOLDS = 10
"""Parts of the sequences, each of which has its classes told by what the others say."""
MOVES = (-2.0, -1.0, 0.0, 1.0, 2.0)
"""Standard deviations of the posterior means."""
LEAST_VARIANCE = 0.01
"""Of the posterior means of an active dimension, as the monitor counts them."""
MOST_CHARACTERS, MOST_DIARY, MOST_NAME, MOST_POINTS = 120, 140, 60, 40


class LatentPicture(lightning.Callback):
    """Callback that writes `latents.json` of a `SequenceVAE` in a `TrainingModule`."""

    def __init__(
        self, description: DataDescription, *, sequences: SequenceSet, seed: int, tokens_per_batch: float
    ) -> None:
        """`sequences`: of validation. `tokens_per_batch`: the mean of training batches."""
        self.description = description
        self.sequences = sequences
        self.seed = seed
        self.tokens_per_batch = tokens_per_batch
        self._done_step = -1

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        step = trainer.global_step
        is_end = trainer.state.fn == TrainerFn.VALIDATING or step == trainer.max_steps
        if trainer.sanity_checking or not trainer.is_global_zero or not is_end or self._done_step == step:
            return
        if not math.isfinite(trainer.callback_metrics["valid_elbo"]):
            return
        assert isinstance(pl_module, TrainingModule)
        assert isinstance(pl_module.network, SequenceVAE)
        if isinstance(pl_module.network, FSDPModule):
            return
        self._done_step = step
        trained = self.tokens_per_batch * trainer.accumulate_grad_batches * trainer.world_size * step
        most_steps = round(min(max(SHARE_OF_RUN * trained, LEAST_STEPS), MOST_STEPS))
        chosen = choose(self.sequences, most_steps, self.seed)
        if len(chosen) < 2:
            return
        found = picture_of(pl_module.network, self.sequences, chosen, self.description)
        write_picture(Path(trainer.default_root_dir), step, found)


def choose(sequences: SequenceSet, most_steps: int, seed: int) -> np.ndarray:
    """Return which sequences are shown, in stored order: as many as have no more steps together, at random."""
    count = min(MOST_SEQUENCES, len(sequences))
    chosen_N = np.random.default_rng(seed).choice(len(sequences), count, replace=False)
    lengths_N = np.asarray(sequences.lengths_N)[chosen_N]
    return np.sort(chosen_N[(np.cumsum(lengths_N) <= most_steps) & (lengths_N > 0)])


def write_picture(run: Path, step: int, found: dict[str, Any]) -> None:
    """Write what `picture_of` returns into a run, or say why not."""
    try:
        with replace_file(run / LATENTS) as partial:
            partial.write_text(
                json.dumps({"step": step} | found, ensure_ascii=False, allow_nan=False), encoding="utf-8"
            )
    except OSError as error:  # a run is worth more than its pictures
        print(harmless(f"note: {LATENTS} cannot be written ({error}); the report goes without"), flush=True)


@torch.no_grad()
def picture_of(
    network: SequenceVAE, sequences: SequenceSet, chosen_N: np.ndarray, description: DataDescription
) -> dict[str, Any]:
    """Return the content of `latents.json` but the step: plain data, a few dozen kB at most."""
    device = network.begin_W.device
    by_length = chosen_N[np.argsort(np.asarray(sequences.lengths_N)[chosen_N], kind="stable")]
    rows: dict[int, np.ndarray] = {}
    labels: dict[int, int] = {}
    with evaluating(network):
        for first in range(0, len(by_length), PER_BATCH):
            numbers_B = np.sort(by_length[first : first + PER_BATCH])
            batch = move_data_to_device(sequences.gather(numbers_B), device)
            latents = network.latents(batch, at_mean=True)
            mean_BZ = latents.top_z
            if network.latent_per_step:
                mean_BZ = mean_over_steps(mean_BZ, latents.posterior.mask)
            rows |= dict(zip(numbers_B.tolist(), mean_BZ.double().cpu().numpy(), strict=True))
            if batch.labels_B is not None:
                labels |= dict(zip(numbers_B.tolist(), batch.labels_B.tolist(), strict=True))
    mean_NZ = np.stack([rows[number] for number in chosen_N.tolist()])
    lengths_N = np.asarray(sequences.lengths_N)[chosen_N]
    found: dict[str, Any] = {
        "sequences": len(chosen_N),
        "of": len(sequences),
        "lengths": lengths_N.tolist(),
        "labels": [labels.get(number, -1) for number in chosen_N.tolist()],
        "classes": [visible(str(one))[:MOST_CHARACTERS] for one in description.classes],
    }
    labels_N = np.array(found["labels"])
    found["told_apart"] = told_apart(mean_NZ, labels_N)
    apart_N2 = discriminants(mean_NZ, labels_N)
    if apart_N2 is not None:
        found["places"], found["shares"] = apart_N2.round(4).tolist(), []
    elif mean_NZ.shape[1] > 1:
        components = principal_components(mean_NZ)
        total = float(components.variances_K.sum())
        found["places"] = components.places_N2.round(4).tolist()
        found["shares"] = [round(float(one) / total, 4) if total > 0 else 0.0 for one in components.variances_K[:2]]
    shown = ChosenLatents(network, sequences, description, chosen_N, mean_NZ, labels_N)
    if not (network.has_codes or network.has_step_latents):
        found |= {"by_class": shown.by_class(), "walk": shown.walk()}
    found["neighbours"] = shown.neighbours()
    found["moved"] = [] if network.has_codes else shown.moved()
    found["feature"] = description.names[0] if description.kind == "vectors" and not description.plane else ""
    found["time_label"] = f"{description.time_unit} since the first step" if description.kind == "events" else "step"
    return found


def discriminants(mean_NZ: np.ndarray, labels_N: np.ndarray) -> np.ndarray | None:
    """Return the places in the plane in which classes lie furthest apart, by their spread (Fisher's linear discriminants), (N, 2).

    None for fewer than three classes, and where the sequences are too few for such a plane to say something.
    """
    known_N = labels_N >= 0
    counts = np.unique(labels_N[known_N], return_counts=True)
    classes = [one for one, count in zip(*counts, strict=True) if count >= LEAST_OF_CLASS]
    if len(classes) < 3 or mean_NZ.shape[1] < 2 or known_N.sum() < SEQUENCES_PER_DIMENSION * mean_NZ.shape[1]:
        return None
    deviation_Z = mean_NZ.std(axis=0)
    rows_NZ = (mean_NZ - mean_NZ.mean(axis=0)) / np.where(deviation_Z > 0, deviation_Z, 1)
    groups = [rows_NZ[labels_N == one] for one in classes]
    scattered_NZ = np.concatenate([one - one.mean(axis=0) for one in groups])
    within_ZZ = scattered_NZ.T @ scattered_NZ / len(scattered_NZ)
    centres_NZ = np.concatenate([np.broadcast_to(one.mean(axis=0), one.shape) for one in groups])
    between_ZZ = centres_NZ.T @ centres_NZ
    whitening_ZZ = np.linalg.inv(np.linalg.cholesky(within_ZZ + 1e-6 * np.eye(len(within_ZZ))))
    _, directions_ZZ = np.linalg.eigh(whitening_ZZ @ between_ZZ @ whitening_ZZ.T)
    places_N2: np.ndarray = rows_NZ @ whitening_ZZ.T @ directions_ZZ[:, :-3:-1]
    return places_N2


def told_apart(mean_NZ: np.ndarray, labels_N: np.ndarray) -> dict[str, float] | None:
    """Return for what share of a class, as a mean over the classes, the nearest mean of a class is its own, with its 95 % interval.

    Distances are in units of the spread within classes, whose covariance is drawn towards its diagonal by Z / (Z + N). Each tenth
    of the sequences is told by the means and the spread of the others. By chance it is 1 / C, however unequal classes are. The
    interval is Wilson's for as many sequences as such a mean is worth; of 300 sets without a difference 5 to 6 % lay above
    chance with all of it. None for fewer than two classes.
    """
    sizes = dict(
        zip(*(found.tolist() for found in np.unique(labels_N[labels_N >= 0], return_counts=True)), strict=True)
    )
    classes = [one for one, size in sizes.items() if size >= LEAST_OF_CLASS]
    if len(classes) < 2:
        return None
    places = [np.flatnonzero(labels_N == one) for one in classes]
    rows_NZ = mean_NZ[np.concatenate(places)]
    class_N = np.repeat(np.arange(len(classes)), [len(one) for one in places])
    fold_N = np.concatenate([np.arange(len(one)) % FOLDS for one in places])
    deviation_Z = rows_NZ.std(axis=0)
    rows_NZ = (rows_NZ - rows_NZ.mean(axis=0)) / np.where(deviation_Z > 0, deviation_Z, 1)
    count, dimensions = rows_NZ.shape
    told_N = np.zeros(count, dtype=int)
    for fold in range(FOLDS):
        others_N = fold_N != fold
        centre_CZ = np.stack([rows_NZ[others_N & (class_N == one)].mean(axis=0) for one in range(len(classes))])
        scattered_MZ = (rows_NZ - centre_CZ[class_N])[others_N]
        within_ZZ = scattered_MZ.T @ scattered_MZ / len(scattered_MZ)
        share = dimensions / (dimensions + len(scattered_MZ))
        within_ZZ = (1 - share) * within_ZZ + np.diag(share * np.diag(within_ZZ) + 1e-6)
        whitening_ZZ = np.linalg.inv(np.linalg.cholesky(within_ZZ))
        apart_CNZ = (rows_NZ[~others_N] - centre_CZ[:, None]) @ whitening_ZZ.T
        told_N[~others_N] = np.linalg.norm(apart_CNZ, axis=2).argmin(axis=0)
    score = float(np.mean([(told_N == class_N)[class_N == one].mean() for one in range(len(classes))]))
    worth = len(classes) ** 2 / sum(1 / sizes[one] for one in classes)
    z = 1.96
    middle = (score + z**2 / (2 * worth)) / (1 + z**2 / worth)
    half = z / (1 + z**2 / worth) * math.sqrt(score * (1 - score) / worth + (z / (2 * worth)) ** 2)
    found = {"sequences": count, "classes": len(classes), "score": score, "low": middle - half, "high": middle + half}
    return {name: round(value, 4) for name, value in found.items()}


@dataclass(frozen=True)
class ChosenLatents:
    """Sequences, their latents and classes (-1: unknown), and what is shown of them."""

    network: SequenceVAE
    sequences: SequenceSet
    description: DataDescription
    chosen_N: np.ndarray
    mean_NZ: np.ndarray
    labels_N: np.ndarray

    def by_class(self) -> list[dict[str, Any]]:
        """Return for each class the sequence closest to the mean of its latents, and what is drawn at that mean."""
        sizes = np.bincount(self.labels_N[self.labels_N >= 0], minlength=len(self.description.classes))
        shown = [
            one for one in np.argsort(-sizes, kind="stable").tolist()[:MOST_CLASSES] if sizes[one] >= LEAST_OF_CLASS
        ]
        if len(shown) < 2:
            return []
        centre_CZ, nearest = self._centres(sorted(shown))
        originals = self._originals(nearest)
        steps = np.median(np.minimum(np.asarray(self.sequences.lengths_N)[self.chosen_N], MOST_DECODED))
        lengths_M = torch.full(
            (len(shown) * DRAWN_FOR_CLASS,), MOST_DECODED if self.description.kind == "tokens" else int(steps)
        )
        z = torch.from_numpy(np.repeat(centre_CZ, DRAWN_FOR_CLASS, axis=0)).to(self.network.begin_W)
        noise = Noise(0, torch.arange(len(lengths_M), device=z.device))
        drawn = [_told(record, self.description) for record in self._decoded(z, lengths_M, noise, 1.0)]
        return [
            {
                "class": visible(str(self.description.classes[one]))[:MOST_CHARACTERS],
                "original": originals[place],
                "drawn": drawn[place * DRAWN_FOR_CLASS : (place + 1) * DRAWN_FOR_CLASS],
            }
            for place, one in enumerate(sorted(shown))
        ]

    def walk(self) -> dict[str, Any]:
        """Return two sequences, and what is decoded evenly between their latents: drawn with the same noise everywhere, of
        vectors the means.

        They are those in the middle of the two classes that are furthest apart; without classes, of the first and the last tenth
        along the direction in which the latents differ most.
        """
        classes = [
            one
            for one in np.unique(self.labels_N[self.labels_N >= 0]).tolist()
            if (self.labels_N == one).sum() >= LEAST_OF_CLASS
        ]
        if len(classes) < 2:
            along_N = (
                principal_components(self.mean_NZ).places_N2[:, 0] if self.mean_NZ.shape[1] > 1 else self.mean_NZ[:, 0]
            )
            tenth = len(along_N) // 10
            ends = np.argsort(along_N, kind="stable")[[tenth, -1 - tenth]].tolist()
        else:
            centre_CZ, nearest = self._centres(classes)
            apart_CC = np.linalg.norm(centre_CZ[:, None] - centre_CZ, axis=2)
            ends = [nearest[place] for place in sorted(np.unravel_index(apart_CC.argmax(), apart_CC.shape))]
        share_M1 = np.array(WALK)[:, None]
        z = torch.from_numpy((1 - share_M1) * self.mean_NZ[ends[0]] + share_M1 * self.mean_NZ[ends[1]]).to(
            self.network.begin_W
        )
        lengths_2 = np.minimum(np.asarray(self.sequences.lengths_N)[self.chosen_N[ends]], MOST_DECODED)
        lengths_M = torch.full(
            (len(WALK),), MOST_DECODED if self.description.kind == "tokens" else int(lengths_2.max())
        )
        noise = Noise(0, torch.zeros(len(WALK), dtype=torch.long, device=z.device))
        temperature = 0.0 if self.description.kind == "vectors" else 1.0
        records = self._decoded(z, lengths_M, noise, temperature)
        return {
            "ends": self._originals(ends),
            "shares": list(WALK),
            "decoded": [_told(record, self.description) for record in records],
        }

    def neighbours(self) -> list[dict[str, Any]]:
        """Return a few sequences, from the closest to the centre outwards, each with those whose latents are nearest to its own."""
        from_centre_N = np.linalg.norm(self.mean_NZ - self.mean_NZ.mean(axis=0), axis=1)
        order_N = np.argsort(from_centre_N, kind="stable")
        anchors = order_N[np.linspace(0, len(order_N) - 1, min(ANCHORS, len(order_N))).round().astype(int)]
        found = []
        for anchor in anchors.tolist():
            distance_N = np.linalg.norm(self.mean_NZ - self.mean_NZ[anchor], axis=1)
            nearest = [one for one in np.argsort(distance_N, kind="stable").tolist() if one != anchor][:NEIGHBOURS]
            ids, records = self._stored([anchor, *nearest])
            name = _liveliest(records[:1], self.description) if self.description.kind != "tokens" else ""
            shown = [
                {"id": id_, "class": self._class(place)} | _shown(record, name, self.description)
                for id_, place, record in zip(ids, [anchor, *nearest], records, strict=True)
            ]
            distances = [round(float(one), 3) for one in distance_N[nearest]]
            found.append({"of": shown[0], "nearest": shown[1:], "distances": distances, "name": name})
        return found

    def moved(self) -> list[dict[str, Any]]:
        """Return what is decoded while one active dimension of a sequence's latent is moved: tokens drawn with the same noise for
        all, the means of values.

        The sequence is the one closest to the centre; a dimension is moved to the mean of all, and by standard deviations from
        there.
        """
        variance_Z = self.mean_NZ.var(axis=0)
        active = [one for one in np.argsort(-variance_Z, kind="stable").tolist() if variance_Z[one] >= LEAST_VARIANCE]
        active = active[:MOST_DIMENSIONS]
        if not active:
            return []
        anchor = int(np.linalg.norm(self.mean_NZ - self.mean_NZ.mean(axis=0), axis=1).argmin())
        count = len(active) * len(MOVES)
        batch = self.sequences.gather(np.repeat(self.chosen_N[anchor], count))
        batch = move_data_to_device(beginning(batch, count, MOST_DECODED), self.network.begin_W.device)
        with evaluating(self.network):
            latents = self.network.latents(batch, at_mean=True)
            top_z: Tensor = latents.top_z.clone()
            if not self.network.latent_per_step:  # of the whole sequence, of which the batch may hold a part
                top_z[:] = torch.from_numpy(self.mean_NZ[anchor]).to(top_z)
            for place, dimension in enumerate(active):
                mean, deviation = float(self.mean_NZ[:, dimension].mean()), math.sqrt(variance_Z[dimension])
                for number, move in enumerate(MOVES):
                    top_z[place * len(MOVES) + number, ..., dimension] = mean + move * deviation
            z = top_z
            if latents.steps is not None:
                z = self.network.with_steps(top_z, latents.steps.drawn * latents.steps.relative.mask[..., None])
        lengths_M = batch.lengths_B
        if self.description.kind == "tokens" and not self.network.has_step_latents:
            lengths_M = torch.full_like(lengths_M, MOST_DECODED)
        sets: Any = batch if self.description.kind == "events" else None
        noise = Noise(0, torch.zeros_like(lengths_M))
        # the most likely token of each step soon goes in circles
        temperature = 1.0 if self.description.kind == "tokens" else 0.0
        records = self._decoded(z, lengths_M, noise, temperature, sets)
        found = []
        for place, dimension in enumerate(active):
            own = records[place * len(MOVES) : (place + 1) * len(MOVES)]
            name = _liveliest([own[0], own[-1]], self.description) if self.description.kind != "tokens" else ""
            decoded = [_shown(record, name, self.description) for record in own]
            found.append({"dimension": dimension, "moves": list(MOVES), "decoded": decoded, "name": name})
        return found

    def _centres(self, classes: list[int]) -> tuple[np.ndarray, list[int]]:
        """Return the mean latent of each class, and the sequence of the class that is closest to it."""
        centre_CZ = np.stack([self.mean_NZ[self.labels_N == one].mean(axis=0) for one in classes])
        far_CN = np.linalg.norm(self.mean_NZ - centre_CZ[:, None], axis=2)
        nearest = [
            int(np.where(self.labels_N == one, far_N, np.inf).argmin())
            for one, far_N in zip(classes, far_CN, strict=True)
        ]
        return centre_CZ, nearest

    def _originals(self, places: list[int]) -> list[dict[str, Any]]:
        """Return sequences of the data as the report shows them."""
        ids, records = self._stored(places)
        return [
            {"id": id_, "class": self._class(place)} | _told(record, self.description)
            for id_, place, record in zip(ids, places, records, strict=True)
        ]

    def _class(self, place: int) -> str:
        """Return the name of a sequence's class, empty where it is not known."""
        label = self.labels_N[place]
        return visible(str(self.description.classes[label]))[:MOST_CHARACTERS] if label >= 0 else ""

    def _stored(self, places: list[int]) -> tuple[list[str], list[Record]]:
        """Return the names of sequences of the data, and how they begin; a place may come twice."""
        numbers_M = self.chosen_N[places]
        batch = self.sequences.gather(np.unique(numbers_M))
        records = to_records(beginning(batch, len(places), MOST_DECODED), self.description)
        by_number = dict(zip(batch.sequences_B.tolist(), records, strict=True))
        ids = [visible(str(id_))[:MOST_CHARACTERS] for id_ in self.sequences.ids(numbers_M)]
        return ids, [by_number[number] for number in numbers_M.tolist()]

    def _decoded(
        self, z: Tensor, lengths_M: Tensor, noise: Noise, temperature: float, sets: Any = None
    ) -> Sequence[Record]:
        drawn = sample(self.network, z, lengths_M, temperature=temperature, noise=noise, sets=sets)
        return to_records(drawn, self.description)


def _liveliest(records: list[Record], description: DataDescription) -> str:
    """Return the feature in which two sequences differ most, by the standard deviation of the data; of one, the most frequent.

    A feature with less than half as many values as the most frequent one makes no curve, and is passed over.
    """
    tracks = [tracks_of(record, description) for record in records]
    counts = {name: len(tracks[0][name].values) for name in description.names}
    if len(tracks) == 1:
        return max(counts, key=counts.__getitem__)
    frequent = [name for name, count in counts.items() if 2 * count >= max(counts.values())]

    def apart(name: str) -> float:
        first, last = (np.array(each[name].values) for each in tracks)
        count = min(len(first), len(last))
        deviation = description.std[description.names.index(name)] or 1.0
        return float(np.abs(first[:count] - last[:count]).mean() / deviation) if count else -1.0

    return max(frequent, key=apart)


def _shown(record: Record, name: str, description: DataDescription) -> dict[str, Any]:
    """Return a sequence as the report shows it: text, a drawing, or the points of one feature."""
    if description.kind == "tokens" or description.plane:
        return _told(record, description)
    return {"points": _few(tracks_of(record, description)[name])}


def _told(record: Any, description: DataDescription) -> dict[str, Any]:
    """Return a whole sequence at a glance: text, a drawing, the points of the first feature, or a diary of events."""
    match description.kind:
        case "tokens":
            written = record if isinstance(record, str) else " ".join(map(str, record))
            return {"text": visible(written)[:MOST_CHARACTERS]}
        case "vectors":
            if description.plane:
                places = drawing_of(record, description.plane)
                return {"points": _few(places, every=1), "is_drawing": True}
            return {"points": _few(tracks_of(record, description)[description.names[0]])}
    diary, time = "", None
    for event in record:
        value = "" if math.isnan(event["value"]) else f" {brief(event['value'])}"
        when = "; " if diary and event["time"] != time else ", " if diary else ""
        when += f"{event['time']:,.0f}: " if event["time"] != time else ""
        time = event["time"]
        longer = f"{diary}{when}{visible(event['variable'])[:MOST_NAME]}{value}"
        if len(longer) > MOST_DIARY:
            return {"text": f"{diary}, ..."}
        diary = longer
    return {"text": diary}


def _few(track: Track, every: int | None = None) -> list[tuple[float, float]]:
    """Return the points of a track, few enough for a small curve, that are finite."""
    points = list(zip(track.times, track.values, strict=True))
    apart = every or max(1, -(-len(points) // MOST_POINTS))
    return [(float(f"{x:.5g}"), float(f"{y:.5g}")) for x, y in points[::apart] if math.isfinite(x + y)]
