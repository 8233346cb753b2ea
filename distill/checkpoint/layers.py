"""The layers of a model: where they are, and the settings in its config with one entry per layer."""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from distill.errors import InputError


def find_layer_lists(model: PreTrainedModel) -> list[str]:
    """Returns the names of the outermost `nn.ModuleList`s with `num_hidden_layers` modules.

    There are several in an encoder-decoder, and none if all layers share their weights.
    """
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists: list[str] = []
    for name, module in model.named_modules():
        is_nested = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, nn.ModuleList) and len(module) == count and not is_nested:
            lists.append(name)
    return lists


def find_layer_names(model: PreTrainedModel) -> list[str]:
    """Returns the names of the model's layers in order, those of an encoder-decoder list by list.

    Raises:
        InputError: The model has no list of layers, for example because all layers share their weights.
    """
    lists, count = find_layer_lists(model), model.config.get_text_config().num_hidden_layers
    if not lists:
        raise InputError(
            f"{type(model).__name__}: expected a list of {count} layers, found none: it can't be sharded, checkpointed "
            "or trained layer by layer"
        )
    return [f"{name}.{i}" for name in lists for i in range(count)]


def find_layer_stack(model: PreTrainedModel) -> str:
    """Returns the name of the only list of the model's layers, such as `bert.encoder.layer`.

    Raises:
        InputError: There is no such list, or more than one.
    """
    lists = find_layer_lists(model)
    if len(lists) != 1:
        count = getattr(model.config, "num_hidden_layers", None)
        raise InputError(
            f"{model.config.model_type}: expected one list of {count} layers, found {lists or 'none'}: layers can't be "
            "addressed by number"
        )
    return lists[0]


def rename_layer(name: str, stack: str, layers: Sequence[int]) -> str | None:
    """Returns the name of a weight or module once only `layers` are kept; None if it belongs to a removed layer.

    Args:
        name: Name in the model's state_dict.
        stack: Name of the module list that holds the layers, as returned by `find_layer_stack`.
        layers: Numbers of the kept layers, in the new order.
    """
    if not name.startswith(f"{stack}."):
        return name
    number, dot, rest = name[len(stack) + 1 :].partition(".")
    return f"{stack}.{layers.index(int(number))}{dot}{rest}" if int(number) in layers else None


def select_layer_settings(config: PreTrainedConfig, layers: Sequence[int]) -> None:
    """Sets the layer count, and reduces every list with one entry per layer, such as layer_types, to `layers`.

    Numbers beyond the last layer repeat the entries from the start.
    """
    count = config.num_hidden_layers
    for name, entries in list(vars(config).items()):
        if "layer" in name and isinstance(entries, list) and len(entries) == count:
            setattr(config, name, [entries[i % count] for i in layers])
    config.num_hidden_layers = len(layers)
