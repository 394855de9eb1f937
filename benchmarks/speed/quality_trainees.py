"""Trainings that go on for a while and are validated when requested: our commands, a bare loop fed by Hugging Face, MOSES' own VAE.

In: data (tokens of a known process, or molecules), flags of the model, a learning rate. Out: a `Candidate`, which starts a
`Trainee` with a seed.

*Hugging Face `datasets`* feed the same network in a bare PyTorch loop: no Lightning, no cache, no plan. Random batches of 64 rows,
padded to the longest by torch's `pad_sequence`; plain AdamW with clipping; float32, or autocast to bfloat16. Validation is ours,
on the same batches as train_optimized.py's.

*MOSES' VAE* is trained by its own trainer: its GRU networks, vocabulary, collate, loop, clipping, Adam, in float32.

    pip install rdkit
    pip download --no-deps --dest .venv molsets==0.3.1      # time_to_quality does this by itself

The package cannot be installed beside ours: it asks for a pomegranate of 2019 that does not build any more, and brings a
package called `tests`. Its VAE needs none of that. So it is imported out of the wheel, past `moses/__init__.py`, which would
import all the rest. The wheel holds the MOSES molecules, too. Three things are not as its scripts have them: the weight of the KL
is constant, as ours is, the learning rate is one of the grid instead of 3e-4, and an epoch ends when the turn's time is over.
Its loss is the mean NLL of a symbol plus weight * the mean KL of a sequence. That is our objective (NLL + KL of a sequence,
both summed) divided by the symbols of a sequence if the weight is 1 / (mean symbols of a sequence); Adam does not mind the
divisor. A symbol is a character or the end mark. Both models start from a begin mark that costs nothing and leave padding out:
the same likelihood. MOSES' own categories hold four marks, of which three never come.

Shapes: N sequences, B of a batch, T steps (padded), S characters and the end mark, V symbols.
"""

import hashlib
import importlib
import subprocess
import sys
import time
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import train_optimized
import train_with_collapse_detection
from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import OptimizedSettings, ReferenceSettings, TrainingSettings
from seqvae.data.batch import TokenBatch
from seqvae.data.demo import LengthLaw, TokenTruth
from seqvae.monitors.formulas import gaussian_kl
from seqvae.profiling.measured_run import MeasuredRun, Recipe
from seqvae.training.fit import make_data
from seqvae.training.module import VALIDATION, seed_noise
from seqvae.training.network import build_network
from seqvae.training.objective import negative_elbo, resolve_free_bits

RATES = (3e-4, 1e-3, 3e-3)
"""Learning rates that all sides try; 3e-4 is MOSES' own, 3e-3 ours."""
WARMUP_STEPS = 10
PLAIN = ("--kl_schedule", "constant", "--beta", "1", "--lr_schedule", "constant", "--warmup", str(WARMUP_STEPS))
"""Flags that let trainings be compared wherever they stop: nothing depends on how long they go on."""
TRAIN_SEQUENCES, VALID_SEQUENCES = 20_000, 64
"""Numbers of sequences; few to validate on, as that is done often, and on the same ones by all."""
MEAN_LENGTH = 75.0
HF_BATCH = 64

WHEEL = "molsets-0.3.1-py3-none-any.whl"
SHA256 = "7f4450e3ebecebe79c3a2a55950c93daddee071120daf64a163d03481e811d34"
VALID_MOLECULES = 256
MOSES_VALIDATION_BATCH = 64
MOSES_VALIDATION_NOISE = 0


class Stretch(NamedTuple):
    """A stretch of training."""

    seconds: float
    tokens: int
    """Real tokens: neither padding nor marks of beginning and end."""


class Trainee(Protocol):
    """A training under way."""

    @property
    def parameters(self) -> int: ...

    def train(self, seconds: float) -> Stretch:
        """Train for this time, to the end of the optimizer step."""

    def validate(self) -> float:
        """Return the mean ELBO of the validation sequences at weight 1, in nats per sequence."""

    def close(self) -> None: ...


class Candidate(NamedTuple):
    """A way to train."""

    name: str
    rate: float
    """Learning rate."""
    batch: str
    start: Callable[[int], Trainee]
    """A function that starts it with a seed."""


