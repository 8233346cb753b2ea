"""Cache of teacher signals, computed once and looked up by sample content without loading the teacher.

A cache is a folder, and `docs/reference/cache-format.md` describes every byte of it. In short:

    cache.json               identity (teacher, tokenizer, preprocessing, signals), rows of each shard, file hashes
    index-NNNNNN.safetensors location of each sample: 16 bytes per sample, sorted, memory-mapped
    codebook.safetensors     frequency tables that the records are coded with
    shard-NNNNNN.safetensors keys, records, and the end offset and checksum of each record

The container is safetensors (a length, a JSON header and plain arrays): records are accessed by memory-mapping the
file, equal content always gives equal bytes, and readers exist in many languages. Arrow IPC can be mapped as well, but
compresses whole columns of a batch, from which a single record can't be extracted, and spreads a file's metadata over
flatbuffers; parquet decodes whole pages. Both were rejected for these reasons.

A row's key is a hash of the sample's content (`key.py`), so order, batch size, epoch, worker and rank may all change
between writing and reading. Records are coded close to the entropy bound (`rans.py`).

Public names are imported on first use, so that importing this package loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distill.cache.format.identity import Identity
    from distill.cache.format.key import sample_key, sample_keys
    from distill.cache.plan import Samples
    from distill.cache.reader import CacheReader
    from distill.cache.samples import build_samples
    from distill.cache.sequences import Sequences, collect_sequences
    from distill.cache.signals import Dense, Generated, Hidden, Relations, Sampled, TopK
    from distill.cache.writer import WriteResult, plan_cache, write_cache

EXPORTS = {
    "CacheReader": "reader",
    "Dense": "signals",
    "Generated": "signals",
    "Hidden": "signals",
    "Identity": "format.identity",
    "Relations": "signals",
    "Sampled": "signals",
    "Samples": "plan",
    "Sequences": "sequences",
    "TopK": "signals",
    "WriteResult": "writer",
    "plan_cache": "writer",
    "sample_key": "format.key",
    "sample_keys": "format.key",
    "build_samples": "samples",
    "collect_sequences": "sequences",
    "write_cache": "writer",
}
__all__ = [
    "CacheReader",
    "Dense",
    "Generated",
    "Hidden",
    "Identity",
    "Relations",
    "Sampled",
    "Samples",
    "Sequences",
    "TopK",
    "WriteResult",
    "plan_cache",
    "sample_key",
    "sample_keys",
    "build_samples",
    "collect_sequences",
    "write_cache",
]


def __getattr__(name: str) -> object:
    if name in EXPORTS:
        return getattr(import_module(f"{__name__}.{EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
