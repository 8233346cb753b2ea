"""Joins distill and compress; the only place with command lines, files, terminals and process groups."""

import sys

from distill.checkpoint.readers import READERS
from pipelines.runs import stops

READERS["modules.json"] = "distill.models.sentence_encoder:PooledModel"

if sys.argv[:1] == ["-m"]:  # by `python -m pipelines.…` this is imported first: a stop may come during other imports
    stops.begin()
