"""Pipeline-parallel execution of a model with one stage per process, on the schedules of torch.distributed.pipelining.

Every process of the pipeline group calls with the same batch, and each gets the outputs; only a hidden state
[rows, length, width] is sent from stage to stage.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers import PreTrainedModel

from distill.errors import InputError
from distill.models.inputs import INPUTS
from distill.parallel.pipeline_stage import Relay, relay_of

Loss = Callable[[Tensor, Any], Tensor]


class StageForward(nn.Module):
    """A stage in the form that a schedule calls: the first stage takes token ids, all others take hidden states, and
    every stage returns hidden states.

    Logits and requested hidden states are stored here per micro-batch instead of being returned, so that the shape of
    every stage's output is known in advance.

    Args:
        stage: From `load_stage`.
        hidden: Indices of the hidden states to store, 0 being the embeddings.
    """

    def __init__(self, stage: PreTrainedModel, hidden: Sequence[int] = ()):
        super().__init__()
        self.stage, self.relay = stage, relay_of(stage)
        self.logits: list[Tensor] = []
        self.hidden: dict[int, list[Tensor]] = {n: [] for n in hidden if owner_of(n, self.relay) == self.relay.index}

    def forward(self, given: Tensor, **inputs: Tensor) -> Tensor:
        """Runs the stage: [rows, length] or [rows, length, width] -> [rows, length, width]."""
        if self.relay.first:
            inputs["input_ids"] = given
        self.relay.start(given, self.hidden)
        model: Any = self.stage if self.relay.last else self.stage.base_model
        settings = {"use_cache": False} if "use_cache" in signature(model.forward).parameters else {}
        out = model(**inputs, **settings)
        if self.relay.last and "logits" in out:
            self.logits.append(out.logits)
        return self.relay.finish().to(self.stage.dtype).contiguous()  # autocast may have changed the dtype


def owner_of(number: int, relay: Relay) -> int:
    """Returns the index of the stage that computes hidden state `number`."""
    return next(i for i, layers in enumerate(relay.stages) if number == 0 or number - 1 in layers)


class PipelineForward:
    """Forward pass of a model whose stages are on the processes of `group`: a frozen teacher, or a student in
    validation.

    The stage's mode and gradients are unchanged, and no autograd graph is recorded.

    Args:
        stage: From `load_stage`, with this process's rank in `group` as its index.
        group: The pipeline's processes; all processes of the world if None.
        micro_batches: Maximum number of micro-batches per batch.
        hidden: Indices of the hidden states to return; 0 is the embeddings.

    Raises:
        InputError: The number of processes isn't the number of stages, the stage isn't this process's, or the model
            doesn't have a requested hidden state.
    """

    def __init__(
        self,
        stage: PreTrainedModel,
        group: dist.ProcessGroup | None = None,
        *,
        micro_batches: int = 4,
        hidden: Sequence[int] = (),
    ):
        check_group(relay_of(stage), group)
        layers = relay_of(stage).stages[-1].stop
        unknown = [number for number in hidden if not 0 <= number <= layers]
        if unknown:
            raise InputError(f"hidden states: expected numbers from 0 to {layers}, found {unknown[0]}")
        self.stage, self.group, self.micro_batches, self.hidden = stage, group, micro_batches, tuple(hidden)

    @torch.no_grad()
    def __call__(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Returns the model's outputs for a padded batch, on every process.

        Args:
            batch: input_ids, attention_mask and optionally token_type_ids, [rows, length]; other entries are ignored.

        Returns:
            logits [rows, classes] or [rows, length, vocabulary], if the model has a head; hidden, if requested, a
            mapping from index to [rows, length, width].
        """
        forward = StageForward(self.stage, self.hidden)
        run_schedule(forward, self.group, self.micro_batches, batch)
        rows, last = len(batch["input_ids"]), forward.relay.count - 1
        logits = self.from_owner(last, forward.logits, rows)
        out: dict[str, Any] = {} if logits is None else {"logits": logits}
        if self.hidden:
            out["hidden"] = {
                number: self.from_owner(owner_of(number, forward.relay), forward.hidden.get(number, []), rows)
                for number in self.hidden
            }
        return out

    def from_owner(self, owner: int, parts: list[Tensor], rows: int) -> Tensor | None:
        return from_rank(owner, torch.cat(parts)[:rows] if parts else None, self.group, self.stage.device)


