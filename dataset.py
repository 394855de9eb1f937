"""The LightningDataModule over Parquet and its settings; the code is in `seqvae.data`."""

from seqvae.config.data import BatchSettings, CacheSettings, LengthSettings, LoadingSettings, SourceSettings
from seqvae.data.datamodule import SequenceDataModule

__all__ = [
    "BatchSettings",
    "CacheSettings",
    "LengthSettings",
    "LoadingSettings",
    "SequenceDataModule",
    "SourceSettings",
]
