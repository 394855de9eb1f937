"""The plan of a rescue: readings and verdicts of the posterior in, one by one; what to train by from now on out, as a `Move`.

    watching --alarm--> healing --alive--> lowering --all tried, or one did not hold--> watching
                           |  not within LOOK_STEPS: the next rung
                           +--> given up

A *course* is an objective: a weight of the KL and a floor, the nats of the rate that cost nothing. A rescue keeps the weights and
resets the optimizer, on the course of its first rung; rungs become stronger until the latent is alive. Then the courses become
weaker step by step, down to the user's own, as long as the latent stays alive; the last one that held stays for good. All steps of
all rescues together stay within a budget. Plain Python on numbers: no torch, no clock, no files. The same readings give the same
moves, also across a checkpoint.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from seqvae.config.training import ObjectiveSettings
from seqvae.monitors.reading import Reading, Scope
from seqvae.monitors.rules import OF_SEQUENCES, OF_STEPS, Thresholds
from seqvae.training.objective import resolve_free_bits
from seqvae.verdicts import FLOOR_NATS, readable

TRIGGERS = ("collapsing", "collapsed", "decoder_ignores_z")
"""Verdicts that a rescue begins with."""
LINES: dict[Scope, Thresholds] = {"sequence": OF_SEQUENCES, "step": OF_STEPS}
TARGETS = 2.0
"""Target KL of the second rung, in floors (`FLOOR_NATS`)."""
LOOK_STEPS = 100
"""Within which a rung has to bring the latent to life; a third of the budget where that is less."""
LOWERING_STEPS, LOWERING_SHARE = 50, 0.05
"""Steps that the latent has to survive on a weaker course, and the share of the run, whichever is more; a sixth of the budget where
that is less than the first."""
FIRM = 1.5
"""Floors of this many times the least information keep it up by themselves."""
MARGIN = 2.0
"""Times the least information that a latent has to have on courses with less than a firm floor: below, it still fell after it had
been seen alive for 50 steps (MI 0.5 under a floor of 0.3 nats, and 0.39 in the end)."""
IN_A_ROW = 2
"""Readings that have to agree that the latent is alive, or is not."""
EVERY_N_STEPS = 10
"""Between two readings at most, as long as a rescue goes on."""

Name = Literal["no_kl", "low_weight", "half_weight", "target_kl", "floor", "half_floor", "own"]
STRONGEST_FIRST: tuple[Name, ...] = get_args(Name)
RUNGS: tuple[Name, ...] = ("floor", "target_kl", "low_weight", "no_kl")
Phase = Literal["watching", "healing", "lowering", "given_up"]


class Course(NamedTuple):
    """An objective that a rescue trains by."""

    kl_weight: float
    floor: float
    """Nats of each posterior that cost nothing, in equal parts for its dimensions."""
    target_kl: float | None = None
    """Nats per sequence that a controller steers to, in place of the weight."""

    def __str__(self) -> str:
        weight = (
            f"KL weight {self.kl_weight:g}" if self.target_kl is None else f"KL steered to {self.target_kl:.3g} nats"
        )
        return f"{weight}, {self.floor:.3g} nats of each posterior free" if self.floor else f"{weight}, no free bits"


class Move(NamedTuple):
    """What changes now."""

    phase: Phase
    name: Name
    course: Course
    message: str
    """What happened, why, and what is done."""
    outcome: str
    """Of the phase before; empty: this is the first."""
    added_steps: int
    """By which the run is longer than planned, with all rescues so far."""
    used_steps: int
    """Of all rescues so far."""
    resets_optimizer: bool = False
    revives_decoder: bool = False
    """Whether the weights are those of the last healthy checkpoint, or, without one, the decoder starts from scratch."""

    @property
    def is_over(self) -> bool:
        """Whether the monitor judges again."""
        return self.phase in ("watching", "given_up")


class State(NamedTuple):
    """What later moves depend on, in types of JSON."""

    phase: Phase = "watching"
    name: Name | None = None
    """Of the course in force; None: the run's own objective, schedule and all."""
    held: Name | None = None
    """The weakest course that the latent has survived in this rescue."""
    since_step: int = 0
    """Of the phase's course."""
    began_at: int = 0
    """The step that the rescue began at."""
    in_a_row: int = 0
    """Readings that agree on what the phase waits for: life when healing, death when lowering."""
    used_steps: int = 0
    """Of rescues that are over."""
    refused: tuple[Name, ...] = ()
    """Courses that the latent did not survive."""
    added_steps: int = 0
    expected_steps: int = 0
    """Of the run, as the first rescue began."""
    steps_per_sequence: float = 0.0
    """Of the sequences that decoder use was first read on; 0: not known."""


