"""What a run came to, in words: the verdict in one sentence, why, what to do next, and how far it got.

In: a `Run`. Out: a `Story`. The posterior's verdict is the monitor's own; what a run's end says goes before it.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from seqvae.reports.page import brief
from seqvae.reports.run_directory import Run
from seqvae.reports.run_lines import Row, number, text, texts, whole

Tone = Literal["good", "fair", "bad", "open"]

TONES: dict[str, Tone] = {
    "healthy": "good",
    "partly_collapsed": "fair",
    "collapsing": "fair",
    "collapsed": "bad",
    "decoder_ignores_z": "bad",
    "not_variational": "bad",
    "diverged": "bad",
}
"""Of verdicts; all others leave it open."""

SENTENCES = {
    "healthy": "The latent carries something, and the decoder uses it",
    "partly_collapsed": "Most latent dimensions are dead, and the rest carry everything",
    "collapsing": "The latent is collapsing: what it carries is going",
    "collapsed": "The posterior has collapsed: the decoder does without the latent",
    "decoder_ignores_z": "The decoder ignores the latent, although its rate is paid",
    "not_variational": "The posteriors are next to points: this is no longer a variational model",
    "diverged": "Training diverged: it came to NaN or infinity",
    "warming_up": "Too early to judge: the KL weight is still rising",
    "cannot_tell": "The readings do not decide yet whether the latent is used",
}
USED = "and the decoder uses it"
"""What the evidence for healthy says where the decoder's answer was clear."""
UNHEARD = "The latent carries something; whether the decoder uses it is not known for certain"
UNWATCHED = "Nobody watched the posterior: whether it has collapsed is not known"
UNREAD = "The posterior has not been read yet"

GIVEN_UP = (
    "Monitoring was switched off (--disable_metrics_monitoring), which gives up the rate, the mutual information and the decoder "
    "use over the run, the verdict with its advice, and the figures of speed"
)
FAINT_RATE = 0.3
"""Nats of a validation KL below which a latent carries next to nothing (the monitor's own line)."""
ENDS = ("finished", "interrupted", "diverged", "stopped", "failed")
"""Events that end a session."""
SILENT_SECONDS = 1800
"""After so long without a sign, a run whose end was not noted is taken for dead."""
STILL_RISING = 0.003
"""Share of the ELBO that the last quarter of the validations gained."""


class Story(NamedTuple):
    """Plain sentences."""

    tone: Tone
    verdict: str
    """One word or two: `healthy`."""
    sentence: str
    why: str
    next: tuple[str, ...]
    state: str
    """How far it got."""


def tell(run: Run, now: float) -> Story:
    """`now`: seconds since 1970."""
    end = end_of(run.events)
    broken = end is not None and end["event"] in ("failed", "diverged")
    verdict = verdict_in_force(run)
    state = state_of(run, end, now)
    if broken and end is not None:
        failed = end["event"] == "failed"
        before = f" Until then the verdict was: {spoken(verdict)}." if verdict not in (None, "diverged") else ""
        return Story(
            "bad",
            "failed" if failed else "diverged",
            "The run was ended by an error" if failed else SENTENCES["diverged"],
            f"{text(end, 'said') or 'What it said was not kept.'}{before}",
            _after_failure(run, failed),
            state,
        )
    if verdict is None:
        return _unwatched(run, state)
    event = _last_verdict(run.events)
    is_of_it = text(event, "verdict") == verdict
    evidence = text(event, "evidence") if is_of_it else ""
    since = whole(event, "since_step") if is_of_it else None
    dead_by = whole(event, "dead_by_step") if is_of_it else None
    when = f"{'Since' if verdict != 'diverged' else 'At'} step {since:,}: " if since else ""
    doomed = f" If nothing changes, nothing will be left by step {dead_by:,}." if dead_by else ""
    why = f"{when}{evidence}.{doomed}" if evidence else "The monitor's last reading says so; its evidence is not there."
    unheard = verdict == "healthy" and USED not in evidence
    sentence = UNHEARD if unheard else SENTENCES.get(verdict, spoken(verdict))
    return Story(
        TONES.get(verdict, "open"), spoken(verdict), sentence, why, _next(run, verdict, event, is_of_it), state
    )


def verdict_in_force(run: Run) -> str | None:
    """None: nobody judged. A run that broke off may hold a verdict behind its last reading."""
    last = _last_verdict(run.events)
    named = text(run.readings[-1], "verdict") if run.readings else ""
    behind = run.readings and (number(last, "step") or 0) < (number(run.readings[-1], "step") or 0)
    return (named if behind and named else text(last, "verdict") or named) or None


