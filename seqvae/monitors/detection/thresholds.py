"""Where a detector draws its lines, each with its reason. All nats are per posterior, those of decoder use per sequence.

The lines were drawn on one half of the runs of `benchmarks/detection/collapse_zoo.py` and checked on the other.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The lines between verdicts. The defaults are meant for all models; a latent that should carry less than half a nat needs
    lower ones."""

    faint_rate: float = 0.3
    """A rate below this carries nothing worth a latent: the information is never more than the rate."""

    restless_rate: float = 0.001
    """Added to `faint_rate` for each dimension: training never leaves a dead one quite still."""

    faint_information: float = 0.2
    """A little above the noise that collapsed posteriors of a model in training show."""

    faint_dimension: float = 0.03
    """A dimension with this much KL is more than noise, and models that come to life late do so in one or two dimensions first."""

    growth: float = 1.25
    """A rate that grew by this factor lately is growing."""

    waking: float = 1.9
    """The same factor for the information of a model that begins to use a rate that it pays for: it scatters more than the rate."""

    clear_information: float = 0.5
    """From here on the latent tells things apart. Counts where decoder use cannot be read, or is neither clear nor gone."""

    clear_use: float = 0.5
    """From this decoder use on the decoder uses z, if it is also `clear_use_errors` standard errors away from 0."""

    clear_use_errors: float = 3.0

    no_use: float = 0.1
    """Below this, or within `no_use_errors` standard errors above it, the decoder may as well not use z at all."""

    no_use_errors: float = 2.0

    paid_rate: float = 0.5
    """A rate of this much that is not used is held up by something: free bits, normalised means, a fixed variance."""

    dead_variance: float = 0.01
    """A dimension whose mean varies less is dead (Burda et al. 2016)."""

    many_dead: float = 0.5
    """Share of dead dimensions from which a latent is called partly collapsed."""

    narrow_variance: float = 0.02
    """A geometric mean of the active dimensions' variances below this is nearly a point, no distribution."""

    falling_share: float = 0.6
    """A rate or an information that fell to less than this share of what it was is falling."""

    slowing_share: float = 0.6
    """A fall that has slowed down to less than this share of its slope will settle."""

    agreement: float = 0.5
    """How much the readings have to agree on a trend: the share of pairs that go one way less those that go the other."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")


OF_SEQUENCES = Thresholds()
OF_STEPS = Thresholds(
    faint_rate=0.03,
    restless_rate=0.0001,
    faint_dimension=0.003,
    faint_information=0.1,
    clear_information=0.2,
    paid_rate=0.05,
)
"""Where steps have posteriors of their own: the rate of one is a tenth of a sequence's, or less, and its information less than
half. Decoder use is per sequence either way."""
