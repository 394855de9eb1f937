"""The runs of the zoo as plain data: what is trained on what, with which remedy or fault, and in which half it counts.

In: the name of a data set. Out: for each run its flags, what is done to its network beyond flags, its seed and its half.
Nothing is trained here, and nothing is imported that trains.
"""

import hashlib
from typing import Literal, NamedTuple

from seqvae.data.description import Kind

Half = Literal["tuning", "scored"]
HALVES: tuple[Half, ...] = ("tuning", "scored")
Alteration = Literal["none", "fixed variance", "dead encoder", "z is 0", "z is noise"]
"""A change of the network beyond what flags can do."""

STEPS = 1000
"""Optimizer steps of each run."""
BATCH = 32
DEMO_KINDS: dict[str, Kind] = {"demo-tokens": "tokens", "demo-vectors": "vectors", "demo-events": "events"}
FREE_DATA = tuple(DEMO_KINDS)
REAL_DATA = ("moses_smiles", "japanese_vowels", "physionet2012")
ALL_DATA = (*FREE_DATA, *REAL_DATA)


class DataSet(NamedTuple):
    """A data set: the length of its sequences, at which a step stays below about 10 ms, and its own flags."""

    longest: int
    words: tuple[str, ...] = ()


DATA = {
    "demo-tokens": DataSet(24),
    "demo-vectors": DataSet(24),
    "demo-events": DataSet(16),
    "moses_smiles": DataSet(32, ("--tokenizer", "characters")),
    # 270 sequences: at the rate of the others the decoders memorise them, and two seeds differ by 2 nats on held-out ones.
    "japanese_vowels": DataSet(29, ("--lr", "5e-4")),
    "physionet2012": DataSet(12),
}
DEMO_SEQUENCES, DEMO_MEAN_LENGTH = 4000, 16.0

STRONG = ("--width", "64", "--depth", "2", "--latent_size", "16")
WEAK = ("--width", "24", "--depth", "1", "--heads", "2", "--latent_size", "8")
DECODERS: dict[str, tuple[str, ...]] = {
    "transformer": ("--encoder", "transformer", "--decoder", "transformer", *STRONG),
    "weak-lstm": ("--encoder", "lstm", "--decoder", "lstm", *WEAK),
    "tcn": ("--encoder", "tcn", "--decoder", "tcn", *STRONG),
    "parallel": ("--encoder", "transformer", "--decoder", "parallel", *WEAK),
    "lstm": ("--encoder", "lstm", "--decoder", "lstm", *STRONG),
    "weak-transformer": ("--encoder", "transformer", "--decoder", "transformer", *WEAK),
    "weak-tcn": ("--encoder", "tcn", "--decoder", "tcn", *WEAK),
}
DECODER_SHIFT = 3
"""Places by which the list of decoders is shifted from one data set to the next: each treatment meets six of the seven."""


class Treatment(NamedTuple):
    """One way to train: flags, and what is done to the network."""

    words: tuple[str, ...]
    alteration: Alteration = "none"
    turn: int | None = None
    """0 or 1: applied to every other data set, alternating with another treatment of its kind; None: to all."""


def constant(beta: float, *more: str) -> tuple[str, ...]:
    return ("--kl_schedule", "constant", "--beta", str(beta), *more)


def linear(beta: float, warmup: float) -> tuple[str, ...]:
    return ("--kl_schedule", "linear", "--beta", str(beta), "--kl_warmup", str(warmup))


