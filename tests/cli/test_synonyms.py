"""Words of other tools are answered with ours, and a guess at a spelling is made only where it is near."""

import re

import pytest

from benchmarks.flag_page import COMMANDS
from seqvae.config.flags import PRESETS_DIR, CommandLine
from seqvae.config.synonyms import ANSWERS
from seqvae.errors import UsageError

LINES = {
    command.typed: CommandLine(command.schema, presets=None if command.takes_words else PRESETS_DIR)
    for command in COMMANDS
}
TRAIN = "train_optimized.py"


def answer_to(word: str, typed: str = TRAIN) -> str:
    with pytest.raises(UsageError) as caught:
        LINES[typed].read_words([word])
    return str(caught.value).removeprefix(f"{word} is not a flag; ")


@pytest.mark.parametrize("answer", [answer for answer in ANSWERS if answer.startswith("--")])
def test_every_flag_that_an_answer_names_is_one_and_takes_the_value(answer):
    mentioned = re.findall(r"--(\w+)(?: ([\w.:-]+))?", answer)
    assert mentioned
    having = [line for line in LINES.values() if all(name in {**line.flags, **line.controls} for name, _ in mentioned)]
    assert having
    for name, value in mentioned:
        if value:
            having[0].settings(having[0].read_words([f"--{name}", value]))


@pytest.mark.parametrize("answer", ANSWERS)
def test_every_word_of_the_table_reaches_its_answer_in_some_command(answer):
    """Neither hidden behind another answer everywhere, nor a flag of ours wherever the answer would be one."""
    for word in ANSWERS[answer].split():
        unknown = [typed for typed, line in LINES.items() if word not in line.flags]
        assert f"; {'use ' if answer.startswith('--') else ''}{answer}" in {
            LINES[typed]._advice_on(word) for typed in unknown
        }, word


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("--epochs", "use --max_epochs"),
        ("--num_train_epochs", "use --max_epochs"),
        ("--accumulate_grad_batches", "use --gradient_accumulation_steps"),
        ("--accumulate-grad-batches", "use --gradient-accumulation-steps"),
        ("--d_model", "use --width"),
        ("--max_duration", "use --max_epochs 10, --max_steps 1000 or --max_time 1:00:00"),
        ("--use_optimized_dataset", "leave it out: data are converted once and then mapped from disk"),
        ("--use_amp", "use --precision 16-mixed"),
        ("--bf16", "use --precision bf16-mixed"),
        ("--use_torch_compile", "use --compile_model"),
        ("--cache", "use --cache_data (in memory), --cache_dir (on disk)"),
        ("--workers", "use --num_workers"),
        ("--seq_len", "use --max_sequence_length"),
        ("--learning_rate", "use --lr"),
        ("--latent_dim", "use --latent_size"),
        ("--kl_weight", "use --beta"),
        ("--ema_decay", "use --ema (its decay)"),
        ("--gpus", "use --devices (how many; CUDA_VISIBLE_DEVICES says which)"),
        ("--debug", "use --preset debug"),
        ("--trainer.accumulate_grad_batches", "use --gradient_accumulation_steps"),
        ("--trainer.max_epochs", "did you mean --max_epochs?"),
    ],
)
def test_a_word_of_another_tool_is_answered_with_ours(word, answer):
    assert answer_to(word) == answer


@pytest.mark.parametrize(
    ("typed", "word", "answer"),
    [
        ("seqvae evaluate", "--fp16", "use --precision bf16-mixed"),
        ("seqvae evaluate", "--num_samples", "use --iw_samples"),
        ("seqvae evaluate", "--output", "use --json"),
        ("seqvae sample", "--num_samples", "use --count"),
        ("seqvae sample", "--max_length", "use --length"),
        ("seqvae impute", "--num_samples", "use --draws"),
        ("seqvae encode", "--output_dir", "use --output"),
        ("seqvae profile", "--iterations", "use --num_iterations"),
        ("seqvae sample", "--epochs", "--help lists them"),
    ],
)
def test_the_answer_is_a_flag_of_the_command_that_was_typed(typed, word, answer):
    assert answer_to(word, typed) == answer


@pytest.mark.parametrize(
    "word", ["--lookahead_decay", "--teacher_forcing", "--num_classes", "--max_words", "--use_something"]
)
def test_what_only_resembles_a_flag_is_not_suggested(word):
    assert answer_to(word) == "--help lists them"


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--latnet_size", "latent_size"),
        ("--max_step", "max_steps"),
        ("--widht", "width"),
        ("--bucketting", "bucketing"),
    ],
)
def test_a_misspelled_flag_is_suggested(word, meant):
    assert answer_to(word) == f"did you mean --{meant}?"


def test_a_word_of_another_tool_is_answered_in_files_and_keyword_arguments(tmp_path):
    (tmp_path / "run.yaml").write_text("epochs: 3\n")
    line = LINES[TRAIN]
    with pytest.raises(UsageError, match=r"line 1: epochs is not a setting here; use max_epochs$"):
        line.settings(line.read_words(["--config", str(tmp_path / "run.yaml")]))
    with pytest.raises(UsageError, match=r"^fp16 is no setting; use precision 16-mixed$"):
        line.read_values({"fp16": True})
