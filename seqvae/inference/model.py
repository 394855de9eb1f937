"""A trained model, opened: from a checkpoint, the directory of a run, or what `Model.save` wrote.

model = Model.load("runs/mine")
latents = model.encode("new.parquet")          # a DataFrame, as `seqvae encode` writes it as Parquet
model.save("exported")                         # safetensors and JSON, for other programs and for Model.load
"""

import glob
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import pyarrow as pa
import torch

from seqvae.config.data import CacheSettings, LengthSettings, SourceSettings
from seqvae.config.inference import (
    DataChoices,
    DataSource,
    DrawingSettings,
    EvaluateSettings,
    ImputeSettings,
    MachineChoices,
    PathSettings,
    PriorSettings,
    SampleSettings,
)
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.description import DataDescription, FittedPreprocessing
from seqvae.data.frames import path_of
from seqvae.data.parquet.side_tables import columns_beside
from seqvae.data.storage import require_consent
from seqvae.errors import DataError, UsageError
from seqvae.files import is_remote, why_no_path
from seqvae.inference import hub, tables
from seqvae.inference.evaluate import evaluate
from seqvae.inference.onnx_export import write_onnx
from seqvae.inference.prior_fitting import fit_prior
from seqvae.inference.probe import import_logistic_regression
from seqvae.inference.saved import CONFIG, Saved, config_in, read_saved, write_saved
from seqvae.inference.streaming import all_splits, chosen_splits
from seqvae.models.vae import SequenceVAE
from seqvae.reports.model_card import results_of
from seqvae.reports.run_files import BEST, LAST, PREVIOUS
from seqvae.training.network import StoredNetwork, build_stored, read_network
from seqvae.training.run_directory.checkpoint_file import ADDED_LATER, damage_of

if TYPE_CHECKING:
    import pandas as pd

    from seqvae.data.frames import Data

_log = logging.getLogger(__name__)

_INDEXED = re.compile(r".*\[\d+\]")
"""Features of a column of lists have no names of their own."""


class Reading(TypedDict, total=False):
    """The options for reading other data than those of the training, by the flags of `DataChoices`."""

    sequence_column: str | None
    id_column: str | None
    label_path: str | None
    allow_remote: bool
    endpoint_url: str | None
    bad_values: Literal["error", "drop", "missing"] | None
    on_bad_files: Literal["error", "skip"] | None
    max_sequence_length: int | None
    cache_dir: str | None