class PipelineTrainer:
    """Training steps of a model whose stages are on the processes of `group`.

    Each process optimises the parameters of its own stage. A matrix that the first and the last stage share gets the
    sum of both gradients on both, bit-identical, so that equal optimizers keep it equal. Dropout draws from each
    process's own generator; seed them differently.

    Args:
        stage: From `load_stage`, with this process's rank in `group` as its index.
        group: The pipeline's processes; all processes of the world if None.
        copies: Processes with the same stage of other replicas of the model, which get different data.
        micro_batches: Maximum number of micro-batches per batch. If the number is at least that of the stages, the
            schedule is 1F1B, which keeps the activations of at most as many micro-batches as there are stages;
            otherwise GPipe.

    Raises:
        InputError: The number of processes isn't the number of stages, or the stage isn't this process's.
    """

    def __init__(
        self,
        stage: PreTrainedModel,
        group: dist.ProcessGroup | None = None,
        *,
        copies: dist.ProcessGroup | None = None,
        micro_batches: int = 4,
    ):
        self.stage, self.group, self.micro_batches, self.relay = stage, group, micro_batches, relay_of(stage)
        self.copies = copies
        check_group(self.relay, group)

    def step(self, batch: Mapping[str, Tensor], targets: Any, loss: Loss) -> Tensor:
        """Runs the forward and backward passes of a batch and accumulates the gradients.

        Args:
            batch: As for `PipelineForward`.
            targets: Tensors [rows, ...] and lists with one entry per row, in mappings and tuples; needed by the last
                stage only.
            loss: Maps the logits of a micro-batch and its share of `targets` to its loss. The batch's loss is the *sum*
                over the micro-batches, whose sizes differ: sum over samples or labelled positions, and divide by a
                number that belongs to the whole batch.

        Returns:
            The losses of the micro-batches [micro-batches], on every process.
        """
        forward, rows = StageForward(self.stage), len(batch["input_ids"])

        def loss_of_rows(hidden: Tensor, numbers: Tensor) -> Tensor:
            first, stop = int(numbers[0]), min(int(numbers[-1]) + 1, rows)
            return loss(forward.logits.pop()[: stop - first], slice_rows(targets, first, stop))

        with self.tied_gradients():
            losses = run_schedule(forward, self.group, self.micro_batches, batch, loss_of_rows)
        known = torch.stack(losses).detach() if losses else None
        found = from_rank(self.relay.count - 1, known, self.group, self.stage.device)
        assert found is not None
        return found

    @contextmanager
    def tied_gradients(self) -> Iterator[None]:
        """Sums the tied weights' gradients of the step within the context over first and last stage; gradients
        accumulated earlier are already summed.
        """
        tied = [self.stage.get_parameter(name) for name in self.relay.tied if self.relay.first or self.relay.last]
        tied = [weight for weight in tied if weight.requires_grad]
        earlier = [weight.grad for weight in tied]
        for weight in tied:
            weight.grad = None
        yield
        for weight, before in zip(tied, earlier, strict=True):
            mine = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad = mine + self.swapped(mine)
            if before is not None:
                weight.grad += before

    def swapped(self, mine: Tensor) -> Tensor:
        """Exchanges a tensor between the first and the last stage and returns the other stage's."""
        other, peer = torch.empty_like(mine), self.relay.count - 1 if self.relay.first else 0
        ops = [dist.P2POp(dist.isend, mine, group=self.group, group_peer=peer)]
        ops.append(dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return other

    def average_gradients(self) -> None:
        """Averages the gradients over all replicas; to be called once per step, after accumulation."""
        if self.copies is None or dist.get_world_size(self.copies) == 1:
            return
        found = [each.grad for each in self.stage.parameters() if each.grad is not None]
        under_way = [dist.all_reduce(each, group=self.copies, async_op=True) for each in found]
        for work in under_way:
            work.wait()
        torch._foreach_div_(found, dist.get_world_size(self.copies))

    def clip_gradients(self, most: float) -> Tensor:
        """Scales the gradients of all stages so that their total norm is at most `most`; returns the norm before []."""
        counted_before = set(self.relay.tied) if self.relay.last else set()
        weights = {name: each for name, each in self.stage.named_parameters() if each.grad is not None}
        own: list[Any] = [each.grad for name, each in weights.items() if name not in counted_before]
        square = nn.utils.get_total_norm(own).square()
        dist.all_reduce(square, group=self.group)
        nn.utils.clip_grads_with_norm_(weights.values(), most, square.sqrt())
        return square.sqrt()


def run_schedule(
    forward: StageForward,
    group: dist.ProcessGroup | None,
    micro_batches: int,
    batch: Mapping[str, Tensor],
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> list[Tensor]:
    """Runs one batch through the stages, including the backward pass if a `loss` of (hidden states, row indices) is
    given.

    Returns:
        Losses of the micro-batches, on the last stage.

    Raises:
        InputError: The batch is packed.
    """
    if "documents" in batch:
        raise InputError(
            "packing: a model in pipeline stages hands on no masks, and documents of a row would see each other; "
            "train it unpacked, or lay it out in another way"
        )
    relay, device = forward.relay, forward.stage.device
    inputs: dict[str, Any] = {name: batch[name].to(device) for name in INPUTS if name in batch}
    rows = len(inputs["input_ids"])
    size = -(-rows // micro_batches)
    count = -(-rows // size)
    inputs = {name: filled_up(value, size * count) for name, value in inputs.items()}
    schedule = schedule_of(forward, group, inputs["input_ids"][:size], count, loss)
    args = (inputs.pop("input_ids"),) if relay.first else ()
    if loss is None:
        schedule.eval(*args, return_outputs=False, **inputs)
        return []
    losses: list[Tensor] = []
    numbers = torch.arange(size * count) if relay.last else None
    schedule.step(*args, target=numbers, losses=losses, return_outputs=False, **inputs)
    return losses


def schedule_of(
    forward: StageForward, group: dist.ProcessGroup | None, ids: Tensor, count: int, loss: Any
) -> ScheduleGPipe | Schedule1F1B:
    """Builds a schedule for `count` micro-batches with the shape of `ids`.

    With known shapes torch needs no trial run of a micro-batch, and building a schedule costs only one round of tiny
    messages, which is cheaper than keeping a schedule and its receive buffers for every shape.
    """
    stage, relay = forward.stage, forward.relay
    wire = torch.empty(
        *ids.shape, stage.config.hidden_size, dtype=stage.dtype, device="meta", requires_grad=loss is not None
    )
    given = ids.to("meta") if relay.first else wire
    part = PipelineStage(forward, relay.index, relay.count, stage.device, given, wire, group=group)
    kind = Schedule1F1B if loss is not None and count >= relay.count else ScheduleGPipe
    return kind(part, count, loss_fn=loss, scale_grads=False)


def filled_up(tensor: Tensor, rows: int) -> Tensor:
    """Returns the tensor padded to `rows` rows with copies of its last row, so that all micro-batches have the same
    shape.
    """
    return tensor[torch.arange(rows, device=tensor.device).clamp(max=len(tensor) - 1)] if rows > len(tensor) else tensor


def slice_rows(targets: Any, first: int, stop: int) -> Any:
    """Returns rows `first` to `stop` (exclusive) of the tensors and lists in `targets`."""
    if isinstance(targets, Mapping):
        return {name: slice_rows(value, first, stop) for name, value in targets.items()}
    if isinstance(targets, tuple):
        return tuple(slice_rows(value, first, stop) for value in targets)
    return targets[first:stop]


def from_rank(
    owner: int, tensor: Tensor | None, group: dist.ProcessGroup | None, device: torch.device
) -> Tensor | None:
    """Broadcasts the `tensor` of the group's process `owner`, or None, to all processes of the group."""
    form = [None if tensor is None else (tensor.shape, tensor.dtype)]
    dist.broadcast_object_list(form, group=group, device=device, group_src=owner)
    if form[0] is None:
        return None
    shape, dtype = form[0]
    tensor = torch.empty(shape, dtype=dtype, device=device) if tensor is None else tensor.contiguous()
    dist.broadcast(tensor, group=group, group_src=owner)
    return tensor


def check_group(relay: Relay, group: dist.ProcessGroup | None) -> None:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if (size, rank) != (relay.count, relay.index):
        raise InputError(
            f"pipeline: stage {relay.index} of {relay.count} was loaded in process {rank} of a group of {size}: "
            "the stages wouldn't find each other"
        )
