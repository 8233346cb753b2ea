"""Preloaded by the fork server: modules loaded and code compiled here are available in every forked process."""

import gc
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

torch.set_num_threads(1)  # before anything runs: threads don't survive a fork

for name in (
    "support.processes.cache_ranks",
    "support.processes.training_ranks",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    *(f"transformers.models.{family}.modeling_{family}" for family in ("bert", "distilbert", "llama", "roberta")),
):
    import_module(name)

samples = import_module("support.cache_samples")
with TemporaryDirectory() as folder:
    samples.write(Path(folder) / "cache", samples.make_rows(8))

gc.freeze()  # a collection in a forked process would write to each of the objects above
