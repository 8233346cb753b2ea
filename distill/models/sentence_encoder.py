"""A stock encoder that answers with one vector a text in the place of logits."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from distill.checkpoint.config import load_config
from distill.checkpoint.sentence_folder import SentenceForm, form_of, read_form, read_projections, set_form, write_form
from distill.errors import InputError

APPLIED = {"Identity": nn.Identity(), "Tanh": nn.Tanh(), "ReLU": nn.ReLU(), "GELU": nn.GELU()}


@dataclass
class SentenceOutput(ModelOutput):
    """`logits` [batch, width] are the vectors of the texts; `hidden_states` as of the stock class."""

    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


def pooled(states: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """One vector a text [batch, width] of its tokens' states [batch, length, width]; `mask` [batch, length] is 1 at
    tokens, on whichever side the padding is.
    """
    if pooling == "mean":
        shares = mask[..., None].to(states.dtype)
        return (states * shares).sum(1) / shares.sum(1).clamp(min=1e-9)
    if pooling == "max":
        return states.masked_fill(mask[..., None] == 0, -torch.inf).amax(1)
    # Largest products, not argmax: ONNX Runtime has none of whole numbers.
    places = torch.arange(mask.shape[1], device=mask.device)
    last = mask.shape[1] - 1  # len(places) would fix the length of an exported graph
    place = last - (mask * (last - places)).amax(1) if pooling == "cls" else (mask * places).amax(1)
    return states.gather(1, place[:, None, None].expand(-1, 1, states.shape[-1])).squeeze(1)


class PooledModel(PreTrainedModel):
    """Mixed into a stock body: its own weights, under their own names, and what `SentenceForm` adds to them.

    Loaded and built by `PooledModel.from_pretrained` and `PooledModel.from_config`, as by an auto class; the model is
    of a class made from the body's, whose config says under `sentence` what follows it. `save_pretrained` writes the
    stock checkpoint and the files that `SentenceTransformer` reads beside it.

    A body's own pooler is kept, as these files have it, but nothing reads it, so it never learns.
    """

    form: SentenceForm
    projections: nn.ModuleList

    def __init__(self, config: PretrainedConfig, *inputs: Any, **settings: Any):
        super().__init__(config, *inputs, **settings)
        self.form = form_of(config) or SentenceForm()
        widths = [config.hidden_size, *(each.width for each in self.form.projections)]
        self.projections = nn.ModuleList(
            nn.Linear(width, each.width, bias=each.bias)
            for width, each in zip(widths, self.form.projections, strict=False)
        )
        # In the checkpoint's own file they would be left over for everyone else.
        apart = {name for name, _ in self.named_parameters() if name.startswith("projections.")}
        self._keys_to_ignore_on_save = {*(self._keys_to_ignore_on_save or ()), *apart}
        self._keys_to_ignore_on_load_missing = {*(self._keys_to_ignore_on_load_missing or ()), r"^projections\."}
        self.requires_grad_()

    @classmethod
    def from_config(cls, config: PretrainedConfig, **settings: Any) -> "PooledModel":
        """A new model of the body that `config` is of; without `sentence` in it the mean of the tokens is taken.

        Raises:
            InputError: An encoder with a decoder, or a config that no stock body has.
        """
        return pooled_class(config)._from_config(config, **settings).eval()

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, folder: str | Path, *inputs: Any, config: PretrainedConfig | None = None, **settings: Any
    ) -> Any:
        """The checkpoint in `folder`, in eval mode; what it says of sentences is in modules.json, else in its config.

        Raises:
            InputError: As `from_config` and `read_form`.
        """
        place = Path(folder)
        config = load_config(place) if config is None else config
        set_form(config, read_form(place) or form_of(config) or SentenceForm())
        if cls is PooledModel:
            return pooled_class(config).from_pretrained(place, *inputs, config=config, **settings)
        loaded: Any = super().from_pretrained(place, *inputs, config=config, **settings)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        try:
            for own, weights in zip(model.projections, read_projections(place), strict=True):
                own.load_state_dict(weights)
        except (ValueError, RuntimeError) as error:
            raise InputError(
                f"model {str(place)!r}: has other weights of Dense modules than its config says: {error}"
            ) from error
        model.requires_grad_().eval()
        return loaded

    def save_pretrained(self, save_directory: Any, *inputs: Any, **settings: Any) -> None:
        super().save_pretrained(save_directory, *inputs, **settings)
        weights = [{name: each.detach().cpu() for name, each in own.state_dict().items()} for own in self.projections]
        write_form(self.form, self.config.hidden_size, weights, Path(save_directory))

    def requires_grad_(self, requires_grad: bool = True) -> "PooledModel":
        super().requires_grad_(requires_grad)
        # Gradients that never come keep processes waiting for one another.
        unread = getattr(self, "pooler", None)
        if isinstance(unread, nn.Module):
            unread.requires_grad_(False)
        return self

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool = False,
        **inputs: Any,
    ) -> SentenceOutput:
        """Vectors of the texts `input_ids` [batch, length]."""
        out: Any = super().forward(
            input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=output_hidden_states, **inputs
        )
        states = out.last_hidden_state
        mask = torch.ones(states.shape[:2], dtype=torch.long, device=states.device)
        vectors = pooled(states, mask if attention_mask is None else attention_mask, self.form.pooling)
        for linear, each in zip(self.projections, self.form.projections, strict=True):
            vectors = APPLIED[each.activation](linear(vectors))
        if self.form.normalize:
            vectors = nn.functional.normalize(vectors, dim=-1)
        return SentenceOutput(logits=vectors, hidden_states=out.hidden_states if output_hidden_states else None)


def pooled_class(config: PretrainedConfig) -> type[PooledModel]:
    """The class for a config's body."""
    body = AutoModel._model_mapping.get(type(config), None)
    if not isinstance(body, type) or getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"model of type {config.model_type!r}: expected an encoder with one vector a token, found "
            f"{'an encoder with a decoder' if isinstance(body, type) else 'none among the stock bodies'}"
        )
    return class_over(body)


@cache
def class_over(body: type[PreTrainedModel]) -> type[PooledModel]:
    # Under the body's name: a checkpoint tells its class's name, and this one is stock.
    return type(body.__name__, (PooledModel, body), {"config_class": body.config_class})


def check_projections(folder: Path, config: PretrainedConfig) -> None:
    """
    Raises:
        InputError: Dense modules of the sentence encoder in `folder` whose weights are missing, of another shape, of
            integers or not finite.
    """
    form, width = read_form(folder) or SentenceForm(), int(config.hidden_size)
    for number, (each, weights) in enumerate(zip(form.projections, read_projections(folder), strict=True), 1):
        wanted = {"weight": [each.width, width]} | ({"bias": [each.width]} if each.bias else {})
        found = {name: list(tensor.shape) for name, tensor in weights.items()}
        if found != wanted:
            raise InputError(
                f"model {str(folder)!r}: expected weights {wanted} of Dense module {number} as its config says, found "
                f"{found}: texts would get other vectors"
            )
        wrong = [name for name, each in weights.items() if not (each.is_floating_point() and each.isfinite().all())]
        if wrong:
            raise InputError(
                f"model {str(folder)!r}: expected finite floating-point numbers in Dense module {number}, found others "
                f"in {', '.join(wrong)}: every vector would be wrong"
            )
        width = each.width
