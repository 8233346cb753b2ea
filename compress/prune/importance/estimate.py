"""Estimation of importance scores: of the units of each axis and of whole layers."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import CompressError
from compress.prune.importance.gates import LAYERS, Gates
from compress.prune.importance.scores import Scores, compute_fingerprint
from distill.checkpoint.layers import find_layer_stack
from distill.eval_mode import eval_mode
from distill.slicing import Axis, Slot

LossInputs = dict[str, Any]  # tensors with the sample first, and what the loss reads besides
BatchLoss = Callable[[PreTrainedModel, LossInputs], Tensor]  # (model, batch) -> loss of each sample [batch]

SMALLEST_GRADIENT = 1e-5  # in float32, rounding turns gradients of 0 into values around 1e-6

STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "taylor": lambda g: g,
    "absolute": torch.abs,
    "fisher": torch.square,
}


def score_by_magnitude(model: PreTrainedModel, axes: Sequence[Axis]) -> Scores:
    """Scores each unit by the root mean square of all its weights (in every slot), and each layer likewise.

    The mean, not the sum, makes units with different numbers of weights comparable. A weight shared by two slots (tied
    embeddings) counts once.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    scores = {}
    for axis in axes:
        slots = {(id(weights[slot.parameter]), slot.dim): slot for slot in axis.slots}.values()
        parts = [_split_units(weights[slot.parameter], slot, axis.units) for slot in slots]
        squares = torch.stack([part.square().sum(dim=(0, 2)) for part in parts]).sum(dim=0)
        scores[axis.name] = (squares / sum(part.numel() // axis.units for part in parts)).sqrt().cpu()
    stack = model.get_submodule(find_layer_stack(model)).children()
    layers = [torch.cat([weight.detach().flatten().double() for weight in layer.parameters()]) for layer in stack]
    layer_scores = torch.stack([layer.square().mean().sqrt() for layer in layers]).cpu()
    return Scores("magnitude", scores, layer_scores, 0, 0, compute_fingerprint(model))


def _split_units(weight: Tensor, slot: Slot, units: int) -> Tensor:
    """Returns the slot's weights as [outer, units, rest], float64."""
    rows = weight.detach().double().movedim(slot.dim, 0)
    return rows.reshape(slot.outer, units, -1)


def score_by_gradients(
    model: PreTrainedModel,
    axes: Sequence[Axis],
    batches: Iterable[LossInputs],
    loss: BatchLoss,
    methods: Sequence[str] = ("taylor", "fisher"),
) -> dict[str, Scores]:
    """Scores units and layers by the gradients g of each sample's loss on their gates, in one pass.

    taylor: |mean of g|, the first-order change of the loss when the unit is removed. absolute: mean of |g|. fisher:
    mean of g^2, the diagonal of the empirical Fisher information, so that 0.5 * fisher is the second-order increase of
    the mean loss. Each sample of a batch has its own gates, so one backward pass gives each sample's g, and neither the
    batch size nor the order of batches matters. The model runs in eval mode and isn't modified.

    A distance to this model's own outputs has no gradient: if the pruned model is the teacher itself, use labels, true
    or sampled from its outputs; with sampled labels fisher is the second order of the KL divergence.

    Args:
        model: The model.
        axes: Axes whose units are scored.
        batches: Mappings of tensors with the samples first, on the model's device.
        loss: (model, batch) -> [batch], each sample's loss from that sample alone.
        methods: Any of taylor, absolute, fisher.

    Returns:
        Method name -> its scores. A vocabulary can't be gated and has no scores.

    Raises:
        CompressError: A method is unknown, there is no batch, or the loss isn't [batch] or has no gradient on the
            gates.

    Source: taylor: Molchanov et al. 2019 (arXiv 1906.10771), section 3, on gates, and the root of their square.
        absolute: Michel et al. 2019 (arXiv 1905.10650), section 4.1, with samples for batches. fisher: Kwon et al. 2022
        (arXiv 2204.09656), section 4.1.
    """
    if unknown := set(methods) - set(STATISTICS):
        raise CompressError(f"methods: expected some of {', '.join(STATISTICS)}, found {sorted(unknown)}")
    sums: dict[str, dict[str, Tensor]] = {method: {} for method in methods}
    samples = tokens = 0
    largest = 0.0
    with eval_mode(model), Gates(model, axes) as gates:
        for batch in batches:
            for name, gradient in _compute_sample_gradients(model, gates, batch, loss).items():
                largest = max(largest, float(gradient.abs().max()))
                for method in methods:
                    batch_sum = STATISTICS[method](gradient).sum(dim=0)
                    sums[method][name] = sums[method].get(name, 0) + batch_sum
            samples, tokens = samples + _count_samples(batch), tokens + int(_get_token_mask(batch).sum())
    if not samples:
        raise CompressError("scores: expected at least one batch, found no batch: nothing was measured")
    if largest < SMALLEST_GRADIENT:
        raise CompressError(
            f"loss: expected gradients on the gates of at least {SMALLEST_GRADIENT}, found at most {largest:.1g}: "
            "scores would be rounding errors; is it the distance of the model to itself?"
        )
    scores, fingerprint = {}, compute_fingerprint(model)
    for method, totals in sums.items():
        means = {name: (total / samples).abs().cpu() for name, total in totals.items()}
        scores[method] = Scores(method, means, means.pop(LAYERS), samples, tokens, fingerprint)
    return scores


def _compute_sample_gradients(
    model: PreTrainedModel, gates: Gates, batch: LossInputs, loss: BatchLoss
) -> dict[str, Tensor]:
    """Returns the gradient of each sample's loss on its own gates: name -> [batch, units], float64."""
    weight = next(model.parameters())
    dtype = torch.promote_types(weight.dtype, torch.float32)
    open_gates = {name: gate.to(weight.device, dtype) for name, gate in gates.make_open(_count_samples(batch)).items()}
    gates.set({name: gate.requires_grad_() for name, gate in open_gates.items()})
    losses = _compute_sample_losses(model, batch, loss).sum()
    inputs = list(open_gates.values())  # gradients of the weights aren't computed
    gradients = torch.autograd.grad(losses, inputs, allow_unused=True) if losses.requires_grad else (None,)
    if all(gradient is None for gradient in gradients):
        raise CompressError("loss: expected gradients on the gates, found none: every unit would look useless")
    pairs = zip(open_gates.items(), gradients, strict=True)
    return {name: torch.zeros_like(gate).double() if g is None else g.double() for (name, gate), g in pairs}


def _compute_sample_losses(model: PreTrainedModel, batch: LossInputs, loss: BatchLoss) -> Tensor:
    losses, samples = loss(model, batch), _count_samples(batch)
    if losses.shape != (samples,):
        raise CompressError(
            f"loss: expected one value for each of {samples} samples, found shape {list(losses.shape)}: a mean over "
            "the batch would mix their gradients"
        )
    return losses


def measure_layer_losses(
    model: PreTrainedModel, axes: Sequence[Axis], batches: Iterable[LossInputs], loss: BatchLoss
) -> Tensor:
    """Returns the increase of the mean loss when each layer alone is removed, float64 [layers].

    The arguments are those of `score_by_gradients`.
    """
    total: Tensor | float = 0.0
    samples = 0
    with eval_mode(model), torch.no_grad(), Gates(model, axes) as gates:
        closed = 1 - torch.eye(len(gates.layers), device=next(model.parameters()).device)
        for batch in batches:
            gates.set({})
            full = _compute_sample_losses(model, batch, loss).double().sum()
            reduced = []
            for gate in closed:
                gates.set({LAYERS: gate})
                reduced.append(_compute_sample_losses(model, batch, loss).double().sum())
            total = total + torch.stack(reduced) - full
            samples += _count_samples(batch)
    if not isinstance(total, Tensor):
        raise CompressError("layer losses: expected at least one batch, found no batch: nothing was measured")
    return (total / samples).cpu()


def score_by_activation(model: PreTrainedModel, axes: Sequence[Axis], batches: Iterable[LossInputs]) -> Scores:
    """Scores each unit by its mean activation over non-padding tokens.

    Of a hidden channel it is the absolute output of the norms, of other units the L2 norm of what the next matrix reads
    from them.

    A layer's score is 1 minus the mean cosine similarity of its output and input. The other arguments are those of
    `score_by_gradients`.
    """
    gates, means = Gates(model, axes), _ActivationMeans()
    handles = [
        layer.register_forward_hook(partial(means._add_layer_change, i), with_kwargs=True)
        for i, layer in enumerate(gates.layers)
    ]
    for name, modules in gates.modules.items():
        units = gates.axes[name].units
        if gates.axes[name].kind == "hidden":
            handles += [module.register_forward_hook(partial(means._add_norm, name)) for module in modules["scale"]]
        else:
            hooks = [(module, partial(means._add_input, name, units, slot)) for module, slot in modules["in"].items()]
            handles += [module.register_forward_pre_hook(hook) for module, hook in hooks]
    samples = tokens = 0
    accepted = inspect.signature(model.forward).parameters
    try:
        with eval_mode(model), torch.no_grad():
            for batch in batches:
                means.mask = _get_token_mask(batch)
                model(**{name: value for name, value in batch.items() if name in accepted})
                samples, tokens = samples + _count_samples(batch), tokens + int(means.mask.sum())
    finally:
        for handle in handles:
            handle.remove()
    changes = [float(means.compute_mean(f"{LAYERS}.{number}")) for number in range(len(gates.layers))]
    scores = {name: means.compute_mean(name) for name in gates.modules}
    layers = torch.tensor(changes, dtype=torch.float64)
    return Scores("activation", scores, layers, samples, tokens, compute_fingerprint(model))


class _ActivationMeans:
    """Means over non-padding tokens, collected by hooks; `mask` [batch, tokens] is the mask of the current batch."""

    def __init__(self) -> None:
        self.mask = torch.ones(0, 0, dtype=torch.bool)
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}

    def _add_input(self, name: str, units: int, slot: Slot, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        parts = inputs[0].double().unflatten(-1, (slot.outer, units, slot.inner))
        self._add(name, parts.square().sum(dim=(-3, -1)).sqrt())

    def _add_norm(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._add(name, output.double().abs())

    def _add_layer_change(
        self,
        number: int,
        module: nn.Module,
        inputs: tuple[Tensor, ...],
        kwargs: dict[str, Tensor],
        output: Tensor | tuple[Tensor, ...],
    ) -> None:
        before = (inputs[0] if inputs else kwargs["hidden_states"]).double()
        after = (output[0] if isinstance(output, tuple) else output).double()
        self._add(f"{LAYERS}.{number}", 1 - torch.cosine_similarity(before, after, dim=-1)[..., None])

    def _add(self, name: str, magnitudes: Tensor) -> None:
        """Adds [batch, tokens, units]; a tensor without tokens [batch, units] counts as one token per sample."""
        mask = self.mask if magnitudes.dim() > 2 else self.mask.any(dim=1)
        if mask.shape != magnitudes.shape[:-1]:
            raise CompressError(
                f"{name}: expected {list(mask.shape)} tokens, found a tensor of shape {list(magnitudes.shape)}: "
                "padding can't be excluded"
            )
        self.sums[name] = self.sums.get(name, 0) + magnitudes[mask].sum(dim=0)
        self.counts[name] = self.counts.get(name, 0) + mask.sum()

    def compute_mean(self, name: str) -> Tensor:
        """Returns the mean of a name [units]."""
        if name not in self.sums:
            raise CompressError(
                f"activation of {name!r}: expected values, found none: there is no batch, or no module reads this axis"
            )
        return (self.sums[name] / self.counts[name]).cpu()


def _count_samples(batch: LossInputs) -> int:
    result: int = next(iter(batch.values())).shape[0]
    return result


def _get_token_mask(batch: LossInputs) -> Tensor:
    """Returns True for each non-padding token, [batch, tokens]; for all tokens if the batch has no attention_mask."""
    if "attention_mask" in batch:
        result: Tensor = batch["attention_mask"].bool()
        return result
    return torch.ones_like(batch["input_ids"], dtype=torch.bool)
