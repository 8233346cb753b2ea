"""The commands, which combine distill and compress.

Only this package handles command lines, files, terminals and process groups.
"""

import os
import sys

from distill.checkpoint.readers import CHECKPOINT_READERS
from pipelines.runs import stops

# Waiting threads that spin longer take the core that another process computes on: beside a busy process a training took
# three times as long. GNU OpenMP reads it when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

CHECKPOINT_READERS["modules.json"] = "distill.models.sentence_encoder:PooledModel"

if sys.argv[:1] == ["-m"]:  # `python -m pipelines.…` imports this module first; a stop may come during later imports
    stops.watch_process()
