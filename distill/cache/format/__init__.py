"""File formats of a cache: sample keys, shards of records, the index, the identity and the store that combines them."""
