"""A run directory -> `Run`: all that its report is made of, as far as it is there, and what is missing.

Nothing is taken for granted: a run may have just begun, been killed, be damaged, or come from an older version.
"""

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml

from seqvae.reports.preview_text import Preview, read_preview
from seqvae.reports.run_files import ENVIRONMENT, EVENTS, FACTS
from seqvae.reports.run_lines import LARGEST, Row, csv_lines, csv_rows, json_rows, number, read_json, read_lines, spread

CONFIG, METRICS, READINGS, THROUGHPUT = "config.yaml", "metrics.csv", "posterior.jsonl", "throughput.jsonl"
EVALUATION = "evaluation.jsonl"
SAMPLES, POSTERIORS = "samples", "plots/posteriors.npz"
WITNESSES = (METRICS, READINGS, THROUGHPUT, EVENTS)
"""Files that a run writes to while it lives."""
MOST_ROWS = 1000
"""Of a kind: more than a figure has pixels for."""
MOST_EVENTS = 5000
MOST_CONFIG_BYTES = 100_000


class Run(NamedTuple):
    """Rows are in the order of the run."""

    directory: Path
    facts: Row
    """What the newest session said of itself when it began (`seqvae/training/run_directory/facts.py`)."""
    environment: Row
    settings: Mapping[str, str | None]
    """As they stand in config.yaml."""
    training: list[Row]
    validations: list[Row]
    readings: list[Row]
    throughput: list[Row]
    events: list[Row]
    evaluations: list[Row]
    preview: Preview | None
    picture: Path | None
    """The newest preview that is one."""
    posteriors: tuple[np.ndarray, np.ndarray] | None
    """Means and log variances, (N, Z), finite."""
    last_sign: float | None
    """Of life: seconds since 1970."""
    missing: tuple[str, ...]
    """What a run of this kind has, and this one has not."""

    @property
    def name(self) -> str:
        return self.directory.absolute().name

    @property
    def is_monitored(self) -> bool:
        return self.settings.get("disable_metrics_monitoring") != "true"

    @property
    def step(self) -> int:
        """The last one that anything tells of."""
        rows = [of[-1] for of in (self.training, self.validations, self.readings, self.events) if of]
        return max((int(number(row, "step") or 0) for row in rows), default=0)


def is_run_directory(directory: Path) -> bool:
    """Whether anything in it is a run's."""
    return any((directory / name).is_file() for name in (CONFIG, ENVIRONMENT, FACTS, *WITNESSES))


def read_run(directory: Path) -> Run:
    metrics = read_lines(directory / METRICS, has_head=True)
    settings = read_settings(directory / CONFIG)
    preview, picture = _newest_preview(directory / SAMPLES)
    events = [row for row in json_rows(read_lines(directory / EVENTS)[-MOST_EVENTS:]) if _is_event(row)]
    run = Run(
        directory,
        facts=read_json(directory / FACTS),
        environment=read_json(directory / ENVIRONMENT),
        settings=settings,
        training=_table(metrics, ("loss", "kl_weight")),
        validations=_table(metrics, ("valid_elbo",)),
        readings=_thinned(directory / READINGS),
        throughput=_thinned(directory / THROUGHPUT),
        events=events,
        evaluations=json_rows(read_lines(directory / EVALUATION)),
        preview=preview,
        picture=picture,
        posteriors=read_posteriors(directory / POSTERIORS),
        last_sign=_newest(directory / name for name in WITNESSES),
        missing=(),
    )
    return run._replace(missing=tuple(_missing(run)))


def read_settings(path: Path) -> dict[str, str | None]:
    """The text of each value, None for null; composed but never constructed, so that nothing in it can make an object."""
    try:
        with path.open("rb") as file:
            root = yaml.compose(file.read(MOST_CONFIG_BYTES).decode("utf-8", "replace"), Loader=yaml.SafeLoader)
    except (OSError, yaml.YAMLError, ValueError, OverflowError, RecursionError):
        return {}
    if not isinstance(root, yaml.MappingNode):
        return {}
    pairs = [(key, value) for key, value in root.value if isinstance(value, yaml.ScalarNode)]
    return {str(key.value): None if value.tag.endswith(":null") else value.value for key, value in pairs}


def read_posteriors(path: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """What the monitor put beside its figures, without dimensions and then posteriors that are not finite."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            mean_NZ, logvar_NZ = (np.asarray(stored[name], dtype=float) for name in ("mean_NZ", "logvar_NZ"))
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile):
        return None
    if mean_NZ.ndim != 2 or mean_NZ.shape != logvar_NZ.shape:
        return None
    finite_NZ = (np.abs(mean_NZ) <= LARGEST) & (np.abs(logvar_NZ) <= LARGEST)
    dimensions_Z = finite_NZ.any(axis=0)
    posteriors_N = finite_NZ[:, dimensions_Z].all(axis=1)
    chosen = np.ix_(posteriors_N, dimensions_Z)
    return (mean_NZ[chosen], logvar_NZ[chosen]) if posteriors_N.sum() > 2 and dimensions_Z.any() else None


def _thinned(path: Path) -> list[Row]:
    return [row for row in json_rows(spread(read_lines(path), MOST_ROWS)) if number(row, "step") is not None]


def _table(lines: Sequence[bytes], names: Sequence[str]) -> list[Row]:
    """The rows that have one of these columns."""
    rows = csv_rows(csv_lines(lines, names, MOST_ROWS))
    return [row for row in rows if "step" in row and any(name in row for name in names)]


def _is_event(row: Row) -> bool:
    return isinstance(row.get("event"), str) and number(row, "step") is not None


def _newest_preview(directory: Path) -> tuple[Preview | None, Path | None]:
    found = sorted(directory.glob("step-*")) if directory.is_dir() else []
    pages = [path for path in found if path.suffix == ".txt"]
    pictures = [path for path in found if path.suffix == ".png" and path.is_file()]
    return (read_preview(pages[-1]) if pages else None), (pictures[-1] if pictures else None)


def _newest(paths: Iterable[Path]) -> float | None:
    times = []
    for path in paths:
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)


def _missing(run: Run) -> list[str]:
    there = {
        CONFIG: bool(run.settings),
        ENVIRONMENT: bool(run.environment),
        FACTS: bool(run.facts),
        METRICS: bool(run.training or run.validations),
        EVENTS: bool(run.events),
        READINGS: bool(run.readings) or not run.is_monitored,
        THROUGHPUT: bool(run.throughput) or not run.is_monitored,
        SAMPLES: run.preview is not None or run.picture is not None,
    }
    return [name for name, is_there in there.items() if not is_there]
