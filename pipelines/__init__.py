"""The commands, which combine distill and compress.

Only this package handles command lines, files, terminals and process groups.
"""

import sys

from distill.checkpoint.readers import CHECKPOINT_READERS
from pipelines.runs import stops

CHECKPOINT_READERS["modules.json"] = "distill.models.sentence_encoder:PooledModel"

if sys.argv[:1] == ["-m"]:  # `python -m pipelines.…` imports this module first; a stop may come during later imports
    stops.watch_process()