# --- Data -------------------------------------------------------------------------------------------------------------


def write_demo_tokens(
    directory: Path,
    train_sequences: int = TRAIN_SEQUENCES,
    valid_sequences: int = VALID_SEQUENCES,
    mean_length: float = MEAN_LENGTH,
) -> Path:
    """Write the demo process of tokens with the log-normal lengths of the other benchmarks: it can be learnt, unlike noise."""
    truth = TokenTruth.draw(np.random.default_rng(0), LengthLaw(mean=mean_length))
    for number, (split, count) in enumerate({"train": train_sequences, "valid": valid_sequences}.items(), start=1):
        sample = truth.sample(count, np.random.default_rng([0, number]))
        lists = pa.ListArray.from_arrays(pa.array(sample.offsets_N1, pa.int32()), pa.array(sample.tokens_S))
        write_split(directory, split, "tokens", lists)
    return directory


def write_split(directory: Path, split: str, column: str, sequences_N: pa.Array) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({column: sequences_N}), directory / f"{split}.parquet")


# --- Our commands -----------------------------------------------------------------------------------------------------


class CommandTrainee:
    """A run of a training command, in a process of its own."""

    def __init__(self, recipe: Recipe) -> None:
        self._run = MeasuredRun(recipe)

    @property
    def parameters(self) -> int:
        return self._run.ready.parameters

    def train(self, seconds: float) -> Stretch:
        lap = self._run.turn(seconds=seconds, lead_steps=0)
        return Stretch(lap.seconds, lap.real_steps)

    def validate(self) -> float:
        return self._run.validate().elbo

    def close(self) -> None:
        self._run.close()


def parse_settings(
    schema: type[TrainingSettings], data: Path, rate: float, words: Sequence[str], seed: int
) -> TrainingSettings:
    places = ("--data_dir", str(data), "--cache_dir", str(data / "cache"))
    words = [*places, *PLAIN, "--lr", str(rate), "--limit_val_batches", "1.0", *words, "--seed", str(seed)]
    return parse_command_line(schema, words, prog="time_to_quality", description="")


def reference(data: Path, words: Sequence[str], rate: float) -> Candidate:
    """Return train_with_collapse_detection.py, as it is."""

    def start(seed: int) -> Trainee:
        settings = parse_settings(ReferenceSettings, data, rate, words, seed)
        recipe = Recipe("reference", settings, train_with_collapse_detection.callbacks, is_spread=False)
        return CommandTrainee(recipe)

    return Candidate("train_with_collapse_detection.py", rate, "4 sequences", start)


def optimized(data: Path, words: Sequence[str], rate: float, tokens: int) -> Candidate:
    """Return train_optimized.py --fast_detection, with one batch of this many tokens per optimizer step."""
    batch = ("--tokens_per_batch", str(tokens), "--gradient_accumulation_steps", "1")

    def start(seed: int) -> Trainee:
        flags = (*batch, *words, "--fast_detection")
        settings = parse_settings(OptimizedSettings, data, rate, flags, seed)
        return CommandTrainee(Recipe("optimized", settings, train_optimized.callbacks, is_spread=False))

    return Candidate("train_optimized.py", rate, f"{tokens:,} tokens", start)


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def hugging_face(data: Path, words: Sequence[str], rate: float, dtype: torch.dtype) -> Candidate:
    def start(seed: int) -> Trainee:
        settings = parse_settings(OptimizedSettings, data, rate, words, seed)
        return HuggingFaceTrainee(data, settings, rate, dtype)

    precision = "float32" if dtype == torch.float32 else "bfloat16 autocast"
    return Candidate(f"HF datasets, bare loop, {precision}", rate, f"{HF_BATCH} sequences", start)


