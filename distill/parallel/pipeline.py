"""Pipeline-parallel execution of a model with one stage per process, on the schedules of torch.distributed.pipelining.

Every process of the pipeline group calls with the same batch, and each gets the outputs; only a hidden state
[rows, length, width] is sent from stage to stage.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from distill.errors import InputError
from distill.losses.teacher_signals import TeacherSignals
from distill.models.inputs import forgo_cache, select_inputs
from distill.parallel.pipeline_stage import StageBoundary, find_boundary

Targets = TypeVar("Targets")  # tensors and lists with one entry per row, in mappings and tuples
MICRO_BATCHES = 4  # of a batch, unless said otherwise
_ScheduleLoss = Callable[[Tensor, Tensor], Tensor]  # (hidden states, row indices) -> the loss of a micro-batch


class StageForward(nn.Module):
    """A stage in the form that a schedule calls.

    The first stage takes token ids, all others take hidden states, and every stage returns hidden states. Logits
    and requested hidden states are stored here per micro-batch instead of being returned, so that the shape of every
    stage's output is known in advance.

    Args:
        stage: From `load_stage`.
        hidden: Indices of the hidden states to store, 0 being the embeddings.
    """

    def __init__(self, stage: PreTrainedModel, hidden: Sequence[int] = ()):
        super().__init__()
        self.stage, self.boundary = stage, find_boundary(stage)
        self.logits: list[Tensor] = []
        self.hidden: dict[int, list[Tensor]] = {
            n: [] for n in hidden if _find_owner(n, self.boundary) == self.boundary.index
        }

    def forward(self, received: Tensor, **inputs: Tensor) -> Tensor:
        """Runs the stage: [rows, length] or [rows, length, width] -> [rows, length, width]."""
        if self.boundary.is_first:
            inputs["input_ids"] = received
        self.boundary.start(received, self.hidden)
        model = self.stage if self.boundary.is_last else self.stage.base_model
        output = model(**inputs, **forgo_cache(model, inputs))
        if self.boundary.is_last and "logits" in output:
            self.logits.append(output.logits)
        return self.boundary.finish().to(self.stage.dtype).contiguous()  # autocast may have changed the dtype


def _find_owner(number: int, boundary: StageBoundary) -> int:
    """Returns the index of the stage that computes hidden state `number`."""
    return next(i for i, layers in enumerate(boundary.stages) if number == 0 or number - 1 in layers)


class PipelineForward:
    """Forward pass of a model whose stages are on the processes of `group`.

    The model is a frozen teacher, or a student in validation. The stage's mode and gradients are unchanged, and
    no autograd graph is recorded.

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
        micro_batches: int = MICRO_BATCHES,
        hidden: Sequence[int] = (),
    ):
        boundary = find_boundary(stage)
        _check_group(boundary, group)
        layers = boundary.stages[-1].stop
        unknown = [number for number in hidden if not 0 <= number <= layers]
        if unknown:
            raise InputError(f"hidden states: expected indices from 0 to {layers}, found {unknown[0]}")
        self.stage, self.group, self.micro_batches, self.hidden = stage, group, micro_batches, tuple(hidden)

    @torch.no_grad()
    def __call__(self, batch: Mapping[str, Tensor]) -> TeacherSignals:
        """Returns the model's outputs for a padded batch, on every process.

        Args:
            batch: input_ids, attention_mask and optionally token_type_ids, [rows, length]; other entries are ignored.

        Returns:
            logits [rows, classes] or [rows, length, vocabulary], if the model has a head; hidden, if requested, a
            mapping from index to [rows, length, width].
        """
        forward = StageForward(self.stage, self.hidden)
        _run_schedule(forward, self.group, self.micro_batches, batch)
        rows, last = len(batch["input_ids"]), forward.boundary.count - 1
        logits = self._broadcast_rows(last, forward.logits, rows)
        outputs = TeacherSignals() if logits is None else TeacherSignals(logits=logits)
        if self.hidden:
            states = {}
            for number in self.hidden:
                owner, parts = _find_owner(number, forward.boundary), forward.hidden.get(number, [])
                state = self._broadcast_rows(owner, parts, rows)
                if state is not None:
                    states[number] = state
            outputs["hidden"] = states
        return outputs

    def _broadcast_rows(self, owner: int, parts: list[Tensor], rows: int) -> Tensor | None:
        return _broadcast(owner, torch.cat(parts)[:rows] if parts else None, self.group, self.stage.device)


