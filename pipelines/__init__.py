"""Joins distill and compress; the only place with command lines, files, terminals and process groups."""

import sys

from compress.readers import READERS
from pipelines import stops

READERS["modules.json"] = "distill.pooling:PooledModel"

if sys.argv[:1] == ["-m"]:  # by `python -m pipelines.…` this is imported first: a stop may come during other imports
    stops.begin()
