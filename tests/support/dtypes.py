"""Dtypes that a training stores and computes in."""

from collections.abc import Mapping

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from distill.train.module import DistillationModule


class RecordDtypes(Callback):
    """Records the dtypes of a student's tensors in `recorded`.

    `weights` and `states` are those that a process stores, of the optimizer those of the size of a weight; `used` are
    the weights of linear layers in the forward pass, which FSDP has gathered there.
    """

    def __init__(self) -> None:
        self.recorded: dict[str, set[torch.dtype]] = {"weights": set(), "states": set(), "used": set()}

    def on_fit_start(self, trainer: Trainer, pl_module: DistillationModule) -> None:
        for layer in pl_module.student.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_pre_hook(lambda layer, _: self.recorded["used"].add(layer.weight.dtype))

    def on_train_batch_start(self, trainer: Trainer, pl_module: DistillationModule, batch, batch_idx: int) -> None:
        self.recorded["weights"] |= {parameter.dtype for parameter in pl_module.student.parameters()}

    def on_train_end(self, trainer: Trainer, pl_module: DistillationModule) -> None:
        for optimizer in trainer.optimizers:
            state = getattr(optimizer, "optim", optimizer).state
            self.recorded["states"] |= {each.dtype for moments in state.values() for each in list_moments(moments)}


def list_moments(state: Mapping[str, object]) -> list[Tensor]:
    return [each for each in state.values() if isinstance(each, Tensor) and each.dim()]


class StartScale(Callback):
    """Starts a training in float16 at a loss scale with which no gradient of a tiny model overflows."""

    SCALE = 2.0**10

    def on_fit_start(self, trainer: Trainer, pl_module: DistillationModule) -> None:
        trainer.precision_plugin.scaler._init_scale = self.SCALE
