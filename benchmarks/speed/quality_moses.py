"""MOSES' own VAE, trained by its own trainer: its GRU networks, vocabulary, collate, loop, clipping, Adam, in float32.

    pip install rdkit
    pip download --no-deps --dest .venv molsets==0.3.1      # time_to_quality does this by itself

The package cannot be installed beside ours: it asks for a pomegranate of 2019 that does not build any more, and brings a
package called `tests`. Its VAE needs none of that. So it is imported out of the wheel, past `moses/__init__.py`, which would
import all the rest. The wheel holds the MOSES molecules, too.

In: molecules. Out: a `Trainee`. Three things are not as its scripts have them: the weight of the KL is constant, as ours is,
the learning rate is one of the grid instead of 3e-4, and an epoch ends when the turn's time is over.

Its loss is the mean NLL of a symbol plus weight * the mean KL of a sequence. That is our objective (NLL + KL of a sequence,
both summed) divided by the symbols of a sequence if the weight is 1 / (mean symbols of a sequence); Adam does not mind the
divisor. A symbol is a character or the end mark. Both models start from a begin mark that costs nothing and leave padding out:
the same likelihood. MOSES' own categories hold four marks, of which three never come.

Shapes: B sequences, S characters and the end mark, V symbols.
"""

import hashlib
import importlib
import subprocess
import sys
import time
import types
import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.speed.quality_contest import Candidate, Stretch
from benchmarks.speed.quality_data import MOLECULES_VALIDATED_ON
from seqvae.monitors.formulas import gaussian_kl

WHEEL = "molsets-0.3.1-py3-none-any.whl"
SHA256 = "7f4450e3ebecebe79c3a2a55950c93daddee071120daf64a163d03481e811d34"
VALIDATION_BATCH = 64
VALIDATION_NOISE = 0


class MosesMissing(Exception):
    """MOSES cannot be had; says why, and what to type."""


class Moses(NamedTuple):
    """What is needed of the package."""

    model: Any
    trainer: Any
    config: Any


class Molecules(NamedTuple):
    """SMILES strings."""

    trained_on: Sequence[str]
    validated_on: Sequence[str]


def wheel(directory: Path) -> Path:
    """Where the package lies in the directory; downloaded where it does not."""
    path = directory / WHEEL
    if not path.exists():
        words = ("download", "--quiet", "--no-deps", "--dest", str(path.parent), f"molsets=={WHEEL.split('-')[1]}")
        done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
        if done.returncode != 0:
            raise MosesMissing(f"`pip {' '.join(words)}` failed: {done.stderr.strip()}")
    if hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        raise MosesMissing(f"{path} is not the file that was published: remove it")
    return path


def load(path: Path) -> Moses:
    """Import the VAE's own modules. The wheel is not put on the path, where its package `tests` would hide ours."""
    if "moses" not in sys.modules:
        package = types.ModuleType("moses")
        package.__path__ = [f"{path}/moses"]
        sys.modules["moses"] = package
    try:
        return Moses(*(importlib.import_module(f"moses.vae.{name}") for name in Moses._fields))
    except ModuleNotFoundError as error:
        raise MosesMissing(f"{error}: pip install -c constraints.txt -e '.[bench]'") from error


def read_molecules(path: Path, trained_on: int) -> Molecules:
    """The first so many molecules of the published training split, and some of its test split, chosen once at random."""
    with zipfile.ZipFile(path) as archive:
        train, test = (
            pd.read_csv(BytesIO(archive.read(f"moses/dataset/data/{split}.csv.gz")), compression="gzip")["SMILES"]
            for split in ("train", "test")
        )
    chosen = np.sort(np.random.default_rng(0).choice(len(test), MOLECULES_VALIDATED_ON, replace=False))
    return Molecules(train[:trained_on].tolist(), test.iloc[chosen].tolist())


def candidate(moses: Moses, molecules: Molecules, rate: float, batch_size: int) -> Candidate:
    return Candidate(
        "MOSES' VAE", rate, f"{batch_size} molecules", partial(MosesTrainee, moses, molecules, rate, batch_size)
    )


class MosesTrainee:
    """Its training loop, which gets batches for as long as a turn lasts."""

    def __init__(self, moses: Moses, molecules: Molecules, rate: float, batch_size: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.config = moses.config.get_parser().parse_args(["--n_batch", str(batch_size)])
        self.trainer = moses.trainer.VAETrainer(self.config)
        self.model = moses.model.VAE(self.trainer.get_vocabulary(molecules.trained_on), self.config)
        self.optimizer = torch.optim.Adam(self.trainer.get_optim_params(self.model), lr=rate)
        self.molecules = molecules
        self.kl_weight = 1 / float(np.mean([len(text) + 1 for text in molecules.trained_on]))
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
        """On the same noise each time, which training does not see."""
        self.model.eval()
        texts = sorted(self.molecules.validated_on, key=len, reverse=True)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(VALIDATION_NOISE)
            elbos = [
                elbo_B(self.model, [self.model.string2tensor(text) for text in texts[first : first + VALIDATION_BATCH]])
                for first in range(0, len(texts), VALIDATION_BATCH)
            ]
        return float(torch.cat(elbos).mean())

    def close(self) -> None:
        pass

    def _endless(self) -> Iterator[Sequence[Tensor]]:
        loader = self.trainer.get_dataloader(self.model, self.molecules.trained_on, shuffle=True)
        while True:
            yield from loader


class Portion:
    """Stands in for the progress bar that its loop takes its batches from."""

    def __init__(self, batches: Iterator[Sequence[Tensor]], until: float) -> None:
        self._batches, self._until = batches, until
        self.characters = 0

    def __iter__(self) -> Iterator[Sequence[Tensor]]:
        while self.characters == 0 or time.perf_counter() < self._until:
            batch = next(self._batches)
            self.characters += sum(len(text) - 2 for text in batch)  # without the marks of beginning and end
            yield batch

    def set_postfix_str(self, said: str) -> None:
        pass


def elbo_B(model: Any, texts: Sequence[Tensor]) -> Tensor:
    """-(NLL + KL) of each sequence, from its logits and posteriors and not from its loss; the longest sequence comes first."""
    seen: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        return getattr(model, name).register_forward_hook(lambda _, __, output: seen.__setitem__(name, output))

    hooks = [note(name) for name in ("q_mu", "q_logvar", "decoder_fc")]
    model(texts)
    for hook in hooks:
        hook.remove()
    targets_BS = torch.nn.utils.rnn.pad_sequence(
        [text[1:] for text in texts], batch_first=True, padding_value=model.pad
    )
    nll_BS = F.cross_entropy(seen["decoder_fc"][:, :-1].transpose(1, 2), targets_BS, reduction="none")
    nll_B = (nll_BS * (targets_BS != model.pad)).sum(dim=1)
    return -(nll_B + gaussian_kl(seen["q_mu"], seen["q_logvar"]).sum(dim=-1))
