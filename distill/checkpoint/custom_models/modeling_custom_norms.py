"""A transformers model whose layers have another kind of normalization than its stock class.

Stillroom ships this file beside the weights of such models. It needs torch and transformers only.
`CustomNormsBertForSequenceClassification` is the stock BertForSequenceClassification in which the norms that its config
lists are replaced; everything else is unchanged. The classes are created on first access: `CustomNorms` before the
name of any stock model or config. `config.norms` holds the name of each replaced norm, as a module of the base model,
and its kind:

    layernorm, rmsnorm   divide by the deviation or the root mean square of a token's features
    nonorm               a scale and a shift of each feature (Sun et al. 2020, MobileBERT, section 3.2)
    batchnorm            statistics of each feature over the tokens of a training batch that aren't padding, and
                         running averages of them in eval mode (Ioffe & Szegedy 2015)
    identity             nothing: scale and shift are in the weights around it
"""

# mypy: ignore-errors
# The bases of these classes are only known when they are made.

import inspect
import re

import torch
import transformers
from torch import nn

PREFIX = "CustomNorms"
SMALLEST_RMS_EPS = 1e-6  # an export to ONNX leaves out a smaller summand, and no runtime recognizes the norm
SMALLEST_EPS = 1e-5  # added to a variance over tokens, which is 0 for a feature that is constant in a batch


class RootMeanSquareNorm(nn.RMSNorm):
    """torch's RMSNorm in the steps that runtimes of exported files recognize as one operator."""

    def __init__(self, width, eps):
        super().__init__(width, eps=max(eps, SMALLEST_RMS_EPS))

    def forward(self, hidden):
        wide = hidden.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(hidden.dtype)


class NoNorm(nn.Module):
    """A scale and a shift of each feature."""

    def __init__(self, width, eps=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, hidden):
        return hidden * self.weight + self.bias


class TokenBatchNorm(nn.Module):
    """Batch normalization of each feature over the tokens of a batch that aren't padding.

    In training the statistics are those of the batch, and their running averages are updated; in eval mode the running
    averages are used. `mask` [rows, length] is that of the forward pass, set by `hand_over_mask`; None: no padding.
    """

    def __init__(self, width, eps=SMALLEST_EPS, momentum=0.1):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.eps, self.momentum, self.mask = max(eps, SMALLEST_EPS), momentum, None

    def forward(self, hidden):
        if not self.training:
            scale = self.weight * torch.rsqrt(self.running_var + self.eps)
            return hidden * scale + (self.bias - self.running_mean * scale)
        mean, variance = self.measure(hidden.float())
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance, self.momentum)
        scaled = (hidden.float() - mean) * (self.weight * torch.rsqrt(variance + self.eps)) + self.bias
        return scaled.to(hidden.dtype)

    def measure(self, hidden):
        """Mean and variance of each feature over the tokens of the mask, float32 [width]."""
        if self.mask is None:
            return hidden.mean((0, 1)), hidden.var((0, 1), correction=0)
        if self.mask.shape != hidden.shape[:2]:
            raise ValueError(f"batchnorm: expected a mask of {list(hidden.shape[:2])}, found {list(self.mask.shape)}")
        counted = self.mask.unsqueeze(-1).to(hidden.dtype)
        count = counted.sum()
        mean = (hidden * counted).sum((0, 1)) / count
        return mean, ((hidden - mean).square() * counted).sum((0, 1)) / count


NORM_CLASSES = {
    "layernorm": nn.LayerNorm,
    "rmsnorm": RootMeanSquareNorm,
    "nonorm": NoNorm,
    "batchnorm": TokenBatchNorm,
    "identity": lambda width, eps: nn.Identity(),
}


def hand_over_mask(body, args, kwargs):
    """Tells the batch norms of a body, before its forward pass in training, which tokens are padding."""
    if not body.training:
        return
    given = inspect.signature(type(body).forward).bind_partial(body, *args, **kwargs).arguments
    mask = given.get("attention_mask", given.get("kwargs", {}).get("attention_mask"))
    if mask is not None and mask.dim() != 2:
        raise ValueError(f"batchnorm: expected an attention mask [rows, length], found {list(mask.shape)}")
    for module in body.modules():
        if isinstance(module, TokenBatchNorm):
            module.mask = mask


class CustomNormsModel:
    """Comes before a stock class among the bases of one with other norms."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        body = self.base_model
        for name, kind in config.norms.items():
            replace_norm(body, name, kind, config)
        if "batchnorm" in config.norms.values():
            body.register_forward_pre_hook(hand_over_mask, with_kwargs=True)


def replace_norm(body, name, kind, config):
    """Puts a norm of another kind in the place of a norm, with its width, epsilon and dtype."""
    old = body.get_submodule(name)
    eps = getattr(old, "eps", getattr(old, "variance_epsilon", getattr(config, "layer_norm_eps", 1e-12)))
    new = NORM_CLASSES[kind](len(old.weight), eps=eps).to(old.weight.device, old.weight.dtype)
    body.set_submodule(name, new)


def auto_class(stock):
    """Name of the auto class that loads the stock class, such as AutoModelForSequenceClassification."""
    task = re.search(r"(For[A-Z]\w+|LMHeadModel)$", stock.__name__)
    if task is None:
        return "AutoModel"
    return f"AutoModel{task[0]}" if task[0] != "LMHeadModel" else "AutoModelForCausalLM"


def config_class(stock):
    """The stock config under a model_type of its own, so that no stock model can be built from it by mistake."""

    class CustomNormsConfig(stock):
        model_type = f"custom_norms_{stock.model_type}"

    CustomNormsConfig.__name__ = CustomNormsConfig.__qualname__ = f"{PREFIX}{stock.__name__}"
    CustomNormsConfig.stock = stock
    CustomNormsConfig.register_for_auto_class()
    return CustomNormsConfig


def model_class(stock):
    """The stock model with CustomNormsModel before it."""
    config = getattr_here(f"{PREFIX}{stock.config_class.__name__}")
    content = {"__module__": __name__, "config_class": config, "stock": stock, "__doc__": CustomNormsModel.__doc__}
    made = type(f"{PREFIX}{stock.__name__}", (CustomNormsModel, stock), content)
    made.register_for_auto_class(auto_class(stock))
    return made


def getattr_here(name):
    """The class `name`, created on first access."""
    if name in globals():
        return globals()[name]
    stock = getattr(transformers, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
    if not isinstance(stock, type):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = config_class(stock) if issubclass(stock, transformers.PreTrainedConfig) else model_class(stock)
    return globals()[name]


__getattr__ = getattr_here
