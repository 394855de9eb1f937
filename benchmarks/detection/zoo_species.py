"""The zoo's inhabitants as plain data: what is trained on what, with which remedy or fault, and in which half it counts.

In: the name of a data set. Out: for each run the words that its command line would have, the body that is put under its
encoder or decoder, its seed and its half. Nothing is trained here, and nothing imported that trains.
"""

import hashlib
from typing import Literal, NamedTuple

from seqvae.data.description import Kind

Half = Literal["tuning", "scored"]
HALVES: tuple[Half, ...] = ("tuning", "scored")
Body = Literal["as it is", "fixed variance", "dead encoder", "told z = 0", "told noise"]
"""What is done to the network beyond what flags can say."""

STEPS = 1000
"""Optimizer steps of each run."""
BATCH = 32
DEMO_KINDS: dict[str, Kind] = {"demo-tokens": "tokens", "demo-vectors": "vectors", "demo-events": "events"}
FREE_DATA = tuple(DEMO_KINDS)
REAL_DATA = ("moses_smiles", "japanese_vowels", "physionet2012")
ALL_DATA = (*FREE_DATA, *REAL_DATA)


class DataSet(NamedTuple):
    """How much of it a run is given, so that a step stays below some 10 ms."""

    longest: int
    words: tuple[str, ...] = ()


DATA = {
    "demo-tokens": DataSet(24),
    "demo-vectors": DataSet(24),
    "demo-events": DataSet(16),
    "moses_smiles": DataSet(32, ("--tokenizer", "characters")),
    # 270 sequences: at the rate of the others the decoders learn them by heart, and two seeds differ by 2 nats on held-out ones.
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
DECODERS_PER_DATA_SET = 3
"""Places by which the list of decoders is moved on from data set to data set: each treatment meets six of the seven."""


class Treatment(NamedTuple):
    """One way to train."""

    words: tuple[str, ...]
    body: Body = "as it is"
    turn: int | None = None
    """0 or 1: given to every other data set, in turns with another treatment of its kind; None: to all."""


def constant(beta: float, *more: str) -> tuple[str, ...]:
    return ("--kl_schedule", "constant", "--beta", str(beta), *more)


def free(bits: float) -> tuple[str, ...]:
    return constant(1, "--free_bits", str(bits))


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
    "free-bits-0.1": Treatment(free(0.1), turn=0),
    "free-bits-0.5": Treatment(free(0.5), turn=1),
    "free-bits-0.25": Treatment(free(0.25)),
    "batch-norm": Treatment(BATCH_NORM),
    "fixed-variance": Treatment(constant(1), "fixed variance"),
    "word-dropout-0.3": Treatment(constant(1, "--word_dropout", "0.3"), turn=0),
    "word-dropout-0.6": Treatment(constant(1, "--word_dropout", "0.6"), turn=1),
    "target-kl-3": Treatment(("--target_kl", "3"), turn=0),
    "target-kl-5": Treatment(("--target_kl", "5"), turn=1),
    "diverging": Treatment(constant(1, "--lr", "1e5", "--warmup", "0.1", *UNBOUNDED), turn=0),
    "diverging-late": Treatment(constant(0.2, "--lr", "5e2", "--warmup", "1.0", *UNBOUNDED), turn=1),
    "dead-encoder": Treatment(constant(0.2), "dead encoder", turn=0),
    "cut-off": Treatment(constant(1), "told z = 0", turn=0),
    "cut-off-by-noise": Treatment(linear(1, 0.2), "told noise", turn=1),
    "cut-off-free-bits": Treatment(free(0.25), "told z = 0"),
    "cut-off-batch-norm": Treatment(BATCH_NORM, "told noise"),
    "fixed-variance-at-4": Treatment(constant(4), "fixed variance"),
}
ROUND: dict[Half, int] = {"tuning": 1, "scored": 2}
"""How often a half was drawn. Whoever changes the detector for what the scored half showed draws it anew: other decoders, other
seeds."""
RATE = "3e-3"
"""Healthy models get healthy within the run, and strong decoders learn to do without a latent at weight 1."""


SPLIT = 12
"""Goes into the hash that splits the runs: one of forty tried, taken because its halves have about as many of each data set and
each decoder, before any run was judged."""


class Species(NamedTuple):
    """One run."""

    treatment: str
    data: str
    decoder: str
    half: Half

    @property
    def name(self) -> str:
        return f"{self.treatment}.{self.data}.{self.decoder}"

    @property
    def seed(self) -> int:
        return (
            hashed(f"{self.name}, round {ROUND[self.half]}") % 2**32
            if ROUND[self.half] > 1
            else hashed(self.name) % 2**32
        )

    @property
    def body(self) -> Body:
        return TREATMENTS[self.treatment].body

    @property
    def words(self) -> tuple[str, ...]:
        """Flags of the command line, but for where the data are and the run goes."""
        return (*self.common_words, *TREATMENTS[self.treatment].words, "--seed", str(self.seed))

    @property
    def baseline(self) -> str:
        """The name of the same decoder, trained as long without a latent."""
        return f"{self.data}.{self.decoder}.word-dropout-{self.word_dropout}"

    @property
    def baseline_words(self) -> tuple[str, ...]:
        return (*self.common_words, "--word_dropout", self.word_dropout)

    @property
    def word_dropout(self) -> str:
        words = TREATMENTS[self.treatment].words
        return words[words.index("--word_dropout") + 1] if "--word_dropout" in words else "0"

    @property
    def common_words(self) -> tuple[str, ...]:
        data = DATA[self.data]
        lengths = ("--max_sequence_length", str(data.longest), "--tokens_per_batch", str(BATCH * data.longest))
        batches = ("--batch_size", str(BATCH), "--max_steps", str(STEPS), "--num_workers", "0")
        # Labels would keep the means moving whatever the decoder does, and the floor is a treatment of its own.
        objective = ("--label_weight", "0", "--free_bits", "0", "--lr", RATE)
        validation = ("--limit_val_batches", "0", "--checkpoint_every_n_steps", str(STEPS))
        return (*lengths, *batches, *objective, *validation, *DECODERS[self.decoder], *data.words)


def all_species(data: tuple[str, ...] = ALL_DATA) -> list[Species]:
    """Those of the tuning half first."""
    everything = [
        Species(treatment, name, decoder_of(treatment, name), half_of(treatment, name))
        for name in data
        for treatment in TREATMENTS
        if name in data_of(treatment)
    ]
    return sorted(everything, key=lambda species: (species.half != "tuning", hashed(species.name)))


def data_of(treatment: str) -> tuple[str, ...]:
    """The data sets that a treatment is given to: all, or every other."""
    turn = TREATMENTS[treatment].turn
    return ALL_DATA if turn is None else ALL_DATA[turn::2]


def decoder_of(treatment: str, data: str) -> str:
    place = list(TREATMENTS).index(treatment) + DECODERS_PER_DATA_SET * ALL_DATA.index(data)
    return list(DECODERS)[(place + ROUND[half_of(treatment, data)] - 1) % len(DECODERS)]


def half_of(treatment: str, data: str) -> Half:
    """By the hash of treatment and data set: every other data set in the order of these, from one that the treatment's says."""
    ordered = sorted(data_of(treatment), key=lambda name: hashed(f"{SPLIT}.{treatment}.{name}"))
    return "tuning" if (ordered.index(data) + hashed(f"{SPLIT}.{treatment}")) % 2 == 0 else "scored"


def hashed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
