"""The values that a training step logs: each term with its weight and share of the gradient, and the matched layers."""

from collections.abc import Mapping
from typing import TypeAlias

from lightning import Trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from distill.data.batches.data_module import RowsDataModule
from distill.errors import InputError
from distill.losses.compose import compute_gradient_shares
from distill.losses.config import LossConfig
from distill.train.steps.layer_terms import LayerTerms

TermValues: TypeAlias = dict[str, Tensor | float]  # of a step, by their names in the log


def is_logging_step(trainer: Trainer | None) -> bool:
    """Returns whether Lightning passes the current step's values to its loggers."""
    # It does so only in the step before each multiple and drops all other values.
    return trainer is not None and (trainer.global_step + 1) % getattr(trainer, "log_every_n_steps", 1) == 0


def check_finite_loss(total: Tensor, step: int) -> None:
    """Checks the weighted sum of the terms.

    Raises:
        InputError: It is NaN or infinite.
    """
    if not total.isfinite():
        raise InputError(
            f"train: expected a finite loss, found {total.item()} in step {step}: nothing is learnt from here on; "
            "lower the learning rate or look for extreme values in the teacher's signals"
        )


def collect_term_values(loss: LossConfig, terms: Mapping[str, Tensor], module: nn.Module) -> TermValues:
    """Returns each term's unweighted value, weight and share of the gradient norm, such as `train/kl_weight`.

    Without gradient shares for sharded weights: a backward pass of a single term would reduce their gradients a second
    time.

    Args:
        loss: Settings of the terms in this step.
        terms: Unweighted values with an autograd graph.
        module: Contains the trained parameters.
    """
    parameters = list(module.parameters())
    # DeepSpeed marks sharded parameters with ds_id, and FSDP's are plain tensors while they are gathered.
    is_sharded = any(isinstance(each, DTensor) or hasattr(each, "ds_id") for each in parameters)
    is_sharded = is_sharded or any(isinstance(each, FSDPModule) for each in module.modules())
    shares = compute_gradient_shares(loss, terms, parameters) if terms and not is_sharded else {}
    values: TermValues = {}
    for name, value in terms.items():
        values[f"train/{name}"] = value.detach()
        values[f"train/{name}_weight"] = getattr(loss, name)
        if name in shares:
            values[f"train/{name}_gradient_share"] = shares[name]
    return values


def collect_run_values(trainer: Trainer, layer_terms: LayerTerms) -> dict[str, float]:
    """Returns the learning rate, the matched layers, and the share of the time that the data module waited."""
    values: dict[str, float] = {"lr": trainer.optimizers[0].param_groups[0]["lr"]}
    values |= {f"train/matched_{s}": t for s, t in layer_terms.layer_matches if s}
    data = getattr(trainer, "datamodule", None)
    if isinstance(data, RowsDataModule):
        values["train/wait_share"] = data.measure_wait_share()
    return values
