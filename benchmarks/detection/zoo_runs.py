"""The runs of the zoo as plain data: what is trained on what, with which remedy or fault, and in which half it counts.

In: the name of a data set. Out: for each run its flags, what is done to its network beyond flags, its seed and its half.
Nothing is trained here, and nothing is imported that trains.

The first two draws, of 129 runs each, served to build the detector. The third has other data, decoders and treatments, and aims at
what a detector gets wrong: late wakers, ramps that kill late, cycles, latents of each step, labels that carry the latent, batches
of 2, runs too short to tell. Its scored half was looked at and drawn again, for the fourth.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from seqvae.data.description import Kind

Half = Literal["tuning", "scored"]
HALVES: tuple[Half, ...] = ("tuning", "scored")
Alteration = Literal["none", "fixed variance", "dead encoder", "z is 0", "z is noise"]
"""A change of the network beyond what flags can do."""
Flags = dict[str, str]

STEPS = 750
"""Optimizer steps of a run whose treatment says nothing else: 15 between two of its 50 readings."""
BATCH = 32
RATE = "3e-3"
"""Learning rate at which models become healthy within the run, and strong decoders learn to do without a latent at weight 1."""


class DataSet(NamedTuple):
    """A data set: the length of its sequences, at which a step stays below about 10 ms, and its own flags."""

    longest: int
    flags: Mapping[str, str] = MappingProxyType({})
    labels: Mapping[str, str] | None = None
    """The flags that name its labels; None: it has none."""


DEMO_KINDS: dict[str, Kind] = {"demo-tokens": "tokens", "demo-vectors": "vectors", "demo-events": "events"}
DEMO_SEQUENCES, DEMO_MEAN_LENGTH, DEMO_SEED = 4000, 16.0, 3
GENERATED_SETS = ("pen", "ar", "topics")
REAL_DATA = ("moses_smiles", "japanese_vowels", "physionet2012")
FREE_DATA = (*DEMO_KINDS, *GENERATED_SETS)
ALL_DATA = (*FREE_DATA, *REAL_DATA)
DATA = {
    "demo-tokens": DataSet(20, labels={"--label_column": "label"}),
    "demo-vectors": DataSet(20),
    "demo-events": DataSet(12),
    "pen": DataSet(16),
    "ar": DataSet(16),
    "topics": DataSet(16),
    "moses_smiles": DataSet(28, {"--tokenizer": "characters"}),
    # 270 sequences: at the rate of the others the decoders memorise them, and two seeds differ by 2 nats on held-out ones.
    "japanese_vowels": DataSet(29, {"--lr": "1e-3"}, labels={"--label_column": "label"}),
    "physionet2012": DataSet(
        12, labels={"--label_path": "{folder}/outcomes.csv", "--label_column": "in_hospital_mortality"}
    ),
}


def body(
    encoder: str, decoder: str, width: int, depth: int, latent_size: int, heads: int = 2, dropout: float = 0.1
) -> Flags:
    sizes = {"--width": width, "--depth": depth, "--latent_size": latent_size, "--heads": heads, "--dropout": dropout}
    return {"--encoder": encoder, "--decoder": decoder} | {flag: str(value) for flag, value in sizes.items()}


DECODERS: dict[str, Flags] = {
    "transformer": body("transformer", "transformer", 64, 2, 16, heads=4),
    "small-transformer": body("transformer", "transformer", 32, 1, 8),
    "lstm": body("lstm", "lstm", 64, 1, 16),
    "small-lstm": body("lstm", "lstm", 24, 1, 6),
    "tcn": body("tcn", "tcn", 48, 2, 12),
    "parallel": body("transformer", "parallel", 24, 1, 8),
    "wide-parallel": body("lstm", "parallel", 48, 1, 10),
    "mixed": body("lstm", "transformer", 40, 1, 4, dropout=0.0),
}
PARALLEL = ("parallel", "wide-parallel")
PAIRS: tuple[tuple[str, str], ...] = (
    ("demo-tokens", "transformer"),
    ("demo-tokens", "small-lstm"),
    ("demo-vectors", "tcn"),
    ("demo-vectors", "wide-parallel"),
    ("demo-events", "small-transformer"),
    ("demo-events", "lstm"),
    ("pen", "parallel"),
    ("pen", "small-lstm"),
    ("pen", "mixed"),
    ("ar", "wide-parallel"),
    ("ar", "tcn"),
    ("ar", "small-transformer"),
    ("topics", "mixed"),
    ("topics", "lstm"),
    ("topics", "parallel"),
    ("moses_smiles", "small-lstm"),
    ("moses_smiles", "transformer"),
    ("japanese_vowels", "parallel"),
    ("japanese_vowels", "lstm"),
    ("japanese_vowels", "small-transformer"),
    ("physionet2012", "parallel"),
    ("physionet2012", "tcn"),
    ("physionet2012", "mixed"),
)
"""What is trained on what: a baseline, the decoder without a latent, is trained twice for each pair."""


class Treatment(NamedTuple):
    """One way to train: flags, and what is done to the network."""

    kind: str
    runs: int
    """On how many pairs."""
    flags: Flags
    alteration: Alteration = "none"
    steps: int = STEPS
    batch: int = BATCH
    data: tuple[str, ...] = ALL_DATA
    """The sets that it makes sense on."""
    decoders: tuple[str, ...] = tuple(DECODERS)

    @property
    def is_compared(self) -> bool:
        """Whether a decoder that was trained without a latent in the same way tells what the latent is worth."""
        return (self.steps, self.batch) == (STEPS, BATCH) and not {"--word_dropout", "--lr"} & set(self.flags)


def constant(beta: float, **more: float | str) -> Flags:
    return {"--kl_schedule": "constant", "--beta": f"{beta:g}"} | {
        f"--{name}": f"{value}" for name, value in more.items()
    }


def rising(beta: float, warmup: float, shape: str = "linear") -> Flags:
    return {"--kl_schedule": shape, "--beta": f"{beta:g}", "--kl_warmup": f"{warmup:g}"}


def cyclical(beta: float, cycle: float = 0.25, warmup: float = 0.5) -> Flags:
    return rising(beta, warmup, "cyclical") | {"--kl_cycle": f"{cycle:g}"}


AUTOREGRESSIVE = tuple(name for name in DECODERS if name not in PARALLEL)
LABELLED = tuple(name for name, data in DATA.items() if data.labels)
UNBOUNDED: dict[str, float | str] = {"lr_schedule": "constant", "gradient_clip": 0}
BATCH_NORM = constant(1, posterior="batch_norm")
WAKER_STEPS = 1000
WAKER_DATA, WAKER_DECODERS = ("physionet2012",), ("parallel",)

TREATMENTS: dict[str, Treatment] = {
    # Constant weights, from no price to one that nothing survives.
    "weight-0.0005": Treatment("weight", 4, constant(0.0005)),
    "weight-0.005": Treatment("weight", 4, constant(0.005)),
    "weight-0.05": Treatment("weight", 2, constant(0.05)),
    "weight-0.2": Treatment("weight", 4, constant(0.2)),
    "weight-0.5": Treatment("weight", 4, constant(0.5)),
    "weight-1": Treatment("weight", 8, constant(1)),
    "weight-2": Treatment("weight", 6, constant(2)),
    "weight-4": Treatment("weight", 6, constant(4)),
    "weight-8": Treatment("weight", 4, constant(8)),
    "weight-32": Treatment("weight", 2, constant(32)),
    # Ramps, some of which kill late.
    "linear-1-in-0.2": Treatment("ramp", 2, rising(1, 0.2)),
    "linear-1-in-0.5": Treatment("ramp", 4, rising(1, 0.5)),
    "linear-1-in-0.8": Treatment("ramp", 2, rising(1, 0.8)),
    "linear-4-in-0.4": Treatment("ramp", 4, rising(4, 0.4)),
    "linear-4-in-0.8": Treatment("ramp", 2, rising(4, 0.8)),
    "linear-30-in-0.3": Treatment("ramp", 2, rising(30, 0.3)),
    "linear-30-in-0.6": Treatment("ramp", 2, rising(30, 0.6)),
    "linear-30-in-0.9": Treatment("ramp", 2, rising(30, 0.9), steps=1000),
    "sigmoid-1-in-0.6": Treatment("ramp", 2, rising(1, 0.6, "sigmoid")),
    "sigmoid-4-in-0.7": Treatment("ramp", 4, rising(4, 0.7, "sigmoid")),
    "cyclical-0.3": Treatment("cycle", 2, cyclical(0.3)),
    "cyclical-1": Treatment("cycle", 4, cyclical(1)),
    "cyclical-4": Treatment("cycle", 2, cyclical(4)),
    "cyclical-30": Treatment("cycle", 2, cyclical(30, cycle=0.2, warmup=0.3), steps=1000),
    # Remedies, which hold up the rate whether it is used or not.
    "free-bits-0.02": Treatment("floor", 4, constant(1, free_bits=0.02)),
    "free-bits-0.1": Treatment("floor", 2, constant(1, free_bits=0.1)),
    "free-bits-0.25": Treatment("floor", 4, constant(1, free_bits=0.25)),
    "free-bits-0.1-at-4": Treatment("floor", 2, constant(4, free_bits=0.1)),
    "batch-norm": Treatment("floor", 4, BATCH_NORM),
    "fixed-variance": Treatment("floor", 2, constant(1), "fixed variance"),
    "fixed-variance-at-4": Treatment("floor", 2, constant(4), "fixed variance"),
    "target-kl-1": Treatment("target", 2, {"--target_kl": "1"}),
    "target-kl-4": Treatment("target", 4, {"--target_kl": "4"}),
    "word-dropout-0.3": Treatment("word dropout", 2, constant(1, word_dropout=0.3), decoders=AUTOREGRESSIVE),
    "word-dropout-0.7": Treatment("word dropout", 4, constant(1, word_dropout=0.7), decoders=AUTOREGRESSIVE),
    # Faults.
    "dead-encoder": Treatment("fault", 2, constant(0.2), "dead encoder"),
    "cut-off": Treatment("fault", 2, constant(0.5), "z is 0"),
    "cut-off-free-bits": Treatment("fault", 2, constant(1, free_bits=0.2), "z is 0"),
    "cut-off-by-noise": Treatment("fault", 2, rising(1, 0.4), "z is noise"),
    "cut-off-batch-norm": Treatment("fault", 2, BATCH_NORM, "z is noise"),
    "diverging": Treatment("divergence", 2, constant(1, lr="1e5", warmup=0.1, **UNBOUNDED)),
    "diverging-late": Treatment("divergence", 2, constant(0.2, lr="5e2", warmup=1.0, **UNBOUNDED)),
    # A latent of each step: 0.01 is the product's own free bits there.
    "steps-at-0.2": Treatment("steps", 2, constant(0.2, latent_scope="step", latent_size=4)),
    "steps-at-1": Treatment("steps", 4, constant(1, latent_scope="step", latent_size=4)),
    "steps-at-4": Treatment("steps", 2, constant(4, latent_scope="step", latent_size=4)),
    "steps-free-bits-0.01": Treatment("steps", 4, constant(1, latent_scope="step", latent_size=4, free_bits=0.01)),
    "steps-linear-4": Treatment("steps", 2, rising(4, 0.6) | {"--latent_scope": "step", "--latent_size": "4"}),
    # Other sizes.
    "batch-2": Treatment("batch", 4, constant(1), batch=2, steps=1000),
    "batch-2-at-0.2": Treatment("batch", 2, constant(0.2), batch=2, steps=1000),
    "batch-256": Treatment("batch", 2, constant(1), batch=256, steps=250, decoders=("parallel", "mixed", "small-lstm")),
    "latent-1": Treatment("latent size", 2, constant(0.5, latent_size=1)),
    "latent-2": Treatment("latent size", 2, constant(1, latent_size=2), data=("pen", "ar", "demo-vectors")),
    "latent-64": Treatment("latent size", 4, constant(1, latent_size=64)),
    "latent-128": Treatment("latent size", 2, constant(0.3, latent_size=128)),
    "latent-128-free-bits": Treatment("latent size", 2, constant(1, latent_size=128, free_bits=0.01)),
    "label-weight-5-at-1": Treatment("labels", 2, constant(1, label_weight=5), data=LABELLED),
    "label-weight-20-at-4": Treatment("labels", 4, constant(4, label_weight=20), data=LABELLED),
    # Other lengths; after the first few of these it cannot be told.
    "short-60": Treatment("short", 2, constant(1), steps=60),
    "short-100": Treatment("short", 2, constant(4), steps=100),
    "short-150": Treatment("short", 2, constant(1), steps=150),
    "short-ramp-150": Treatment("short", 2, rising(1, 0.5), steps=150),
    "steps-300": Treatment("length", 2, constant(2), steps=300),
    "steps-2000": Treatment("length", 2, constant(2), steps=2000, decoders=("parallel", "mixed", "small-transformer")),
    "ramp-2000": Treatment(
        "length", 2, rising(4, 0.5), steps=2000, decoders=("small-lstm", "wide-parallel", "parallel")
    ),
    # Models that fall silent while their decoder learns the simplest things, and wake.
    "waker-5": Treatment("waker", 1, constant(5), steps=WAKER_STEPS, data=WAKER_DATA, decoders=WAKER_DECODERS),
    "waker-6.5": Treatment("waker", 1, constant(6.5), steps=WAKER_STEPS, data=WAKER_DATA, decoders=WAKER_DECODERS),
    "waker-8": Treatment("waker", 1, constant(8), steps=WAKER_STEPS, data=WAKER_DATA, decoders=WAKER_DECODERS),
    "waker-11": Treatment("waker", 1, constant(11), steps=WAKER_STEPS, data=WAKER_DATA, decoders=WAKER_DECODERS),
    "vowels-4": Treatment("waker", 2, constant(4), steps=WAKER_STEPS, data=("japanese_vowels",)),
    "vowels-8": Treatment("waker", 2, constant(8), steps=WAKER_STEPS, data=("japanese_vowels",)),
}
DRAWS: dict[Half, int] = {"tuning": 3, "scored": 4}
"""The number of the draw that each half is of. A change of the detector because of what the scored half showed takes a new one of
that half: other data and decoders for a treatment where there are others, and other seeds."""
SPLIT = 308
"""Part of the hash that splits the third draw, chosen before any of it was trained: of 2,000, the one whose halves hold most nearly
as many runs of each data set, decoder and kind of treatment."""


class ZooRun(NamedTuple):
    """One run: a treatment of a decoder on a data set."""

    treatment: str
    data: str
    decoder: str
    half: Half

    @property
    def name(self) -> str:
        return f"{self.treatment}.{self.data}.{self.decoder}"

    @property
    def pair(self) -> tuple[str, str]:
        return self.data, self.decoder

    @property
    def seed(self) -> int:
        return hash_of(f"{self.name}, round {DRAWS[self.half]}") % 2**32

    @property
    def alteration(self) -> Alteration:
        return TREATMENTS[self.treatment].alteration

    @property
    def steps(self) -> int:
        return TREATMENTS[self.treatment].steps

    @property
    def words(self) -> tuple[str, ...]:
        """Flags of the command line, without those for the places of the data and of the run."""
        treatment = TREATMENTS[self.treatment]
        labels = dict(DATA[self.data].labels or {}) if "--label_weight" in treatment.flags else {}
        flags = common_flags(self.data, self.decoder, treatment.steps, treatment.batch) | labels | treatment.flags
        return words_of(flags | {"--seed": str(self.seed)})

    @property
    def baseline(self) -> str | None:
        """Name of the same decoder, trained alike without a latent; None: there is none to compare with."""
        return f"{self.data}.{self.decoder}" if TREATMENTS[self.treatment].is_compared else None

    @property
    def baseline_words(self) -> tuple[str, ...]:
        return words_of(common_flags(self.data, self.decoder))


def common_flags(data: str, decoder: str, steps: int = STEPS, batch: int = BATCH) -> Flags:
    """Return the flags that a run shares with its baseline, as far as a treatment does not say otherwise."""
    longest = DATA[data].longest
    lengths = {"--max_sequence_length": longest, "--tokens_per_batch": batch * longest}
    length = {"--batch_size": batch, "--max_steps": steps, "--num_workers": 0, "--checkpoint_every_n_steps": steps}
    # Free bits are a treatment of their own, and labels too: they keep the means moving whatever the decoder does.
    objective = {"--label_weight": 0, "--free_bits": 0, "--lr": RATE, "--limit_val_batches": 0}
    numbers = {flag: str(value) for flag, value in (lengths | length | objective).items()}
    return numbers | DECODERS[decoder] | dict(DATA[data].flags)


def words_of(flags: Flags) -> tuple[str, ...]:
    return tuple(word for flag_and_value in flags.items() for word in flag_and_value)


def all_runs(data: tuple[str, ...] = ALL_DATA) -> list[ZooRun]:
    """Return the runs on these data sets, those of the tuning half first."""
    third = third_draw()
    runs = [run for run in third if run.half == "tuning"] + scored_again(third, DRAWS["scored"])
    runs = [run for run in runs if run.data in data]
    return sorted(runs, key=lambda run: (run.half != "tuning", hash_of(run.name)))


def third_draw(split: int = SPLIT) -> list[ZooRun]:
    """Draw both halves.

    A treatment goes to the pairs that have fewest runs so far, no data set twice as long as there are others. Its runs count in
    the one half and the other by turns, in the order of a hash.
    """
    runs = []
    load: Counter[tuple[str, str]] = Counter()
    for name, treatment in TREATMENTS.items():
        chosen: list[tuple[str, str]] = []
        for _ in range(treatment.runs):
            chosen.append(next_pair(name, chosen, load))
        chosen.sort(key=lambda pair: hash_of(f"{split}.{name}.{'.'.join(pair)}"))
        first = hash_of(f"{split}.{name}")
        runs += [ZooRun(name, *pair, HALVES[(place + first) % 2]) for place, pair in enumerate(chosen)]
    return runs


def scored_again(runs: list[ZooRun], draw: int) -> list[ZooRun]:
    """Draw the scored half again: as many runs of each treatment, on no pair of the tuning half, on new ones if possible."""
    again: list[ZooRun] = []
    load: Counter[tuple[str, str]] = Counter()
    for name in TREATMENTS:
        tuned, scored = ([run.pair for run in runs if (run.treatment, run.half) == (name, half)] for half in HALVES)
        chosen: list[tuple[str, str]] = []
        for _ in scored:
            chosen.append(next_pair(name, chosen, load, excluded=tuned, avoided=scored, salt=f"{draw}."))
        again += [ZooRun(name, *pair, "scored") for pair in chosen]
    return again


def next_pair(
    treatment: str,
    chosen: Sequence[tuple[str, str]],
    load: Counter[tuple[str, str]],
    *,
    excluded: Sequence[tuple[str, str]] = (),
    avoided: Sequence[tuple[str, str]] = (),
    salt: str = "",
) -> tuple[str, str]:
    """Return what a treatment is applied to next, beside the pairs chosen for it, and count it in."""
    data, decoders = TREATMENTS[treatment].data, TREATMENTS[treatment].decoders
    candidates = [
        pair
        for pair in PAIRS
        if pair[0] in data and pair[1] in decoders and pair not in chosen and pair not in excluded
    ]
    of_data = Counter(name for name, _ in chosen)
    pair = min(
        candidates,
        key=lambda pair: (
            pair in avoided,
            of_data[pair[0]],
            load[pair],
            hash_of(f"{salt}{treatment}.{'.'.join(pair)}"),
        ),
    )
    load[pair] += 1
    return pair


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
