"""Keys and values of a text's earlier tokens, which a decoder reads while it computes the next ones."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from distill.checkpoint.outputs import read_logits
from distill.errors import InputError
from distill.eval_mode import eval_mode


class _AppendToBuffer(torch.autograd.Function):
    """Writes tensors after the first `start` positions of a buffer; returns all up to their end, with a gradient."""

    @staticmethod
    def forward(ctx: Any, latest: Tensor, buffer: Tensor, start: int) -> Tensor:
        """Returns a view of the buffer."""
        ctx.start, end = start, start + latest.shape[-2]
        buffer[..., start:end, :].copy_(latest)
        return buffer[..., :end, :]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Returns the gradient of what was written."""
        return gradients[0][..., ctx.start :, :], None, None


class _FullKeys(DynamicLayer):
    """Keys and values of a layer that attends to all earlier tokens.

    All positions of a text have room in two buffers, which attention reads: a copy of the earlier ones in each chunk
    would take as much again. `update` may be called twice, as by activation checkpointing: what it writes becomes a
    part of the earlier tokens in `advance`.

    Args:
        room: Positions of a text.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.latest: tuple[Tensor, Tensor] | None = None
        self.buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns keys and values with the earlier ones, which have no gradient, in front of them."""
        self.latest = key_states.detach(), value_states.detach()
        if self.keys is None or self.values is None:
            return key_states, value_states
        return self.join(key_states, value_states)

    def join(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the earlier keys and values followed by these."""
        assert self.keys is not None
        assert self.buffers is not None
        start = self.keys.shape[-2]
        return _AppendToBuffer.apply(keys, self.buffers[0], start), _AppendToBuffer.apply(
            values, self.buffers[1], start
        )

    def keep(self, keys: Tensor, values: Tensor) -> None:
        """Adds keys and values to the earlier ones; the buffers already contain them, except in the first call."""
        end = keys.shape[-2] + (0 if self.keys is None else self.keys.shape[-2])
        if self.buffers is None:
            self.buffers = self._hold(keys), self._hold(values)
        self.keys, self.values = (buffer[..., :end, :] for buffer in self.buffers)

    def _hold(self, first: Tensor) -> Tensor:
        buffer = first.new_empty((*first.shape[:-2], self.room, first.shape[-1]))
        buffer[..., : first.shape[-2], :] = first
        return buffer

    def advance(self) -> None:
        """Adds the latest tokens to the earlier ones.

        Raises:
            InputError: The layer wasn't computed, as one that is dropped at random.
        """
        if self.latest is None:
            raise InputError(
                "train.backward_window: expected every layer to be computed in every chunk, found one that wasn't: "
                "its earlier keys and values would be missing"
            )
        self.keep(*self.latest)
        assert self.keys is not None
        self.dtype, self.device = self.keys.dtype, self.keys.device
        self.latest, self.is_initialized = None, True

    def select_rows(self, rows: Tensor) -> None:
        """Forgets all rows but these, int64 [rows]."""
        if self.keys is None or self.values is None:
            return
        rows, end = rows.to(self.keys.device), self.keys.shape[-2]
        if self.buffers is None:
            self.keys, self.values = self.keys[rows], self.values[rows]
            return
        keys, values = (buffer[rows] for buffer in self.buffers)
        self.buffers, self.keys, self.values = (keys, values), keys[..., :end, :], values[..., :end, :]


class _SlidingKeys(_FullKeys, DynamicSlidingWindowLayer):
    """Keys and values of a layer that attends to a window of tokens."""

    def __init__(self, sliding_window: int):
        DynamicSlidingWindowLayer.__init__(self, sliding_window)
        self.latest, self.buffers, self.window = None, None, sliding_window

    def join(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns copies: the first positions are forgotten, so that a buffer would have to be moved."""
        assert self.keys is not None
        assert self.values is not None
        return torch.cat([self.keys, keys], -2), torch.cat([self.values, values], -2)

    def keep(self, keys: Tensor, values: Tensor) -> None:
        """Makes keys and values earlier ones, and forgets those that no later token reads."""
        if self.keys is not None:
            keys, values = self.join(keys, values)
        first = max(0, keys.shape[-2] - self.window + 1)
        self.keys, self.values = (each[..., first:, :].clone() if first else each for each in (keys, values))

    def advance(self) -> None:
        """Adds the latest tokens to the earlier ones, and counts them."""
        length = 0 if self.latest is None else self.latest[0].shape[-2]
        super().advance()
        self.cumulative_length += length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the length and the offset of the keys."""
        return DynamicSlidingWindowLayer.get_mask_sizes(self, query_length)

    def get_seq_length(self) -> int:
        """Returns the number of earlier tokens, forgotten ones included."""
        return self.cumulative_length


class CarriedKeys(DynamicCache):
    """The keys and values of earlier tokens in all layers of a model, without gradients.

    Args:
        model: The decoder.
        room: Tokens of a text.

    Raises:
        InputError: A layer has a state of another kind.
    """

    def __init__(self, model: PreTrainedModel, room: int):
        super().__init__(config=model.config)
        self.carried: list[_FullKeys] = []
        for layer in self.layers:
            if type(layer) is DynamicSlidingWindowLayer:
                self.carried.append(_SlidingKeys(layer.sliding_window))
            elif type(layer) is DynamicLayer:
                self.carried.append(_FullKeys(room))
            else:
                raise _reject(model, f"a {type(layer).__name__}, whose state isn't keys and values")
        self.layers = list(self.carried)


class Context:
    """What models remember of the earlier tokens of a batch's rows; the entry `context` of a batch of later tokens.

    Each model has keys of its own, so that a student and its teacher can read the same batch.

    Args:
        room: Tokens of a text.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.keys: dict[PreTrainedModel, CarriedKeys] = {}
        self.mask: Tensor | None = None  # of the earlier tokens

    def add_inputs(self, model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Any]:
        """Returns the inputs of the batch's tokens with those of the earlier ones."""
        if model not in self.keys:
            self.keys[model] = CarriedKeys(model, self.room)
        batch_mask = inputs["attention_mask"]
        mask = batch_mask if self.mask is None else torch.cat([self.mask.to(batch_mask.device), batch_mask], 1)
        return inputs | {"attention_mask": mask, "past_key_values": self.keys[model], "use_cache": True}

    def select_rows(self, rows: Tensor) -> None:
        """Forgets all rows but these, int64 [rows]."""
        if self.mask is None or len(rows) == len(self.mask):
            return
        self.mask = self.mask[rows]
        for layer in self._list_layers():
            layer.select_rows(rows)

    def advance(self, mask: Tensor) -> None:
        """Makes the tokens of the batch, with their attention mask, earlier ones."""
        self.mask = mask if self.mask is None else torch.cat([self.mask, mask], 1)
        for layer in self._list_layers():
            layer.advance()

    def _list_layers(self) -> list[_FullKeys]:
        return [layer for keys in self.keys.values() for layer in keys.carried]


@contextmanager
def share_masks(batch: Mapping[str, object]) -> Iterator[None]:
    """Makes all layers share one mask within the context, which is a forward pass of a batch with a `context`.

    From a boolean mask, as sdpa gets it, torch makes numbers in each layer, and keeps them for the backward pass.
    """
    build = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

    def build_numbers(*, dtype: torch.dtype = torch.float32, **settings: Any) -> Tensor | None:
        mask = build(dtype=dtype, **settings)
        if mask is None:
            return None
        kind = mask.device.type
        wanted = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
        return torch.zeros((), dtype=wanted, device=mask.device).masked_fill(~mask, -torch.inf)

    if "context" not in batch:
        yield
        return
    ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = build_numbers
    try:
        yield
    finally:
        ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = build


@torch.no_grad()
def check_context(model: PreTrainedModel) -> None:
    """Checks that a decoder computes the same logits for a text in two parts as for the whole.

    Raises:
        InputError: The model isn't a decoder with keys and values, or the logits differ.
    """
    config = model.config.get_text_config()
    parameters = inspect.signature(model.forward).parameters
    if config.is_encoder_decoder or "past_key_values" not in parameters or not model.can_generate():
        raise _reject(model, "a model without keys and values of earlier tokens")
    ids = (torch.arange(18, device=model.device) * 7 % (config.vocab_size - 1) + 1).view(2, 9)
    mask, context = torch.ones_like(ids), Context(ids.shape[1])
    with eval_mode(model):
        whole = read_logits(model(input_ids=ids, attention_mask=mask))
        parts = []
        for span in (slice(0, 5), slice(5, 9)):
            inputs = {"input_ids": ids[:, span], "attention_mask": mask[:, span]}
            parts.append(read_logits(model(**context.add_inputs(model, inputs))))
            context.advance(mask[:, span])
    difference = (torch.cat(parts, 1) - whole).float().abs().max() / whole.float().abs().max()
    if not difference < torch.finfo(model.dtype).eps ** 0.5:
        raise _reject(model, f"logits that differ by {float(difference):.2g} of the largest in a text in two parts")


def _reject(model: PreTrainedModel, found: str) -> InputError:
    return InputError(
        f"train.backward_window: {type(model).__name__}: expected a decoder that reads earlier tokens through keys and "
        f"values alone, found {found}: it can't be trained in chunks of a document; use train.checkpointing"
    )