class HuggingFaceTrainee:
    """The network that the settings describe, in a bare loop over batches of Hugging Face `datasets`."""

    def __init__(self, data: Path, settings: TrainingSettings, rate: float, dtype: torch.dtype) -> None:
        torch.manual_seed(settings.run.seed)
        self.settings = settings
        self.data = make_data(settings)
        self.network = build_network(self.data, settings.model, settings.compute)
        self.optimizer = AdamW(self.network.parameters(), lr=rate)
        self.schedule = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))
        self.autocast = partial(torch.autocast, "cpu", dtype, enabled=dtype != torch.float32)
        self.free_bits = resolve_free_bits(settings.objective, settings.model.latent_scope)
        self._batches = endless_batches(data)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.network.parameters())

    def train(self, seconds: float) -> Stretch:
        begun, tokens = time.perf_counter(), 0.0
        self.network.train()
        while tokens == 0 or time.perf_counter() - begun < seconds:
            batch = next(self._batches)
            with self.autocast():
                objective = negative_elbo(self.network(batch), 1.0, self.free_bits)
            (objective.loss / batch.step_tokens).backward()
            nn.utils.clip_grad_norm_(self.network.parameters(), self.settings.optimizer.gradient_clip)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            tokens += batch.step_tokens
        return Stretch(time.perf_counter() - begun, round(tokens))

    def validate(self) -> float:
        """Validate on the same noise each time, without touching that of training."""
        self.network.eval()
        loss, sequences = 0.0, 0
        with torch.no_grad(), torch.random.fork_rng(devices=[]), self.autocast():
            for batch in self.data.val_dataloader():
                seed_noise(self.settings.run.seed, VALIDATION, batch.position, device=batch.lengths_B.device)
                loss += float(negative_elbo(self.network(batch), 1.0, 0.0).loss)
                sequences += int((batch.lengths_B > 0).sum())
        return -loss / sequences

    def close(self) -> None:
        self.data.teardown("validate")


def endless_batches(data: Path) -> Iterator[TokenBatch]:
    """Yield batches as the documentation of `datasets` has it: rows in numpy's format (faster than torch's), a DataLoader."""
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.load_dataset(
        "parquet", data_files=str(data / "train.parquet"), split="train", cache_dir=str(data / "hf")
    )
    loader: DataLoader[Any] = DataLoader(
        rows.with_format("numpy"), batch_size=HF_BATCH, shuffle=True, collate_fn=padded
    )
    while True:
        yield from loader


def padded(rows: list[dict[str, Any]]) -> TokenBatch:
    """Return rows as a batch of the network; its place in a plan has no meaning here."""
    sequences = [torch.as_tensor(row["tokens"]).long() for row in rows]
    lengths_B = torch.tensor([len(tokens_T) for tokens_T in sequences])
    tokens_BT = pad_sequence(sequences, batch_first=True)
    return TokenBatch(tokens_BT, lengths_B, torch.arange(len(rows)), None, int(lengths_B.sum()), 0)


# --- MOSES ------------------------------------------------------------------------------------------------------------


class MosesMissing(Exception):
    """Raised where MOSES cannot be used; it says why, and what to type."""


class Moses(NamedTuple):
    """The modules of the package that its VAE needs."""

    model: Any
    trainer: Any
    config: Any


class Molecules(NamedTuple):
    """SMILES strings."""

    train: Sequence[str]
    valid: Sequence[str]


def find_wheel(directory: Path) -> Path:
    """Return the path of the package in a directory, into which it is downloaded if necessary."""
    path = directory / WHEEL
    if not path.exists():
        words = ("download", "--quiet", "--no-deps", "--dest", str(path.parent), f"molsets=={WHEEL.split('-')[1]}")
        done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
        if done.returncode != 0:
            raise MosesMissing(f"`pip {' '.join(words)}` failed: {done.stderr.strip()}")
    if hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        raise MosesMissing(f"{path} is not the file that was published: remove it")
    return path


def load_moses(path: Path) -> Moses:
    """Import the VAE's own modules. The wheel is not put on the path, where its package `tests` would hide ours."""
    if "moses" not in sys.modules:
        package = types.ModuleType("moses")
        package.__path__ = [f"{path}/moses"]
        sys.modules["moses"] = package
    try:
        return Moses(*(importlib.import_module(f"moses.vae.{name}") for name in Moses._fields))
    except ModuleNotFoundError as error:
        raise MosesMissing(f"{error}: pip install -c constraints.txt -e '.[bench]'") from error


