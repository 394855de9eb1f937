"""Several processes train what one process trains: the same loss, step by step, from the same batches."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from seqvae.data.demo import write_demo
from seqvae.files import read_rows

ROOT = Path(__file__).parent.parent.parent
SMALL = (
    "--width 16 --heads 2 --depth 1 --precision 32 --log_every_n_steps 1 --max_steps 12 --val_check_interval 5 "
    "--tokens_per_batch 1000 --lr 0.01 --limit_val_batches 4"
)
COLUMNS = ["step", "loss", "nll_per_step", "kl", "kl_weight", "lr", "gradient_norm", "valid_elbo", "valid_kl"]


def run(folder: Path, name: str, words: str, launcher: tuple[str, ...] = ()) -> pd.DataFrame:
    places = ["--output_dir", str(folder), "--cache_dir", str(folder / "cache"), "--run_name", name]
    line = [sys.executable, *launcher, str(ROOT / "train_optimized.py"), *SMALL.split(), *words.split(), *places]
    done = subprocess.run(line, capture_output=True, text=True, cwd=folder, timeout=200)
    assert done.returncode == 0, done.stderr
    return pd.read_csv(folder / name / "metrics.csv")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return folder, run(folder, "one", "--target_kl 2 --gradient_accumulation_steps 2")


@pytest.mark.parametrize(
    ("name", "words", "launcher"),
    [
        ("lightning", "--devices 2", ()),
        pytest.param("torchrun", "", ("-m", "torch.distributed.run", "--nproc_per_node", "2"), marks=pytest.mark.slow),
    ],
)
def test_two_processes_without_accumulation_equal_one_with_two_batches(one_process, name, words, launcher):
    folder, alone = one_process
    together = run(folder, name, f"{words} --target_kl 2 --gradient_accumulation_steps 1", launcher)
    pd.testing.assert_frame_equal(together[COLUMNS], alone[COLUMNS], rtol=2e-4, check_exact=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "--prior vamp",
        "--prior mixture --posterior flow",
        "--posterior du --tokens_per_batch 2000",
        "--posterior batch_norm --tokens_per_batch 2000",
        "--latent_scope step --prior autoregressive",
        "--latent_scope both",
        "--latent discrete",
        "--latent discrete --codebook fsq",
        "--optimizer muon --ema 0.9",
        "--contrastive_weight 1",
    ],
)
def test_two_processes_train_every_latent_as_one_does(words, tmp_path):
    words += " --dropout 0 --word_dropout 0"
    alone = run(tmp_path, "one", f"{words} --gradient_accumulation_steps 2")
    together = run(tmp_path, "two", f"{words} --devices 2 --gradient_accumulation_steps 1")
    # Running statistics move once for each batch of a process: half as often in two, which validation sees in so short a run.
    columns = COLUMNS[:-2] if "tokens_per_batch" in words else COLUMNS
    pd.testing.assert_frame_equal(together[columns], alone[columns], rtol=1e-3, check_exact=False)


@pytest.mark.slow
def test_two_processes_of_labelled_events_equal_one(tmp_path):
    data_dir = write_demo(tmp_path, "events", sequences=400, mean_length=20)
    words = f"--data_dir {data_dir} --label_column label --label_weight 1"
    alone = run(tmp_path, "one", f"{words} --gradient_accumulation_steps 2")
    together = run(tmp_path, "two", f"{words} --devices 2 --gradient_accumulation_steps 1")
    columns = [*COLUMNS, "valid_auroc", "valid_auprc"]
    pd.testing.assert_frame_equal(together[columns], alone[columns], rtol=1e-3, check_exact=False)


@pytest.mark.slow
def test_two_processes_are_rescued_as_one_is(tmp_path):
    """The collapse is a real one, and a course that depends on a reading would show that the processes read differently."""
    words = "--kl_schedule constant --free_bits 0 --beta 4 --max_steps 120 --on_collapse rescue --rescue_budget 0.6"
    alone = run(tmp_path, "one", f"{words} --gradient_accumulation_steps 2")
    together = run(tmp_path, "two", f"{words} --devices 2 --gradient_accumulation_steps 1")
    names = ("step", "course", "phase", "outcome", "last_step", "used_steps")
    one, two = (
        [
            [row[name] for name in names]
            for row in read_rows(tmp_path / name / "events.jsonl")
            if row["event"] == "rescue"
        ]
        for name in ("one", "two")
    )
    assert one == two != []
    assert alone["step"].iloc[-1] > 120
    pd.testing.assert_frame_equal(together[["step", "kl_weight", "lr"]], alone[["step", "kl_weight", "lr"]])
    pd.testing.assert_frame_equal(together[["loss"]], alone[["loss"]], rtol=1e-2, check_exact=False)


COMPARED = """
import sys
import torch
from lightning import Callback
from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import OptimizedSettings
from seqvae.training.fit import fit
from train_optimized import callbacks

class Compare(Callback):
    def on_train_batch_end(self, trainer, module, *_):
        weights_P = torch.cat([weight.detach().flatten() for weight in module.network.parameters()])
        weights_RP = module.all_gather(weights_P)
        assert weights_RP.shape[0] == 2 and torch.equal(weights_RP[0], weights_RP[1]), trainer.global_step

settings = parse_command_line(OptimizedSettings, sys.argv[1:], prog="compared", description="")
fit(settings, [*callbacks(settings), Compare()])
"""


@pytest.mark.slow
def test_two_processes_have_one_encoder_while_it_learns_alone(tmp_path):
    (tmp_path / "compared.py").write_text(COMPARED, encoding="utf-8")
    words = f"{SMALL} --gradient_accumulation_steps 1 --aggressive_encoder --output_dir {tmp_path} --run_name two"
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "compared.py", *words.split()]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    (event,) = [row for row in read_rows(tmp_path / "two" / "events.jsonl") if row["event"] == "aggressive_encoder"]
    assert 0 < event["used_steps"] <= event["budget_steps"] == 12
