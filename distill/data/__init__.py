"""Data loading: sources, columns, splits, token ids and batches.

Public names are imported on first use, so that importing this package loads no torch.
"""

from importlib import import_module

EXPORTS = {
    "DataConfig": "config",
    "Encoded": "batches.encode",
    "EvalBatches": "batches.batches",
    "Examples": "splits.examples",
    "IGNORED": "batches.encode",
    "LanguageBlocks": "batches.token_blocks",
    "MaskConfig": "masking.config",
    "MaskedBlocks": "masking.masks",
    "PackedRows": "batches.packing",
    "Splits": "splits.examples",
    "TextColumn": "sources.text_column",
    "TextDataModule": "batches.data_module",
    "TrainBatches": "batches.batches",
    "load_labelled": "splits.labelled",
    "load_numbers": "splits.labelled",
    "load_splits": "splits.labelled",
    "read_splits": "sources.tables",
    "read_table": "sources.tables",
    "read_texts": "sources.text_files",
    "token_blocks": "batches.token_blocks",
}
__all__ = list(EXPORTS)


def __getattr__(name: str) -> object:
    if name in EXPORTS:
        return getattr(import_module(f"{__name__}.{EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
