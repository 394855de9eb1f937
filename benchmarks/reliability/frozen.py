"""Compare two checkouts of this project to the last bit: what training, resuming, inference and the detector come to.

    python -m benchmarks.reliability.frozen --old OLD_CHECKOUT # against this checkout, in five minutes on two cores
    python -m benchmarks.reliability.frozen --old OLD_CHECKOUT --only moses_smiles zoo # some of it
    python -m benchmarks.reliability.frozen --old OLD_CHECKOUT --keep DIR # leave runs, results and logs of both in DIR
    python -m benchmarks.reliability.frozen --old OLD_CHECKOUT --zoo runs/zoo # also the records of benchmarks.collapse_zoo

In: two checkouts, and the real data below --data. Both train the same small models on the CPU with the same seed, each with
caches of its own. The new code goes on with a run that the old code was stopped in, and both use the old code's checkpoint.
Out: a row for each comparison, with the largest difference where there is one; the exit code is 1 if anything differs.
"""

import gzip
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from benchmarks.measure import make_parser, print_table
from benchmarks.reliability.same_run import Parts, difference, flat, parts_of_run

THIS = next(parent for parent in Path(__file__).resolve().parents if (parent / "pyproject.toml").is_file())
EQUAL = "equal to the bit"
JOBS = 2
"""Number of cases at a time, each in processes of one thread."""
STOPPED_BY_SIGTERM = 143
COMMON = """
--accelerator cpu --seed 1 --max_steps 60 --gradient_accumulation_steps 2 --tokens_per_batch 600 --max_sequence_length 40
--width 16 --depth 1 --heads 2 --latent_size 4 --dropout 0.2 --monitor_every_n_steps 5 --monitor_window 12
--log_every_n_steps 1 --checkpoint_every_n_steps 20 --val_check_interval 25 --limit_val_batches 2 --cache_dir cache
"""
USES = {
    "evaluate": "--split valid --iw_samples 10 --iw_sequences 50 --cache_dir cache --json",
    "encode": "--split valid --cache_dir cache --output",
    "sample": "--count 100 --output",
    "reconstruct": "--split valid --temperature 0.7 --cache_dir cache --output",
    "impute": "--split valid --draws 4 --cache_dir cache --output",
}
"""The flags of each verb; behind the last one comes the file that it writes."""


class Case(NamedTuple):
    """One training on one data set; DATA stands for the folder of the real data."""

    flags: str
    verbs: str = "evaluate encode sample reconstruct"
    probe: str = ""
    """Flags with which `evaluate` probes a label."""
    script: str = "train_optimized.py"


MORTALITY = "--label_path DATA/physionet2012/outcomes.csv --{} in_hospital_mortality"
CASES = {
    "demo_tokens": Case("--kind tokens --fast_detection --word_dropout 0.2"),
    "demo_vectors": Case("--kind vectors --encoder lstm --decoder lstm --posterior batch_norm"),
    "demo_events": Case("--kind events --latent_scope step --worker_type process", "evaluate encode impute"),
    "moses_smiles": Case(
        "--data_dir DATA/moses_smiles --tokenizer characters --encoder tcn --decoder tcn --kl_schedule cyclical --fast_detection"
    ),
    "japanese_vowels": Case(
        "--data_dir DATA/japanese_vowels --label_column label --label_weight 1 --decoder parallel --precision 32 "
        "--gradient_checkpointing",
        probe="--probe label",
    ),
    "physionet2012": Case(
        f"--data_dir DATA/physionet2012 --target_kl 3 --fast_detection {MORTALITY.format('label_column')} --label_weight 1",
        "evaluate encode sample reconstruct impute",
        probe=MORTALITY.format("probe"),
    ),
    "plain_recipe": Case("--kind tokens", script="train_with_collapse_detection.py"),
}
"""Cases that together have all kinds of data, backbones, likelihoods and posteriors, both precisions and both kinds of workers."""
STOP_HALF_WAY = """
import os, runpy, signal, sys
from torch.optim.optimizer import register_optimizer_step_post_hook
steps = iter(range(1, 61))
def stop(*_):
    if next(steps) == 30:
        os.kill(os.getpid(), signal.SIGTERM)
register_optimizer_step_post_hook(stop)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A program that runs a script and requests its end after 30 optimizer steps, whatever its modules are called."""
REPLAY = """
import importlib, json, sys
zoo = importlib.import_module(sys.argv[1])
verdicts = {}
for record in map(zoo.record_from, json.load(open(sys.argv[2]))):
    for name, cadence in zoo.CADENCES.items():
        replayed = zoo.replay(record, cadence, zoo.JUDGES["detector"](record, cadence))
        calls = {f"step {call.step}": call.name for call in replayed.calls}
        _, probed = replayed
        verdicts.setdefault(record.name, {})[name] = {"calls": calls, "readings with decoder use": probed}
json.dump(verdicts, open(sys.argv[3], "w"))
"""
"""A program that replays records with the module of benchmarks/ that defines `record_from`, wherever a checkout has it."""


