"""What could make a training faster: its settings and some facts in, changes worth trying out. Nothing is measured here.

Changes of one theme exclude one another. A change of batches keeps the tokens of an optimizer step, so that it goes on
learning as before; what would learn differently, or give something up, is there to be measured and stands apart.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from seqvae.config.training import TrainingSettings
from seqvae.config.yaml_files import values_of
from seqvae.profiling.changes import Change, Value

WORTH_WORKERS = 0.02
"""Share of a step that it waits for data from which on more hands could matter."""
PAD_GRID = 32
"""Shapes: few enough for what is prepared for each, for a few percent of padding."""
USUAL_LOG_STEPS = 50
REGROUPED = "as many tokens in an optimizer step, in other batches"
OTHER_STEP = "another size of optimizer step learns differently"


class Facts(NamedTuple):
    """What a first look at a run tells."""

    device: str
    """cpu, cuda or mps."""
    cores: int
    precision: str
    """In force."""
    has_bf16: bool
    """The device computes with it faster than with float32."""
    tokens: int
    """Steps of all training sequences."""
    longest: int
    """Steps of the longest, as it is padded."""
    tokens_per_batch: int
    """At most, in force."""
    waiting_share: float
    """Of a step, for data."""
    peak_memory_gib: float
    available_memory_gib: float
    """To one more run beside this one."""


def changes_for(settings: TrainingSettings, facts: Facts) -> list[Change]:
    """In the order in which they are worth trying."""
    return [
        *_batch_changes(settings, facts),
        *_padding_changes(settings, facts),
        *_precision_changes(facts),
        *_compute_changes(settings, facts),
        *_loading_changes(settings, facts),
        *_watching_changes(settings),
    ]


def _batch_changes(settings: TrainingSettings, facts: Facts) -> list[Change]:
    accumulate = settings.optimizer.gradient_accumulation_steps
    found = []
    for times in (2, 4):
        larger = _batches_times(Fraction(times), settings, facts)
        if larger and accumulate % times == 0:
            values = {**larger, **_fitting_memory(times, settings, facts)}
            values["gradient_accumulation_steps"] = accumulate // times
            reason = "fewer, larger products of matrices"
            found.append(
                Change(f"batches {times} times as large", "batches", values, reason, REGROUPED, by_totals=True)
            )
    smaller = _batches_times(Fraction(1, 2), settings, facts)
    if smaller:
        values = {**smaller, "gradient_accumulation_steps": 2 * accumulate}
        reason = "half as much at once stays in the caches"
        found.append(Change("batches half as large", "batches", values, reason, REGROUPED, by_totals=True))
    return [*found, *_other_steps(settings, facts)]


def _other_steps(settings: TrainingSettings, facts: Facts) -> list[Change]:
    """Optimizer steps of more tokens."""
    batches, accumulate = settings.batches, settings.optimizer.gradient_accumulation_steps
    wanted: dict[str, dict[str, Value]] = {}
    same = _batches_times(Fraction(1), settings, facts)  # or the default budget would go with the accumulation
    if same and 2 * accumulate * facts.tokens_per_batch <= facts.tokens:
        wanted["twice the accumulation"] = {**same, "gradient_accumulation_steps": 2 * accumulate}
    larger = _batches_times(Fraction(2), settings, facts)
    if larger and 2 * accumulate * facts.tokens_per_batch <= facts.tokens and not _fitting_memory(2, settings, facts):
        wanted["twice the batch"] = {**larger, "gradient_accumulation_steps": accumulate}
    if batches.batch_size is not None and batches.bucketing and batches.use_dynamic_padding:
        wanted["a budget in place of a number"] = {"batch_size": None, "tokens_per_batch": facts.tokens_per_batch}
    reason = "fewer optimizer steps"
    return [
        Change(name, "step size", _differing(values, settings), reason, apart=OTHER_STEP, by_totals=True)
        for name, values in wanted.items()
    ]


def _batches_times(factor: Fraction, settings: TrainingSettings, facts: Facts) -> dict[str, Value]:
    """What makes batches larger or smaller; nothing where the data do not have it."""
    batches = settings.batches
    values: dict[str, Value] = {}
    if batches.batch_size is not None:
        values["batch_size"] = int(batches.batch_size * factor)
    if batches.batch_size is None or batches.tokens_per_batch is not None:
        values["tokens_per_batch"] = int(facts.tokens_per_batch * factor)
    tokens = facts.tokens_per_batch * factor
    is_whole = batches.batch_size is None or (batches.batch_size * factor).denominator == 1
    return values if is_whole and facts.longest <= tokens <= facts.tokens else {}


def _fitting_memory(times: int, settings: TrainingSettings, facts: Facts) -> dict[str, Value]:
    """What such large batches need beside, where memory would not do."""
    has_room = times * facts.peak_memory_gib <= facts.available_memory_gib
    return {} if has_room or settings.compute.gradient_checkpointing else {"gradient_checkpointing": True}


def _padding_changes(settings: TrainingSettings, facts: Facts) -> list[Change]:
    batches = settings.batches
    found = []
    if not (batches.bucketing and batches.use_dynamic_padding):
        fitting = max(1, facts.tokens_per_batch // facts.longest)
        number = fitting if batches.batch_size is None else min(fitting, batches.batch_size)
        values: dict[str, Value] = {"bucketing": True, "use_dynamic_padding": True, "batch_size": number}
        values = _differing(values, settings)
        effect = "as many sequences in an optimizer step, those of similar length together"
        found.append(Change("similar lengths together", "batches", values, "less padding", effect, by_totals=True))
    if batches.use_dynamic_padding and batches.bucketing and not batches.pad_grid:
        reason = "libraries prepare themselves for every shape"
        values = {"pad_grid": PAD_GRID}
        found.append(Change(f"at most {PAD_GRID} shapes", "shapes", values, reason, REGROUPED, by_totals=True))
    elif batches.pad_grid:
        values = {"pad_grid": 0}
        found.append(Change("any shape", "shapes", values, "less padding", REGROUPED, by_totals=True))
    return found


def _precision_changes(facts: Facts) -> list[Change]:
    names = ["32-true"]
    if facts.has_bf16:
        names.append("bf16-mixed")
    if facts.device != "cpu":
        names.append("16-mixed")
    effects = {"32-true": "numbers are rounded less", "bf16-mixed": "numbers are rounded more"}
    return [
        Change(name, "precision", {"precision": name}, "other arithmetic", effects.get(name, effects["bf16-mixed"]))
        for name in names
        if name != facts.precision
    ]


def _compute_changes(settings: TrainingSettings, facts: Facts) -> list[Change]:
    compute = settings.compute
    found = []
    if compute.compile_model:
        found.append(Change("not compiled", "compiler", {"compile_model": False}, "compiling has to pay"))
    else:
        found.append(Change("compiled", "compiler", {"compile_model": True}, "less memory traffic"))
        if facts.device == "cuda":
            values: dict[str, Value] = {"compile_model": True, "compile_mode": "reduce-overhead"}
            found.append(Change("compiled, recorded graphs", "compiler", values, "nothing launched one by one"))
    if compute.gradient_checkpointing:
        found.append(
            Change("no gradient checkpointing", "memory", {"gradient_checkpointing": False}, "nothing computed twice")
        )
    if compute.plain_operations and facts.device == "cpu":
        values = {"plain_operations": False}
        found.append(Change("operations by hand", "operations", values, "less memory traffic"))
    if not settings.optimizer.fused_optimizer:
        found.append(Change("fused optimizer", "optimizer", {"fused_optimizer": True}, "one pass over the weights"))
    if facts.device == "cuda" and not settings.loading.pin_memory:
        found.append(Change("pinned memory", "transfer", {"pin_memory": True}, "batches copied meanwhile"))
    return found


def _loading_changes(settings: TrainingSettings, facts: Facts) -> list[Change]:
    """A few are cheap to try; more hands only where a step waits."""
    loading = settings.loading
    workers = 1 if loading.num_workers == "auto" else loading.num_workers
    present = (loading.worker_type if workers else "thread", workers)
    wanted = [("thread", 1), ("thread", 0), ("process", 2)]
    if facts.waiting_share >= WORTH_WORKERS:
        wanted += [("thread", 2)]
        wanted += [("thread", 4), ("process", 4)] if facts.cores >= 4 else []
    found = []
    for kind, number in wanted:
        if (kind, number) == present:
            continue
        values = _differing({"worker_type": kind, "num_workers": number}, settings)
        if number == 0:
            name, values = "no loader thread", {"num_workers": 0}
        else:
            name = f"{number} loader {kind}{'s' if kind == 'thread' else 'es'}" if number > 1 else f"1 loader {kind}"
        found.append(Change(name, "loading", values, f"a step waits {facts.waiting_share:.1%} of its time for data"))
    return found


def _watching_changes(settings: TrainingSettings) -> list[Change]:
    watch = settings.monitoring
    found = []
    if not watch.disable_metrics_monitoring:
        if not watch.fast_detection:
            values: dict[str, Value] = {"fast_detection": True}
            effect = "the posterior is read half as often or less"
            found.append(Change("watching less", "watching", values, "fewer readings", effect, by_totals=True))
        if watch.on_collapse == "warn":
            values = {"disable_metrics_monitoring": True}
            apart = "nobody would see a posterior collapse"
            found.append(Change("not watching", "watching", values, "no readings", apart=apart, by_totals=True))
    if settings.run.log_every_n_steps < USUAL_LOG_STEPS:
        values = {"log_every_n_steps": USUAL_LOG_STEPS}
        found.append(Change("logging less", "logging", values, "fewer lines", "metrics.csv is coarser", by_totals=True))
    return found


def _differing(values: Mapping[str, Value], settings: TrainingSettings) -> dict[str, Value]:
    """Those that are not in force already."""
    present = {name: value for group in values_of(settings).values() for name, value in values_of(group).items()}
    return {name: value for name, value in values.items() if present[name] != value}
