"""Sparse training: masks that hold at every step, follow a schedule, and end in plain weights with zeros."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from compress.errors import CompressError
from compress.sparsity.layers import LayerFilter, find_sparsifiable_layers
from compress.sparsity.patterns import Masks, check_divisible, choose_masks, expand_units, sum_blocks
from compress.sparsity.schedule import SparsitySchedule

_AVERAGE = "average"  # state of an optimizer that also averages the weights


class SparseState(TypedDict):
    """State of a sparse training: the fields of its `SparsitySchedule`, and tensors by the name of a weight."""

    config: dict[str, object]
    step: int
    fixed: bool
    masks: dict[str, Tensor]
    scores: dict[str, Tensor]
    removed: dict[str, Tensor]


class SparseTraining:
    """Maintains a model's masks during training; created by `prepare_sparse`.

    The parameters themselves are masked at all times: the forward pass uses them directly, a checkpoint has its zeros
    at every step, and gradients are dense, including those of removed weights. Call `after_backward` once per optimizer
    step, after the last backward pass (and any gradient averaging across processes) and before gradient clipping; call
    `after_step` right after the step, or `attach` the optimizer, which then calls it. Call `skip_step` for a step
    that the optimizer doesn't take.

    The rest of the training is fully determined by `state_dict`, the model's weights and the optimizer's own state;
    processes with the same state compute the same masks.

    Args:
        model: The model.
        config: Pattern, score, schedule.
        weights: Name -> weight.
        masks: Initial masks. Fixed masks only change by rewiring.
        fixed: Whether `masks` were passed in rather than chosen by score.
    """

    def __init__(
        self, model: nn.Module, config: SparsitySchedule, weights: Mapping[str, Tensor], masks: Masks, *, fixed: bool
    ):
        self.model, self.config, self.weights, self.masks, self.fixed = model, config, weights, masks, fixed
        self.step = 0
        self.scores: dict[str, Tensor] = {}
        self.removed: dict[str, Tensor] = {}  # movement: last values of removed weights
        if config.score == "movement" and not fixed:
            self.scores = {name: torch.zeros_like(w, dtype=torch.float32) for name, w in weights.items()}
            self.removed = {name: torch.zeros_like(w) for name, w in weights.items()}
        self._gradients: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._saw_backward = False

    @torch.no_grad()
    def after_backward(self) -> None:
        """Records the dense gradients, then zeroes those of removed weights.

        Raises:
            CompressError: A weight whose next mask depends on its gradient has none.
        """
        rewires = self._is_rewiring_step(self.step + 1)
        scores_movement = bool(self.scores) and self.step < self.config.end
        for name, weight in self.weights.items():
            if weight.grad is None:
                if scores_movement or rewires:
                    raise CompressError(f"weight {name!r}: expected a gradient, found none: its mask can't be updated")
                continue
            if scores_movement:
                dense = torch.where(self.masks[name], weight, self.removed[name])
                self.scores[name] -= dense.float() * weight.grad.float()
            if rewires:
                self._gradients[name] = weight.grad.abs()
            weight.grad.masked_fill_(~self.masks[name], 0)
        self._saw_backward = True

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer) -> None:
        """Resets removed weights to 0 and, if the schedule requires it, changes the masks.

        Raises:
            CompressError: `after_backward` wasn't called.
        """
        if not self._saw_backward:
            raise CompressError(
                f"sparsity: expected after_backward before step {self.step + 1}, found no call: the optimizer's "
                "moments have gradients of removed weights, which would become nonzero again"
            )
        self._saw_backward, self.step = False, self.step + 1
        for name, weight in self.weights.items():
            weight.masked_fill_(~self.masks[name], 0)
            average = optimizer.state.get(weight, {}).get(_AVERAGE)
            if average is not None:  # computed before the weights were masked
                average.masked_fill_(~self.masks[name], 0)
        if self._is_rewiring_step(self.step):
            self._replace_masks(self._rewire_masks(), optimizer)
        else:
            self._follow_schedule(optimizer)
        self._gradients.clear()

    @torch.no_grad()
    def skip_step(self, optimizer: Optimizer) -> None:
        """Advances the schedule by a step that the optimizer didn't take: masks may change, but aren't rewired."""
        self._saw_backward, self.step = False, self.step + 1
        self._follow_schedule(optimizer)
        self._gradients.clear()

    def attach(self, optimizer: Optimizer) -> None:
        """Calls `after_step` after every step of the optimizer, until `convert_sparse`."""
        self._handles.append(optimizer.register_step_post_hook(lambda stepped, args, kwargs: self.after_step(stepped)))

    def state_dict(self) -> SparseState:
        """Returns the config, masks, scores and step as plain values and tensors."""
        return SparseState(
            config=asdict(self.config),
            step=self.step,
            fixed=self.fixed,
            masks=_clone_tensors(self.masks),
            scores=_clone_tensors(self.scores),
            removed=_clone_tensors(self.removed),
        )

    def load_state_dict(self, state: SparseState) -> None:
        """Resumes from a `state_dict`; the caller restores the model and the optimizer.

        Raises:
            CompressError: The state belongs to another config or to other weights.
        """
        saved, current = state["config"] | {"fixed": state["fixed"]}, asdict(self.config) | {"fixed": self.fixed}
        changed = next(
            (name for name in sorted(saved.keys() | current.keys()) if saved.get(name) != current.get(name)), None
        )
        if changed is not None:
            raise CompressError(
                f"sparsity.{changed}: expected a training state with {current.get(changed)!r}, found "
                f"{saved.get(changed)!r}: its masks follow another schedule"
            )
        found = {name: tuple(mask.shape) for name, mask in state["masks"].items()}
        expected = {name: tuple(weight.shape) for name, weight in self.weights.items()}
        if found != expected:
            name, shape = sorted(set(found.items()) ^ set(expected.items()))[0]
            raise CompressError(
                f"sparsity: expected the state of the same weights, found a difference at {name!r} {shape}: its masks "
                "belong to another model"
            )
        self.step, self._saw_backward = state["step"], False
        self.masks = self._copy_to_devices(state["masks"])
        self.scores = self._copy_to_devices(state["scores"])
        self.removed = self._copy_to_devices(state["removed"])

    def _copy_to_devices(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return _clone_tensors({name: tensor.to(self.weights[name].device) for name, tensor in tensors.items()})

    def _is_rewiring_step(self, step: int) -> bool:
        return self.config.is_due(step) and self.config.compute_rewiring_share(step) > 0

    def _follow_schedule(self, optimizer: Optimizer) -> None:
        """Changes the masks if the schedule of the zeros requires it."""
        if not self.fixed and not self.config.rewire and self.config.is_due(self.step):
            self._replace_masks(self._choose_masks(), optimizer)

    def _choose_masks(self) -> Masks:
        """Returns masks for the scheduled share; weights once removed by magnitude stay removed."""
        scores = self.scores or {
            name: weight.abs().float().masked_fill(~self.masks[name], -torch.inf)
            for name, weight in self.weights.items()
        }
        return choose_masks(scores, self.config, self.config.compute_share(self.step))

    def _rewire_masks(self) -> Masks:
        """Returns the masks after this step's swaps."""
        block, share = self.config.block, self.config.compute_rewiring_share(self.step)
        masks = {}
        for name, weight in self.weights.items():
            alive = sum_blocks(self.masks[name].float(), block) > 0
            sizes, gradients = sum_blocks(weight.abs(), block), sum_blocks(self._gradients[name], block)
            masks[name] = expand_units(rewire_units(alive, sizes, gradients, share), block)
        return masks

    def _replace_masks(self, masks: Masks, optimizer: Optimizer) -> None:
        """Replaces the masks; the optimizer's moments of weights that are removed or restored become 0."""
        for name, weight in self.weights.items():
            old, new = self.masks[name], masks[name]
            if self.removed:
                self.removed[name] = torch.where(old, weight, self.removed[name])
                weight.copy_(torch.where(new, self.removed[name], 0))
            weight.masked_fill_(~new, 0)
            for value in optimizer.state.get(weight, {}).values():
                if isinstance(value, Tensor) and value.shape == weight.shape:
                    _zero_entries(value, ~(old & new))
        self.masks = masks


