"""Which cells of a csv file look like missing values and have no quotes; Arrow's tables don't tell quotes."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute

# As pandas reads them; `none` and `NONE` are words.
MISSING = ("NaN", "nan", "NA", "N/A", "n/a", "<NA>", "#N/A", "None", "null", "NULL")
MARK = b"unquoted"  # in the metadata of a column: a bit a row


def mark_unquoted(table: pa.Table, read_nulls: Callable[[list[str], list[str]], pa.Table]) -> pa.Table:
    """Notes in a table of text which cells are missing values without quotes; the text stays as it is.

    Args:
        table: As it was read, all of it text.
        read_nulls: Reads columns of these names again, with null for these words where they have no quotes.
    """
    words = [before + word + after for word in MISSING for before in ("", " ") for after in ("", " ")]
    once = [name for name in table.column_names if table.column_names.count(name) == 1]
    suspects = [name for name in once if pa.compute.any(pa.compute.is_in(table[name], pa.array(words))).as_py()]
    if not suspects:
        return table
    again = read_nulls(suspects, words)
    marks = {name: {MARK: np.packbits(again[name].is_null().to_numpy()).tobytes()} for name in suspects}
    fields = [field.with_metadata((field.metadata or {}) | marks.get(field.name, {})) for field in table.schema]
    return pa.Table.from_arrays(table.columns, schema=pa.schema(fields, table.schema.metadata))


def unquoted(table: pa.Table, column: str) -> np.ndarray | None:
    """Which cells are such words, bool [rows]; None where none is."""
    bits = (table.schema.field(column).metadata or {}).get(MARK)
    return None if bits is None else np.unpackbits(np.frombuffer(bits, np.uint8), count=len(table)).astype(bool)
