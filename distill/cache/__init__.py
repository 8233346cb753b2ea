"""The cache of teacher signals: written once, read by content, any number of times, with no teacher in memory.

A cache is a folder; `docs/cache.md` describes every byte. In short:

    cache.json               the identity: teacher, tokenizer, preprocessing, signals; rows of each shard; hashes
    index-NNNNNN.safetensors where each sample is: 16 bytes a sample, sorted, mapped into memory
    codebook.safetensors     frequencies that ids are coded with
    shard-NNNNNN.safetensors keys, records, the end and the checksum of each record

The container is safetensors: a length, a JSON header and plain arrays, so that records are reached by mapping the
file, the same content always gives the same bytes, and readers exist in many languages. Arrow IPC maps as well, but
compresses whole columns of a batch, which a single record can't be taken from, and spreads a file's meaning over
flatbuffers; parquet decodes whole pages. Both were left aside for that.

A row's key is a hash of the sample's content (`key.py`), so that order, batch size, epoch, worker and rank may all
change between writing and reading. Records are coded close to the entropy bound (`rans.py`).
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
