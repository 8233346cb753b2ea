"""A stock encoder that outputs one vector per text instead of logits."""

import copy
from dataclasses import dataclass
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from distill.checkpoint.config import load_config
from distill.checkpoint.custom_models.modeling_token_vectors import TokenVectorsConfig, TokenVectorsSentenceModel
from distill.checkpoint.sentence_folder import read_form, read_projections, write_form
from distill.checkpoint.sentence_form import SentenceForm, get_form, set_form
from distill.errors import InputError

_ACTIVATIONS = {"Identity": nn.Identity(), "Tanh": nn.Tanh(), "ReLU": nn.ReLU(), "GELU": nn.GELU()}


@dataclass
class SentenceOutput(ModelOutput):
    """Model output: `logits` [batch, width] are the vectors of the texts, `hidden_states` those of the stock class."""

    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


def pool_states(states: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """Returns one vector per text [batch, width], pooled from its tokens' states [batch, length, width].

    `mask` [batch, length] is 1 at tokens; padding may be on either side.
    """
    if pooling == "mean":
        shares = mask[..., None].to(states.dtype)
        return (states * shares).sum(1) / shares.sum(1).clamp(min=1e-9)
    if pooling == "max":
        return states.masked_fill(mask[..., None] == 0, -torch.inf).amax(1)
    # Maxima of products instead of argmax, which ONNX Runtime lacks for integers.
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = mask.shape[1] - 1  # len(positions) would fix the length of an exported graph
    position = last - (mask * (last - positions)).amax(1) if pooling == "cls" else (mask * positions).amax(1)
    return states.gather(1, position[:, None, None].expand(-1, 1, states.shape[-1])).squeeze(1)


class PooledModel(PreTrainedModel):
    """Mixin for a stock body that adds the pooling, projections and normalization of a `SentenceForm`.

    The body's weights keep their names. Models are loaded and built by `PooledModel.from_pretrained` and
    `PooledModel.from_config`, as by an auto class; their class is derived from the body's class, and the config stores
    the form under `sentence`. `save_pretrained` writes the stock checkpoint and the additional files that
    `SentenceTransformer` reads. An encoder without attention, whose class pools by itself, is loaded as it is.

    A body's own pooler is retained, since these files contain it, but it is not used and never trained.
    """

    form: SentenceForm
    projections: nn.ModuleList

    def __init__(self, config: PretrainedConfig, *inputs: object, **settings: object):
        super().__init__(config, *inputs, **settings)
        self.form = get_form(config) or SentenceForm()
        widths = [config.hidden_size, *(each.width for each in self.form.projections)]
        self.projections = nn.ModuleList(
            nn.Linear(width, each.width, bias=each.bias)
            for width, each in zip(widths, self.form.projections, strict=False)
        )
        # In the checkpoint's own file other loaders would report them as unexpected weights.
        separate = {name for name, _ in self.named_parameters() if name.startswith("projections.")}
        self._keys_to_ignore_on_save = {*(self._keys_to_ignore_on_save or ()), *separate}
        self._keys_to_ignore_on_load_missing = {*(self._keys_to_ignore_on_load_missing or ()), r"^projections\."}
        self.requires_grad_()

    @classmethod
    def from_config(cls, config: PretrainedConfig, **settings: object) -> "PooledModel":
        """Builds a new model with the body of `config`; without `sentence` in the config the tokens are mean-pooled.

        Raises:
            InputError: The config is of an encoder-decoder, or of no stock body.
        """
        model: PooledModel = find_encoder_class(config)._from_config(config, **settings)
        model.eval()
        return model

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path,
        *inputs: Any,
        config: PretrainedConfig | None = None,
        **settings: Any,
    ) -> Any:
        """Loads the checkpoint in a folder in eval mode.

        Its sentence form is read from modules.json if the folder has one, otherwise from the config.

        Returns:
            The model, or with `output_loading_info` what transformers returns then, the model first.

        Raises:
            InputError: As in `from_config` and `read_form`, or the weights of Dense modules do not fit the config.
        """
        path = Path(pretrained_model_name_or_path)
        config = load_config(path) if config is None else config
        if isinstance(config, TokenVectorsConfig):
            return TokenVectorsSentenceModel.from_pretrained(path, *inputs, config=config, **settings)
        set_form(config, read_form(path) or get_form(config) or SentenceForm())
        if cls is PooledModel:
            return derive_pooled_class(config).from_pretrained(path, *inputs, config=config, **settings)
        loaded = super().from_pretrained(path, *inputs, config=config, **settings)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        try:
            for projection, weights in zip(model.projections, read_projections(path), strict=True):
                projection.load_state_dict(weights)
        except (ValueError, RuntimeError) as error:
            raise InputError(
                f"model {str(path)!r}: expected weights of Dense modules as in its config, found others: {error}"
            ) from error
        model.requires_grad_().eval()
        return loaded

    def save_pretrained(self, save_directory: str | PathLike[str], *inputs: Any, **settings: Any) -> None:
        """Writes the stock checkpoint and the files of `SentenceTransformer` to the folder `save_directory`."""
        super().save_pretrained(save_directory, *inputs, **settings)
        weights = [
            {name: tensor.detach().cpu() for name, tensor in projection.state_dict().items()}
            for projection in self.projections
        ]
        write_form(self.form, self.config.hidden_size, weights, Path(save_directory))

    def requires_grad_(self, requires_grad: bool = True) -> "PooledModel":
        """Enables or disables gradients of all parameters, except that the body's own pooler never gets gradients."""
        super().requires_grad_(requires_grad)
        # With DDP, processes would wait for gradients that are never computed.
        pooler = getattr(self, "pooler", None)
        if isinstance(pooler, nn.Module):
            pooler.requires_grad_(False)
        return self

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool = False,
        **inputs: object,
    ) -> SentenceOutput:
        """Returns the vectors of the texts `input_ids` [batch, length]."""
        out = super().forward(
            input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=output_hidden_states, **inputs
        )
        states = out.last_hidden_state
        mask = torch.ones(states.shape[:2], dtype=torch.long, device=states.device)
        vectors = pool_states(states, mask if attention_mask is None else attention_mask, self.form.pooling)
        for linear, each in zip(self.projections, self.form.projections, strict=True):
            vectors = _ACTIVATIONS[each.activation](linear(vectors))
        if self.form.normalize:
            vectors = nn.functional.normalize(vectors, dim=-1)
        return SentenceOutput(logits=vectors, hidden_states=out.hidden_states if output_hidden_states else None)