class Tree(NamedTuple):
    """A checkout, the directory that everything of its own goes to, and the real data."""

    root: Path
    work: Path
    data: Path

    def run(self, *words: str, log: str, code: int = 0) -> None:
        """Run Python with some words, and keep what it prints; raise ChildProcessError unless it ends with the code."""
        environment = os.environ | {"PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"}
        path = self.work / f"{log}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, *(word.replace("DATA", str(self.data)) for word in words)]
        with path.open("wb") as file:
            done = subprocess.run(command, cwd=self.work, env=environment, stdout=file, stderr=subprocess.STDOUT)
        if done.returncode != code:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines() or ["(printed nothing)"]
            raise ChildProcessError(f"{self.root}, {log}: exit code {done.returncode} in place of {code}: {lines[-1]}")

    def train(self, name: str, folder: str, *before: str, code: int = 0) -> Path:
        """Train a case, or go on with it where it was stopped, and return the run's directory."""
        case = CASES[name]
        words = (*before, str(self.root / case.script), *COMMON.split(), *case.flags.split())
        self.run(*words, "--output_dir", folder, "--run_name", name, log=f"{folder}/{name}", code=code)
        return self.work / folder / name

    def use(self, verb: str, name: str) -> Path:
        """Use a copy of the old code's run, and return the file that was written."""
        script = "evaluate.py" if verb == "evaluate" else "use_model.py"
        if not (self.root / script).exists():
            command = ["-m", "seqvae", verb]
        else:
            command = [str(self.root / script), *([] if verb == "evaluate" else [verb])]
        output = self.work / "from_old" / f"{name}-{verb}.{'json' if verb == 'evaluate' else 'parquet'}"
        probe = CASES[name].probe.split() if verb == "evaluate" else []
        words = (*command, f"from_old/{name}", *probe, *USES[verb].split(), str(output))
        self.run(*words, log=f"from_old/{name}-{verb}")
        return output


class Compared(NamedTuple):
    """A row of the table."""

    comparison: str
    values: int
    result: str


def main() -> int:
    parser = make_parser("benchmarks.reliability.frozen", __doc__)
    real = os.environ.get("SEQVAE_REAL_DATA")
    parser.add_argument("--old", type=Path, required=True, help="checkout that is the reference")
    parser.add_argument("--new", type=Path, default=THIS, help="checkout that is compared with it; default: this one")
    parser.add_argument("--data", type=Path, default=real, help="folder of the real data; default: $SEQVAE_REAL_DATA")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="empty directory for all that is written")
    parser.add_argument("--zoo", type=Path, metavar="DIR", help="records of collapse_zoo, which are replayed too")
    parser.add_argument("--only", nargs="+", choices=[*CASES, "zoo"], default=[*CASES, "zoo"], help="some of it")
    options = parser.parse_args()
    if options.data is None or not options.data.is_dir():
        parser.error("--data or SEQVAE_REAL_DATA must name the folder of the real data")
    if options.keep is not None and options.keep.exists() and any(options.keep.iterdir()):
        parser.error(f"--keep {options.keep} must be empty")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(JOBS) as pool:
        work, data = (options.keep or Path(scratch)).resolve(), options.data.resolve()
        old, new = Tree(options.old.resolve(), work / "old", data), Tree(options.new.resolve(), work / "new", data)
        cases = pool.map(partial(compare_case, old, new), [name for name in options.only if name != "zoo"])
        rows = [row for found in cases for row in found]
        rows += compare_zoo(old, new, options.zoo) if "zoo" in options.only else []
    print_table(f"{options.old} and {options.new}", [row._asdict() for row in rows])
    differing = sum(row.result != EQUAL for row in rows)
    print(f"{len(rows)} comparisons, {differing} differ, {(time.monotonic() - started) / 60:.1f} minutes")
    return 1 if differing else 0


def compare_case(old: Tree, new: Tree, name: str) -> list[Compared]:
    """Train in both, go on in the new code from the middle, and use the old code's checkpoint in both."""
    unbroken = old.train(name, "runs")
    stopped = old.train(name, "stopped", "-c", STOP_HALF_WAY, code=STOPPED_BY_SIGTERM)
    shutil.copytree(stopped, new.work / "stopped" / name)
    for tree in (old, new):
        shutil.copytree(unbroken, tree.work / "from_old" / name)
    pairs = {
        "train": (unbroken, partial(new.train, name, "runs")),
        "resume": (unbroken, partial(new.train, name, "stopped")),
    }
    pairs |= {verb: (old.use(verb, name), partial(new.use, verb, name)) for verb in CASES[name].verbs.split()}
    rows = []
    for what, (expected, make) in pairs.items():
        try:
            rows.append(compare(f"{name}: {what}", parts_of(expected), parts_of(make())))
        except OSError as error:  # the command failed, or did not write what it should have
            rows.append(Compared(f"{name}: {what}", 0, str(error)))
    print(f"{name}: done", file=sys.stderr, flush=True)
    return rows


