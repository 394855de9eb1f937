"""How good the samples of a model of molecules are: how many RDKit reads, how many differ, how many are new.

    python -m benchmarks.quality.molecules                                  # trains on all of MOSES, for an hour
    python -m benchmarks.quality.molecules --limit 20000 --max_steps 300    # a first look
    python -m benchmarks.quality.molecules --evaluate RUN --data_dir DIR    # an existing run and its data

30,000 samples from the prior at temperature 1, drawn as `seqvae sample` does. ELBO, rate and mutual information are of the
test split. The Frechet ChemNet distance (FCD) of the valid samples is that to MOSES' published statistics of its test molecules;
beside it stands that of as many training molecules, which is what can be reached. Tokens are byte pairs learnt from the training
molecules: 512 symbols, up to whole rings, 8.4 per molecule; that every molecule is decoded to the same string is checked on all of
them.
"""

import io
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import machine, make_parser, print_table, restart_as_commands_run
from seqvae.errors import DataError, UsageError, run_command

PROG = "benchmarks.quality.molecules"
ROOT = Path(__file__).parent.parent.parent
COUNT, FIRST = 30_000, 10_000
"""Samples, as MOSES takes them, and the valid ones of which so many differ."""
TOKENS = 512
LEARNT_FROM = 100_000
"""Molecules, evenly out of all: more change hardly a token."""
STEPS = 22_000
"""Optimizer steps of 4,000 tokens each, which are 470 molecules."""
SETTINGS = {
    "--width": "192",
    "--depth": "2",
    "--gradient_accumulation_steps": "1",
    "--dropout": "0",  # no molecule comes more than three times: there is nothing to memorise
    "--free_bits": "0.15",  # of 16 dimensions: a molecule may cost at least 2.4 nats
    "--limit_val_batches": "0.2",  # some 2,000 molecules
}


