"""Evaluated models side by side: their records and paired differences in, one dict in types of JSON out."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from seqvae.inference.evaluation_numbers import Weighted, paired_difference

UNLIKE = {
    "kind": "not data of the same kind",
    "split": "not the same split",
    "units": "not in the same units: the models know other vocabularies, moments or scales of time",
    "content": "not the same sequences, in the same order and cut alike",
}
"""Of a record: what has to be the same for its numbers to compare, and what is said where it is not."""


def compare(found: Sequence[tuple[dict[str, Any], Weighted | None]]) -> dict[str, Any]:
    """`differences`: IW-NLL of one less that of another, where both were measured on the same sequences."""
    letters = [chr(ord("A") + number) for number in range(len(found))]
    pairs = combinations(zip(letters, found, strict=True), 2)
    differences, unlike = [], []
    for (one, (record, ours)), (other, (another, theirs)) in pairs:
        if (reason := _unlike(record, another)) is not None:
            unlike.append(f"{one} and {other}: {reason}")
        elif (difference := paired_difference(ours, theirs)) is not None:
            lower = one if difference.value < 0 else other
            differences.append({"of": f"{one} - {other}", **difference._asdict(), "lower": lower})
    records = tuple(record for record, _ in found)
    return {"records": records, "same_data": not unlike, "unlike": tuple(unlike), "differences": tuple(differences)}


def _unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    return next((text for name, text in UNLIKE.items() if one[name] != other[name]), None)
