"""Training with masks: they hold under every step, move as the schedule says, and leave plain weights with zeros."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from compress.errors import CompressError
from compress.sparsity.config import Sparsity
from compress.sparsity.layers import Chosen, sparse_layers
from compress.sparsity.patterns import Masks, block_sums, check_shape, keep, spread


class SparseTraining:
    """Keeps a model's masks while it trains; `prepare` makes it.

    The parameters themselves are masked at all times: the forward pass uses them as they are, a checkpoint has its
    zeros at every step, and their gradients are dense, for a removed weight too. Call `after_backward` once a step of
    the optimizer, after the last backward pass (and what averages gradients over processes) and before gradients are
    cut to a norm, and `after_step` right after the step, or `attach` the optimizer, which then calls it.

    Everything that decides the rest of the training is in `state_dict`, the model's weights and the optimizer's own
    state; processes that hold the same ones make the same masks.

    Args:
        model: The model.
        config: Pattern, score, schedule.
        weights: Name -> weight.
        masks: First masks. Fixed ones stay as they are unless they are rewired.
        fixed: Whether `masks` were given rather than chosen.
    """

    def __init__(self, model: nn.Module, config: Sparsity, weights: Mapping[str, Tensor], masks: Masks, *, fixed: bool):
        self.model, self.config, self.weights, self.masks, self.fixed = model, config, weights, masks, fixed
        self.step = 0
        self.scores: dict[str, Tensor] = {}
        self.removed: dict[str, Tensor] = {}  # movement: values that weights had when they went
        if config.score == "movement" and not fixed:
            self.scores = {name: torch.zeros_like(w, dtype=torch.float32) for name, w in weights.items()}
            self.removed = {name: torch.zeros_like(w) for name, w in weights.items()}
        self._gradients: dict[str, Tensor] = {}
        self._handles: list[Any] = []
        self._seen = False

    @torch.no_grad()
    def after_backward(self) -> None:
        """Reads the dense gradients, then sets those of removed weights to 0.

        Raises:
            CompressError: A weight without gradient, where the next masks depend on it.
        """
        grows, learns = self._rewires(self.step + 1), bool(self.scores) and self.step < self.config.end
        for name, weight in self.weights.items():
            if weight.grad is None:
                if learns or grows:
                    raise CompressError(
                        f"weight {name!r}: expected a gradient, found none: its mask could never change"
                    )
                continue
            if learns:
                whole = torch.where(self.masks[name], weight, self.removed[name])
                self.scores[name] -= whole.float() * weight.grad.float()
            if grows:
                self._gradients[name] = weight.grad.abs()
            weight.grad.masked_fill_(~self.masks[name], 0)
        self._seen = True

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer) -> None:
        """Puts removed weights back to 0 and, where the schedule says so, changes the masks.

        Raises:
            CompressError: `after_backward` wasn't called.
        """
        if not self._seen:
            raise CompressError(
                f"sparsity: step {self.step + 1} came without after_backward: gradients of removed weights went into "
                "the optimizer's moments, and weights would come back with them"
            )
        self._seen, self.step = False, self.step + 1
        for name, weight in self.weights.items():
            weight.masked_fill_(~self.masks[name], 0)
        if self._rewires(self.step):
            self._change(self._rewired(), optimizer)
        elif not self.fixed and not self.config.rewire and self.config.is_due(self.step):
            self._change(self._chosen(), optimizer)
        self._gradients.clear()

    def attach(self, optimizer: Optimizer) -> None:
        """Calls `after_step` after every step of the optimizer from now on; `convert` ends it."""
        self._handles.append(optimizer.register_step_post_hook(lambda made, args, kwargs: self.after_step(made)))

    def state_dict(self) -> dict[str, Any]:
        """The masks, scores and the step, as plain values and tensors."""
        state: dict[str, Any] = {"config": asdict(self.config), "step": self.step, "fixed": self.fixed}
        for part in ("masks", "scores", "removed"):
            state[part] = {name: value.clone() for name, value in getattr(self, part).items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken; the model and the optimizer are loaded by whoever saved them.

        Raises:
            CompressError: The state of another config or of other weights.
        """
        if state["config"] != asdict(self.config) or state["fixed"] != self.fixed:
            raise CompressError(
                f"sparsity: expected the state of {self.config}, found one of {state['config']}: the masks would mix"
            )
        theirs = {name: tuple(mask.shape) for name, mask in state["masks"].items()}
        ours = {name: tuple(weight.shape) for name, weight in self.weights.items()}
        if theirs != ours:
            other = sorted(set(theirs.items()) ^ set(ours.items()))[0]
            raise CompressError(
                f"sparsity: expected the state of the same weights, found {other[0]!r} {other[1]} apart"
            )
        self.step, self._seen = state["step"], False
        for part in ("masks", "scores", "removed"):
            setattr(self, part, {name: state[part][name].to(self.weights[name].device) for name in state[part]})
            setattr(self, part, {name: value.clone() for name, value in getattr(self, part).items()})

    def _rewires(self, step: int) -> bool:
        return self.config.is_due(step) and self.config.rewired_at(step) > 0

    def _chosen(self) -> Masks:
        """Masks by the schedule's share; what a magnitude once removed stays away."""
        scores = self.scores or {
            name: weight.abs().float().masked_fill(~self.masks[name], -torch.inf)
            for name, weight in self.weights.items()
        }
        return keep(scores, self.config, self.config.share_at(self.step))

    def _rewired(self) -> Masks:
        block, share = self.config.block, self.config.rewired_at(self.step)
        masks = {}
        for name, weight in self.weights.items():
            alive = block_sums(self.masks[name].float(), block) > 0
            sizes, gradients = block_sums(weight.abs(), block), block_sums(self._gradients[name], block)
            masks[name] = spread(rewired(alive, sizes, gradients, share), block)
        return masks

    def _change(self, masks: Masks, optimizer: Optimizer) -> None:
        """From the masks that hold to others; who comes or goes leaves no trace in the optimizer's moments."""
        for name, weight in self.weights.items():
            old, new = self.masks[name], masks[name]
            if self.removed:
                self.removed[name] = torch.where(old, weight, self.removed[name])
                weight.copy_(torch.where(new, self.removed[name], 0))
            weight.masked_fill_(~new, 0)
            for value in optimizer.state.get(weight, {}).values():
                if isinstance(value, Tensor) and value.shape == weight.shape:
                    value.masked_fill_(~(old & new), 0)
        self.masks = masks


