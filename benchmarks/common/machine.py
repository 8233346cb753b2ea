"""What a benchmark's figures were measured with, as one line beneath its table."""

import torch

from pipelines.settings.this_machine import count_cores, find_commit, find_processor


def describe_setup() -> str:
    """Returns the processor, its cores, torch's version and this checkout's commit."""
    commit = find_commit()
    suffix = f", commit {commit}" if commit else ""
    return f"{find_processor()}, {count_cores()} cores, torch {torch.__version__}{suffix}"
