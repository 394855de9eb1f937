"""Sequences to vectors as a transformer of scikit-learn: `SequenceEmbedder().fit(X).transform(X)`, in pipelines and searches.

In: a list of sequences, or an array. Out: each sequence's posterior mean. What it trains is a run as any other, in a directory
that is removed unless `output_dir` names one.
"""

import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from seqvae.api import fit
from seqvae.errors import DataError, UsageError

if TYPE_CHECKING:
    from seqvae.inference.model import Model

try:
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data
except ModuleNotFoundError as error:
    raise UsageError("SequenceEmbedder needs the extra 'eval': pip install -e '.[eval]'") from error

FEWEST = 2
"""Sequences to learn from: one to train on, one to validate on."""


class SequenceEmbedder(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Embed sequences as the posterior means of a variational autoencoder.

    X is a list of sequences of any lengths: lists or 1-D arrays of whole numbers (tokens), lists or 1-D arrays of floats (one
    number a step), lists of vectors or 2-D arrays (one vector a step), or texts, which need `tokenizer`; or a Series, or a
    DataFrame of one column, that holds these. An array of numbers, or a DataFrame of columns of numbers, is read as series of
    equal length: (sequences, steps) or (sequences, steps, features), whole numbers as numbers. To embed the rows of a table as
    vectors of one step, reshape it to (rows, 1, features). y is ignored.

    `n_latent`: dimensions of the embedding. `max_steps`, `max_epochs`: length of the training, by default as `seqvae.fit` chooses.
    `tokenizer`: `words`, `characters`, `bytes` or the path of a tokenizer.json. `validation_fraction`: share of the sequences,
    drawn at random, that is held out to choose the best checkpoint by. `random_state`: of that choice, the weights and the noise;
    the same number gives the same embedding on the same machine. `output_dir`: where the run, with its report, is kept. `verbose`:
    show the training. `flags`: further settings of `seqvae.fit`, by name.

    After `fit`: `model_` (a `seqvae.Model`), `verdict_` (what the monitor says of the posterior), `n_sequences_` (as many were
    learnt from), and `n_features_in_` where X was a table of numbers.
    """

    def __init__(
        self,
        n_latent: int = 16,
        *,
        max_steps: int | None = None,
        max_epochs: int | None = None,
        tokenizer: str | None = None,
        validation_fraction: float = 0.1,
        random_state: "int | np.random.RandomState | None" = None,
        output_dir: str | Path | None = None,
        verbose: bool = False,
        flags: Mapping[str, Any] | None = None,
    ) -> None:
        self.n_latent = n_latent
        self.max_steps = max_steps
        self.max_epochs = max_epochs
        self.tokenizer = tokenizer
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.output_dir = output_dir
        self.verbose = verbose
        self.flags = flags

    def fit(self, X: Any, y: Any = None) -> "SequenceEmbedder":
        """Train on sequences."""
        sequences = self._sequences(X, is_first=True)
        if len(sequences) < FEWEST:
            raise ValueError(
                f"Found array with {len(sequences)} sample(s) while a minimum of {FEWEST} is required by {type(self).__name__}"
            )
        flags = dict(self.flags or {})
        if flags.get("latent_scope", "sequence") == "step":
            raise ValueError("latent_scope='step' gives no embedding of a whole sequence")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction must lie between 0 and 1, got {self.validation_fraction}")
        random = check_random_state(self.random_state)
        order = random.permutation(len(sequences))
        held_out = min(max(1, round(self.validation_fraction * len(sequences))), len(sequences) - 1)
        splits = {
            name: [sequences[place] for place in sorted(places)]
            for name, places in (("train", order[held_out:]), ("validation", order[:held_out]))
        }
        with _quiet(not self.verbose), _scratch() as scratch, _value_errors():
            own = {
                "latent_size": self.n_latent,
                "max_steps": self.max_steps,
                "max_epochs": self.max_epochs,
                "tokenizer": self.tokenizer,
                "seed": int(random.randint(2**31 - 1)),
                "output_dir": str(self.output_dir or scratch / "runs"),
                "cache_dir": str(scratch),
                "fast_detection": True,
            }
            run = fit(splits, **own | flags)
            self.model_: Model = run.model
            self.verdict_ = run.verdict
        self.n_sequences_ = len(sequences)
        self._n_features_out = int(self.model_.settings["latent_size"])
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Return the posterior mean of each sequence, (sequences, n_latent)."""
        check_is_fitted(self, "model_")
        sequences = self._sequences(X, is_first=False)
        with _quiet(not self.verbose), _scratch() as scratch, _value_errors():
            found = self.model_.encode(sequences, cache_dir=str(scratch))
        return np.stack(found["mean"].to_list()).astype(np.float32)

    def _sequences(self, X: Any, *, is_first: bool) -> list[Any]:
        """Return the sequences of X; tables of numbers are checked as scikit-learn checks them."""
        if isinstance(X, pd.DataFrame) and X.shape[1] == 1 and X.dtypes.iloc[0].kind not in "biuf":
            X = X.iloc[:, 0]
        if isinstance(X, pd.Series):
            X = X.tolist()
        if isinstance(X, Sequence) and not isinstance(X, str | bytes):
            if not len(X):
                raise ValueError("Found array with 0 sample(s) while a minimum of 1 is required.")
            return list(X)
        numbers = validate_data(self, X, reset=is_first, dtype=np.float64, allow_nd=True, ensure_min_samples=1)
        if numbers.ndim > 3:
            raise ValueError(f"an array has sequences, steps and features, and this one {numbers.ndim} dimensions")
        return list(numbers)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.string = True
        tags.transformer_tags.preserves_dtype = []  # always float32
        return tags


@contextmanager
def _scratch() -> Iterator[Path]:
    with TemporaryDirectory(prefix="seqvae-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def _quiet(is_quiet: bool) -> Iterator[None]:
    """Print nothing but warnings."""
    with ExitStack() as stack:
        if is_quiet:
            stack.enter_context(redirect_stdout(io.StringIO()))
            stack.callback(logging.disable, logging.root.manager.disable)
            logging.disable(logging.INFO)
        yield


@contextmanager
def _value_errors() -> Iterator[None]:
    """Raise what is wrong with data as the type that scikit-learn's tools expect."""
    try:
        yield
    except DataError as error:
        raise ValueError(str(error)) from error
