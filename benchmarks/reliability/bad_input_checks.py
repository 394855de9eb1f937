"""What counts as a right end of a command on damaged data: what it says, how it ends, and what stands in the cache afterwards.

In: what a command left (exit code, both outputs) and what the data meant. Out: sentences, one for each thing that is wrong;
none where all is right. Nothing here knows how the data were damaged.
"""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.reliability.bad_input_data import File, Value
from seqvae.config.data import LengthSettings
from seqvae.data.batch import EventBatch, TokenBatch, VectorBatch
from seqvae.data.cache import SequenceData, open_cache
from seqvae.data.dataset import SequenceSet, read_meta
from seqvae.data.description import UNKNOWN
from seqvae.errors import ExitCode

FORGED = "forged"
"""What hostile names say behind a line break: no line of an output may begin with it."""
LEFT_OUT = re.compile(r"([\d,]+) sequences? left out \(--bad_values drop\)")
NOT_READY = "NOT READY to train"


class Ended(NamedTuple):
    """A command that is over."""

    prog: str
    code: int
    out: str
    err: str
    prints_reasons: bool = False
    """A page on stdout says why data are refused, in place of a message on stderr."""


class Compared(NamedTuple):
    """A cache beside what the data meant."""

    wrong: list[str]
    left_out: int
    """Sequences that are not there and were counted, or whose file was."""


def check_end(ended: Ended, names: Sequence[str]) -> list[str]:
    """`names`: what an error may be about; it has to name one of them."""
    wrong = []
    if "Traceback" in ended.err + ended.out:
        last = ended.err.strip().splitlines()[-1:]
        wrong.append(f"{ended.prog}: a traceback ({' '.join(last)[:200]})")
    if ended.code not in (ExitCode.DONE, ExitCode.DATA):
        wrong.append(f"{ended.prog}: exit code {ended.code} ({ended.err.strip()[-300:]})")
    for stream, text in (("stdout", ended.out), ("stderr", ended.err)):
        if bad := sorted({c for c in text if not c.isprintable() and c != "\n"}):
            wrong.append(f"{ended.prog}: {stream} holds {', '.join(map(ascii, bad))}")
        if any(line.lstrip().startswith(FORGED) for line in text.splitlines()):
            wrong.append(f"{ended.prog}: a name has begun a line of {stream}")
    return wrong + list(_wrong_message(ended, names))


def compare_cache(path: Path, files: Sequence[File], bad_values: str, root: Path) -> Compared:
    """Whether every sequence in a cache is what its file meant, and every other one is accounted for."""
    data = open_cache(path, LengthSettings(max_sequence_length=10**6))
    refused = read_meta(path)["bad_files"]
    used = [file for file in files if not any(reason.startswith(f"{root / file.path}: ") for reason in refused)]
    in_files_left_out = sum(len(file.meant) for file in files if file not in used)
    wrong: list[str] = []
    unaccounted = 0
    for split in ("train", "valid"):
        wanted: dict[str, list[Value]] = {}
        for one in (one for file in used if file.split == split for one in file.meant):
            wanted.setdefault(str(one.id), []).append(one.if_missing if bad_values == "missing" else one.value)
        for id_, held in held_sequences(data, data.splits[split]):
            values = wanted.get(str(id_), [])
            match = next((at for at, value in enumerate(values) if is_same(value, held, data)), None)
            if match is None:
                wrong.append(f"{split}: {id_!r} is {held!r:.300}, which is not what its file meant ({values!r:.300})")
            else:
                values.pop(match)
        unaccounted += sum(len(values) for values in wanted.values())
    counted = sum(int(found[1].replace(",", "")) for note in data.notes if (found := LEFT_OUT.match(note)))
    if unaccounted != counted:
        wrong.append(f"{unaccounted} sequences are not in the cache, but {counted} are said to be left out")
    if refused and not any("left out that cannot be used" in note for note in data.notes):
        wrong.append(f"{len(refused)} files are left out, and no note says so")
    return Compared(wrong, in_files_left_out + unaccounted)


