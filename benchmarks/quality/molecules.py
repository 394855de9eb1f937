"""How good the samples of a model of molecules are: how many RDKit reads, how many differ, how many are new.

    python -m benchmarks.quality.molecules                                # trains as examples/molecules does, for an hour
    python -m benchmarks.quality.molecules --evaluate RUN --data_dir DIR  # an existing run and its data

10,000 samples from the prior at temperature 1, drawn as `seqvae sample` does. ELBO, rate and mutual information are of the
test split.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, make_parser, print_table, restart_as_commands_run
from seqvae.errors import UsageError, run_command

PROG = "benchmarks.quality.molecules"
COUNT = 10_000


def main() -> None:
    parser = make_parser(PROG, __doc__)
    parser.add_argument("--evaluate", metavar="RUN", type=Path, help="sample from this one, and train nothing")
    parser.add_argument("--data_dir", type=Path, help="the data that the run was trained on")
    options, words = parser.parse_known_args()
    if options.evaluate and not options.data_dir:
        raise UsageError("--evaluate needs --data_dir, the directory of the data that the run was trained on")
    restart_as_commands_run()
    run, data_dir = (options.evaluate, options.data_dir) if options.evaluate else trained_run(words)
    rows = rows_of(run, data_dir)
    print_table("molecules", rows)
    environment = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    last = (run / "throughput.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    training = {"command": environment["command"], "threads": environment["threads"], "last": json.loads(last)}
    print(json.dumps({"machine": machine(), "training": training, "rows": rows}))


def trained_run(words: list[str]) -> tuple[Path, Path]:
    """Run the example itself, with its own flags; return the run and its data."""
    folder = Path("runs") / "benchmark-molecules"
    subprocess.run(
        [sys.executable, "-m", "examples.molecules", "--output_dir", str(folder), *words], check=True, stdout=sys.stderr
    )
    return folder / "model", folder / "data"


def rows_of(run: Path, data_dir: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    from examples.molecules.results import quality
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
    known = set(pq.read_table(data_dir / "train.parquet", columns=["smiles"])["smiles"].to_pylist())
    found = quality(strings, known)
    statistics = posterior_statistics(trained.network, paired_batches(open_data(trained, DataChoices()), ["test"]))
    return [
        row("samples from the prior, temperature 1", f"{found.sampled:,}", f"{COUNT / seconds:,.0f} per second"),
        row("valid", share(found.valid, found.sampled), "RDKit reads them"),
        row("unique", share(found.unique, found.valid), "of the valid ones"),
        row("novel", share(found.novel, found.unique), "of these, not among the training molecules"),
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