BATCH_NORM = constant(1, "--posterior", "batch_norm")
UNBOUNDED = ("--lr_schedule", "constant", "--gradient_clip", "0")
TREATMENTS: dict[str, Treatment] = {
    "weight-0.005": Treatment(constant(0.005)),
    "weight-0.05": Treatment(constant(0.05)),
    "weight-0.2": Treatment(constant(0.2), turn=1),
    "weight-0.5": Treatment(constant(0.5), turn=0),
    "weight-1": Treatment(constant(1)),
    "weight-2": Treatment(constant(2)),
    "weight-4": Treatment(constant(4)),
    "weight-30": Treatment(constant(30), turn=1),
    "linear-in-0.2": Treatment(linear(1, 0.2), turn=1),
    "linear-in-0.5": Treatment(linear(1, 0.5), turn=0),
    "linear-to-4": Treatment(linear(4, 0.5)),
    "linear-to-30": Treatment(linear(30, 0.5), turn=0),
    "cyclical": Treatment(("--kl_schedule", "cyclical", "--kl_warmup", "0.5")),
    "free-bits-0.1": Treatment(constant(1, "--free_bits", "0.1"), turn=0),
    "free-bits-0.5": Treatment(constant(1, "--free_bits", "0.5"), turn=1),
    "free-bits-0.25": Treatment(constant(1, "--free_bits", "0.25")),
    "batch-norm": Treatment(BATCH_NORM),
    "fixed-variance": Treatment(constant(1), "fixed variance"),
    "word-dropout-0.3": Treatment(constant(1, "--word_dropout", "0.3"), turn=0),
    "word-dropout-0.6": Treatment(constant(1, "--word_dropout", "0.6"), turn=1),
    "target-kl-3": Treatment(("--target_kl", "3"), turn=0),
    "target-kl-5": Treatment(("--target_kl", "5"), turn=1),
    "diverging": Treatment(constant(1, "--lr", "1e5", "--warmup", "0.1", *UNBOUNDED), turn=0),
    "diverging-late": Treatment(constant(0.2, "--lr", "5e2", "--warmup", "1.0", *UNBOUNDED), turn=1),
    "dead-encoder": Treatment(constant(0.2), "dead encoder", turn=0),
    "cut-off": Treatment(constant(1), "z is 0", turn=0),
    "cut-off-by-noise": Treatment(linear(1, 0.2), "z is noise", turn=1),
    "cut-off-free-bits": Treatment(constant(1, "--free_bits", "0.25"), "z is 0"),
    "cut-off-batch-norm": Treatment(BATCH_NORM, "z is noise"),
    "fixed-variance-at-4": Treatment(constant(4), "fixed variance"),
}
DRAW: dict[Half, int] = {"tuning": 1, "scored": 2}
"""The number of times a half was drawn. A change of the detector because of what the scored half showed takes a new draw of
that half, with other decoders and other seeds."""
RATE = "3e-3"
"""Learning rate at which models become healthy within the run, and strong decoders learn to do without a latent at weight 1."""
SPLIT = 12
"""Part of the hash that splits the runs. Forty were tried before any run was judged; this one gives halves with about as many runs
of each data set and of each decoder."""


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
    def seed(self) -> int:
        draw = DRAW[self.half]
        return hash_of(self.name if draw == 1 else f"{self.name}, round {draw}") % 2**32

    @property
    def alteration(self) -> Alteration:
        return TREATMENTS[self.treatment].alteration

    @property
    def words(self) -> tuple[str, ...]:
        """Flags of the command line, without those for the places of the data and of the run."""
        return (*self.common_words, *TREATMENTS[self.treatment].words, "--seed", str(self.seed))

    @property
    def word_dropout(self) -> str:
        words = TREATMENTS[self.treatment].words
        return words[words.index("--word_dropout") + 1] if "--word_dropout" in words else "0"

    @property
    def baseline(self) -> str:
        """Name of the same decoder, trained as long without a latent."""
        return f"{self.data}.{self.decoder}.word-dropout-{self.word_dropout}"

    @property
    def baseline_words(self) -> tuple[str, ...]:
        return (*self.common_words, "--word_dropout", self.word_dropout)

    @property
    def common_words(self) -> tuple[str, ...]:
        """The flags that a run shares with its baseline."""
        data = DATA[self.data]
        lengths = ("--max_sequence_length", str(data.longest), "--tokens_per_batch", str(BATCH * data.longest))
        batches = ("--batch_size", str(BATCH), "--max_steps", str(STEPS), "--num_workers", "0")
        # Labels would keep the means moving whatever the decoder does, and free bits are a treatment of their own.
        objective = ("--label_weight", "0", "--free_bits", "0", "--lr", RATE)
        validation = ("--limit_val_batches", "0", "--checkpoint_every_n_steps", str(STEPS))
        return (*lengths, *batches, *objective, *validation, *DECODERS[self.decoder], *data.words)


def all_runs(data: tuple[str, ...] = ALL_DATA) -> list[ZooRun]:
    """Return the runs on these data sets, those of the tuning half first."""
    runs = []
    for place, (treatment, (_, _, turn)) in enumerate(TREATMENTS.items()):
        data_sets = ALL_DATA if turn is None else ALL_DATA[turn::2]
        # Every other data set, in an order by hash, from one that the treatment's hash decides.
        ordered = [name for _, name in sorted((hash_of(f"{SPLIT}.{treatment}.{name}"), name) for name in data_sets)]
        for name in data_sets:
            is_tuning = (ordered.index(name) + hash_of(f"{SPLIT}.{treatment}")) % 2 == 0
            half: Half = "tuning" if is_tuning else "scored"
            decoder = (place + DECODER_SHIFT * ALL_DATA.index(name) + DRAW[half] - 1) % len(DECODERS)
            if name in data:
                runs.append(ZooRun(treatment, name, list(DECODERS)[decoder], half))
    return sorted(runs, key=lambda run: (run.half != "tuning", hash_of(run.name)))


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
