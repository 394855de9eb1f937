"""What a run came to, in words: the verdict in one sentence, why, what to do next, and how far it got.

In: a `Run`. Out: a `Story`. The posterior's verdict is the monitor's own; how a run ended takes precedence.
"""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from seqvae.reports.read_run import Row, Run, column, number, text, texts, whole
from seqvae.reports.run_files import BEST, LAST, RESCUE
from seqvae.text import brief, duration
from seqvae.verdicts import USE_UNKNOWN_SENTENCE, VERDICTS, Tone, advice_on, readable, sentence_of, tone_of

GIVEN_UP = (
    "Monitoring was switched off (--disable_metrics_monitoring), which gives up the rate, the mutual information and the decoder "
    "use over the run, the verdict with its advice, and the figures of speed"
)
FAINT_RATE = 0.3
"""Nats of a validation KL below which a latent carries next to nothing (the monitor's own threshold)."""
ENDS = ("finished", "interrupted", "diverged", "stopped", "failed")
"""Events that end a session."""
SILENT_SECONDS = 1800
"""After so long without a sign, a run whose end was not noted is taken for dead."""
GRAVITY: tuple[Tone, ...] = ("good", "open", "fair", "bad")
STILL_RISING = 0.003
"""Share of the ELBO that the last quarter of the validations gained, or the second half of those at a high learning rate."""
HIGH_RATE = 0.5
"""Share of its height above which a learning rate is high. Behind that any run comes to rest, whatever more would gain: on one
set, runs of 500, 1,000, 2,000 and 3,000 steps gained 13, 5, 3 and 2.5 % in the second half of their high rate, and each was worse
than the next by 4, 3 and 1 %."""
LEAST_STEPS, LEAST_VALIDATIONS = 500, 2
"""Optimizer steps at a high rate, and validations in each half of them, before an ELBO is said to have levelled off. In fewer
steps a decoder still learns the simplest things, and may rest before it comes to the others."""
_NUMBERS = re.compile(r"(?:; |: )rate [^;]*$")
"""The end of a verdict's evidence: the numbers when it came into force."""


class Story(NamedTuple):
    """The beginning of a report, in plain sentences."""

    tone: Tone
    verdict: str
    """One word or two: `healthy`."""
    sentence: str
    why: str
    next: tuple[str, ...]
    state: str
    """How far it got."""


def story_of(run: Run, now: float) -> Story:
    """Sum a run up. `now`: seconds since 1970. Of several levels of latents the gravest verdict is the headline."""
    stories = {f"{name} latents": _story_of_level(level, now) for name, level in run.levels.items()}
    if not stories:
        return _story_of_level(run, now)
    name, worst = max(stories.items(), key=lambda item: GRAVITY.index(item[1].tone))
    if worst.verdict in ("failed", "diverged") or len(set(stories.values())) == 1:
        return worst
    alike = len({story.verdict for story in stories.values()}) == 1
    advice = {
        line: [of for of, story in stories.items() if line in story.next]
        for story in stories.values()
        for line in story.next
    }
    return Story(
        worst.tone,
        worst.verdict if alike else ", ".join(f"{of}: {story.verdict}" for of, story in stories.items()),
        f"{name.capitalize()}: {worst.sentence[0].lower()}{worst.sentence[1:]}",
        " ".join(f"{of.capitalize()}, {story.verdict}: {story.why}" for of, story in stories.items()),
        tuple(line if len(of) == len(stories) else f"{of[0].capitalize()}: {line}" for line, of in advice.items()),
        worst.state,
    )