def end_of(events: Sequence[Row]) -> Row | None:
    """What ended the newest session, if that was noted."""
    ended = [row for row in events if row["event"] in (*ENDS, "started", "resumed")]
    return ended[-1] if ended and ended[-1]["event"] in ENDS else None


def total_steps(run: Run) -> int | None:
    end = end_of(run.events)
    return (whole(end, "total_steps") if end else None) or whole(run.facts, "total_steps")


def state_of(run: Run, end: Row | None, now: float) -> str:
    total = total_steps(run)
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


def spoken(name: str | None) -> str:
    """
    >>> spoken("decoder_ignores_z"), spoken(None)
    ('decoder ignores z', 'not watched')
    """
    return "not watched" if name is None else name.replace("_", " ")


def duration(seconds: float) -> str:
    """
    >>> duration(5), duration(300), duration(9000), duration(300000)
    ('5 s', '5 min', '2.5 h', '3.5 days')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} days"


def moment(seconds: float) -> str:
    """
    >>> moment(0)
    '1970-01-01 00:00 UTC'
    """
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


def _last_verdict(events: Sequence[Row]) -> Row:
    return next((row for row in reversed(events) if row["event"] == "verdict"), {})


def _unwatched(run: Run, state: str) -> Story:
    kl = number(run.validations[-1], "valid_kl") if run.validations else None
    told = f" The last validation's KL is {brief(kl)} nats a sequence" if kl is not None else ""
    if told:
        told += ", which is as little as a collapsed posterior has." if kl is not None and kl < FAINT_RATE else "."
    if run.is_monitored:
        why = "There is no reading so far." + told
        return Story("open", "no reading", UNREAD, why, _go_on(run), state)
    anew = "Train again without --disable_metrics_monitoring (--fast_detection costs next to nothing) to know."
    suspicious = kl is not None and kl < FAINT_RATE
    return Story("fair" if suspicious else "open", "not watched", UNWATCHED, f"{GIVEN_UP}.{told}", (anew,), state)


def _next(run: Run, verdict: str, event: Row, is_of_it: bool) -> tuple[str, ...]:
    advice = texts(event, "advice") if is_of_it else []
    if advice:
        return tuple(advice[:6])
    return _go_on(run) if end_of(run.events) is None or verdict != "healthy" else _of_finished(run)


def _go_on(run: Run) -> tuple[str, ...]:
    end = end_of(run.events)
    if end is not None and end["event"] == "finished":
        return ("A longer run (--max_steps) gives the monitor more readings to judge by.",)
    command = text(run.facts, "resume_command")
    again = f" To go on: {command}" if command else ""
    if end is not None:
        return (f"Go on where it stopped: the same command again.{again}",)
    return (
        "Nothing needs doing while it goes on. If it was killed, the same command goes on where it stopped." + again,
    )


def _after_failure(run: Run, failed: bool) -> tuple[str, ...]:
    if not failed:
        return ("a lower --lr", "a longer --warmup", "a lower --gradient_clip", "--precision 32-true, if it is another")
    return ("Mend what the error names; the same command then goes on from the last checkpoint.",)


def _of_finished(run: Run) -> tuple[str, ...]:
    """A healthy run that has ended: was it long enough?"""
    end = end_of(run.events)
    if end is not None and end["event"] == "interrupted":
        return _go_on(run)
    elbos = [
        (step, elbo)
        for row in run.validations
        if (elbo := number(row, "valid_elbo")) is not None
        if (step := whole(row, "step")) is not None
    ]
    if len(elbos) < 4:
        return ("Nothing needs mending.",)
    best_step, best = max(elbos, key=lambda pair: pair[1])
    earlier = max(elbo for _, elbo in elbos[: -max(1, len(elbos) // 4)])
    if best - earlier > STILL_RISING * abs(best) and best_step >= elbos[-max(1, len(elbos) // 4)][0]:
        return (
            f"The validation ELBO still rose at the end (by {brief(best - earlier)} nats in the last quarter): more --max_steps "
            "would gain more.",
        )
    if best - elbos[-1][1] > STILL_RISING * abs(best):
        return (f"The best validation was at step {best_step:,}: take checkpoints/best.ckpt rather than last.ckpt.",)
    return ("Nothing needs mending, and the validation ELBO has levelled off: this is what these settings come to.",)
