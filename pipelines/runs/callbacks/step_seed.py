"""The random numbers of each training batch, which depend on its number and not on previous batches."""

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from pipelines.runs.trainer_state import find_data_module


def mix_seed(seed: int, rank: int, number: int) -> int:
    """Returns a seed of 63 bits for a batch of a process, also where only the lower 32 are read, as on a CPU."""
    lower = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0]) if seed or rank else 0
    return (((seed << 32) + number + (rank << 48)) ^ lower) % 2**63


def seed_device(seed: int, device: torch.device) -> None:
    """Seeds the generators of the CPU and of a device.

    `torch.manual_seed` formats the stack for every kind of device that isn't there, which takes longer than a small
    layer.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


class StepSeed(Callback):
    """Seeds dropout for each batch.

    The random numbers depend on the batch's number and not on previous batches.
    """

    def __init__(self, seed: int):
        self.seed = seed

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Seeds PyTorch with the run's seed, the batch's number, the rank of the data and the segment of its rows."""
        number = trainer.current_epoch * int(trainer.num_training_batches) + batch_idx
        data_rank, _ = find_data_module(trainer).find_rank()
        segment, segments = find_data_module(trainer).find_segment()
        seed_device(mix_seed(self.seed, data_rank * segments + segment, number), pl_module.device)
