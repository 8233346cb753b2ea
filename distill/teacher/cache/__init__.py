"""The cache of teacher signals.

A cache is a folder:

    cache.json              what it holds: the identity (below) and the number of rows of each shard
    shard-00000.safetensors "keys" uint8 [rows, 16], "logits" float32 [rows, classes]; metadata: sha256

A row's key is a hash of the sample's content (token ids and token types, see `key.py`), so that order, batch size,
epoch, worker and rank may all change between writing and reading. The identity names the teacher's weights, the
tokenizer, the preprocessing and the signal; a reader that expects another is refused with the fields that differ.
Shards are written beside their place and renamed, so a kill loses the shard under way and nothing else; which rows a
shard holds follows from the samples alone, so a shard written again is the same to the bit.
"""

from distill.teacher.cache.identity import Identity
from distill.teacher.cache.key import sample_keys
from distill.teacher.cache.reader import CacheReader
from distill.teacher.cache.writer import write_cache

__all__ = ["CacheReader", "Identity", "sample_keys", "write_cache"]
