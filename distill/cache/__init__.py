"""Cache of teacher signals, computed once and looked up by sample content without loading the teacher.

A cache is a folder, and `docs/cache.md` describes every byte of it. In short:

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
"""

from distill.cache.format.identity import Identity
from distill.cache.format.key import sample_key, sample_keys
from distill.cache.plan import Samples
from distill.cache.reader import CacheReader
from distill.cache.signals import Dense, Generated, Hidden, Relations, Sampled, TopK
from distill.cache.writer import plan_cache, write_cache

__all__ = [
    "CacheReader",
    "Dense",
    "Generated",
    "Hidden",
    "Identity",
    "Relations",
    "Sampled",
    "Samples",
    "TopK",
    "plan_cache",
    "sample_key",
    "sample_keys",
    "write_cache",
]