def main() -> None:
    parser = make_parser(PROG, __doc__)
    parser.add_argument("--evaluate", metavar="RUN", type=Path, help="sample from this one, and train nothing")
    parser.add_argument("--data_dir", type=Path, help="the data that the run was trained on")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N molecules of each published file")
    parser.add_argument("--max_steps", type=int, default=STEPS, metavar="N", help="of training (default: %(default)s)")
    parser.add_argument("--max_time", metavar="TIME", help="of training, as hours:minutes:seconds; default: no limit")
    options = parser.parse_args()
    if options.evaluate and not options.data_dir:
        raise UsageError("--evaluate needs --data_dir, the directory of the data that the run was trained on")
    restart_as_commands_run()
    limits = ["--max_steps", str(options.max_steps), *(["--max_time", options.max_time] if options.max_time else [])]
    run, data_dir = (options.evaluate, options.data_dir) if options.evaluate else trained_run(options.limit, limits)
    rows = rows_of(run, data_dir)
    print_table("molecules", rows)
    environment = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    last = (run / "throughput.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    training = {"command": environment["command"], "threads": environment["threads"], "last": json.loads(last)}
    print(json.dumps({"machine": machine(), "training": training, "rows": rows}))


def trained_run(limit: int | None, limits: Sequence[str]) -> tuple[Path, Path]:
    """Fetch the molecules, learn their tokens and train; return the run and its data."""
    from examples.get_data import moses_smiles

    folder = Path("runs") / "benchmark-molecules"
    data_dir, tokenizer = folder / "data", folder / "tokenizer.json"
    if not (data_dir / "test.parquet").exists():  # a run goes on only where its data have kept their date
        data_dir.mkdir(parents=True, exist_ok=True)
        moses_smiles(data_dir, limit)
        make_tokenizer(data_dir, tokenizer)
    places = {"--data_dir": data_dir, "--cache_dir": folder / "cache", "--output_dir": folder, "--tokenizer": tokenizer}
    words = [str(word) for pair in (places | SETTINGS).items() for word in pair]
    command = [
        sys.executable,
        str(ROOT / "train_optimized.py"),
        "--fast_detection",
        *words,
        *limits,
        "--run_name",
        "model",
    ]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return folder / "model", data_dir


def smiles_in(path: Path) -> list[str]:
    import pyarrow.parquet as pq

    return [str(smiles) for smiles in pq.read_table(path, columns=["smiles"])["smiles"].to_pylist()]


def make_tokenizer(data_dir: Path, path: Path) -> None:
    """Learn the same tokens from the same training molecules; every character is one, however rare."""
    from tokenizers import Tokenizer, decoders, models, trainers

    splits = [smiles_in(data_dir / f"{split}.parquet") for split in ("train", "valid", "test")]
    train, *_ = splits
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS, initial_alphabet=sorted(set("".join(train))), special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(train[:: max(1, len(train) // LEARNT_FROM)][:LEARNT_FROM], trainer)
    for smiles in splits:
        ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(smiles)]
        for one, decoded in zip(smiles, tokenizer.decode_batch(ids, skip_special_tokens=False), strict=True):
            if decoded != one:
                raise DataError(f"molecule {one!r} comes back from the tokenizer as {decoded!r}")
    tokenizer.save(str(path))


def molecules_of(sampled: Sequence[str]) -> list[str]:
    """Return the strings that RDKit reads as a molecule, as it writes them."""
    from rdkit import Chem, RDLogger

    log: Any = RDLogger
    log.DisableLog("rdApp.*")  # it complains of each string that is none, and we count those
    molecules = [Chem.MolFromSmiles(smiles) if smiles else None for smiles in sampled]
    return [Chem.MolToSmiles(molecule) for molecule in molecules if molecule is not None]


def chemnet_distance(smiles: Sequence[str], mean_F: np.ndarray, covariance_FF: np.ndarray) -> float:
    """Return the Frechet distance of molecules from others, of whose features in ChemNet these are the moments."""
    from fcd import get_predictions, load_ref_model
    from fcd.utils import calculate_frechet_distance

    features_NF = get_predictions(load_ref_model(), list(smiles), n_jobs=0)
    return float(calculate_frechet_distance(features_NF.mean(axis=0), np.cov(features_NF.T), mean_F, covariance_FF))


def published_moments(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return MOSES' moments of its test molecules in ChemNet; the file is pickled, and its archive pinned to the byte."""
    from examples.get_data import MOLECULES, files_in

    (content,) = files_in(MOLECULES, folder, ["moses/dataset/data/test_stats.npz"])
    moments = np.load(io.BytesIO(content), allow_pickle=True)["stats"].item()["FCD"]
    return moments["mu"], moments["sigma"]


def rows_of(run: Path, data_dir: Path) -> list[dict[str, Any]]:
    from seqvae.config.inference import DataChoices, SampleSettings
    from seqvae.inference.estimates import posterior_statistics
    from seqvae.inference.model import open_data, open_model
    from seqvae.inference.streaming import paired_batches
    from seqvae.inference.tables import sample

    trained = open_model(str(run / "checkpoints" / "last.ckpt"))
    begin = time.perf_counter()
    tables = list(sample(trained, SampleSettings(count=COUNT), seed=0))
    seconds = time.perf_counter() - begin
    strings = [text for table in tables for text in table.column("text").to_pylist()]
    trained_on = smiles_in(data_dir / "train.parquet")  # 99.9 % of them are as RDKit writes them
    valid = molecules_of(strings)
    different = set(valid)
    new = different - set(trained_on)
    moments = published_moments(data_dir.parent)
    distance = chemnet_distance(valid, *moments)
    of_training = chemnet_distance(trained_on[:: len(trained_on) // len(valid)][: len(valid)], *moments)
    statistics = posterior_statistics(
        trained.network, paired_batches(open_data(trained, DataChoices(data_dir=str(data_dir))), ["test"])
    )
    return [
        row("samples from the prior, temperature 1", f"{len(strings):,}", f"{COUNT / seconds:,.0f} per second"),
        row("valid", share(len(valid), len(strings)), "RDKit reads them"),
        row("unique", share(len(set(valid[:FIRST])), len(valid[:FIRST])), f"of the first {FIRST:,} valid ones"),
        row("novel", share(len(new), len(different)), "of these, not among the training molecules"),
        row(
            "FCD",
            f"{distance:.3f}",
            f"valid samples to MOSES' test set; {of_training:.3f} for as many training molecules",
        ),
        row(
            "ELBO, nats per molecule",
            f"{statistics.elbo.value:.2f}",
            f"test split, ± {statistics.elbo.error:.2f}",
        ),
        row("rate (KL)", f"{statistics.rate.value:.2f}", "nats per molecule"),
        row("mutual information", f"{statistics.mutual_information:.2f}", f"of {statistics.posteriors:,} posteriors"),
        row("active units", str(statistics.active_units), f"of {len(statistics.kl_per_dim)}"),
    ]


def share(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "-"


def row(name: str, value: str, of: str) -> dict[str, str]:
    return {"figure": name, "value": value, "of": of}


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