def rewire_units(alive: Tensor, sizes: Tensor, gradients: Tensor, share: float) -> Tensor:
    """Drops the floor(share * n) smallest of n live units and grows the same number with the largest gradients.

    The number is at most that of the removed units. A unit that was just dropped may grow again; it then keeps its
    weights. All tensors are [units_out, units_in]; `alive` is bool, `sizes` and `gradients` are absolute values.
    """
    flat = alive.flatten()
    count = min(int(share * int(flat.sum())), int((~flat).sum()))
    lowest = sizes.flatten().masked_fill(~flat, torch.inf).argsort(stable=True)[:count]
    remaining = flat.index_fill(0, lowest, False)
    largest = gradients.flatten().masked_fill(remaining, -1).argsort(descending=True, stable=True)[:count]
    return remaining.index_fill(0, largest, True).view_as(alive)


@torch.no_grad()
def prepare_sparse(
    model: nn.Module, config: SparsitySchedule, *, masks: Masks | None = None, select: LayerFilter | None = None
) -> SparseTraining:
    """Prepares a model for sparse training: its weights get the zeros of the schedule's first step, in place.

    Args:
        model: Any module with linear layers.
        config: Pattern, score (magnitude or movement) and schedule.
        masks: Masks returned by `sparsify`: they are held instead, whatever the score, and only rewiring changes them.
        select: Filter for linear layers; see `find_sparsifiable_layers`.

    Raises:
        CompressError: The score needs calibration data and there are no masks; the masks belong to other weights; or
            the pattern doesn't divide a shape.

    Source: Zhu & Gupta 2017 (arXiv 1710.01878), section 3: weights removed by magnitude stay removed. Sanh et al. 2020
    (arXiv 2005.07683), section 4, hard movement pruning: scores S -= w * dL/dw' over all weights, where w' are the
    masked weights and w those with the removed ones' last values; the top of S stays. With a score rate of 1 and no
    optimizer for S, a removed weight is not decayed, and after `end` the mask is fixed. Evci et al. 2020 (arXiv
    1911.11134), algorithm 1: new connections start at 0; the first mask is by magnitude instead of random, and the
    optimizer also steps in rewiring steps.
    """
    layers = find_sparsifiable_layers(model, select)
    weights = {f"{name}.weight": layer.weight for name, layer in layers.items()}
    for name, weight in weights.items():
        check_divisible(name, weight, config)
    if masks is not None:
        _check_masks(masks, weights)
        initial = {name: masks[name].to(weight.device) for name, weight in weights.items()}
    elif config.score in ("wanda", "sparsegpt"):
        raise CompressError(
            f"sparsity.score {config.score}: expected the masks that `sparsify` returned, found none: this score needs "
            "calibration data, which training doesn't have"
        )
    else:
        initial = choose_masks(
            {name: weight.abs() for name, weight in weights.items()}, config, config.compute_share(0)
        )
    for name, weight in weights.items():
        weight.masked_fill_(~initial[name], 0)
    return SparseTraining(model, config, weights, initial, fixed=masks is not None)