class PipelineTrainer:
    """Training steps of a model whose stages are on the processes of `group`.

    Each process optimizes the parameters of its own stage. A matrix that the first and the last stage share gets the
    sum of both gradients on both, bit-identical, so that equal optimizers keep it equal. Dropout draws from each
    process's own generator; seed them differently.

    Args:
        stage: From `load_stage`, with this process's rank in `group` as its index.
        group: The pipeline's processes; all processes of the world if None.
        replicas: Processes with the same stage of other replicas of the model, which get different data.
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
        replicas: dist.ProcessGroup | None = None,
        micro_batches: int = MICRO_BATCHES,
    ):
        self.stage, self.group, self.micro_batches, self.boundary = stage, group, micro_batches, find_boundary(stage)
        self.replicas = replicas
        _check_group(self.boundary, group)

    def step(self, batch: Mapping[str, Tensor], targets: Targets, loss: Callable[[Tensor, Targets], Tensor]) -> Tensor:
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

        def compute_loss(hidden: Tensor, indices: Tensor) -> Tensor:
            first, stop = int(indices[0]), min(int(indices[-1]) + 1, rows)
            return loss(forward.logits.pop()[: stop - first], _slice_rows(targets, first, stop))

        with self._sum_tied_gradients():
            losses = _run_schedule(forward, self.group, self.micro_batches, batch, compute_loss)
        local_losses = torch.stack(losses).detach() if losses else None
        broadcast = _broadcast(self.boundary.count - 1, local_losses, self.group, self.stage.device)
        if broadcast is None:
            raise RuntimeError("pipeline: expected losses on the last stage, found none")
        return broadcast

    @contextmanager
    def _sum_tied_gradients(self) -> Iterator[None]:
        """Sums the tied weights' gradients of the step within the context over the first and the last stage.

        Gradients accumulated earlier are already summed.
        """
        is_end = self.boundary.is_first or self.boundary.is_last
        tied = [self.stage.get_parameter(name) for name in self.boundary.tied if is_end]
        tied = [weight for weight in tied if weight.requires_grad]
        earlier = [weight.grad for weight in tied]
        for weight in tied:
            weight.grad = None
        yield
        for weight, before in zip(tied, earlier, strict=True):
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad = gradient + self._exchange_ends(gradient)
            if before is not None:
                weight.grad += before

    def _exchange_ends(self, tensor: Tensor) -> Tensor:
        """Exchanges a tensor between the first and the last stage and returns the other stage's."""
        other, peer = torch.empty_like(tensor), self.boundary.count - 1 if self.boundary.is_first else 0
        ops = [dist.P2POp(dist.isend, tensor, group=self.group, group_peer=peer)]
        ops.append(dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return other

    def average_gradients(self) -> None:
        """Averages the gradients over all replicas; to be called once per step, after accumulation."""
        if self.replicas is None or dist.get_world_size(self.replicas) == 1:
            return
        gradients = [each.grad for each in self.stage.parameters() if each.grad is not None]
        reductions = [dist.all_reduce(each, group=self.replicas, async_op=True) for each in gradients]
        for work in reductions:
            work.wait()
        torch._foreach_div_(gradients, dist.get_world_size(self.replicas))

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales the gradients of all stages so that their total norm is at most `max_norm`.

        Gradients of tied weights count once. Returns the norm before, a scalar.
        """
        counted = set(self.boundary.tied) if self.boundary.is_last else set()
        weights = {name: each for name, each in self.stage.named_parameters() if each.grad is not None}
        gradients = [each.grad for name, each in weights.items() if name not in counted and each.grad is not None]
        square = nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(square, group=self.group)
        nn.utils.clip_grads_with_norm_(weights.values(), max_norm, square.sqrt())
        return square.sqrt()


def _run_schedule(
    forward: StageForward,
    group: dist.ProcessGroup | None,
    micro_batches: int,
    batch: Mapping[str, Tensor],
    loss: _ScheduleLoss | None = None,
) -> list[Tensor]:
    """Runs one batch through the stages, with a backward pass if there is a `loss`.

    Returns:
        Losses of the micro-batches, on the last stage.

    Raises:
        InputError: The batch is packed.
    """
    if "documents" in batch:
        raise InputError(
            "packing: expected an unpacked batch, found documents: pipeline stages pass on no masks, and documents "
            "of a row would attend to each other; train it unpacked, or in another layout"
        )
    boundary, device = forward.boundary, forward.stage.device
    inputs: dict[str, Tensor] = {name: value.to(device) for name, value in select_inputs(batch).items()}
    rows = len(inputs["input_ids"])
    size = -(-rows // micro_batches)
    count = -(-rows // size)
    inputs = {name: _pad_rows(value, size * count) for name, value in inputs.items()}
    schedule = _build_schedule(forward, group, inputs["input_ids"][:size], count, loss)
    args = (inputs.pop("input_ids"),) if boundary.is_first else ()
    keywords: dict[str, Any] = dict(inputs)
    if loss is None:
        schedule.eval(*args, return_outputs=False, **keywords)
        return []
    losses: list[Tensor] = []
    indices = torch.arange(size * count) if boundary.is_last else None
    schedule.step(*args, target=indices, losses=losses, return_outputs=False, **keywords)
    return losses


def _build_schedule(
    forward: StageForward, group: dist.ProcessGroup | None, ids: Tensor, count: int, loss: _ScheduleLoss | None
) -> ScheduleGPipe | Schedule1F1B:
    """Builds a schedule for `count` micro-batches with the shape of `ids`.

    With known shapes torch needs no trial run of a micro-batch, and building a schedule costs only one round of tiny
    messages, which is cheaper than keeping a schedule and its receive buffers for every shape.
    """
    stage, boundary = forward.stage, forward.boundary
    states = torch.empty(
        *ids.shape, stage.config.hidden_size, dtype=stage.dtype, device="meta", requires_grad=loss is not None
    )
    inputs = ids.to("meta") if boundary.is_first else states
    part = PipelineStage(forward, boundary.index, boundary.count, stage.device, inputs, states, group=group)
    schedule_class = Schedule1F1B if loss is not None and count >= boundary.count else ScheduleGPipe
    return schedule_class(part, count, loss_fn=loss, scale_grads=False)


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """Returns the tensor padded to `rows` rows with copies of its last row.

    All micro-batches then have the same shape.
    """
    return tensor[torch.arange(rows, device=tensor.device).clamp(max=len(tensor) - 1)] if rows > len(tensor) else tensor


def _slice_rows(targets: Targets, first: int, stop: int) -> Targets:
    """Returns rows `first` to `stop` (exclusive) of the tensors and lists in `targets`."""
    leaves, structure = pytree.tree_flatten(targets, is_leaf=lambda node: isinstance(node, list))
    sliced: Targets = pytree.tree_unflatten([leaf[first:stop] for leaf in leaves], structure)
    return sliced


def _broadcast(
    owner: int, tensor: Tensor | None, group: dist.ProcessGroup | None, device: torch.device
) -> Tensor | None:
    """Broadcasts the `tensor` of the group's process `owner`, or None, to all processes of the group."""
    shape_and_dtype = [None if tensor is None else (tensor.shape, tensor.dtype)]
    dist.broadcast_object_list(shape_and_dtype, group=group, device=device, group_src=owner)
    if shape_and_dtype[0] is None:
        return None
    shape, dtype = shape_and_dtype[0]
    tensor = torch.empty(shape, dtype=dtype, device=device) if tensor is None else tensor.contiguous()
    dist.broadcast(tensor, group=group, group_src=owner)
    return tensor


def _check_group(boundary: StageBoundary, group: dist.ProcessGroup | None) -> None:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if (size, rank) != (boundary.count, boundary.index):
        raise InputError(
            f"pipeline: expected stage {rank} of {size} in this process of the group, found stage {boundary.index} of "
            f"{boundary.count}: the stages wouldn't receive each other's states"
        )
