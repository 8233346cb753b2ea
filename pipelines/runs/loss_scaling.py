"""Loss scaling of trainings in float16: gradients are unscaled before they are clipped, in every layout."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class LossScaling(MixedPrecision):
    """Products in float16 by autocast, of a loss that is scaled so that small gradients don't become 0.

    A step whose gradients overflow is skipped: weights and optimizer state stay as they are, and the scale is halved.
    The schedule goes on, because it depends on the position in the data. After 2,000 steps without an overflow the
    scale is doubled. It is part of the checkpoints.

    Lightning's own plugin leaves the unscaling to a fused optimizer's step, which would clip scaled gradients.

    Args:
        device: Type of the device that trains.

    Source: Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740), section 3.2; `torch.amp.GradScaler`.
    """

    scaler: "ShardedScaler"

    def __init__(self, device: str):
        super().__init__("16-mixed", device, ShardedScaler(device))

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Tensor], **kwargs: Any
    ) -> Any:
        """Computes the gradients, unscales and clips them, and takes the step if they are finite."""
        closure()
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        result = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return result


class ShardedScaler(torch.amp.GradScaler):
    """A scaler for gradients that are plain tensors, DTensors on any mesh, or both; all processes skip the same steps.

    torch's unscales all gradients in one call, which can't take both kinds.
    """

    def _unscale_grads_(  # the method that torch's own ShardedGradScaler overrides
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        gradients = [cast(Tensor, each.grad) for each in parameters if each.grad is not None]
        locals_ = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
        overflows: dict[torch.device, Tensor] = {}
        for device in {each.device for each in locals_} or {inv_scale.device}:
            overflows[device] = found_inf.to(device, copy=True)
            device_gradients = [each for each in locals_ if each.device == device]
            torch._amp_foreach_non_finite_check_and_unscale_(device_gradients, overflows[device], inv_scale.to(device))
        if any(isinstance(each, DTensor) for each in parameters):
            total = torch.stack([each.to(inv_scale.device) for each in overflows.values()]).amax(0)
            dist.all_reduce(total, dist.ReduceOp.MAX)
            overflows = {device: total.to(device) for device in overflows}
        return overflows