def get_stock_body(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the stock body of a `PooledModel`, with the same weights, and any other model unchanged."""
    if not isinstance(model, PooledModel):
        return model
    body = copy.copy(model)
    body.__class__ = AutoModel._model_mapping[type(model.config)]  # type: ignore[assignment]
    body._modules = {name: module for name, module in model._modules.items() if name != "projections"}
    return body


def find_encoder_class(config: PretrainedConfig) -> Any:
    """Returns the class of a config's sentence encoder: a `PooledModel`, or that of encoders without attention.

    Raises:
        InputError: As in `derive_pooled_class`.
    """
    return TokenVectorsSentenceModel if isinstance(config, TokenVectorsConfig) else derive_pooled_class(config)


def derive_pooled_class(config: PretrainedConfig) -> type[PooledModel]:
    """Returns the `PooledModel` class for a config's body.

    Raises:
        InputError: The config is of an encoder-decoder, or of no stock body.
    """
    body = AutoModel._model_mapping.get(type(config), None)
    if not isinstance(body, type) or getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"model of type {config.model_type!r}: expected a stock model with one vector per token, found "
            f"{'an encoder-decoder' if isinstance(body, type) else 'a type without a stock model'}"
        )
    return _derive_class(body)


@cache
def _derive_class(body: type[PreTrainedModel]) -> type[PooledModel]:
    # Under the body's name: saved checkpoints contain the class name, and only the body's is a stock class.
    return type(body.__name__, (PooledModel, body), {"config_class": body.config_class})


def check_projections(folder: Path, config: PretrainedConfig) -> None:
    """Checks the weights of the Dense modules of the sentence encoder in `folder`.

    Raises:
        InputError: The weights of a Dense module are missing, have a different shape, are integers or are not finite.
    """
    form, width = read_form(folder) or SentenceForm(), int(config.hidden_size)
    for number, (each, weights) in enumerate(zip(form.projections, read_projections(folder), strict=True), 1):
        expected = {"weight": [each.width, width]} | ({"bias": [each.width]} if each.bias else {})
        found = {name: list(tensor.shape) for name, tensor in weights.items()}
        if found != expected:
            raise InputError(
                f"model {str(folder)!r}: expected weights {expected} of Dense module {number} as in its config, found "
                f"{found}: texts would get other vectors"
            )
        invalid = [name for name, each in weights.items() if not (each.is_floating_point() and each.isfinite().all())]
        if invalid:
            raise InputError(
                f"model {str(folder)!r}: expected finite floating-point numbers in Dense module {number}, found others "
                f"in {', '.join(invalid)}: every vector would be wrong"
            )
        width = each.width
