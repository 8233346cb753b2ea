"""Training of a new output head on frozen features, before the whole teacher is fine-tuned."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.losses.logits import label_loss
from distill.models.inputs import INPUTS
from distill.tasks.logit_rows import OutputRows, rows_of

STEPS, RATE = 200, 3e-2


def probe_head(
    model: PreTrainedModel,
    head: nn.Linear,
    batches: Iterable[dict[str, Tensor]],
    answers: OutputRows | None = None,
    on_progress: Callable[[int], None] = lambda rows: None,
) -> None:
    """Fits `head`, the model's last linear layer, to the labels on features from one forward pass of the frozen model.

    `answers` define the rows of the logits, as in training.

    A random head would send random gradients through the body and damage its features; with a fitted head, the
    following fine-tuning preserves them and needs fewer epochs.

    Source: Kumar et al. 2022, LP-FT (arXiv 2202.10054), section 4; the probe is fitted by full-batch AdamW.
    """
    answers = answers or OutputRows()
    features, labels = collect(model, head, batches, answers, on_progress)
    with torch.enable_grad():
        optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, weight_decay=0.01)
        for _ in range(STEPS):
            loss = label_loss(answers.logits({}, head(features)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    head.zero_grad(set_to_none=True)


@torch.no_grad()
def collect(
    model: PreTrainedModel,
    head: nn.Linear,
    batches: Iterable[dict[str, Tensor]],
    answers: OutputRows,
    on_progress: Callable[[int], None],
) -> tuple[Tensor, Tensor]:
    """Returns the inputs of `head` [samples or positions, width] and the labels of the rows computed from them."""
    seen: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    labels = []
    model.eval()
    try:
        for batch in batches:
            model(**{name: batch[name].to(model.device) for name in INPUTS if name in batch})
            seen[-1] = rows_of(batch, select_label_positions(model, batch, seen[-1]), 2)
            labels.append(answers.labels(batch).to(model.device))
            on_progress(len(batch["labels"]))
    finally:
        hook.remove()
    return torch.cat(seen), torch.cat(labels)


def select_label_positions(model: PreTrainedModel, batch: dict[str, Tensor], values: Tensor) -> Tensor:
    """Returns `values` unchanged, or for a decoder's classifier those of the token that its output comes from.

    Such a classifier applies its head to every token of [batch, length, width], but outputs only the logits of the last
    token that isn't padding according to its config; the result is [batch, width].
    """
    labels = batch["labels"]
    if values.dim() < 3 or (labels.dim() > 1 and not labels.is_floating_point()):  # float labels belong to samples
        return values
    padding = model.config.get_text_config().pad_token_id
    read = batch["attention_mask"].bool() if padding is None else batch["input_ids"] != padding
    last = (read * torch.arange(read.shape[1])).argmax(1).to(values.device)
    return values[torch.arange(len(values), device=values.device), last]
