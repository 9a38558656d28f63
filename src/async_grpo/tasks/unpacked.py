"""How much memory the rows of a parquet file take, before they are unpacked.

A text that a million rows refer to takes a few bytes of a file, and so does a page of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from async_grpo.errors import UsageError
from async_grpo.formatting import size

LARGEST = 1 << 31  # bytes of all rows
_OF_A_VALUE = 8  # bytes of a number, and of a text beside its own


def require_small(path: Path, columns: Sequence[str] | None = None) -> None:
    """Refuse a file whose rows take over `LARGEST` bytes in these columns, or in all. Its metadata are believed.

    Raises:
        UsageError: they do, or the encoding of a column does not say it.
        pyarrow.ArrowException, OSError: it is no parquet file.
    """
    about = pq.read_metadata(path)
    groups = [about.row_group(number) for number in range(about.num_row_groups)]
    texts, pages = {}, 0
    for number, leaf in enumerate(about.schema.column(number) for number in range(about.num_columns)):
        if columns and not any(f"{leaf.path}.".startswith(f"{name}.") for name in columns):
            continue
        chunks = [group.column(number) for group in groups]
        values = [max(chunk.num_values, group.num_rows) for chunk, group in zip(chunks, groups, strict=True)]
        pages += sum(chunk.total_uncompressed_size for chunk in chunks) + sum(values) * max(_OF_A_VALUE, leaf.length)
        if leaf.physical_type == "BYTE_ARRAY":
            texts[leaf.path] = values
            if any(encoding.startswith("DELTA") for chunk in chunks for encoding in chunk.encodings):
                raise UsageError(
                    f"{path.name}: the encoding of column {leaf.path} (DELTA…) does not say how large it is when "
                    "unpacked. Write the file again: pandas.read_parquet(old).to_parquet(new)."
                )
    if pages > LARGEST:
        raise _too_large(f"{path.name}: its {about.num_rows:,} rows take", pages)
    with pq.ParquetFile(path, read_dictionary=[*texts], arrow_extensions_enabled=False) as file:
        if sum(n * _longest(file, at, text) for text, values in texts.items() for at, n in enumerate(values)) > LARGEST:
            _refuse_largest(file, path.name, [*texts])


def _longest(file: pq.ParquetFile, group: int, text: str) -> int:
    """Bytes of the longest text in the dictionary of a column, which comes whole with the first row that has one."""
    for batch in file.iter_batches(1024, row_groups=[group], columns=[text]):
        array = batch.column(0)
        while not pa.types.is_dictionary(array.type):
            array = array.field(0) if pa.types.is_struct(array.type) else array.values
        if len(array.dictionary):
            return int(pc.max(pc.binary_length(array.dictionary)).as_py())
    return 0


def _refuse_largest(file: pq.ParquetFile, name: str, texts: Sequence[str]) -> None:
    """Raise at the first row too many, where all the texts that rows refer to take over `LARGEST` bytes."""
    first, total = 1, 0
    for number in range(file.num_row_groups):
        rows = np.zeros(file.metadata.row_group(number).num_rows, np.int64)
        for text in texts:  # of one column, and of one group: Arrow joins no nested dictionaries
            batches = file.iter_batches(row_groups=[number], columns=[text])
            rows += np.concatenate([rows[:0], *(_referred(batch.column(0)) for batch in batches)])
        until = total + np.cumsum(rows)
        for row in np.flatnonzero(until > LARGEST)[:1]:
            raise _too_large(f"{name}, row {first + row:,}, and those before it take", until[row])
        first, total = first + len(rows), total + int(rows.sum())


def _too_large(rows: str, found: float) -> UsageError:
    return UsageError(
        f"{rows} {size(found)} when unpacked, and at most {size(LARGEST)} are read. Leave rows out or shorten them, or "
        "divide the file if its rows shall all be in memory."
    )


def _referred(array: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Bytes of the texts that each entry refers to, of an array with one dictionary at its end."""
    if pa.types.is_struct(array.type):
        return _referred(array.field(0))
    if pa.types.is_dictionary(array.type):
        return np.asarray(pc.take(pc.binary_length(array.dictionary), array.indices).fill_null(0))
    entries = np.repeat(np.arange(len(array)), pc.list_value_length(array).fill_null(0))
    return np.bincount(entries, _referred(array.flatten()), minlength=len(array)).astype(np.int64)
