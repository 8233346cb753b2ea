"""Model inputs of packed rows: positions that restart, and masks that restrict attention to each document."""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from distill.data.batches.packing import PackedRows
from distill.data.batches.token_blocks import LanguageBlocks
from distill.errors import InputError
from distill.eval_mode import eval_mode

ModelInputs = dict[str, Any]  # tensors; the attention mask may be a dict of masks by kind of layer
HEAD_EXCHANGE = "head_exchange"  # how names of attention implementations of `distill.parallel.ulysses_attention` begin
_FULL, _SLIDING = "full_attention", "sliding_attention"  # supported values of `layer_types` in configs


def build_packed_inputs(
    model: PreTrainedModel, batch: Mapping[str, Tensor], documents: Tensor | None = None
) -> ModelInputs:
    """Returns the inputs of a packed batch with which the model separates the documents of a row.

    Its output for each document then equals its output for that document alone. Document boundaries are 4-D attention
    masks. `position_ids` alone are not enough: transformers (5.23, `masking_utils`) detects packed positions in causal
    models only, and not when the key-value cache is used, which is the default of configs; documents would then attend
    to each other without any warning.

    Args:
        model: A decoder or an encoder whose layers use full or sliding-window attention.
        batch: input_ids, position_ids and documents, int64 [batch, length] each, as collated by `PackedRows`.
        documents: Those of whole rows [batch, length of these], for a batch of a segment of their positions; the
            masks are those of whole rows then.

    Returns:
        input_ids, position_ids with the offset of the model family, attention_mask [batch, 1, length, length] or one
        mask per kind of layer, and token_type_ids if the batch contains them.

    Raises:
        InputError: The documents of a row can't be separated in this model; the message gives the reason.
    """
    config = model.config.get_text_config()
    _check_family(model, config)
    causal = _is_causal(model)
    inputs: ModelInputs = {name: batch[name] for name in ("input_ids", "token_type_ids") if name in batch}
    inputs["position_ids"] = batch["position_ids"] + find_first_position(model)
    documents = batch["documents"] if documents is None else documents
    same = documents[:, :, None] == documents[:, None, :]  # padding counts as a separate document
    masks = {
        kind: _convert_mask(
            _build_document_mask(same, causal, config.sliding_window if kind == _SLIDING else None), model
        )
        for kind in _find_layer_kinds(config)
    }
    by_kind = len(masks) > 1 or (_SLIDING in masks and getattr(config, "layer_types", None))
    inputs["attention_mask"] = masks if by_kind else next(iter(masks.values()))
    return inputs


def _build_document_mask(same: Tensor, causal: bool, window: int | None) -> Tensor:
    """Returns which positions attend to which: bool [batch, 1, length, length], rows are queries and columns keys.

    Args:
        same: Whether two positions belong to the same document [batch, length, length].
        causal: Whether positions attend only to themselves and earlier positions.
        window: In a causal model the number of visible positions including the query's own, otherwise the maximum
            distance.
    """
    positions = torch.arange(same.shape[-1], device=same.device)
    back = positions[:, None] - positions  # equals the distance within a document, whose positions are contiguous
    mask = same & (back >= 0) if causal else same
    if window is not None:
        mask = mask & (back < window if causal else back.abs() <= window)
    return mask[:, None]


def _convert_mask(mask: Tensor, model: PreTrainedModel) -> Tensor:
    """Returns the mask in the form of the model's attention implementation: additive for eager, else boolean."""
    if model.config._attn_implementation != "eager":
        return mask
    zero = torch.zeros((), dtype=model.dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(model.dtype).min)


def _find_layer_kinds(config: PretrainedConfig) -> tuple[str, ...]:
    """Returns the distinct kinds of attention among the layers."""
    named = tuple(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    return named or ((_SLIDING,) if getattr(config, "sliding_window", None) else (_FULL,))


def _check_family(model: PreTrainedModel, config: PretrainedConfig) -> None:
    name = f"packing: {type(model).__name__}"
    unsupported = [kind for kind in _find_layer_kinds(config) if kind not in (_FULL, _SLIDING)]
    if unsupported:
        raise InputError(
            f"{name}: expected layers of {_FULL} or {_SLIDING}, found {', '.join(unsupported)}: such a layer's state "
            "would carry over from one document to the next; train it unpacked"
        )
    if getattr(config, "trigram_input", False):
        raise InputError(
            f"{name}: expected embeddings of single tokens, found trigram_input: the last token of a document would be "
            "part of the next one's first; train it unpacked"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise InputError(
            f"{name}: expected causal attention, found use_bidirectional_attention, whose window is defined in another "
            "way: the edge of the window would be at the wrong position; train it unpacked"
        )
    if config.is_encoder_decoder or "position_ids" not in inspect.signature(model.forward).parameters:
        raise InputError(
            f"{name}: expected a decoder or an encoder that takes position_ids, found a model that computes them "
            "itself: positions would continue across documents; train it unpacked"
        )
    implementation = str(model.config._attn_implementation)
    if implementation not in ("eager", "sdpa") and not implementation.startswith(HEAD_EXCHANGE):
        raise InputError(
            f"{name}: expected attention eager or sdpa, found {implementation}: its kernels take no mask that "
            "separates documents; load the model with attn_implementation='sdpa'"
        )


def _is_causal(model: PreTrainedModel) -> bool:
    """Returns whether the model's attention is causal, according to the `is_causal` attributes of its modules.

    Raises:
        InputError: No module has the attribute, or the modules disagree.
    """
    values = {getattr(module, "is_causal", None) for module in model.modules()} & {True, False}
    if len(values) != 1:
        found = "both values among its modules" if values else "no module with the attribute"
        raise InputError(
            f"packing: {type(model).__name__}: expected one value of is_causal, found {found}: its attention mask is "
            "unknown; train it unpacked"
        )
    return bool(values.pop())


def find_first_position(model: PreTrainedModel) -> int:
    """Returns the id of a text's first position: the padding id plus 1 in RoBERTa-like models, otherwise 0."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            return int(module.padding_idx) + 1  # type: ignore[arg-type]
    return 0


@torch.no_grad()
def check_family_packing(model: PreTrainedModel) -> None:
    """Checks a model family by packing: two short documents in one row must get the outputs of each document alone.

    Raises:
        InputError: As in `build_packed_inputs`; or the output for a document depends on the other document or on its
            position in the row.
    """
    rng = np.random.default_rng(0)
    vocabulary = model.config.get_text_config().vocab_size
    first, second, other = (rng.integers(min(5, vocabulary - 1), vocabulary, size) for size in (9, 7, 9))
    rows = PackedRows(LanguageBlocks([first, second, other]), [np.array([0, 1]), np.array([2, 1])])
    batch = {name: value.to(model.device) for name, value in rows.collate([0, 1], 0).items()}
    with eval_mode(model):
        packed = model(**build_packed_inputs(model, batch))[0].float()
        alone = [model(input_ids=torch.as_tensor(ids[None]).to(model.device))[0].float() for ids in (first, second)]
    scale = packed.abs().max()
    step = torch.finfo(model.dtype).eps
    leak = (packed[0, 9:] - packed[1, 9:]).abs().max() / scale
    shift = (packed[0] - torch.cat(alone, 1)[0]).abs().max() / scale
    if not (leak < 100 * step and shift < step**0.5):  # rounding is the same for equal shapes only
        raise InputError(
            f"packing: {type(model).__name__}: expected the output that a document gets alone, found one that differs "
            f"by {float(max(leak, shift)):.2g} of the largest logit: documents of a row would attend to each other; "
            "train it unpacked"
        )