@dataclass(frozen=True, repr=False)
class Model:
    """A trained network, with all that it takes to give it data and to read its output.

    `data` of the methods: None for the data of the training; or a directory, Parquet file or glob, a DataFrame, a pyarrow Table or
    a list of sequences, read with the model's own vocabulary and moments. `split`: `train`, `valid`, `test`, or `pool` where the
    data have no splits; None takes all of them (`evaluate`: the one that training did not see). `reading`: see `Reading`. Tables
    are data frames in the data's own units.
    """

    network: SequenceVAE
    """On its device, in evaluation mode."""
    stored: StoredNetwork
    path: Path
    """The file with the weights."""
    run: Path | None
    """The directory of the run that it is a checkpoint of."""
    autocast: torch.dtype | None
    """Type that the decoder computes in; None: float32."""
    saved_results: Mapping[str, Any] = field(default_factory=dict)
    """Of a saved model: what its run had come to."""

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: Literal["auto", "cpu", "gpu"] = "auto",
        precision: Literal["32-true", "bf16-mixed"] = "32-true",
    ) -> "Model":
        """Open a checkpoint, the directory of a run (its best checkpoint, by the ELBO of validation), a saved model, or one on the
        Hugging Face Hub (`hf://user/name`, `hf://user/name@revision`)."""
        return open_model(str(path), MachineChoices(accelerator=device, precision=precision))

    @property
    def description(self) -> DataDescription:
        """The kind of its data, with their symbols, or with names and moments."""
        return self.stored.description

    @property
    def settings(self) -> dict[str, Any]:
        """Return all settings of the run that trained it, by the names of their flags."""
        return self.stored.settings

    @property
    def step(self) -> int:
        return self.stored.step

    @property
    def device(self) -> torch.device:
        return self.network.begin_W.device

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.network.parameters())

    def __repr__(self) -> str:
        latent = self.network.settings.described_latent
        size = f"{self.parameters / 1e6:.2f} M parameters"
        about = f"{self.description.kind}, step {self.step:,}, {self.settings['decoder']} decoder, {size}, {latent}"
        return f"Model({self.path}: {about})"

    def encode(
        self, data: "Data | None" = None, split: str | None = None, **reading: Unpack[Reading]
    ) -> "pd.DataFrame":
        """Return each sequence's posterior mean and variance, its NLL and its rate, in nats (their sum is an outlier score)."""
        return _frame(tables.encode(self, *self._opened(data, split, reading)))

    def reconstruct(
        self,
        data: "Data | None" = None,
        split: str | None = None,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        **reading: Unpack[Reading],
    ) -> "pd.DataFrame":
        """Return each sequence as decoded from its own latent."""
        drawing = DrawingSettings(temperature=temperature)
        return _frame(tables.reconstruct(self, *self._opened(data, split, reading), drawing, seed))

    def sample(
        self, count: int = 1000, *, temperature: float = 1.0, length: int | None = None, seed: int = 0
    ) -> "pd.DataFrame":
        """Return new sequences from the prior; `length` in steps (tokens: at most), by default as in the training data."""
        settings = SampleSettings(count=count, temperature=temperature, length=length)
        return _frame(tables.sample(self, settings, seed))

    def interpolate(
        self,
        first_id: str | int,
        last_id: str | int,
        data: "Data | None" = None,
        split: str | None = None,
        *,
        steps: int = 8,
        temperature: float = 0.0,
        seed: int = 0,
        **reading: Unpack[Reading],
    ) -> "pd.DataFrame":
        """Return what lies between two sequences of the data: `steps` places on the path, both ends included."""
        path, drawing = PathSettings(steps=steps), DrawingSettings(temperature=temperature)
        ids = (str(first_id), str(last_id))
        return _frame(tables.interpolate(self, *self._opened(data, split, reading), ids, path, drawing, seed))

    def impute(
        self,
        data: "Data | None" = None,
        split: str | None = None,
        *,
        draws: int = 16,
        variables: Sequence[str] | None = None,
        seed: int = 0,
        **reading: Unpack[Reading],
    ) -> "pd.DataFrame":
        """Return vectors or events with missing values filled, each with its deviation; `draws`: latents to average over."""
        ImputeSettings(draws=draws)  # refuses impossible values
        opened = self._opened(data, split, reading, keeps_values=self.description.kind != "tokens")
        return _frame(tables.impute(self, *opened, draws, variables, seed))

    def evaluate(
        self,
        data: "Data | None" = None,
        split: str | None = None,
        *,
        iw_samples: int | None = None,
        iw_sequences: int = 1000,
        probe: str | None = None,
        seed: int = 0,
        **reading: Unpack[Reading],
    ) -> dict[str, Any]:
        """Return what `seqvae evaluate --json` writes: readings in nats with standard errors, errors of features, notes.

        `iw_samples`: of z for the IW-NLL; None: as many as bring its error bar to 0.2 nats, 500 at most. `probe`: a column with a
        label, in the data or the `label_path`, to train a linear probe on the latents for.
        """
        settings = EvaluateSettings(iw_samples=iw_samples, iw_sequences=iw_sequences, probe=probe)
        opened, splits = self._opened(data, split, reading, probe)
        if split is None:
            splits = chosen_splits(opened, None)
        record, _ = evaluate(self, opened, splits, settings, seed)
        return record

    def fit_prior(
        self,
        data: "Data | None" = None,
        *,
        width: int = PriorSettings.width,
        max_epochs: int = PriorSettings.max_epochs,
        lr: float = PriorSettings.lr,
        seed: int = 0,
        **reading: Unpack[Reading],
    ) -> "Model":
        """Return this model, whose latents are codes, with a prior over them, fitted to those of the training split.

        It is then sampled and evaluated by that prior; `save` keeps it. Training and validation split are needed.
        """
        settings = PriorSettings(width=width, max_epochs=max_epochs, lr=lr)
        return fit_prior(self, self._opened(data, None, reading)[0], settings, seed)[0]

    @property
    def results(self) -> Mapping[str, Any]:
        """Return what is known of the run that trained it, as its card has it: verdict, readings, evaluation, data, command."""
        return self.saved_results if self.run is None else results_of(self.run, self.step)

    def save(self, directory: str | Path) -> Path:
        """Write the model into a directory, as safetensors and JSON with a model card, and return the directory."""
        return write_saved(Path(directory).expanduser(), self.stored, self.results)[0].parent

    def push_to_hub(self, name: str, *, private: bool = True, message: str | None = None) -> str:
        """Put the model onto the Hugging Face Hub as `user/name`, or `name` of your own, and return the address to load it by.

        A new one is private unless you say otherwise. Paths of this machine are left out. Needs the extra `hub`, and a token of
        `hf auth login` or HF_TOKEN.
        """
        return hub.push(Saved(self.stored, dict(self.results)), name, private=private, message=message)

    def export_onnx(self, directory: str | Path) -> Path:
        """Write encoder and decoder step as ONNX files into a directory, and return the directory; needs the extra `onnx`."""
        return write_onnx(Path(directory).expanduser(), self.network, self.stored)[0].parent

    def _opened(
        self,
        data: "Data | None",
        split: str | None,
        reading: Reading,
        label_column: str | None = None,
        *,
        keeps_values: bool = False,
    ) -> tuple[SequenceDataModule, Sequence[str]]:
        """Return the data, and the splits to go through."""
        data_dir = None if data is None else path_of(data, reading.get("cache_dir") or self.settings["cache_dir"])
        typed: Reading = {"allow_remote": data_dir is not None and is_remote(data_dir)}
        choices = DataChoices(data_dir=data_dir, split=split, **(typed | reading))
        opened = open_data(self, choices, label_column, keeps_values=keeps_values)
        return opened, all_splits(opened) if split is None else chosen_splits(opened, split)


