"""Hugging Face `datasets` feeding the same network in a bare PyTorch loop: no Lightning, no cache, no plan.

In: the settings of a run of ours, for its network and its objective. Out: a `Trainee`. Random batches of 64 rows, padded to
the longest by torch's `pad_sequence`; plain AdamW with clipping; float32, or autocast to bfloat16. Validation is ours, on the
same batches as train_optimized.py's.

Shapes: B sequences, T steps (padded).
"""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from benchmarks.speed.quality_contest import Candidate, Stretch
from benchmarks.speed.quality_ours import WARMUP_STEPS, settings_of
from seqvae.config.training import TrainingSettings
from seqvae.data.batch import TokenBatch
from seqvae.training.fit import make_data
from seqvae.training.module import VALIDATION, noise_seed, seed_noise
from seqvae.training.network import build_network
from seqvae.training.objective import negative_elbo, resolve_free_bits

BATCH = 64


def hugging_face(data: Path, words: tuple[str, ...], rate: float, dtype: torch.dtype) -> Candidate:
    def start(seed: int) -> HuggingFaceTrainee:
        return HuggingFaceTrainee(data, settings_of(data, words, rate, seed), rate, dtype)

    precision = "float32" if dtype == torch.float32 else "bfloat16 autocast"
    return Candidate(f"HF datasets, bare loop, {precision}", rate, f"{BATCH} sequences", start)


class HuggingFaceTrainee:
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
        begun, tokens = time.perf_counter(), 0
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
        return Stretch(time.perf_counter() - begun, tokens)

    def validate(self) -> float:
        """On the same noise each time, which training does not see."""
        self.network.eval()
        loss, sequences = 0.0, 0
        with torch.no_grad(), torch.random.fork_rng(devices=[]), self.autocast():
            for batch in self.data.val_dataloader():
                seed_noise(noise_seed(self.settings.run.seed, VALIDATION, batch.position), batch.lengths_B.device)
                loss += float(negative_elbo(self.network(batch), 1.0, 0.0).loss)
                sequences += int((batch.lengths_B > 0).sum())
        return -loss / sequences

    def close(self) -> None:
        self.data.teardown("validate")


def endless_batches(data: Path) -> Iterator[TokenBatch]:
    """As the documentation of `datasets` has it: rows in numpy's format, which are faster than torch's, through a DataLoader."""
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.load_dataset(
        "parquet", data_files=str(data / "train.parquet"), split="train", cache_dir=str(data / "hf")
    )
    loader: DataLoader[Any] = DataLoader(rows.with_format("numpy"), batch_size=BATCH, shuffle=True, collate_fn=padded)
    while True:
        yield from loader


def padded(rows: list[dict[str, Any]]) -> TokenBatch:
    """What the network takes; where a batch stands in a plan, nothing asks here."""
    sequences: list[Tensor] = [torch.as_tensor(row["tokens"]).long() for row in rows]
    lengths_B = torch.tensor([len(tokens_T) for tokens_T in sequences])
    tokens_BT = pad_sequence(sequences, batch_first=True)
    return TokenBatch(tokens_BT, lengths_B, torch.arange(len(rows)), None, int(lengths_B.sum()), 0)