@torch.no_grad()
def convert_sparse(training: SparseTraining) -> nn.Module:
    """Ends the training and returns the model with plain weights, exact zeros and no hooks.

    Raises:
        CompressError: The schedule hasn't ended, so that the model has fewer zeros than requested.
    """
    step, config = training.step, training.config
    if not training.fixed and config.compute_share(step) < config.final_share:
        raise CompressError(
            f"sparsity: expected at least {config.end} steps before `convert_sparse`, found {step}: "
            f"{config.compute_share(step):.1%} of the weights are zero instead of {config.final_share:.1%}; train "
            "longer, or end the schedule earlier"
        )
    for handle in training._handles:
        handle.remove()
    for name, weight in training.weights.items():
        weight.masked_fill_(~training.masks[name], 0)
    return training.model


def _check_masks(masks: Masks, weights: Mapping[str, Tensor]) -> None:
    for name in [*weights, *masks]:
        found = tuple(masks[name].shape) if name in masks else None
        expected = tuple(weights[name].shape) if name in weights else None
        if found != expected:
            raise CompressError(
                f"mask of {name!r}: expected shape {expected}, found {found}: the masks belong to other weights"
            )


def _zero_entries(value: Tensor, mask: Tensor) -> None:
    """Sets the entries of an optimizer's state where `mask` is true to 0, in place."""
    if hasattr(value, "codes"):  # torchao's low-bit states don't implement masked_fill_
        value.copy_(value.dequantize().masked_fill(mask, 0))
    else:
        value.masked_fill_(mask, 0)


def _clone_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