def _story_of_level(run: Run, now: float) -> Story:
    end = end_of(run.events)
    events = [row for row in run.events if row["event"] == "verdict"]
    event = events[-1] if events else {}
    named = text(run.readings[-1], "verdict") if run.readings else ""
    is_older = run.readings and (number(event, "step") or 0) < (number(run.readings[-1], "step") or 0)
    # A run that broke off may hold a verdict behind its last reading.
    verdict = (named if is_older and named else text(event, "verdict") or named) or None
    state = state_of(run, end, now)
    if end is not None and end["event"] in ("failed", "diverged"):
        before = f" Until then the verdict was: {readable(verdict)}." if verdict and verdict != "diverged" else ""
        why = f"{text(end, 'said') or 'Its message was not kept.'}{before}"
        if end["event"] == "failed":
            remedy = ("Mend what the error names; the same command then goes on from the last checkpoint.",)
            return Story("bad", "failed", "The run was ended by an error", why, remedy, state)
        diverged = VERDICTS["diverged"]
        return Story(diverged.tone, diverged.name, diverged.sentence, why, advice_on("diverged", active=0), state)
    if verdict is None:
        return _without_verdict(run, state)
    if text(event, "verdict") != verdict:
        event = {}  # it is about another verdict
    evidence, since, dead_by = text(event, "evidence"), whole(event, "since_step"), whole(event, "dead_by_step")
    when = f"{'Since' if verdict != 'diverged' else 'At'} step {since:,}: " if since else ""
    doomed = f" If nothing changes, nothing will be left by step {dead_by:,}." if dead_by else ""
    why = f"{when}{evidence}.{doomed}" if evidence else "The monitor's last reading says so; its evidence is not there."
    read_later = run.readings and (number(event, "step") or 0) <= (number(run.readings[-1], "step") or 0)
    if evidence and verdict != "diverged" and read_later:
        why = f"{when}{_NUMBERS.sub('', evidence)}.{doomed} {_last_reading(run)}"
    is_uncertain = verdict == "healthy" and VERDICTS["healthy"].reason not in evidence
    sentence = USE_UNKNOWN_SENTENCE if is_uncertain else sentence_of(verdict)
    advice = tuple(texts(event, "advice")[:6])
    if not advice:
        advice = _go_on(run) if end is None or verdict != "healthy" else _after_a_healthy_run(run)
    return Story(tone_of(verdict), readable(verdict), sentence, why, advice, state)


def end_of(events: Sequence[Row]) -> Row | None:
    """Return the event that ended the newest session, if it was noted."""
    ended = [row for row in events if row["event"] in (*ENDS, "started", "resumed")]
    return ended[-1] if ended and ended[-1]["event"] in ENDS else None


def state_of(run: Run, end: Row | None, now: float) -> str:
    """Say how far a run got, and whether it still goes on."""
    total = (whole(end, "total_steps") if end else None) or whole(run.facts, "total_steps")
    longer = [whole(row, "last_step") or 0 for row in run.events if row["event"] == RESCUE]
    total = max(total, *longer) if total and longer else total
    step = whole(end, "step") if end else run.step
    place = f"step {step or run.step:,}" + (f" of {total:,}" if total else "")
    if end is None:
        if run.last_sign is None or (run.step == 0 and not run.events):
            return "It has not begun, or left no trace of it."
        ago = max(0.0, now - run.last_sign)
        if ago > SILENT_SECONDS:
            return f"No end was noted, and nothing was written for {duration(ago)}: it was probably killed at {place}."
        return f"Under way at {place}, as of {moment(run.last_sign)}."
    match end["event"]:
        case "finished":
            by = text(end, "ended_by")
            early = f", as --{by} says" if by and by != "steps" else ""
            return f"Finished at {place}{early}."
        case "interrupted":
            return f"Interrupted at {place}."
        case "stopped":
            return f"Stopped at {place}, as --on_collapse stop says."
    return f"Ended at {place}."


def moment(seconds: float) -> str:
    """Return a time in seconds since 1970 as a date.

    >>> moment(0)
    '1970-01-01 00:00 UTC'
    """
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


def _without_verdict(run: Run, state: str) -> Story:
    kl = number(run.validations[-1], "valid_kl") if run.validations else None
    is_faint = kl is not None and kl < FAINT_RATE
    known = ""
    if kl is not None:
        known = f" The last validation's KL is {brief(kl)} nats per sequence"
        known += ", which is as little as a collapsed posterior has." if is_faint else "."
    if run.is_monitored:
        sentence, why = "The posterior has not been read yet", f"There is no reading so far.{known}"
        return Story("open", "no reading", sentence, why, _go_on(run), state)
    sentence = "The posterior was not monitored: whether it has collapsed is not known"
    again = "Train again without --disable_metrics_monitoring (--fast_detection costs next to nothing) to know."
    return Story("fair" if is_faint else "open", "not watched", sentence, f"{GIVEN_UP}.{known}", (again,), state)