def _frame(tables: Iterable[pa.Table]) -> "pd.DataFrame":
    return pa.concat_tables(tables).to_pandas()


# --- Loading -----------------------------------------------------------------------------------------------------------


def open_model(place: str, machine: MachineChoices | None = None) -> Model:
    """Open a checkpoint, the directory of a run (its best checkpoint, by the ELBO of validation) or a saved model."""
    machine = machine or MachineChoices()
    if hub.is_on_hub(place):
        directory = hub.fetch(place)
        path, saved = directory / CONFIG, hub.without_places(read_saved(directory))
    elif reason := why_no_path(place):
        raise UsageError(f"CHECKPOINT {reason}")
    else:
        path = Path(place).expanduser()
        if path.is_dir():
            path = config_in(path) or _best_checkpoint(path)
        saved = read_saved(path.parent) if path.suffix == ".json" else Saved(read_network(path, "CHECKPOINT"), {})
    stored = saved.stored
    network = build_stored(stored, path)
    has_gpu = torch.cuda.is_available()  # never an Apple GPU, which has no float64
    if machine.accelerator == "gpu" and not has_gpu:
        raise UsageError("--accelerator gpu: there is none here that torch can use and that has float64")
    network.to("cuda" if has_gpu and machine.accelerator != "cpu" else "cpu")
    folder = path.absolute().parent
    run = folder.parent if folder.name == "checkpoints" else None
    return Model(
        network, stored, path, run, torch.bfloat16 if machine.precision == "bf16-mixed" else None, saved.results
    )


def _best_checkpoint(directory: Path) -> Path:
    folder = directory if directory.name == "checkpoints" else directory / "checkpoints"
    found = [path for name in (BEST, LAST, PREVIOUS) if (path := folder / name).exists()]
    for path in found:
        if damage := damage_of(path):
            _log.warning("%s: %s; left aside", path, damage)
        else:
            return path
    problem = "its checkpoints are damaged" if found else "it holds no checkpoint"
    raise UsageError(f"CHECKPOINT {directory}: {problem}. Give a .ckpt file, a run's directory, or an export.")


