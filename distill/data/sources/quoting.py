"""Markers for unquoted missing values in csv files, since Arrow's tables don't record quotes."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute

# The missing values of pandas; `none` and `NONE` are ordinary words.
MISSING = ("NaN", "nan", "NA", "N/A", "n/a", "<NA>", "#N/A", "None", "null", "NULL")
_MARK = b"unquoted"  # key in the metadata of a column: one bit per row


def mark_unquoted(table: pa.Table, read_nulls: Callable[[list[str], list[str]], pa.Table]) -> pa.Table:
    """Records in a table's metadata which cells are missing values without quotes; the text is unchanged.

    Args:
        table: The table as it was read, with text columns only.
        read_nulls: Called with names of columns and with words; reads these columns again, with null for each of the
            words that is not quoted.
    """
    null_texts = [before + word + after for word in MISSING for before in ("", " ") for after in ("", " ")]
    unique = [name for name in table.column_names if table.column_names.count(name) == 1]
    suspects = [name for name in unique if pa.compute.any(pa.compute.is_in(table[name], pa.array(null_texts))).as_py()]
    if not suspects:
        return table
    with_nulls = read_nulls(suspects, null_texts)
    marks = {name: {_MARK: np.packbits(with_nulls[name].is_null().to_numpy()).tobytes()} for name in suspects}
    fields = [field.with_metadata((field.metadata or {}) | marks.get(field.name, {})) for field in table.schema]
    return pa.Table.from_arrays(table.columns, schema=pa.schema(fields, table.schema.metadata))


def find_unquoted(table: pa.Table, column: str) -> np.ndarray | None:
    """Returns the mask of cells with an unquoted missing value, bool [rows]; None if the column has no mark."""
    bits = (table.schema.field(column).metadata or {}).get(_MARK)
    return None if bits is None else np.unpackbits(np.frombuffer(bits, np.uint8), count=len(table)).astype(bool)