def _go_on(run: Run) -> tuple[str, ...]:
    end = end_of(run.events)
    if end is not None and end["event"] == "finished":
        return ("A longer run (--max_steps) gives the monitor more readings to judge by.",)
    command = text(run.facts, "resume_command")
    again = f" To go on: {command}" if command else ""
    if end is not None:
        return (f"Go on where it stopped: the same command again.{again}",)
    return (
        f"Nothing needs doing while it goes on. If it was killed, the same command goes on where it stopped.{again}",
    )


def _last_reading(run: Run) -> str:
    """Write the numbers of the last reading as the page shows them."""
    reading, probed = run.readings[-1], run.last_probe
    step, probed_step = whole(reading, "step") or 0, whole(probed, "step") or 0
    error = number(probed, "decoder_use_error")
    named = {
        "rate": number(reading, "rate"),
        "mutual information": number(reading, "mutual_information"),
        "decoder use": number(probed, "decoder_use"),
    }
    found = ", ".join(f"{name} {brief(value)}" for name, value in named.items() if value is not None)
    found += f" ± {brief(error)}" if error else ""
    found += f" (at step {probed_step:,})" if probed and probed_step != step else ""
    return f"At step {step:,}: {found or 'no number that is finite'}."


def _after_a_healthy_run(run: Run) -> tuple[str, ...]:
    """Say whether a run that has ended was long enough."""
    end = end_of(run.events)
    if end is not None and end["event"] == "interrupted":
        return _go_on(run)
    validations = run.comparable_validations
    elbos = column(validations, "valid_elbo")
    on = f", {run.validated_on(validations[-1])}" if len(run.validation_sets) > 1 else ""
    before, behind = _at_a_high_rate(run, elbos)
    rise = None
    if before and behind:
        rise = max(elbo for _, elbo in behind) - max(elbo for _, elbo in before)
    best_step, best = max(elbos, key=lambda pair: pair[1], default=(0.0, 0.0))
    notable = STILL_RISING * abs(best)
    is_long = min(len(before), len(behind)) >= LEAST_VALIDATIONS and behind[-1][0] >= LEAST_STEPS
    has_levelled_off = is_long and rise is not None and rise <= notable
    if len(elbos) >= 4:
        last_quarter = elbos[-(len(elbos) // 4) :]
        gain = best - max(elbo for _, elbo in elbos[: -len(last_quarter)])
        if gain > notable and best_step >= last_quarter[0][0] and not has_levelled_off:
            rose = f"The validation ELBO still rose at the end (by {brief(gain)} nats in the last quarter{on})"
            return (f"{rose}: more --max_steps would gain more.",)
        if best - elbos[-1][1] > notable:
            ahead = f"by {brief(best - elbos[-1][1])} nats{on}"
            return (
                f"The best validation was at step {best_step:,.0f}, {ahead}: take checkpoints/{BEST} rather than {LAST}.",
            )
    if has_levelled_off:
        levelled = "the validation ELBO had levelled off while the learning rate was still high"
        return (f"Nothing needs mending, and {levelled}: this is what these settings come to.",)
    has_cooled = len(before) + len(behind) < len(elbos)
    if rise is not None and rise > notable and has_cooled:
        rose = f"by {brief(rise)} nats from step {before[-1][0]:,.0f} to {behind[-1][0]:,.0f}{on}"
        return (
            f"While the learning rate was high, the validation ELBO still rose ({rose}), and it came to rest only as the rate "
            "fell: more --max_steps would gain more.",
        )
    return (
        "Nothing needs mending. The run is too short to tell whether the validation ELBO has levelled off: more --max_steps would "
        "show.",
    )


def _at_a_high_rate(
    run: Run, elbos: Sequence[tuple[float, float]]
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return the validations of the first and of the second half of the steps up to which the learning rate was high."""
    rates = column(run.training, "lr")
    height = max((rate for _, rate in rates), default=0.0)
    end = max((step for step, rate in rates if rate >= HIGH_RATE * height), default=0.0)
    return [one for one in elbos if one[0] <= end / 2], [one for one in elbos if end / 2 < one[0] <= end]
