"""A transformers model of which parts were removed: layers, heads, feed-forward units or hidden coordinates.

Stillroom ships this file beside the weights of models that no stock class can express, such as one with another number
of heads in each layer. It needs torch and transformers only. `PrunedBertForSequenceClassification` is the stock
BertForSequenceClassification, built as it was before pruning and then cut to the sizes that its config records, so that
everything that depends on a layer's place, its head width or its rotary angles stays what it was. The classes are made
when they are asked for: `Pruned` before the name of any stock model or config. `config.pruned` holds

    dense           settings of the stock config before pruning, where they differ from those of the pruned model
    stack           name of the module list that holds the layers
    layers          numbers of the layers that stay
    shapes          name of a parameter -> its size in each dimension, null where the class has it already
    attributes      name of a module -> numbers that it holds, such as its number of heads
    embedding_rank  columns of the word table, which a projection takes to the width of the model; 0 for a whole table
"""

# mypy: ignore-errors
# The bases of these classes are only known when they are made.

import copy
import re

import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

PREFIX = "Pruned"


def dense_config(config):
    """The stock config with the sizes from before pruning; vocabulary and labels are those of the pruned model."""
    settings = copy.deepcopy(config.to_dict() | config.pruned["dense"])
    for name in ("pruned", "auto_map", "model_type", "architectures"):
        settings.pop(name, None)
    dense = type(config).stock.from_dict(settings)
    dense._attn_implementation_internal = config._attn_implementation_internal
    return dense


class PrunedModel:
    """Comes before a stock class among the bases of a pruned one."""

    def __init__(self, config, *args, **kwargs):
        dense = dense_config(config)
        super().__init__(dense, *args, **kwargs)
        factorize(self, config.pruned.get("embedding_rank", 0))
        drop_layers(self, config.pruned["stack"], config.pruned["layers"])
        for name, shape in config.pruned["shapes"].items():
            resize(self, name, shape)
        for name, numbers in config.pruned["attributes"].items():
            vars(self.get_submodule(name)).update(numbers)
        config._attn_implementation_internal = dense._attn_implementation_internal
        for module in self.modules():
            if type(getattr(module, "config", None)) is type(dense):
                module.config = config
        self.tie_weights(recompute_mapping=False)


class LowRankEmbedding(nn.Embedding):
    """A table of words [words, rank] whose rows are projected to the width of the model."""

    def __init__(self, words, rank, width, padding_idx=None, **made):
        super().__init__(words, rank, padding_idx=padding_idx, **made)
        self.projection = nn.Linear(rank, width, bias=False, **made)

    def forward(self, input):
        return self.projection(super().forward(input))


def factorize(model, rank):
    """Puts factors in the place of the word table, where there is a rank; the checkpoint says what they hold."""
    if rank:
        old = model.get_input_embeddings()
        words, width = old.weight.shape
        made = {"device": old.weight.device, "dtype": old.weight.dtype}
        model.set_input_embeddings(LowRankEmbedding(words, rank, width, old.padding_idx, **made))


def drop_layers(model, stack, layers):
    """Keeps the layers with the numbers `layers`; their places in a cache of keys and values are counted anew."""
    old = model.get_submodule(stack)
    kept = nn.ModuleList(old[i] for i in layers)
    parent, _, name = stack.rpartition(".")
    setattr(model.get_submodule(parent), name, kept)
    for place, layer in enumerate(kept):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = place


def resize(model, name, shape):
    """Cuts a parameter to `shape`; what its coordinates hold is overwritten by the checkpoint."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    old = getattr(module, attribute)
    cut = old.detach()[tuple(slice(size) for size in shape)].clone()
    setattr(module, attribute, nn.Parameter(cut, requires_grad=old.requires_grad))
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = module.weight.shape
    elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        module.normalized_shape = tuple(module.weight.shape)
    elif isinstance(module, Conv1D):
        module.nx, module.nf = module.weight.shape


def auto_class(stock):
    """Name of the auto class that loads the stock class, such as AutoModelForSequenceClassification."""
    task = re.search(r"(For[A-Z]\w+|LMHeadModel)$", stock.__name__)
    if task is None:
        return "AutoModel"
    return f"AutoModel{task[0]}" if task[0] != "LMHeadModel" else "AutoModelForCausalLM"


def config_class(stock):
    """The stock config under a model_type of its own, so that no stock model can be built from it by mistake."""

    class PrunedConfig(stock):
        model_type = f"pruned_{stock.model_type}"

        def validate(self):
            """The sizes from before pruning must be valid; of those of now, heads need not divide the hidden size."""
            if getattr(self, "pruned", None):
                dense_config(self).validate()

    PrunedConfig.__name__ = PrunedConfig.__qualname__ = f"{PREFIX}{stock.__name__}"
    PrunedConfig.stock = stock
    PrunedConfig.register_for_auto_class()
    return PrunedConfig


def model_class(stock):
    """The stock model with PrunedModel before it."""
    config = getattr_here(f"{PREFIX}{stock.config_class.__name__}")
    content = {"__module__": __name__, "config_class": config, "stock": stock, "__doc__": PrunedModel.__doc__}
    made = type(f"{PREFIX}{stock.__name__}", (PrunedModel, stock), content)
    made.register_for_auto_class(auto_class(stock))
    return made


def getattr_here(name):
    """The pruned class `name`, made the first time it's asked for."""
    if name in globals():
        return globals()[name]
    stock = getattr(transformers, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
    if not isinstance(stock, type):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = config_class(stock) if issubclass(stock, transformers.PreTrainedConfig) else model_class(stock)
    return globals()[name]


__getattr__ = getattr_here
