"""What --advise found out, as text for people: plain numbers in (the dict that is written as JSON), lines out."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from seqvae.text import Ink, heading, note, percent, table, visible

FASTER = "faster"
STEADY = 0.1
"""Spread of a rate that a quiet machine stays below."""
FLAGS_INDENT = "      "


class Row(NamedTuple):
    """Of the table."""

    change: str
    gain: str
    spread: str
    memory: str
    verdict: str


def advice_lines(advice: Mapping[str, Any], ink: Ink) -> list[str]:
    """The trials, what is left to the user, and the command to use."""
    base = (
        f"As it is: {advice['base_rate']:,.0f} real {advice['unit']}/s, {advice['base_memory_gib']:.1f} GiB; training would take "
        f"{_duration(advice['run_seconds'])}. {advice['rule'].capitalize()}. Spread: the middle half of the rounds."
    )
    return [
        *_trials("Each change alone", advice["alone"], ink),
        *_trials("Together, measured anew", advice["together"], ink),
        "",
        *note(base, ink, mark=""),
        *_unsteadiness(advice["base_spread"], ink),
        *_left_to_the_user(advice, ink),
        *_proposal(advice, ink),
    ]


def _duration(seconds: float) -> str:
    """
    >>> _duration(45), _duration(600), _duration(9000)
    ('45 seconds', '10 minutes', '2.5 hours')
    """
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:,.1f} hours"


def _trials(title: str, trials: Sequence[Mapping[str, Any]], ink: Ink) -> list[str]:
    """Each with its flags below it, which are too long for a column."""
    if not trials:
        return []
    titles, *lines = table([_row(trial) for trial in trials], ink)
    found = [*heading(title, ink), titles]
    for trial, line in zip(trials, lines, strict=True):
        remarks = "; ".join(trial[name] for name in ("remark", "effect") if trial[name])
        found.append(ink.good(line) if _is_proposable(trial) else line)
        found.append(ink.dim(FLAGS_INDENT + visible(trial["flags"])))
        if remarks:
            found += [ink.dim(part) for part in note(remarks, ink, mark="   ")]
    return found


def _row(trial: Mapping[str, Any]) -> Row:
    if trial["gain"] is None:
        return Row(trial["change"], "-", "-", "-", trial["verdict"])
    return Row(
        change=trial["change"],
        gain=f"{trial['gain']:.2f}x",
        spread=f"{trial['lower']:.2f}-{trial['upper']:.2f}",
        memory=f"{trial['memory_gib']:.1f} GiB",
        verdict=f"{trial['verdict']}, yours to decide"
        if trial["apart"] and trial["verdict"] == FASTER
        else trial["verdict"],
    )


def _is_proposable(trial: Mapping[str, Any]) -> bool:
    return trial["verdict"] == FASTER and not trial["apart"]


def _unsteadiness(spread: float, ink: Ink) -> list[str]:
    if spread <= STEADY:
        return []
    said = (
        f"The run as it is was not equally fast all the time (its turns spread by {percent(spread)}): where other programs are at "
        "work, small gains are uncertain. Try again when the machine is quiet."
    )
    return [ink.warning(line) for line in note(said, ink)]


def _left_to_the_user(advice: Mapping[str, Any], ink: Ink) -> list[str]:
    """What is faster at a price that nobody else can weigh."""
    return [
        line
        for trial in advice["alone"]
        if trial["verdict"] == FASTER and trial["apart"]
        for line in note(f"{trial['flags']}: {trial['gain']:.2f}x, but {trial['apart']}. Not in the proposal.", ink)
    ]


def _proposal(advice: Mapping[str, Any], ink: Ink) -> list[str]:
    best, command = advice["best"], f"  {ink.bold(visible(advice['command']))}"
    if best is not None:
        spread = f"{best['lower']:.2f} to {best['upper']:.2f} in the middle half of {len(best['ratios'])} rounds"
        effect = f" What it changes beside: {best['effect']}." if best["effect"] else ""
        said = f"{best['gain']:.2f} times as fast ({spread}), {best['memory_gib']:.1f} GiB.{effect}"
    elif advice["together"]:
        said = (
            "What was faster at first was not when it was measured anew: these settings are the fastest that was found."
        )
    else:
        said = f"None of {len(advice['alone'])} changes may be proposed as faster: these settings are the fastest that was found."
    return [*heading("Advice", ink), *note(said, ink, mark=""), command]