def rewired(alive: Tensor, sizes: Tensor, gradients: Tensor, share: float) -> Tensor:
    """Drops floor(share * n) of n live units, the smallest, and grows as many of the others, the largest gradients.

    A unit that was just dropped may grow again; it then keeps its weights. All tensors [units_out, units_in]; `alive`
    is bool, `sizes` and `gradients` absolute values.
    """
    flat = alive.flatten()
    count = min(int(share * int(flat.sum())), int((~flat).sum()))
    lowest = sizes.flatten().masked_fill(~flat, torch.inf).argsort(stable=True)[:count]
    kept = flat.index_fill(0, lowest, False)
    largest = gradients.flatten().masked_fill(kept, -1).argsort(descending=True, stable=True)[:count]
    return kept.index_fill(0, largest, True).view_as(alive)


@torch.no_grad()
def prepare(
    model: nn.Module, config: Sparsity, *, masks: Masks | None = None, chosen: Chosen | None = None
) -> SparseTraining:
    """Makes a model ready for sparse training: its weights get the zeros of the schedule's first step, in place.

    Args:
        model: Any module with linear layers.
        config: Pattern, score (magnitude or movement) and schedule.
        masks: What `sparsify` returned: these masks are held instead, after any score, and only rewiring moves them.
        chosen: Which linear layers; see `sparse_layers`.

    Raises:
        CompressError: A score that needs calibration, without masks; masks of other weights; a shape that the pattern
            doesn't divide.

    Source: Zhu & Gupta 2017 (arXiv 1710.01878), section 3: weights that went by magnitude stay away. Sanh et al. 2020
    (arXiv 2005.07683), section 4, hard movement pruning: scores S -= w * dL/dw' over all weights, w' the masked ones
    and w with the removed ones' last values, the top of S stays; with a score rate of 1 and no optimizer for S, a
    removed weight is not decayed, and after `end` the mask stays. Evci et al. 2020 (arXiv 1911.11134), algorithm 1:
    new connections start at 0; the first mask is by magnitude instead of random, and the step of the optimizer is
    taken in rewiring steps too.
    """
    layers = sparse_layers(model, chosen)
    weights = {f"{name}.weight": layer.weight for name, layer in layers.items()}
    for name, weight in weights.items():
        check_shape(name, weight, config)
    if masks is not None:
        check_masks(masks, weights)
        first = {name: masks[name].to(weight.device) for name, weight in weights.items()}
    elif config.score in ("wanda", "sparsegpt"):
        raise CompressError(
            f"sparsity.score: {config.score} chooses its masks from calibration data before the training; expected the "
            "masks that `sparsify` returned, found none"
        )
    else:
        first = keep({name: weight.abs() for name, weight in weights.items()}, config, config.share_at(0))
    for name, weight in weights.items():
        weight.masked_fill_(~first[name], 0)
    return SparseTraining(model, config, weights, first, fixed=masks is not None)


def check_masks(masks: Masks, weights: Mapping[str, Tensor]) -> None:
    for name in [*weights, *masks]:
        found = tuple(masks[name].shape) if name in masks else None
        wanted = tuple(weights[name].shape) if name in weights else None
        if found != wanted:
            raise CompressError(f"mask of {name!r}: expected shape {wanted}, found {found}: other weights were pruned")


@torch.no_grad()
def convert(training: SparseTraining) -> nn.Module:
    """Ends the training: the model with plain weights and exact zeros, no hook left.

    Raises:
        CompressError: The schedule isn't at its end, so there are fewer zeros than asked for.
    """
    step, config = training.step, training.config
    if not training.fixed and config.share_at(step) < config.share:
        raise CompressError(
            f"sparsity: expected to convert after step {config.end}, found step {step}: the "
            f"schedule is at {config.share_at(step):.1%} zeros, not {config.share:.1%}; train on, or let it end earlier"
        )
    for handle in training._handles:
        handle.remove()
    for name, weight in training.weights.items():
        weight.masked_fill_(~training.masks[name], 0)
    return training.model