def held_sequences(data: SequenceData, split: SequenceSet) -> Iterator[tuple[int | str, Value]]:
    """Id and value of each sequence of a split, in own units."""
    about = data.description
    for number, id_ in enumerate(split.ids(np.arange(len(split)))):
        batch = split.gather(np.array([number]))
        if isinstance(batch, TokenBatch):
            tokens = batch.tokens_BT[0].tolist()
            yield id_, [about.symbols[token] for token in tokens] if about.symbols else tokens
        elif isinstance(batch, VectorBatch):
            own_TD = batch.values_BTD[0].double().numpy() * np.array(about.std) + np.array(about.mean)
            yield id_, np.where(batch.observed_BTD[0].numpy(), own_TD, np.nan).tolist()
        elif isinstance(batch, EventBatch):
            steps: list[tuple[float, dict[str, float]]] = [(gap, {}) for gap in batch.gaps_BT[0].tolist()]
            rows = zip(batch.variables_E, batch.values_E.tolist(), batch.has_value_E, batch.steps_E, strict=True)
            for variable, value, has_value, step in rows:
                own = value * about.std[variable] + about.mean[variable] if has_value else math.nan
                steps[int(step)][1][about.names[variable]] = own
            yield id_, steps


def is_same(meant: Value, held: Value, data: SequenceData) -> bool:
    """Whether what is held is what was meant, as exactly as float32 can say it."""
    try:
        return meant is not None and _is_same(meant, held, data)
    except (TypeError, ValueError, KeyError):
        return False  # of another shape, or of variables that there are none of


def _is_same(meant: Value, held: Value, data: SequenceData) -> bool:
    about = data.description
    if about.kind == "tokens":
        known = set(about.symbols)
        return len(meant) == len(held) and all(
            str(one) == str(other) or (other == UNKNOWN and one not in known)
            for one, other in zip(meant, held, strict=True)
        )
    moments = dict(zip(about.names, zip(about.mean, about.std, strict=True), strict=True))
    if about.kind == "vectors":
        scales = list(moments.values())
        return len(meant) == len(held) and all(
            _is_close(one, other, *scale)
            for step, held_step in zip(meant, held, strict=True)
            for one, other, scale in zip(step, held_step, scales, strict=True)
        )
    gaps = np.diff([minute for minute, _ in meant], prepend=meant[0][0])
    held_gaps = [gap for gap, _ in held]
    if len(gaps) != len(held_gaps) or not np.allclose(gaps, held_gaps, rtol=1e-6, atol=1e-6):
        return False
    return all(
        step.keys() == found.keys()
        and all(_is_close(number, found[name], *moments[name]) for name, number in step.items())
        for (_, step), (_, found) in zip(meant, held, strict=True)
    )


def _is_close(meant: float | None, held: float, mean: float, std: float) -> bool:
    if meant is None or math.isnan(held):
        return meant is None and math.isnan(held)
    return abs(held - meant) <= 1e-6 * (std + abs(meant - mean)) + 1e-12 * abs(mean)


def _wrong_message(ended: Ended, names: Sequence[str]) -> Iterator[str]:
    messages = [line for line in ended.err.splitlines() if line.startswith(f"{ended.prog}: ")]
    if ended.code == ExitCode.DONE:
        if messages:
            yield f"{ended.prog}: exit code 0 with {messages[0]!r}"
        return
    if ended.prints_reasons:
        said = ended.out if NOT_READY in ended.out else ""
    else:
        said = messages[0] if len(messages) == 1 else ""
    if not said:
        yield f"{ended.prog}: {len(messages)} messages on stderr where one should stand ({ended.err[-300:]!r})"
    elif not any(name in said.replace("\n    ", " ") for name in names):
        yield f"{ended.prog}: the message names neither file nor column ({said.strip()[-400:]!r})"