def compare_zoo(old: Tree, new: Tree, zoo: Path | None) -> list[Compared]:
    """Replay recorded runs at all cadences, and compare the verdict after each reading."""
    kept = next((old.root / "tests").rglob("recorded_runs.json"))
    records = [record_of(stored) for stored in json.loads(kept.read_text(encoding="utf-8"))]
    paths = sorted(zoo.glob("records/*.json.gz")) if zoo else []
    records += [json.loads(gzip.decompress(path.read_bytes())) for path in paths]
    expected = replay(old, records)
    try:
        found = replay(new, records)
    except ChildProcessError as error:
        return [Compared("zoo", 0, str(error))]
    return [
        compare(f"zoo: {name}", {"verdicts": flat(expected[name])}, {"verdicts": flat(found[name])})
        for name in expected
    ]


def replay(tree: Tree, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    modules = sorted((tree.root / "benchmarks").rglob("*.py"))
    module = next(path for path in modules if re.search(r"^def record_from\(", path.read_text("utf-8"), re.MULTILINE))
    tree.work.mkdir(parents=True, exist_ok=True)
    (tree.work / "records.json").write_text(json.dumps(records), encoding="utf-8")
    name = ".".join(module.relative_to(tree.root).with_suffix("").parts)
    tree.run("-c", REPLAY, name, "records.json", "verdicts.json", log="zoo")
    verdicts: dict[str, Any] = json.loads((tree.work / "verdicts.json").read_text(encoding="utf-8"))
    return verdicts


def record_of(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run of recorded_runs.json as collapse_zoo records one; all dimensions but the largest share the rate."""
    columns, size = stored["readings"], stored["dimensions"]
    readings = []
    for values in zip(*columns.values(), strict=True):
        row = dict(zip(columns, values, strict=True))
        rate, active, posteriors = row["rate"], row["active"], row["posteriors"]
        variance = 1.0 if row["variance"] is None else row["variance"]
        others = None if rate is None else (rate - row["largest"]) / (size - 1)
        reading: dict[str, Any] = {"step": row["step"], "epoch": 0, "scope": "sequence"}
        reading |= {"posteriors": posteriors, "active_units": active}
        reading |= {"rate": rate, "kl_per_dim": [row["largest"], *[others] * (size - 1)], "kl_weight": row["weight"]}
        reading |= {"mutual_information": row["information"], "mutual_information_cap": math.log(posteriors)}
        reading |= {"aggregate_kl": None if rate is None else rate - row["information"], "effective_dimensions": size}
        reading |= {"variance_of_means": [1.0] * active + [0.0] * (size - active)}
        reading |= {"mean_of_variances": [variance] * active + [1.0] * (size - active)}
        readings.append(reading | {"decoder_use": row["use"], "decoder_use_error": row["use_error"]})
    kept = ("name", "total_steps", "objective", "diverged_at_step", "said")
    return {name: stored[name] for name in kept} | {"readings": readings}


def parts_of(path: Path) -> Parts:
    """Return all values of a run's directory or of a verb's output, without clocks and places."""
    if path.suffix == ".json":  # words may change, numbers may not
        values = flat(json.loads(path.read_text(encoding="utf-8")))
        return {"numbers": {name: value for name, value in values.items() if isinstance(value, int | float)}}
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        return {f"column {name}": values_of(table[name]) for name in table.column_names}
    return parts_of_run(path)


def values_of(column: pa.ChunkedArray) -> dict[str, Any]:
    """Return the type, the lengths of lists and the values of a column: some millions of them, so as few objects."""
    values: dict[str, Any] = {"type": str(column.type), "nulls": column.null_count}
    array = column.combine_chunks()
    while pa.types.is_list(array.type) or pa.types.is_fixed_size_list(array.type):
        values[f"lengths, {len(values)}"] = pc.list_value_length(array).to_pylist()
        array = array.flatten()
    is_number = pa.types.is_integer(array.type) or pa.types.is_floating(array.type)
    values["values"] = torch.tensor(array.to_numpy(zero_copy_only=False)) if is_number else array.to_pylist()
    return values


def compare(comparison: str, expected: Parts, found: Parts) -> Compared:
    """Compare two results value by value; an empty part counts as a difference, since nothing was compared."""
    texts, count = [], 0
    for part in expected | found:
        values = expected.get(part, {})
        count += sum(value.numel() if isinstance(value, torch.Tensor) else 1 for value in values.values())
        if text := difference(values, found.get(part, {})) or ("" if values else "empty"):
            texts.append(f"{part}: {text}")
    return Compared(comparison, count, "; ".join(texts) or EQUAL)


if __name__ == "__main__":
    sys.exit(main())
