"""Imported once by the server that writers are forked from: whatever is loaded or compiled here, they have already."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from cache_samples import make_rows, write

torch.set_num_threads(1)  # before anything runs: threads don't survive a fork
with TemporaryDirectory() as place:
    write(Path(place) / "cache", make_rows(8))