def read_molecules(path: Path, train_molecules: int) -> Molecules:
    """Return the first molecules of the published training split, and some of its test split, chosen once at random."""
    with zipfile.ZipFile(path) as archive:
        train, test = (
            pd.read_csv(BytesIO(archive.read(f"moses/dataset/data/{split}.csv.gz")), compression="gzip")["SMILES"]
            for split in ("train", "test")
        )
    chosen = np.sort(np.random.default_rng(0).choice(len(test), VALID_MOLECULES, replace=False))
    return Molecules(train[:train_molecules].tolist(), test.iloc[chosen].tolist())


def moses_vae(moses: Moses, molecules: Molecules, rate: float, batch_size: int) -> Candidate:
    start = partial(MosesTrainee, moses, molecules, rate, batch_size)
    return Candidate("MOSES' VAE", rate, f"{batch_size} molecules", start)


class MosesTrainee:
    """MOSES' training loop, which gets batches for as long as a turn lasts."""

    def __init__(self, moses: Moses, molecules: Molecules, rate: float, batch_size: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.config = moses.config.get_parser().parse_args(["--n_batch", str(batch_size)])
        self.trainer = moses.trainer.VAETrainer(self.config)
        self.model = moses.model.VAE(self.trainer.get_vocabulary(molecules.train), self.config)
        self.optimizer = torch.optim.Adam(self.trainer.get_optim_params(self.model), lr=rate)
        self.molecules = molecules
        self.kl_weight = 1 / float(np.mean([len(text) + 1 for text in molecules.train]))
        self._batches = self._endless()

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def train(self, seconds: float) -> Stretch:
        begun = time.perf_counter()
        portion = Portion(self._batches, until=begun + seconds)
        self.trainer._train_epoch(self.model, 0, portion, self.kl_weight, self.optimizer)
        return Stretch(time.perf_counter() - begun, portion.characters)

    def validate(self) -> float:
        """Validate on the same noise each time, without touching that of training."""
        self.model.eval()
        texts = sorted(self.molecules.valid, key=len, reverse=True)
        parts = [texts[at : at + MOSES_VALIDATION_BATCH] for at in range(0, len(texts), MOSES_VALIDATION_BATCH)]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(MOSES_VALIDATION_NOISE)
            elbos = [moses_elbo_B(self.model, [self.model.string2tensor(text) for text in part]) for part in parts]
        return float(torch.cat(elbos).mean())

    def close(self) -> None:
        pass

    def _endless(self) -> Iterator[Sequence[Tensor]]:
        loader = self.trainer.get_dataloader(self.model, self.molecules.train, shuffle=True)
        while True:
            yield from loader


class Portion:
    """The batches of one turn, in place of the progress bar from which MOSES' loop takes its batches."""

    def __init__(self, batches: Iterator[Sequence[Tensor]], until: float) -> None:
        self._batches, self._until = batches, until
        self.characters = 0

    def __iter__(self) -> Iterator[Sequence[Tensor]]:
        while self.characters == 0 or time.perf_counter() < self._until:
            batch = next(self._batches)
            self.characters += sum(len(text) - 2 for text in batch)  # without the marks of beginning and end
            yield batch

    def set_postfix_str(self, text: str) -> None:
        pass


def moses_elbo_B(model: Any, texts: Sequence[Tensor]) -> Tensor:
    """Return -(NLL + KL) of each sequence, from logits and posteriors and not from MOSES' loss; the longest comes first."""
    outputs: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        return getattr(model, name).register_forward_hook(lambda _, __, output: outputs.__setitem__(name, output))

    hooks = [note(name) for name in ("q_mu", "q_logvar", "decoder_fc")]
    model(texts)
    for hook in hooks:
        hook.remove()
    targets_BS = pad_sequence([text[1:] for text in texts], batch_first=True, padding_value=model.pad)
    nll_BS = F.cross_entropy(outputs["decoder_fc"][:, :-1].transpose(1, 2), targets_BS, reduction="none")
    nll_B = (nll_BS * (targets_BS != model.pad)).sum(dim=1)
    return -(nll_B + gaussian_kl(outputs["q_mu"], outputs["q_logvar"]).sum(dim=-1))