# --- Data --------------------------------------------------------------------------------------------------------------


def open_data(
    model: Model, choices: DataSource, probe: str | None = None, *, keeps_values: bool = False
) -> SequenceDataModule:
    """Open the data of the training, or others read with the model's vocabulary and moments.

    `probe`: have each sequence's label at hand, from this column of the data or of the label file; sequences without one
    are kept. `keeps_values`: have values at hand as they were read, to the bit; that takes a cache of its own.
    """
    if probe is None:
        return _data_module(model, choices, None, keeps_values)
    import_logistic_regression()  # refuses where it is missing, before a cache is built
    try:
        opened = _data_module(model, choices, probe, keeps_values)
        opened.prepare_data()  # now, since what is wrong with the label is to be said of the flag that names it
    except DataError as error:
        raise DataError(str(error).replace("--label_column", "--probe")) from error
    return opened


def _data_module(model: Model, choices: DataSource, label_column: str | None, keeps_values: bool) -> SequenceDataModule:
    description, settings = replace(model.description, classes=()), model.settings
    is_own = choices.data_dir is None
    chosen = {name: value for name, value in asdict(choices).items() if value is not None}
    has_names = description.kind == "vectors" and not any(_INDEXED.fullmatch(name) for name in description.names)
    if not is_own and has_names and settings["feature_columns"] is None:
        chosen["feature_columns"] = ",".join(description.names)
    if settings["tokenizer"] is None and description.tokenizer is not None:  # of the demo, whose text needs no flag
        chosen["tokenizer"] = description.tokenizer
    if label_column is not None:
        own_file = settings["label_path"]
        if label_column != settings["label_column"] and (
            own_file is None or label_column not in columns_beside(own_file)
        ):
            chosen = {"label_path": None} | chosen
        chosen |= {"label_column": label_column, "allow_missing_labels": True}
    elif not is_own:  # labels are not needed, and these data may have none
        chosen = {"label_path": None, "label_column": None, "allow_missing_labels": True} | chosen
    # Where data lie and what may be fetched comes from the user, never from a checkpoint alone.
    endpoint_url = choices.endpoint_url or (settings.get("endpoint_url") if is_own else None)
    values = ADDED_LATER | settings | chosen | {"allow_remote": choices.allow_remote, "endpoint_url": endpoint_url}
    source = SourceSettings(**{each.name: values[each.name] for each in fields(SourceSettings)})
    lengths = LengthSettings(**{each.name: values[each.name] for each in fields(LengthSettings)})
    cache_dir = values["cache_dir"]
    if cache_dir is not None and is_remote(cache_dir) and not choices.allow_remote:
        cache_dir = None
    cache = CacheSettings(cache_dir=cache_dir, cache_data=values["cache_data"])

    if is_own:
        place = source.data_dir
        if place is not None and is_remote(place):
            require_consent(place, choices.allow_remote)
        elif place is not None and not glob.has_magic(place) and not Path(place).expanduser().exists():
            raise DataError(
                f"{place}, which the model was trained on, is not there any more. Say where with --data_dir."
            )
        tokenizer = None if source.tokenizer in ("words", "characters", "bytes") else source.tokenizer
        side_files = (source.params_map_path, source.variable_embeddings_path, source.label_path, tokenizer)
        if not keeps_values and all(path is None or Path(path).is_file() for path in side_files):
            data = SequenceDataModule(source, lengths, cache)
            if replace(data.description, classes=(), unknown_share=description.unknown_share) == description:
                return data
    # The files that training's vocabulary and moments came from are not needed any more, and may be gone; so may labels.
    source = replace(source, params_map_path=None, variable_embeddings_path=None, freeze_variable_embeddings=False)
    if label_column is None:
        source = replace(source, label_path=None, label_column=None)
    if is_own and has_names and source.feature_columns is None:
        source = replace(source, feature_columns=",".join(description.names))
    preprocessing = FittedPreprocessing(description, not is_own, keeps_values)
    return SequenceDataModule(source, lengths, cache, preprocessing=preprocessing)
