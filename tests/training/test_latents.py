"""What a run's end writes of its latents: places, neighbours and moved dimensions, for each kind, at a bounded cost."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn

from seqvae.config.monitoring import MonitoringSettings
from seqvae.config.training import ObjectiveSettings, OptimizerSettings, TrainingSettings
from seqvae.data.batch import Batch, part_of, to_records
from seqvae.models.noise import Noise
from seqvae.models.sampling import sample
from seqvae.models.vae import SequenceVAE
from seqvae.reports.read_run import read_latents
from seqvae.training.callbacks import latents
from seqvae.training.callbacks.latents import (
    MOST_DIMENSIONS,
    LatentPicture,
    choose,
    discriminants,
    picture_of,
    told_apart,
)
from seqvae.training.module import TrainingModule
from seqvae.training.trainer import make_pictures
from tests.support.small_models import KINDS, SMALL, make_batch
from tests.training.test_previews import DESCRIPTIONS

LENGTHS = [6, 4, 2, 9, 5, 7, 3, 8]


class Sequences:
    """A split in memory that deals out sequences of one batch."""

    def __init__(self, kind: str, lengths: list[int] = LENGTHS) -> None:
        self.whole: Batch = make_batch(kind, lengths)
        self.lengths_N = np.array(lengths)

    def __len__(self) -> int:
        return len(self.lengths_N)

    def ids(self, sequences_B: np.ndarray) -> list[str]:
        return [f"id {one}" for one in sequences_B]

    def gather(self, sequences_B: np.ndarray) -> Batch:
        parts = [part_of(self.whole, one, one + 1)._asdict() for one in sequences_B.tolist()]
        for place, part in enumerate(parts):
            if "steps_E" in part:
                part["steps_E"] = part["steps_E"] + place * max(LENGTHS)
        tensors = [name for name, value in parts[0].items() if isinstance(value, torch.Tensor)]
        joined: dict[str, Any] = {name: torch.cat([part[name] for part in parts]) for name in tensors}
        return self.whole._replace(**joined | {"sequences_B": torch.from_numpy(sequences_B.copy())})


def vae(kind: str, **changes: Any) -> SequenceVAE:
    torch.manual_seed(0)
    network = SequenceVAE(DESCRIPTIONS[kind], SMALL.__class__(**vars(SMALL) | changes))
    with torch.no_grad():  # latents that move with the input by more than the threshold of activity
        for parameter in network.posterior.parameters():
            parameter.mul_(8)
    return network


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scope", ["sequence", "step", "both"])
def test_places_neighbours_and_moves_are_those_of_the_posterior_means(kind, scope):
    sequences: Any = Sequences(kind)
    network = vae(kind, latent_scope=scope).train()
    chosen_N = np.arange(len(LENGTHS))
    state = torch.get_rng_state()
    found = picture_of(network, sequences, chosen_N, DESCRIPTIONS[kind])
    assert torch.equal(torch.get_rng_state(), state)
    assert network.training
    assert json.loads(json.dumps(found, allow_nan=False)) == json.loads(json.dumps(found))
    assert found["lengths"] == LENGTHS
    assert len(found["places"]) == len(LENGTHS)
    with torch.no_grad():
        latents = network.eval().latents(sequences.gather(chosen_N), at_mean=True)
    mean_NZ = latents.top_z.double()
    if scope == "step":
        mean_NZ = torch.stack(
            [row[mask].mean(dim=0) for row, mask in zip(mean_NZ, latents.posterior.mask, strict=True)]
        )
    apart_NN = torch.cdist(mean_NZ, mean_NZ)
    for each in found["neighbours"]:
        row = int(each["of"]["id"].split()[1])
        nearest = [int(one["id"].split()[1]) for one in each["nearest"]]
        assert each["distances"] == pytest.approx(apart_NN[row].sort().values[1:4].tolist(), abs=2e-3)
        assert apart_NN[row, nearest].tolist() == pytest.approx(each["distances"], abs=2e-3)
    variance_Z = mean_NZ.var(dim=0, correction=0)
    by_variance = [one for one in (-variance_Z).argsort().tolist() if variance_Z[one] >= 0.01]
    assert [one["dimension"] for one in found["moved"]] == by_variance[:MOST_DIMENSIONS]
    assert found["moved"], "a test without a moved dimension shows nothing"
    assert all(len(one["decoded"]) == len(one["moves"]) == 5 for one in found["moved"])
    if kind != "tokens":
        first = found["moved"][0]["decoded"]
        assert first[0]["points"] != first[-1]["points"]


@pytest.mark.parametrize("kind", KINDS)
def test_classes_are_drawn_at_the_means_of_their_latents_and_the_walk_joins_two_of_them(kind):
    sequences: Any = Sequences(kind, lengths=2 * LENGTHS)
    network = vae(kind)
    chosen_N, labels_N = np.arange(16), np.arange(16) % 3
    sequences.whole = sequences.whole._replace(labels_B=torch.from_numpy(labels_N))
    description = replace(DESCRIPTIONS[kind], classes=("c", "a", "b"))
    found = picture_of(network, sequences, chosen_N, description)
    with torch.no_grad():
        mean_NZ = network.eval().latents(sequences.gather(chosen_N), at_mean=True).top_z
    centre_CZ = torch.stack([mean_NZ[labels_N == one].mean(dim=0) for one in range(3)])
    far_NC = torch.cdist(mean_NZ, centre_CZ)
    closest = [
        int(far_NC[:, one].masked_fill(torch.from_numpy(labels_N != one), torch.inf).argmin()) for one in range(3)
    ]
    assert [one["class"] for one in found["by_class"]] == ["c", "a", "b"]
    assert [one["original"]["id"] for one in found["by_class"]] == [f"id {one}" for one in closest]
    apart_CC = torch.cdist(centre_CZ, centre_CZ)
    first, last = divmod(int(apart_CC.triu().argmax()), 3)
    assert [one["id"] for one in found["walk"]["ends"]] == [f"id {closest[first]}", f"id {closest[last]}"]
    assert [one["class"] for one in found["walk"]["ends"]] == ["cab"[first], "cab"[last]]
    near = found["neighbours"][0]
    for one in (near["of"], *near["nearest"]):
        assert one["class"] == "cab"[int(one["id"].split()[1]) % 3]
    assert (found["sequences"], found["of"], found["told_apart"]["classes"]) == (16, 16, 3)
    assert found["feature"] == (description.names[0] if kind == "vectors" else "")
    if kind == "vectors":  # of which the means are shown
        steps = int(sequences.lengths_N[[closest[first], closest[last]]].max())
        z = mean_NZ[[closest[first]]].lerp(mean_NZ[[closest[last]]], 0.4)
        drawn = sample(
            network, z, torch.tensor([steps]), temperature=0.0, noise=Noise(0, torch.zeros(1, dtype=torch.long))
        )
        records: list[Any] = to_records(drawn, description)
        wanted = [value for step in records[0] for name, value in step.items() if name == description.names[0]]
        assert [value for _, value in found["walk"]["decoded"][2]["points"]] == pytest.approx(wanted, rel=1e-3)


def test_places_are_in_the_plane_that_tells_classes_apart_where_there_are_enough_sequences():
    rng = np.random.default_rng(0)
    labels_N = np.arange(300) % 3
    scattered_NZ = rng.normal(size=(300, 4)) * [9.0, 1.0, 1.0, 1.0]  # by which principal components would go
    mean_NZ = scattered_NZ + np.array([[0, 0, 0, 0], [0, 6, 0, 0], [0, 0, 6, 0]])[labels_N]
    places_N2 = discriminants(mean_NZ, labels_N)
    assert places_N2 is not None
    centre_C2 = np.stack([places_N2[labels_N == one].mean(axis=0) for one in range(3)])
    apart_NC = np.linalg.norm(places_N2[:, None] - centre_C2, axis=2)
    assert (apart_NC.argmin(axis=1) == labels_N).mean() > 0.98
    for one in range(3):  # in units of the spread within a class
        np.testing.assert_allclose(np.cov(places_N2[labels_N == one].T), np.eye(2), atol=0.4)
    assert discriminants(mean_NZ[:39], labels_N[:39]) is None
    assert discriminants(mean_NZ, np.minimum(labels_N, 1)) is None
    assert discriminants(mean_NZ, np.full(300, -1)) is None


def test_whether_classes_differ_is_told_by_sequences_that_had_no_part_in_the_means():
    rng = np.random.default_rng(0)
    labels_N = np.where(np.arange(200) % 10 == 0, 1, 0)  # of unequal size
    scattered_NZ = rng.normal(size=(200, 6)) * [90.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    alike = told_apart(scattered_NZ, labels_N)
    assert alike is not None
    assert alike["low"] < 0.5 < alike["high"]
    apart = told_apart(scattered_NZ + np.outer(labels_N, [0, 4, 0, 0, 0, 0]), labels_N)
    assert apart is not None
    assert (apart["sequences"], apart["classes"]) == (200, 2)
    assert 0.9 < apart["low"] < apart["score"] <= apart["high"] <= 1
    assert told_apart(scattered_NZ, np.where(labels_N == 1, -1, 0)) is None
    assert told_apart(scattered_NZ[:40], labels_N[:40]) is None, "four of a class"
    shuffled = [told_apart(rng.normal(size=(60, 8)), rng.permutation(60) % 3) for _ in range(100)]
    scores = [one["score"] for one in shuffled if one]
    assert np.mean(scores) == pytest.approx(1 / 3, abs=0.02)
    assert sum(one["low"] > 1 / 3 for one in shuffled if one) <= 12


def test_a_diary_is_cut_between_two_events_and_never_inside_a_number():
    record: Any = [
        {"time": float(time), "variable": "rpm", "value": value} for time in range(9) for value in (1234.0, 56789.0)
    ]
    text = latents._told(record, DESCRIPTIONS["events"])["text"]
    assert text.startswith("0: rpm 1,234, rpm 56,789; 1: rpm 1,234, ")
    assert text.endswith(("rpm 56,789, ...", "rpm 1,234, ..."))
    whole = latents._told(record[:3], DESCRIPTIONS["events"])["text"]
    assert whole == "0: rpm 1,234, rpm 56,789; 1: rpm 1,234"
    long: Any = [{"time": 0.0, "variable": 400 * "x", "value": 1.0}]
    assert latents._told(long, DESCRIPTIONS["events"])["text"].endswith(" 1")


def test_without_classes_the_walk_goes_along_the_direction_in_which_latents_differ_most():
    sequences: Any = Sequences("vectors", lengths=3 * LENGTHS)
    network = vae("vectors")
    found = picture_of(network, sequences, np.arange(24), DESCRIPTIONS["vectors"])
    along_N = [place[0] for place in found["places"]]
    order = sorted(range(24), key=along_N.__getitem__)
    assert [one["id"] for one in found["walk"]["ends"]] == [f"id {order[2]}", f"id {order[-3]}"]
    assert found["by_class"] == []


def test_x_and_y_are_shown_as_drawings_and_events_as_a_diary():
    description = replace(DESCRIPTIONS["vectors"], names=("x", "y", "pressure"))
    sequences: Any = Sequences("vectors")
    found = picture_of(vae("vectors"), sequences, np.arange(8), description)
    shown = [*found["walk"]["decoded"], *(one["of"] for one in found["neighbours"]), found["moved"][0]["decoded"][0]]
    assert all(one["is_drawing"] for one in shown)
    sequences = Sequences("events")
    found = picture_of(vae("events"), sequences, np.arange(8), DESCRIPTIONS["events"])
    record: Any = to_records(sequences.gather(np.array([0])), DESCRIPTIONS["events"])[0]
    times = sorted({event["time"] for event in record})
    diaries = {one["id"]: one["text"] for one in found["walk"]["ends"]} | {
        "id 0": latents._told(record, DESCRIPTIONS["events"])["text"]
    }
    assert diaries["id 0"].startswith(f"{times[0]:,.0f}: {record[0]['variable']}")


def test_codes_have_neighbours_and_no_dimension_to_move():
    network = vae("tokens", latent="discrete", codes=8)
    sequences: Any = Sequences("tokens")
    found = picture_of(network, sequences, np.arange(8), DESCRIPTIONS["tokens"])
    assert found["moved"] == []
    assert "walk" not in found
    assert len(found["neighbours"]) == 5


def test_what_is_encoded_is_bounded_by_steps():
    sequences: Any = Sequences("tokens")
    assert choose(sequences, 1000, seed=0).tolist() == list(range(8))
    chosen_N = choose(sequences, 20, seed=0)
    assert 0 < sequences.lengths_N[chosen_N].sum() <= 20


def end_validation(directory: Any, step: int, fn: TrainerFn = TrainerFn.FITTING) -> bool:
    """Let a validation end, and return whether it left a file."""
    sequences: Any = Sequences("vectors")
    picture = LatentPicture(DESCRIPTIONS["vectors"], sequences=sequences, seed=0, tokens_per_batch=9.0)
    module = TrainingModule(vae("vectors"), ObjectiveSettings(), OptimizerSettings(), total_steps=9, seed=0, origin={})
    trainer: Any = SimpleNamespace(
        default_root_dir=str(directory),
        global_step=step,
        max_steps=9,
        accumulate_grad_batches=1,
        world_size=1,
        sanity_checking=False,
        is_global_zero=True,
        callback_metrics={"valid_elbo": torch.tensor(-1.0)},
        state=SimpleNamespace(fn=fn),
    )
    picture.on_validation_end(trainer, module)
    return (directory / "latents.json").exists()


def test_it_is_written_at_the_end_and_read_back(tmp_path):
    assert not end_validation(tmp_path, 5)
    assert end_validation(tmp_path, 9)
    found = read_latents(tmp_path / "latents.json")
    assert found is not None
    assert (found.step, len(found.places), len(found.neighbours)) == (9, 8, 5)
    assert found.groups[LENGTHS.index(2)].startswith("2 to ")
    (tmp_path / "latents.json").unlink()
    assert end_validation(tmp_path, 5, TrainerFn.VALIDATING), "the last validation, on all sequences"


@pytest.mark.parametrize("is_monitored", [True, False])
def test_a_run_that_is_not_monitored_goes_without(is_monitored):
    data: Any = SimpleNamespace(
        split=lambda name: Sequences("vectors"), cut=SimpleNamespace(batches=1), description=DESCRIPTIONS["vectors"]
    )
    monitoring = MonitoringSettings(disable_metrics_monitoring=not is_monitored)
    made = make_pictures(data, TrainingSettings(monitoring=monitoring))
    assert any(isinstance(one, LatentPicture) for one in made) == is_monitored
