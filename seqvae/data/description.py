"""What a model has to know about the data; lies in the cache's meta.json and, later, in every checkpoint.

Apart from the batches, because code that writes or reads files of data needs no torch.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from seqvae.text import step_name

Kind = Literal["tokens", "vectors", "events"]
"""What a step of a sequence is. A further kind needs a batch (`data/batch.py`) and its gathering (`data/dataset.py`), columns
(`data/parquet/schema.py`) and their encoding (`data/building/`), an embedding and a likelihood (`models/`, chosen in
`models/vae.py`), drawing (`models/sampling.py`), and tables (`inference/tables.py`)."""
UNKNOWN = "<unknown>"
"""What people are told that a step of a sequence is: a word that no one takes for an optimizer step."""


@dataclass(frozen=True, kw_only=True)
class DataDescription:
    """The kind of the sequences, and the meaning of their numbers."""

    kind: Kind

    vocabulary_size: int = 0
    """Tokens: ids are 0 .. vocabulary_size - 1. Begin and end marks are the model's, not the data's."""

    symbols: tuple[str, ...] = ()
    """Text: the string of each token id. The first one is <unknown>, except for bytes and a tokenizer.json."""

    tokenizer: str | None = None
    """Text: words, characters, bytes, or the tokenizer.json as a string."""

    unknown_share: float = field(default=0.0, repr=False)
    """Text and events: how likely a step is to hold what training never showed, by the share of what it showed only once. <unknown>
    has this probability whatever the network learned; 0 where training shows <unknown> itself, or shows nothing only once."""

    names: tuple[str, ...] = ()
    """Vectors: the features. Events: the variables, of which the first one is <unknown>."""

    mean: tuple[float, ...] = ()
    """Per name: a value in its own units is normalised * std + mean."""

    std: tuple[float, ...] = ()
    """Per name: see `mean`."""

    valued: tuple[bool, ...] = ()
    """Per name: it has values in the training split."""

    presence_rates: tuple[float, ...] = ()
    """Events, per name: the share of the training split's steps that hold it, half a step added for and against, so that none is
    0 or 1. Older checkpoints have none."""

    robust: tuple[bool, ...] = ()
    """Per name: tails are heavy, and mean and std are those of the values between two outer quantiles; (): of none."""

    time_unit: str = ""
    """Events: minutes, or the name of a numeric time column whose unit is the user's."""

    log_gap_mean: float = 0.0
    """Events: mean of the logarithm of the gaps between steps, in time units, over the training split."""

    log_gap_std: float = 1.0
    """Its standard deviation."""

    shortest_gap: float = 1.0
    """Events: gaps up to this, and 0, count as equal."""

    classes: tuple[str, ...] = ()
    """What the labels 0, 1, ... stand for, where the data have labels."""

    @property
    def plane(self) -> tuple[str, str] | None:
        """The features of a vector that are drawn as a curve in the plane: x and y, where there is no z."""
        by_name = {name.lower(): name for name in self.names}
        if self.kind != "vectors" or "z" in by_name or not {"x", "y"} <= by_name.keys():
            return None
        return by_name["x"], by_name["y"]

    @property
    def unit(self) -> str:
        """The name of one step of a sequence."""
        return step_name(self.kind)


class FittedPreprocessing(NamedTuple):
    """The vocabulary and the moments that were fitted to a network's training data, with which other data are read."""

    description: DataDescription
    pools_are_whole: bool
    """Whether files that are no split are used whole; otherwise a share of them is held out, as it was for training."""
    keeps_values: bool = False
    """Whether values are kept as they were read, too: from normalised ones in float32 they do not come back to the bit."""
