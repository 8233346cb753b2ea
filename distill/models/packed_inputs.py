"""Model inputs of packed rows: positions that restart, and masks that restrict attention to each document."""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.data.batches.packing import PackedRows
from distill.data.batches.token_blocks import LanguageBlocks
from distill.errors import InputError

Attention = dict[str, Tensor] | Tensor
KINDS = ("full_attention", "sliding_attention")  # supported values of `layer_types` in configs


def packed_inputs(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the inputs of a packed batch for `model`, whose output for each document then equals its output for that
    document alone.

    Document boundaries are 4-D attention masks. `position_ids` alone are not enough: transformers (5.23,
    `masking_utils`) detects packed positions in causal models only, and not when the key-value cache is used, which is
    the default of configs; documents would then attend to each other without any warning.

    Args:
        model: A decoder or an encoder whose layers use full or sliding-window attention.
        batch: input_ids, position_ids and documents, int64 [batch, length] each, as collated by `PackedRows`.

    Returns:
        input_ids, position_ids with the offset of the model family, attention_mask [batch, 1, length, length] or one
        mask per kind of layer, and token_type_ids if the batch contains them.

    Raises:
        InputError: The documents of a row can't be separated in this model; the message gives the reason.
    """
    config: Any = model.config.get_text_config()
    check_family(model, config)
    causal = is_causal(model)
    inputs: dict[str, Any] = {name: batch[name] for name in ("input_ids", "token_type_ids") if name in batch}
    inputs["position_ids"] = batch["position_ids"] + first_position(model)
    same = batch["documents"][:, :, None] == batch["documents"][:, None, :]  # padding counts as a separate document
    masks = {
        kind: as_attention(document_mask(same, causal, config.sliding_window if kind != KINDS[0] else None), model)
        for kind in layer_kinds(config)
    }
    apart = len(masks) > 1 or (KINDS[1] in masks and getattr(config, "layer_types", None))
    inputs["attention_mask"] = masks if apart else next(iter(masks.values()))
    return inputs


def document_mask(same: Tensor, causal: bool, window: int | None) -> Tensor:
    """Returns which positions attend to which: bool [batch, 1, length, length], rows are queries and columns keys.

    Args:
        same: Whether two positions belong to the same document [batch, length, length].
        causal: Whether positions attend only to themselves and earlier positions.
        window: In a causal model the number of visible positions including the query's own, otherwise the maximum
            distance.
    """
    places = torch.arange(same.shape[-1], device=same.device)
    back = places[:, None] - places  # equals the distance within a document, whose positions are contiguous
    allowed = same & (back >= 0) if causal else same
    if window is not None:
        allowed = allowed & (back < window if causal else back.abs() <= window)
    return allowed[:, None]


def as_attention(allowed: Tensor, model: PreTrainedModel) -> Tensor:
    """Returns the mask in the form of the model's attention implementation: boolean for sdpa, additive for eager."""
    if model.config._attn_implementation == "sdpa":
        return allowed
    none = torch.zeros((), dtype=model.dtype, device=allowed.device)
    return torch.where(allowed, none, torch.finfo(model.dtype).min)


def layer_kinds(config: Any) -> tuple[str, ...]:
    """Returns the distinct kinds of attention among the layers."""
    named = tuple(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    return named or ((KINDS[1],) if getattr(config, "sliding_window", None) else (KINDS[0],))


def check_family(model: PreTrainedModel, config: Any) -> None:
    name = f"packing: {type(model).__name__}"
    other = [kind for kind in layer_kinds(config) if kind not in KINDS]
    if other:
        raise InputError(
            f"{name}: expected layers of {' or '.join(KINDS)}, found {', '.join(other)}: "
            "what such a layer keeps of one document would reach the next; train it unpacked"
        )
    if getattr(config, "trigram_input", False):
        raise InputError(
            f"{name}: expected embeddings of single tokens, found trigram_input: the last token of a document would be "
            "part of the next one's first; train it unpacked"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise InputError(
            f"{name}: expected attention that looks back only, found use_bidirectional_attention, which counts its "
            "window in another way: its edge would be in the wrong place; train it unpacked"
        )
    if config.is_encoder_decoder or "position_ids" not in inspect.signature(model.forward).parameters:
        raise InputError(
            f"{name}: expected a decoder or an encoder that takes position_ids, found one that counts positions by "
            "itself: it would count on over the end of a document; train it unpacked"
        )
    implementation = model.config._attn_implementation
    if implementation not in ("eager", "sdpa"):
        raise InputError(
            f"{name}: expected attention eager or sdpa, found {implementation}: its kernels take no mask that keeps "
            "documents apart; load the model with attn_implementation='sdpa'"
        )


def is_causal(model: PreTrainedModel) -> bool:
    """Returns whether the model's attention is causal, according to the `is_causal` attributes of its modules.

    Raises:
        InputError: No module has the attribute, or the modules disagree.
    """
    said = {getattr(module, "is_causal", None) for module in model.modules()} & {True, False}
    if len(said) != 1:
        found = "both in its modules" if said else "no module that says so"
        raise InputError(
            f"packing: {type(model).__name__}: expected attention that is causal or isn't, found {found}: "
            "its mask can't be told; train it unpacked"
        )
    return bool(said.pop())


def first_position(model: PreTrainedModel) -> int:
    """Returns the id of a text's first position: the padding id plus 1 in RoBERTa-like models, otherwise 0."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            return int(module.padding_idx) + 1  # type: ignore[arg-type]
    return 0


@torch.no_grad()
def check_packing(model: PreTrainedModel) -> None:
    """Checks an untested model family by comparing its outputs for two short documents packed into one row with those
    for each document alone.

    Raises:
        InputError: As `packed_inputs`; or the output for a document depends on the other document or on its place in
            the row.
    """
    rng = np.random.default_rng(0)
    vocabulary = model.config.get_text_config().vocab_size
    first, second, other = (rng.integers(min(5, vocabulary - 1), vocabulary, size) for size in (9, 7, 9))
    rows = PackedRows(LanguageBlocks([first, second, other]), [np.array([0, 1]), np.array([2, 1])])
    batch = {name: value.to(model.device) for name, value in rows.collate([0, 1], 0).items()}
    training = model.training
    model.eval()
    try:
        packed = model(**packed_inputs(model, batch))[0].float()
        alone = [model(input_ids=torch.as_tensor(ids[None]).to(model.device))[0].float() for ids in (first, second)]
    finally:
        model.train(training)
    scale = packed.abs().max()
    step = torch.finfo(model.dtype).eps
    leak = (packed[0, 9:] - packed[1, 9:]).abs().max() / scale
    moved = (packed[0] - torch.cat(alone, 1)[0]).abs().max() / scale
    if not (leak < 100 * step and moved < step**0.5):  # rounding is the same for equal shapes only
        raise InputError(
            f"packing: {type(model).__name__}: expected the answer that a document gets alone, found one that differs "
            f"by {float(max(leak, moved)):.2g} of the largest logit: documents of a row would learn from each other; "
            "train it unpacked"
        )
