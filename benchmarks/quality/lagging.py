"""The synthetic set of vae-lagging-encoder: its own code beside ours, to the same likelihood and mutual information.

    git clone https://github.com/jxhe/vae-lagging-encoder CHECKOUT
    python -m benchmarks.quality.lagging --checkout CHECKOUT      # an hour or more, nearly all of it theirs
    python -m benchmarks.quality.lagging                          # ours alone, in minutes

The data are made as He et al. (2019) describe them: z of a mixture of four Gaussians in two dimensions, an LSTM of 100 units with
random weights, 1,000 words, ten to a sentence, 16,000 sentences to train on. Both sides: LSTMs of 50 units, two latent dimensions,
one thread. Theirs trains with its own settings (`config_synthetic.py`: SGD, batches of 16 sentences) and without annealing, plain
and aggressive; its time ends where the model that it keeps was stored. Ours trains by its own recipe, in larger batches, for the
numbers of steps in STEPS; its time is that of the shortest training that reaches theirs in both figures. Times are CPU seconds of
the process, which on a free machine are those of the clock. The entropy of the process that makes the data is by quadrature over z.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from benchmarks.measure import machine, make_parser, print_table, run_in_own_process
from seqvae.errors import UsageError, run_command

PROG = "benchmarks.quality.lagging"
DEFAULT_DIRECTORY = Path("runs/lagging")
WORDS, LENGTH, UNITS, LATENTS = 1000, 10, 100, 2
SENTENCES = {"train": 16_000, "valid": 2_000, "test": 2_000}
CENTRES = ((-2.0, -2.0), (-2.0, 2.0), (2.0, -2.0), (2.0, 2.0))
STEPS = (500, 1000, 2000, 3000)
TOKENS = 1024
"""Of our batches: 93 sentences."""
PLAIN = ("--kl_schedule", "constant", "--beta", "1", "--free_bits", "0")
OURS = {
    "plain": PLAIN,
    "aggressive encoder": (*PLAIN, "--aggressive_encoder"),
    "free bits in total": ("--free_bits_by", "total", "--free_bits", "1"),
}
NETWORK = ("--encoder", "lstm", "--decoder", "lstm", "--width", "50", "--depth", "1", "--latent_size", str(LATENTS))
OLD_NUMPY = (
    "import runpy, sys, numpy; numpy.random.random_integers = lambda low, high: numpy.random.randint(low, high + 1); "
    "sys.argv = sys.argv[1:]; sys.path.insert(0, '.'); runpy.run_path('text.py', run_name='__main__')"
)
"""Runs their script with the one function that numpy has dropped since."""


def main() -> None:
    parser = make_parser(PROG, __doc__)
    parser.add_argument("--checkout", type=Path, help="a clone of vae-lagging-encoder, which is copied")
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY, help="where data, logs and runs are kept")
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS, help="lengths of our trainings")
    parser.add_argument("--epochs", type=int, default=50, help="of theirs")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each of ours")
    parser.add_argument("--one", nargs=3, metavar=("NAME", "STEPS", "SEED"), help="train one of ours, and print it")
    options = parser.parse_args()
    directory: Path = options.directory
    if options.one:
        name, steps, seed = options.one
        print(json.dumps(train_ours(directory, name, int(steps), int(seed))))
        return
    process = write_data(directory)
    theirs: list[dict[str, Any]] = []
    if options.checkout is not None:
        theirs = [train_theirs(options.checkout, directory, aggressive, options.epochs) for aggressive in (False, True)]
    ours = []
    for name in OURS:
        for steps in options.steps:
            for seed in range(options.seeds):
                words = ("--directory", str(directory), "--one", name, str(steps), str(seed))
                ours.append(run_in_own_process(PROG, *words))
                print(ours[-1], flush=True)
    rows = [row("their code", one) for one in theirs] + [row("SeqVAE", one) for one in ours]
    print_table("The synthetic set of vae-lagging-encoder, test split", rows)
    ratios = compare(theirs, ours)
    if ratios:
        print_table("To the same likelihood and mutual information", ratios)
    in_short = [
        {"entropy of the process, nats per sentence": f"{process:.2f}", "words": WORDS, "sentences": SENTENCES["train"]}
    ]
    report = {"benchmark": "lagging", "machine": machine(), "rows": rows, "ratios": ratios, "in_short": in_short}
    print(json.dumps(report))


# --- Data ---------------------------------------------------------------------------------------------------------------


class Process(nn.Module):
    """The random LSTM that makes sentences: z sets its first state and is beside its output at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS + 1, UNITS)  # and a begin mark
        self.first = nn.Linear(LATENTS, 2 * UNITS)
        self.cell = nn.LSTMCell(UNITS, UNITS)
        self.out = nn.Linear(UNITS + LATENTS, WORDS)
        for weight in self.parameters():
            nn.init.uniform_(weight, -1, 1)
        nn.init.uniform_(self.out.weight[:, UNITS:], -5, 5)  # what z says to the words

    def begin(self, z: Tensor) -> tuple[Tensor, Tensor]:
        cell = self.first(z)[:, UNITS:]
        return torch.tanh(cell), cell

    def log_p(self, state: tuple[Tensor, Tensor], word_N: Tensor, z: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return the state after a word, and the log probabilities of the next."""
        state = self.cell(self.embedding(word_N), state)
        return state, torch.log_softmax(self.out(torch.cat((state[0], z), dim=1)), dim=1)

    def write(self, z: Tensor) -> Tensor:
        """Return a sentence for each z, (N, LENGTH)."""
        state, word_N, words = self.begin(z), torch.full((len(z),), WORDS), []
        for _ in range(LENGTH):
            state, log_p_NV = self.log_p(state, word_N, z)
            word_N = torch.multinomial(log_p_NV.exp(), 1).squeeze(1)
            words.append(word_N)
        return torch.stack(words, dim=1)

    def log_likelihood(self, sentences_NL: Tensor, z_G2: Tensor) -> Tensor:
        """Return log p(x | z) for each sentence and each z, (N, G)."""
        count, rows = len(z_G2), []
        for sentence_L in sentences_NL:
            state, total_G = self.begin(z_G2), torch.zeros(count)
            words_L = torch.cat((torch.tensor([WORDS]), sentence_L))
            for word, following in pairwise(words_L):
                state, log_p_GV = self.log_p(state, word.expand(count), z_G2)
                total_G = total_G + log_p_GV[:, following]
            rows.append(total_G)
        return torch.stack(rows)


@torch.no_grad()
def write_data(directory: Path) -> float:
    """Write each split as Parquet for us and as text for them; return the entropy of a sentence in nats."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    torch.manual_seed(0)
    process, centres = Process(), torch.tensor(CENTRES)
    (directory / "data").mkdir(parents=True, exist_ok=True)
    sentences_NL = torch.zeros(0, LENGTH, dtype=torch.long)
    for split, count in SENTENCES.items():
        z_N2 = centres[torch.randint(len(CENTRES), (count,))] + torch.randn(count, LATENTS)
        sentences_NL = process.write(z_N2)
        lines = [" ".join(f"w{word}" for word in sentence) for sentence in sentences_NL.tolist()]
        pq.write_table(pa.table({"text": lines}), directory / "data" / f"{split}.parquet")
        (directory / f"{split}.txt").write_text("\n".join(lines) + "\n", encoding="ascii")
    grid = torch.linspace(-6, 6, 121)
    z_G2 = torch.cartesian_prod(grid, grid)
    log_p_G = torch.logsumexp(-0.5 * torch.cdist(z_G2, centres).square(), dim=1)
    log_p_G -= torch.logsumexp(log_p_G, dim=0)
    return -float(torch.logsumexp(process.log_likelihood(sentences_NL[:30], z_G2) + log_p_G, dim=1).mean())


# --- Their code ---------------------------------------------------------------------------------------------------------

KEPT = re.compile(r"update best loss")
ELAPSED = re.compile(r"time elapsed ([0-9.]+)s")
IW_NLL = re.compile(r"iw nll: ([0-9.]+)")
TEST = re.compile(r"TEST --- avg_loss: ([0-9.]+), kl: ([0-9.]+), mi: (-?[0-9.]+)")


def train_theirs(checkout: Path, directory: Path, aggressive: bool, epochs: int) -> dict[str, Any]:
    """Run their script in a copy of the checkout; a finished log is read, and not made again."""
    name = "aggressive" if aggressive else "plain"
    log = directory / f"theirs-{name}.jsonl"
    if not log.exists():
        copy = directory / f"theirs-{name}"
        shutil.copytree(checkout, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git"))
        data = copy / "datasets" / "synthetic_data"
        data.mkdir(parents=True, exist_ok=True)
        shutil.copy(directory / "train.txt", data / "synthetic_train.txt")
        shutil.copy(directory / "test.txt", data / "synthetic_test.txt")
        config = copy / "config" / "config_synthetic.py"
        config.write_text(re.sub(r"'epochs': \d+", f"'epochs': {epochs}", config.read_text()), encoding="utf-8")
        words = ("text.py", "--dataset", "synthetic", "--aggressive", str(int(aggressive)), "--kl_start", "1.0")
        lines = []
        command = [sys.executable, "-u", "-W", "ignore", "-c", OLD_NUMPY, *words]
        with subprocess.Popen(command, cwd=copy, stdout=subprocess.PIPE, text=True, env=one_thread()) as running:
            assert running.stdout is not None
            process = psutil.Process(running.pid)
            for line in running.stdout:
                lines.append({"seconds": cpu_seconds(process), "line": line.strip()})
                print(f"theirs, {name}: {line.strip()}", file=sys.stderr, flush=True)
        if running.returncode:
            raise UsageError(f"{checkout}: text.py ended with {running.returncode}: {lines[-1:]}")
        log.write_text("".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
    return read_theirs(name, [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()])


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process, or infinity if it has ended."""
    try:
        used = process.cpu_times()
    except psutil.NoSuchProcess:  # its last lines, after all figures
        return math.inf
    return round(used.user + used.system, 1)


def read_theirs(name: str, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what their log says: the last test is that of the model that was kept, whose time is that of its storing."""
    first = next(one["seconds"] for one in lines if ELAPSED.search(one["line"]))
    kept = [one["seconds"] for one in lines if KEPT.search(one["line"])][-1] - first
    tests = [found for one in lines if (found := TEST.search(one["line"]))]
    weighted = next(found for one in reversed(lines) if (found := IW_NLL.search(one["line"])))
    loss, rate, information = (float(part) for part in tests[-1].groups())
    return {
        "name": name,
        "setting": f"{sum('VAL ---' in one['line'] for one in lines)} epochs",
        "CPU seconds": kept,
        "IW-NLL": float(weighted.group(1)),
        "ELBO": -loss,
        "rate": rate,
        "mutual information": information,
    }


def one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


# --- Ours ---------------------------------------------------------------------------------------------------------------


def train_ours(directory: Path, name: str, steps: int, seed: int) -> dict[str, Any]:
    """Train as `train_optimized.py` does, and evaluate as `seqvae evaluate` does, with 500 samples for each sentence."""
    from benchmarks.quality.results import last_checkpoint
    from seqvae.cli.command_line import parse_command_line
    from seqvae.config.inference import DataChoices, EvaluateSettings
    from seqvae.config.training import OptimizedSettings
    from seqvae.inference.evaluate import evaluate
    from seqvae.inference.model import open_data, open_model
    from seqvae.training.fit import fit
    from train_optimized import callbacks

    torch.set_num_threads(1)
    flags = ["--data_dir", str(directory / "data"), "--tokenizer", "words", *NETWORK, *OURS[name]]
    flags += ["--tokens_per_batch", str(TOKENS), "--gradient_accumulation_steps", "1"]
    flags += ["--max_steps", str(steps), "--seed", str(seed)]
    flags += ["--output_dir", str(directory / "ours"), "--fast_detection"]
    settings = parse_command_line(OptimizedSettings, flags, prog=PROG, description="")
    start = time.process_time()
    run = fit(settings, callbacks(settings)).directory
    seconds = time.process_time() - start
    model = open_model(str(last_checkpoint(run)))
    choices = EvaluateSettings(iw_samples=500, iw_sequences=SENTENCES["test"])
    record, _ = evaluate(model, open_data(model, DataChoices()), ["test"], choices, seed=0)
    values = {one["name"]: one["value"] for one in record["rows"]}
    return {
        "name": name,
        "setting": f"{steps} steps",
        "CPU seconds": round(seconds, 1),
        **{key: values[key] for key in ("IW-NLL", "ELBO", "rate", "mutual information")},
    }


def row(code: str, one: dict[str, Any]) -> dict[str, str]:
    return {
        "code": code,
        "training": one["name"],
        "length": one["setting"],
        "CPU seconds": f"{one['CPU seconds']:.0f}",
        **{key: f"{one[key]:.2f}" for key in ("IW-NLL", "ELBO", "rate", "mutual information")},
    }


def compare(theirs: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Return, for each of theirs, our shortest training that is at least as good in both figures, and the ratio of the times."""
    rows = []
    for one in theirs:
        reached = [
            each
            for each in ours
            if each["IW-NLL"] <= one["IW-NLL"] and each["mutual information"] >= one["mutual information"]
        ]
        best = min(reached, key=lambda each: float(each["CPU seconds"]), default=None)
        rows.append(
            {
                "to reach theirs": one["name"],
                "their seconds": f"{one['CPU seconds']:.0f}",
                "ours": "" if best is None else f"{best['name']}, {best['setting']}",
                "our seconds": "" if best is None else f"{best['CPU seconds']:.0f}",
                "ratio": "" if best is None else f"{one['CPU seconds'] / best['CPU seconds']:.1f}",
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
