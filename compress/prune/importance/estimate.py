"""Estimation of importance scores: of the units of each axis and of whole layers."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import CompressError
from compress.prune.importance.gates import LAYERS, Gates
from compress.prune.importance.scores import Scores, weights_fingerprint
from distill.checkpoint.layers import find_layer_stack
from distill.slicing import Axis, Slot

Batch = Mapping[str, Tensor]  # the first dimension of each tensor is the sample
Loss = Callable[[PreTrainedModel, Batch], Tensor]  # (model, batch) -> loss of each sample [batch]

VANISHED = 1e-5  # in float32, gradients that should be 0 come out around 1e-6

STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "taylor": lambda g: g,
    "absolute": torch.abs,
    "fisher": torch.square,
}


def magnitude(model: PreTrainedModel, axes: Sequence[Axis]) -> Scores:
    """Returns the root mean square of all weights of a unit (in every slot), and of all weights of a layer.

    The mean, not the sum, makes units with different numbers of weights comparable. A weight shared by two slots (tied
    embeddings) counts once.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    values = {}
    for axis in axes:
        slots = {(id(weights[slot.parameter]), slot.dim): slot for slot in axis.slots}.values()
        parts = [unit_weights(weights[slot.parameter], slot, axis.units) for slot in slots]
        squares = torch.stack([part.square().sum(dim=(0, 2)) for part in parts]).sum(dim=0)
        values[axis.name] = (squares / sum(part.numel() // axis.units for part in parts)).sqrt().cpu()
    stack = model.get_submodule(find_layer_stack(model)).children()
    layers = [torch.cat([weight.detach().flatten().double() for weight in layer.parameters()]) for layer in stack]
    means = torch.stack([layer.square().mean().sqrt() for layer in layers]).cpu()
    return Scores("magnitude", values, means, 0, 0, weights_fingerprint(model))


def unit_weights(weight: Tensor, slot: Slot, units: int) -> Tensor:
    """Returns the slot's weights as [outer, units, rest], float64."""
    rows = weight.detach().double().movedim(slot.dim, 0)
    return rows.reshape(slot.outer, units, -1)


def measure_scores(
    model: PreTrainedModel,
    axes: Sequence[Axis],
    batches: Iterable[Batch],
    loss: Loss,
    methods: Sequence[str] = ("taylor", "fisher"),
) -> dict[str, Scores]:
    """Measures scores from the gradients g of each sample's loss on the gates of all units and layers, in one pass.

    taylor: |mean of g|, the first-order change of the loss when the unit is removed. absolute: mean of |g|. fisher:
    mean of g^2, the diagonal of the empirical Fisher information, so that 0.5 * fisher is the second-order increase of
    the mean loss. Each sample of a batch has its own gates, so one backward pass gives each sample's g, and neither the
    batch size nor the order of batches matters. The model runs in eval mode and isn't modified.

    A distance to this model's own outputs has no gradient: if the pruned model is the teacher itself, use labels, true
    or sampled from its outputs; with sampled labels fisher is the second order of the KL divergence.

    Args:
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
        raise CompressError(f"methods {sorted(unknown)}: unknown, expected some of {', '.join(STATISTICS)}")
    sums: dict[str, dict[str, Tensor]] = {method: {} for method in methods}
    samples = tokens = 0
    steepest = 0.0
    with evaluating(model), Gates(model, axes) as gates:
        for batch in batches:
            for name, gradient in sample_gradients(model, gates, batch, loss).items():
                steepest = max(steepest, float(gradient.abs().max()))
                for method in methods:
                    added = STATISTICS[method](gradient).sum(dim=0)
                    sums[method][name] = sums[method].get(name, 0) + added
            samples, tokens = samples + count_samples(batch), tokens + int(token_mask(batch).sum())
    if not samples:
        raise CompressError("scores: no batch was given, expected at least one: nothing was measured")
    if steepest < VANISHED:
        raise CompressError(
            f"loss: no sample's gradient on any gate is larger than {steepest:.1g}, expected {VANISHED}: scores would "
            "be rounding errors; is it the distance of the model to itself?"
        )
    scores, mark = {}, weights_fingerprint(model)
    for method, totals in sums.items():
        means = {name: (total / samples).abs().cpu() for name, total in totals.items()}
        scores[method] = Scores(method, means, means.pop(LAYERS), samples, tokens, mark)
    return scores


def sample_gradients(model: PreTrainedModel, gates: Gates, batch: Batch, loss: Loss) -> dict[str, Tensor]:
    """Returns the gradient of each sample's loss on its own gates: name -> [batch, units], float64."""
    like = next(model.parameters())
    dtype = torch.promote_types(like.dtype, torch.float32)
    ones = {name: gate.to(like.device, dtype) for name, gate in gates.ones(count_samples(batch)).items()}
    gates.set({name: gate.requires_grad_() for name, gate in ones.items()})
    losses = sample_losses(model, batch, loss).sum()
    gates_only = list(ones.values())  # gradients of the weights aren't computed
    found = torch.autograd.grad(losses, gates_only, allow_unused=True) if losses.requires_grad else [None]
    if all(gradient is None for gradient in found):
        raise CompressError("loss: it has no gradients on the gates: every unit would look useless")
    gradients = zip(ones.items(), found, strict=True)
    return {name: torch.zeros_like(one).double() if g is None else g.double() for (name, one), g in gradients}


def sample_losses(model: PreTrainedModel, batch: Batch, loss: Loss) -> Tensor:
    losses, samples = loss(model, batch), count_samples(batch)
    if losses.shape != (samples,):
        raise CompressError(
            f"loss: shape {list(losses.shape)}, expected one for each of {samples} samples: a mean over the batch "
            "would mix their gradients"
        )
    return losses


def layer_losses(model: PreTrainedModel, axes: Sequence[Axis], batches: Iterable[Batch], loss: Loss) -> Tensor:
    """Returns the increase of the mean loss when each layer alone is removed, float64 [layers].

    The arguments are those of `measure_scores`.
    """
    total: Tensor | float = 0.0
    samples = 0
    with evaluating(model), torch.no_grad(), Gates(model, axes) as gates:
        closed = 1 - torch.eye(len(gates.layers), device=next(model.parameters()).device)
        for batch in batches:
            gates.set({})
            whole = sample_losses(model, batch, loss).double().sum()
            without = []
            for gate in closed:
                gates.set({LAYERS: gate})
                without.append(sample_losses(model, batch, loss).double().sum())
            total = total + torch.stack(without) - whole
            samples += count_samples(batch)
    if not isinstance(total, Tensor):
        raise CompressError("layer_losses: no batch was given, expected at least one: nothing was measured")
    return (total / samples).cpu()


def activation(model: PreTrainedModel, axes: Sequence[Axis], batches: Iterable[Batch]) -> Scores:
    """Returns each unit's mean absolute output over non-padding tokens; for layers, how much they change the input."""
    gates, meter = Gates(model, axes), Meter()
    handles = [
        layer.register_forward_hook(partial(meter.turn, i), with_kwargs=True) for i, layer in enumerate(gates.layers)
    ]
    for name, found in gates.places.items():
        units = gates.axes[name].units
        if gates.axes[name].kind == "hidden":
            handles += [module.register_forward_hook(partial(meter.norm, name)) for module in found["scale"]]
        else:
            read = [(module, partial(meter.read, name, units, slot)) for module, slot in found["in"].items()]
            handles += [module.register_forward_pre_hook(hook) for module, hook in read]
    samples = tokens = 0
    accepted = inspect.signature(model.forward).parameters
    try:
        with evaluating(model), torch.no_grad():
            for batch in batches:
                meter.mask = token_mask(batch)
                model(**{name: value for name, value in batch.items() if name in accepted})
                samples, tokens = samples + count_samples(batch), tokens + int(meter.mask.sum())
    finally:
        for handle in handles:
            handle.remove()
    turns = [float(meter.mean(f"{LAYERS}.{number}")) for number in range(len(gates.layers))]
    values, layers = {name: meter.mean(name) for name in gates.places}, torch.tensor(turns, dtype=torch.float64)
    return Scores("activation", values, layers, samples, tokens, weights_fingerprint(model))


class Meter:
    """Means over non-padding tokens, collected by hooks; `mask` [batch, tokens] is the mask of the current batch."""

    def __init__(self) -> None:
        self.mask = torch.ones(0, 0, dtype=torch.bool)
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}

    def read(self, name: str, units: int, slot: Slot, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        parts = inputs[0].double().unflatten(-1, (slot.outer, units, slot.inner))
        self.add(name, parts.square().sum(dim=(-3, -1)).sqrt())

    def norm(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        self.add(name, output.double().abs())

    def turn(self, number: int, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        before = (inputs[0] if inputs else named["hidden_states"]).double()
        after = (output[0] if isinstance(output, tuple) else output).double()
        self.add(f"{LAYERS}.{number}", 1 - torch.cosine_similarity(before, after, dim=-1)[..., None])

    def add(self, name: str, sizes: Tensor) -> None:
        """Adds [batch, tokens, units]; a tensor without tokens [batch, units] counts as one token per sample."""
        mask = self.mask if sizes.dim() > 2 else self.mask.any(dim=1)
        if mask.shape != sizes.shape[:-1]:
            raise CompressError(
                f"{name}: a tensor of shape {list(sizes.shape)}, expected {list(mask.shape)} tokens: which are padding "
                "can't be told"
            )
        self.sums[name] = self.sums.get(name, 0) + sizes[mask].sum(dim=0)
        self.counts[name] = self.counts.get(name, 0) + mask.sum()

    def mean(self, name: str) -> Tensor:
        if name not in self.sums:
            raise CompressError(f"activation of {name!r}: nothing was seen of it: no batch, or nothing reads it")
        return (self.sums[name] / self.counts[name]).cpu()


def count_samples(batch: Batch) -> int:
    return next(iter(batch.values())).shape[0]


def token_mask(batch: Batch) -> Tensor:
    """Returns True for each non-padding token, [batch, tokens]; for all tokens if the batch has no attention_mask."""
    if "attention_mask" in batch:
        return batch["attention_mask"].bool()
    return torch.ones_like(batch["input_ids"], dtype=torch.bool)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model in eval mode inside the block and restores the previous modes of its modules afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
