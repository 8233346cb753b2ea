"""Joins distill and compress; the only place with command lines, files, terminals and process groups."""

from compress.readers import READERS

READERS["modules.json"] = "distill.pooling:PooledModel"
