"""Training of a new output head on frozen features, before the whole teacher is fine-tuned."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.losses.logits import label_loss
from distill.models.inputs import select_inputs
from distill.tasks.logit_rows import OutputRows, flatten_rows

_STEPS, _LEARNING_RATE = 200, 3e-2


def probe_head(
    model: PreTrainedModel,
    head: nn.Linear,
    batches: Iterable[dict[str, Tensor]],
    output_rows: OutputRows | None = None,
    on_progress: Callable[[int], None] = lambda samples: None,
) -> None:
    """Fits the model's head to the labels, on features from one forward pass of the frozen model.

    A random head would send random gradients through the body and damage its features; with a fitted head, the
    following fine-tuning preserves them and needs fewer epochs.

    Args:
        model: The model, on any device.
        head: Its last linear layer.
        batches: Padded batches with labels.
        output_rows: Defines a row of the logits, as in training.
        on_progress: Called with the number of samples of each batch.

    Source: Kumar et al. 2022, LP-FT (arXiv 2202.10054), section 4; the probe is fitted by full-batch AdamW.
    """
    output_rows = output_rows or OutputRows()
    features, labels = collect_features(model, head, batches, output_rows, on_progress)
    with torch.enable_grad():
        optimizer = torch.optim.AdamW(head.parameters(), lr=_LEARNING_RATE, weight_decay=0.01)
        for _ in range(_STEPS):
            loss = label_loss(output_rows.logits({}, head(features)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    head.zero_grad(set_to_none=True)


@torch.no_grad()
def collect_features(
    model: PreTrainedModel,
    head: nn.Linear,
    batches: Iterable[dict[str, Tensor]],
    output_rows: OutputRows,
    on_progress: Callable[[int], None],
) -> tuple[Tensor, Tensor]:
    """Returns the inputs of `head` [samples or positions, width] and the labels of the rows computed from them."""
    features: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0].clone()))
    labels = []
    model.eval()
    try:
        for batch in batches:
            model(**{name: value.to(model.device) for name, value in select_inputs(batch).items()})
            features[-1] = flatten_rows(batch, _select_label_positions(model, batch, features[-1]), 2)
            labels.append(output_rows.labels(batch).to(model.device))
            on_progress(len(batch["labels"]))
    finally:
        hook.remove()
    return torch.cat(features), torch.cat(labels)


def _select_label_positions(model: PreTrainedModel, batch: dict[str, Tensor], values: Tensor) -> Tensor:
    """Returns `values` unchanged, or for a decoder's classifier those of the token that its output comes from.

    Such a classifier applies its head to every token of [batch, length, width], but outputs only the logits of the last
    token that isn't padding according to its config; the result is [batch, width].
    """
    labels = batch["labels"]
    if values.dim() < 3 or (labels.dim() > 1 and not labels.is_floating_point()):  # float labels belong to samples
        return values
    padding = model.config.get_text_config().pad_token_id
    tokens = batch["attention_mask"].bool() if padding is None else batch["input_ids"] != padding
    last = (tokens * torch.arange(tokens.shape[1])).argmax(1).to(values.device)
    return values[torch.arange(len(values), device=values.device), last]
