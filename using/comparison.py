"""Evaluated models side by side: their records and paired differences in, one dict in types of JSON out."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from using.evaluation_numbers import Weighted, paired_difference


def compare(found: Sequence[tuple[dict[str, Any], Weighted | None]]) -> dict[str, Any]:
    """`differences`: IW-NLL of one less that of another, where both were measured on the same sequences."""
    letters = [chr(ord("A") + number) for number in range(len(found))]
    pairs = combinations(zip(letters, found, strict=True), 2)
    differences = []
    for (one, (_, ours)), (other, (_, theirs)) in pairs:
        if (difference := paired_difference(ours, theirs)) is not None:
            lower = one if difference.value < 0 else other
            differences.append({"of": f"{one} - {other}", **difference._asdict(), "lower": lower})
    records = [record for record, _ in found]
    alike = {
        (record["kind"], record["data"], record["split"], record["sequences"], record["steps"]) for record in records
    }
    return {"records": tuple(records), "same_data": len(alike) == 1, "differences": tuple(differences)}
