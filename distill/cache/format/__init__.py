"""Files of a cache: a sample's key, shards of records, the index of where each is, and what the cache was made from."""