class RescuePlan:
    """The plan of one run's rescues."""

    def __init__(self, objective: ObjectiveSettings, total_steps: int, budget: float) -> None:
        """`objective`: the user's; `budget`: the share of the run's `total_steps` that all rescuing may take."""
        self.objective, self.total_steps, self.budget = objective, total_steps, budget
        self.state = State(expected_steps=total_steps)

    def expect(self, steps: int) -> None:
        """Count shares of the run from what it will reach before the clock ends it; from the first rescue on they are fixed."""
        if self.state.phase == "watching" and self.state.name is None:
            self.state = self.state._replace(expected_steps=min(steps, self.total_steps))

    @property
    def budget_steps(self) -> int:
        return int(self.budget * self.state.expected_steps)

    @property
    def look_steps(self) -> int:
        """Return the steps within which a rung has to bring the latent to life."""
        return max(1, min(LOOK_STEPS, self.budget_steps // 3))

    @property
    def lowering_steps(self) -> int:
        """Return the steps that the latent has to survive on a weaker course."""
        share = int(LOWERING_SHARE * self.state.expected_steps)
        return max(1, share, min(LOWERING_STEPS, self.budget_steps // 6))

    @property
    def every_n_steps(self) -> int:
        """Return the steps between two readings, as long as a rescue goes on."""
        return max(1, min(EVERY_N_STEPS, self.lowering_steps // 5))

    @property
    def is_active(self) -> bool:
        return self.state.phase in ("healing", "lowering")

    def take_in(self, reading: Reading, verdict: str) -> Move | None:
        """Take in a reading and the verdict in force after it; return what changes now, if anything does."""
        state, step = self.state, reading.step
        if state.phase == "given_up":
            return None
        if state.phase == "watching":
            return self._begin(reading, verdict) if verdict in TRIGGERS else None
        name, waits_for_life = state.name, state.phase == "healing"
        assert name is not None
        course = self._courses(reading)[name]
        alive = is_alive(reading, 1.0 if waits_for_life or is_firm(course, reading.scope) else MARGIN)
        state = self.state = state._replace(in_a_row=state.in_a_row + 1 if alive == waits_for_life else 0)
        taken = step - state.since_step
        is_out = self._used(step) + self.every_n_steps > self.budget_steps
        if state.in_a_row >= IN_A_ROW and waits_for_life:
            return self._weaken(reading, f"alive after {taken:,} steps")
        if state.in_a_row >= IN_A_ROW:
            self.state = state._replace(refused=(*state.refused, name))
            return self._stay(reading, f"lost on this course after {taken:,} steps")
        if waits_for_life and is_out:
            return self._give_up(reading, "not alive when the budget was used up")
        if waits_for_life:
            is_late = taken + self.every_n_steps > self.look_steps
            return self._next_rung(reading, f"not alive within {taken:,} steps") if is_late else None
        if alive and taken >= self.lowering_steps:
            return self._weaken(reading, f"alive on this course for {taken:,} steps")
        return self._stay(reading, "the budget was used up before it could be judged") if is_out else None

    # --- Moves --------------------------------------------------------------------------------------------------------

    def _begin(self, reading: Reading, verdict: str) -> Move:
        state, left = self.state, self.budget_steps - self.state.used_steps
        if state.name is not None and state.name not in state.refused:
            state = state._replace(refused=(*state.refused, state.name))
        self.state = state._replace(began_at=reading.step)
        if left < 2 * IN_A_ROW * self.every_n_steps:
            return self._give_up(reading, f"{readable(verdict)}, with {max(0, left):,} steps of the budget left")
        # Where less is left than the budget, the run becomes longer: a rescue always has its whole budget before it.
        added_steps = max(state.added_steps, reading.step + left - self.total_steps)
        self.state = self.state._replace(added_steps=added_steps)
        return self._next_rung(reading, readable(verdict))

    def _next_rung(self, reading: Reading, outcome: str) -> Move:
        """Take the weakest rung that is stronger than the course in force and does not apply in vain."""
        courses, present = self._courses(reading), self.state.name or "own"
        strength = STRONGEST_FIRST.index
        rungs = [name for name in RUNGS if name in courses and strength(name) < strength(present)]
        if not courses["floor"].kl_weight:
            rungs = []  # --beta 0: nothing of the KL is left to take away
        if not rungs:
            return self._give_up(reading, outcome)
        self.state = self.state._replace(held=None)
        what = "the optimizer starts over"
        if rungs[0] == "no_kl":
            what = "the weights are those of healthy.ckpt, or else the decoder starts from scratch; " + what
        return self._move(
            reading, "healing", rungs[0], outcome, what, resets_optimizer=True, revives_decoder=rungs[0] == "no_kl"
        )

    def _weaken(self, reading: Reading, outcome: str) -> Move:
        """Go on to the next weaker course that has not failed; where there is none, stay."""
        state, courses = self.state, self._courses(reading)
        assert state.name is not None
        self.state = state._replace(held=state.name)
        weaker = STRONGEST_FIRST[STRONGEST_FIRST.index(state.name) + 1 :]
        name = next((name for name in weaker if name in courses and name != "target_kl"), None)
        if name is None or name in state.refused:
            return self._stay(reading, outcome)
        return self._move(reading, "lowering", name, outcome, "a weaker course is tried")

    def _stay(self, reading: Reading, outcome: str) -> Move:
        """End the rescue on the weakest course that held."""
        held = self.state.held
        assert held is not None
        if held == "no_kl":  # no variational model: nothing to stay on
            return self._give_up(reading, outcome)
        return self._end(reading, "watching", held, outcome, "rescued: this course stays")

    def _give_up(self, reading: Reading, outcome: str) -> Move:
        what = "no further rescue, this course stays: try a lower --beta or a weaker decoder"
        return self._end(reading, "given_up", "floor", outcome, what)

    def _end(self, reading: Reading, phase: Phase, name: Name, outcome: str, what: str) -> Move:
        used = self._used(reading.step)
        move = self._move(reading, phase, name, outcome, what)
        self.state = self.state._replace(used_steps=used)
        return move

    def _move(self, reading: Reading, phase: Phase, name: Name, outcome: str, what: str, **more: bool) -> Move:
        course, used = self._courses(reading)[name], self._used(reading.step)
        self.state = state = self.state._replace(phase=phase, name=name, since_step=reading.step, in_a_row=0)
        message = f"rescue: {outcome}; {what} ({course}; {used:,} of {self.budget_steps:,} steps used)"
        return Move(phase, name, course, message, outcome, state.added_steps, used, **more)

    def _courses(self, reading: Reading) -> dict[Name, Course]:
        """Return the courses of this run; the length of a sequence, which targets depend on, is that of the first reading."""
        state = self.state
        if reading.decoder_use_steps and reading.decoder_use_sequences and not state.steps_per_sequence:
            steps = reading.decoder_use_steps / reading.decoder_use_sequences
            self.state = state = state._replace(steps_per_sequence=steps)
        return courses_of(self.objective, reading, state.steps_per_sequence)

    def _used(self, step: int) -> int:
        return self.state.used_steps + step - self.state.began_at

    # --- Memory -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self.state._asdict() | {"refused": list(self.state.refused)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = State(**{**state, "refused": tuple(state["refused"])})


def is_alive(reading: Reading, margin: float = 1.0) -> bool:
    """Return whether the latent tells things apart, and the decoder clearly uses it, where that can be read.

    `margin`: times the least information that it takes.
    """
    t, use, error = LINES[reading.scope], reading.decoder_use, reading.decoder_use_error
    if not reading.mutual_information > margin * t.clear_information:
        return False
    return use is None or (error is not None and use > t.clear_use and use > t.clear_use_errors * error)


def is_firm(course: Course, scope: Scope) -> bool:
    """Return whether a course keeps the information up by itself."""
    return course.target_kl is not None or course.floor >= FIRM * LINES[scope].clear_information


def courses_of(objective: ObjectiveSettings, reading: Reading, steps_per_sequence: float) -> dict[Name, Course]:
    """Return the courses that a rescue of such posteriors can take, the user's own last.

    Their weight is the user's, and 1 at most: under more, no floor is kept for long. Floors come on top of the user's own, which
    did not keep the latent alive.
    """
    weight = 1.0 if objective.target_kl is not None else min(1.0, objective.beta)
    own = Course(weight, resolve_free_bits(objective, reading.scope) * len(reading.kl_per_dim), objective.target_kl)
    floor = own.floor + FLOOR_NATS[reading.scope]
    courses: dict[Name, Course] = {"no_kl": Course(0.0, floor)}
    per_sequence = 1.0
    if reading.scope == "sequence":
        courses |= {"low_weight": Course(0.2 * weight, floor), "half_weight": Course(0.5 * weight, floor)}
    else:  # at a low weight a latent of each step copies its step: 55 nats per sequence, and an ELBO of -57 in place of -33
        per_sequence = steps_per_sequence
    if per_sequence:
        courses["target_kl"] = Course(weight, 0.0, TARGETS * floor * per_sequence)
    courses["floor"] = Course(weight, floor)
    half = Course(weight, own.floor + FLOOR_NATS[reading.scope] / 2)
    if is_firm(half, reading.scope):
        courses["half_floor"] = half
    return courses | {"own": own}
