"""The loading report of a model: which weights the files lack, or have in another shape, or have in excess."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from transformers import PreTrainedModel

from distill.errors import InputError

_SHOWN = 4  # maximum number of weight names in an error message
POOLER = "pooler"


class LoadingInfo(TypedDict):
    """What `from_pretrained` returns beside the model with `output_loading_info`."""

    missing_keys: Iterable[str]
    unexpected_keys: Iterable[str]
    mismatched_keys: Iterable[tuple[str, Iterable[int], Iterable[int]]]  # name, shape in the files, in the model
    error_msgs: Iterable[str]


@dataclass(frozen=True)
class LoadReport:
    """The loading report of `from_pretrained` for a model's weights, by their names in the model.

    Args:
        model: Name of the model's class.
        head_missing: Missing weights of the head, and of the pooler if the files have none of it.
        head_reshaped: (name, shape in the files, shape in the model) of the head's weights with another shape.
        head_absent: Whether the files have no weight of the head.
        left_over: Unexpected weights in the files, outside the model's body.
        problems: Problems with the weights of the body, as text.
    """

    model: str
    head_missing: tuple[str, ...]
    head_reshaped: tuple[tuple[str, list[int], list[int]], ...]
    head_absent: bool
    left_over: tuple[str, ...]
    problems: tuple[str, ...]

    def check(self, folder: Path | str, role: str, *, new_head: bool = False) -> None:
        """Checks that all weights were loaded.

        Args:
            folder: The checkpoint, for the message.
            role: Its role in the command, for the message.
            new_head: Whether the head will be newly initialized: it may be missing or have another shape.

        Raises:
            InputError: Weights are missing or have another shape, or the files have unexpected weights in the body.
        """
        problems = list(self.problems)
        if not new_head:
            problems += _describe_missing(self.head_missing) + _describe_reshaped(self.head_reshaped)
        if problems:
            others = f"; the model has no place for {list_names(self.left_over)} in the files" if self.left_over else ""
            raise InputError(
                f"{role} {str(folder)!r}: expected the weights of a {self.model} as config.json describes it, found "
                f"{'; '.join(problems)}{others}: it would compute with random numbers in their place"
            )


def build_load_report(model: PreTrainedModel, info: LoadingInfo) -> LoadReport:
    """Builds the loading report of `model`, with the weights of body and head separated."""
    missing, unexpected = _sort_naturally(info["missing_keys"]), _sort_naturally(info["unexpected_keys"])
    reshaped = sorted((name, list(stored), list(expected)) for name, stored, expected in info["mismatched_keys"])
    prefix, heads = _body_prefix(model), _head_names(model)
    optional = heads | (_pooler_names(model) if _lacks_pooler(model, missing, unexpected) else set())
    body_missing = [name for name in missing if name not in optional]
    body_unexpected = [name for name in unexpected if _is_of_body(name, model)]
    problems = [
        *_describe_missing(body_missing, _describe_layer_counts(body_missing, model)),
        *_describe_reshaped([each for each in reshaped if each[0].startswith(prefix)]),
        *(
            [f"{len(body_unexpected)} in the files that it has no place for ({list_names(body_unexpected)})"]
            if body_unexpected
            else []
        ),
        *info["error_msgs"],
    ]
    return LoadReport(
        type(model).__name__,
        head_missing=tuple(name for name in missing if name in optional),
        head_reshaped=tuple(each for each in reshaped if not each[0].startswith(prefix)),
        head_absent=bool(heads) and heads <= set(missing),
        left_over=tuple(name for name in unexpected if name not in body_unexpected),
        problems=tuple(problems),
    )


def describe_missing_head(report: LoadReport) -> str:
    """Describes a checkpoint whose files have no weights of the head that its config names."""
    others = f", but {list_names(report.left_over)}" if report.left_over else ""
    return f"the files have no weights of its head ({list_names(report.head_missing)}){others}"


def list_names(names: Iterable[str]) -> str:
    """Returns names as text: the first ones, and how many more there are."""
    listed = list(names)
    return ", ".join(listed[:_SHOWN]) + (f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else "")


def _body_prefix(model: PreTrainedModel) -> str:
    """Returns the prefix of the names of the body's weights; empty if the model is a body itself."""
    return "" if model.base_model is model else f"{model.base_model_prefix}."


def _head_names(model: PreTrainedModel) -> set[str]:
    return {name for name in model.state_dict() if not name.startswith(_body_prefix(model))}


def _pooler_names(model: PreTrainedModel) -> set[str]:
    """Returns the weights of an encoder's pooler, the layer on the first token that only heads on whole texts use."""
    return {name for name in model.state_dict() if name.startswith(f"{_body_prefix(model)}{POOLER}.")}


def _lacks_pooler(model: PreTrainedModel, missing: Iterable[str], unexpected: Iterable[str]) -> bool:
    """Returns whether the files have no weight of a pooler, as for masked language models."""
    return _pooler_names(model) <= set(missing) and not any(POOLER in name.split(".") for name in unexpected)


def _is_of_body(name: str, model: PreTrainedModel) -> bool:
    """Returns whether a weight that only the files have belongs to a module of the body; the prefix may be missing."""
    body = model.base_model
    body_children = {child for child, _ in body.named_children()}
    head_children = {child for child, _ in model.named_children()} if body is not model else set()
    part = name.removeprefix(f"{model.base_model_prefix}.").partition(".")[0]
    has_prefix = name.startswith(f"{model.base_model_prefix}.")
    return part in body_children and (has_prefix or part not in head_children)


def _sort_naturally(names: Iterable[str]) -> list[str]:
    """Sorts names, comparing the numbers in them numerically."""
    return sorted(map(str, names), key=lambda name: [part.zfill(8) for part in re.split(r"(\d+)", name)])


def _describe_missing(names: Iterable[str], reason: str = "") -> list[str]:
    listed = list(names)
    return [f"{len(listed)} missing ({list_names(listed)}){reason}"] if listed else []


def _describe_reshaped(reshaped: Iterable[tuple[str, list[int], list[int]]]) -> list[str]:
    each = [f"{name}: {stored} in the files, {expected} in the model" for name, stored, expected in reshaped]
    return [f"{len(each)} of another shape ({list_names(each)})"] if each else []


def _describe_layer_counts(missing: Iterable[str], model: PreTrainedModel) -> str:
    """Returns a message with the number of layers in the files if entire layers are missing, else an empty string."""
    absent = set(missing)
    lists: dict[str, dict[str, bool]] = {}  # name of a list of layers -> number of a layer -> whether the files have it
    for name in model.state_dict():
        match = re.match(r"(.*?)\.(\d+)\.", name)
        if match:
            layers = lists.setdefault(match[1], {})
            layers[match[2]] = layers.get(match[2], False) or name not in absent
    for name, layers in lists.items():
        if 0 < sum(layers.values()) < len(layers):
            return f": config.json has {len(layers)} layers in {name}, the files have {sum(layers.values())}"
    return ""
