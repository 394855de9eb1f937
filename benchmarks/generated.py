"""Generated Parquet of any size for the benchmarks: token lists with log-normal lengths (mean 75, 3 to 1000 or more)."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from seqvae.data.demo.processes import log_normal_lengths

ROWS_PER_GROUP = 50_000


def write_token_lists(path: Path, sequences: int, vocabulary: int = 5000, seed: int = 0, longest: int = 1000) -> None:
    """Columns id and tokens: list<int32>; written a row group at a time, so that any size fits in memory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    writer = None
    for start in range(0, sequences, ROWS_PER_GROUP):
        lengths = log_normal_lengths(min(ROWS_PER_GROUP, sequences - start), random, longest=longest)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens = random.integers(0, vocabulary, offsets[-1], dtype=np.int32)
        lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens))
        table = pa.table({"id": np.arange(start, start + len(lengths)), "tokens": lists})
        writer = writer or pq.ParquetWriter(path, table.schema, compression="none", use_dictionary=False)
        writer.write_table(table)
    if writer is not None:
        writer.close()
