"""The settings of a study, which trains one run after the other to find good settings: `seqvae tune`.

In: the text of --space. Out: for each setting the values to choose from. Imports nothing heavy, since `--help` imports it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from math import isfinite
from types import MappingProxyType
from typing import NamedTuple

from seqvae.config.data import BatchSettings
from seqvae.config.flags import CommandLine, Flag
from seqvae.config.model import ModelSettings
from seqvae.config.monitoring import MonitoringSettings
from seqvae.config.run import refuse_below
from seqvae.config.training import ObjectiveSettings, OptimizedSettings, OptimizerSettings
from seqvae.config.yaml_files import to_flat_dict
from seqvae.errors import UsageError, did_you_mean

RANGES = {
    "beta": "0.2:2",
    "free_bits": "0.01:1",
    "target_kl": "1:30",
    "kl_warmup": "0.05:0.5",
    "kl_cycle": "0.1:0.5",
    "contrastive_weight": "0:1",
    "label_weight": "0.1:10",
    "lr": "3e-4:1e-2",
    "warmup": "0.005:0.1",
    "weight_decay": "0.001:0.1",
    "gradient_clip": "0.3:10",
    "latent_size": "4:64",
    "width": "64|128|256",
    "depth": "1:4",
    "heads": "2|4|8",
    "dropout": "0:0.3",
    "word_dropout": "0:0.6",
    "prior_components": "8|16|32|64",
}
"""What a setting is chosen from where --space only names it; switches and words are chosen from all that they take."""
TUNED = (ModelSettings, ObjectiveSettings, OptimizerSettings, BatchSettings)
"""The groups whose settings may be tuned. Other ones change the data or the validation, and ELBOs of these cannot be compared."""
LOGARITHMIC_FROM = 8
"""A range whose ends differ by this factor or more is searched evenly in the logarithm."""


class Range(NamedTuple):
    """Numbers from the lowest to the highest, both included."""

    low: float
    high: float
    is_whole: bool

    @property
    def is_logarithmic(self) -> bool:
        return self.low > 0 and self.high / self.low >= LOGARITHMIC_FROM


class Choices(NamedTuple):
    """Values to choose from, as they are typed."""

    values: tuple[str, ...]


Space = dict[str, Range | Choices]


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """Tuning"""

    trials: int = 20
    """Runs of the study, those of earlier commands for the same --run_name included."""

    space: str = "beta,free_bits,latent_size,lr"
    """Settings to choose, separated by commas, each alone or with a range of its own: lr=1e-4:1e-2, latent_size=8|16|32."""

    probe: str | None = None
    """Column with a label, in the data or the --label_path: the second objective is how well a linear probe tells its classes from
    the latents, in place of the mutual information."""

    def __post_init__(self) -> None:
        refuse_below(1, self, "trials")
        if self.probe is not None and not self.probe:
            raise ValueError("--probe is empty: give the name of a column")


@dataclass(frozen=True, kw_only=True)
class StudySettings(OptimizedSettings):
    """All settings of `seqvae tune`: those that its runs have in common, and how to search for the others."""

    monitoring: MonitoringSettings = field(default_factory=partial(MonitoringSettings, on_collapse="stop"))
    tuning: TuneSettings = field(default_factory=TuneSettings)

    @property
    def space(self) -> Space:
        """The values to choose from, by setting."""
        return parse_space(self.tuning.space, to_flat_dict(self.of_trials()))

    def of_trials(self) -> OptimizedSettings:
        """Return what the runs of the study have in common, as `seqvae train` takes it."""
        common = {one.name: getattr(self, one.name) for one in fields(OptimizedSettings)}
        compute = replace(self.compute, launcher=None, ray_workers=None)
        return OptimizedSettings(**common | {"compute": compute})


def parse_space(text: str, common: Mapping[str, object] = MappingProxyType({})) -> Space:
    """Return the values that each setting of --space may have, none of which `common`, all other settings, forbids.

    >>> parse_space("lr=1e-4:1e-2, latent_size=8|16")
    {'lr': Range(low=0.0001, high=0.01, is_whole=False), 'latent_size': Choices(values=('8', '16'))}
    """
    flags = _tunable()
    space: Space = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, equals, values = (word.strip() for word in part.partition("="))
        name = name.removeprefix("--").replace("-", "_")
        if name not in flags:
            raise UsageError(
                f"--space {name}: no setting of model, objective, optimizer or batches{did_you_mean(name, flags)}"
            )
        if name in space:
            raise UsageError(f"--space names {name} twice")
        space[name] = _values_of(flags[name], values if equals else _default_values(flags[name]), common)
    if not space:
        raise UsageError(f"--space {text!r} names no setting. Usage: --space lr,latent_size=8|16|32,beta=0.5:2")
    return space


@cache  # it takes a tenth of a second
def _line() -> CommandLine[OptimizedSettings]:
    return CommandLine(OptimizedSettings)


def _tunable() -> Mapping[str, Flag]:
    """Return the settings that may be tuned, by name."""
    names = {setting.name for group in TUNED for setting in fields(group)}
    return {name: flag for name, flag in _line().flags.items() if name in names}


def _default_values(flag: Flag) -> str:
    if flag.name in RANGES:
        return RANGES[flag.name]
    if flag.is_switch:
        return "false|true"
    if flag.choices and not flag.types:
        return "|".join(flag.choices)
    raise UsageError(
        f"--space {flag.name}: say from where to where, as {flag.name}=1:8, or which values, as {flag.name}=2|4|8"
    )


def _values_of(flag: Flag, text: str, common: Mapping[str, object]) -> Range | Choices:
    """Return a range or choices, each of them a value that the flag takes."""
    low, colon, high = text.partition(":")
    if not colon:
        values = tuple(dict.fromkeys(word.strip() for word in text.split("|")))
        for value in values:
            refuse_value(flag.name, value, common)
        if len(values) < 2:
            raise UsageError(
                f"--space {flag.name}={text}: one value is no choice. Give it as --{flag.name} {text or '...'}"
            )
        return Choices(values)
    is_whole = float not in flag.types
    if int not in flag.types and is_whole:
        raise UsageError(f"--space {flag.name}={text}: takes no numbers, but {flag.expected}, as a|b")
    try:
        found = Range(float(low), float(high), is_whole)
    except ValueError as error:
        raise UsageError(f"--space {flag.name}={text}: a range is two numbers, as 1:8") from error
    if not (isfinite(found.low) and isfinite(found.high) and found.low < found.high):
        raise UsageError(f"--space {flag.name}={text}: a range goes from a number to a higher one")
    for end in (low, high):
        refuse_value(flag.name, end.strip(), common)
    return found


def refuse_value(name: str, text: str, common: Mapping[str, object]) -> None:
    """Refuse a value that a run with these other settings would refuse."""
    try:
        _line().settings(_line().read_values({**common, name: text}))
    except UsageError as error:
        raise UsageError(f"--space {name}: {error}") from error
