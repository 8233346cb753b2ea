"""A checkpoint: a model folder that is located and checked once and then handed on; torch isn't imported here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.checkpoint.config import check_config, load_config
from distill.checkpoint.digest import hash_content
from distill.checkpoint.folder import locate_checkpoint
from distill.checkpoint.head_task import task_of_head

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Checkpoint:
    """A model folder whose files were checked; `open_checkpoint` returns one.

    What takes time is computed on first use: config, tokenizer and digest.

    Args:
        name: The checkpoint as the user named it: a folder, a hub id, or `package:NAME/FOLDER`.
        role: Its role in the command, such as teacher, for error messages.
        folder: The folder with config.json, weights and tokenizer.
        description: The content of config.json.
    """

    name: str
    role: str
    folder: Path
    description: Mapping[str, Any] = field(repr=False, hash=False)

    @property
    def architectures(self) -> list[str]:
        """Names of the model's classes; empty if config.json doesn't contain them."""
        names = self.description.get("architectures")
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    @property
    def labels(self) -> int | None:
        """Number of labels of the head; None if config.json doesn't contain it."""
        names, count = self.description.get("id2label"), self.description.get("num_labels")
        return len(names) if isinstance(names, dict) else count if isinstance(count, int) else None

    @property
    def task(self) -> str:
        """Task that the model was trained for; empty for a pre-trained model without a head, or if ambiguous."""
        problem = self.description.get("problem_type")
        return task_of_head(self.architectures, problem if isinstance(problem, str) else None, self.labels)

    @property
    def model_type(self) -> str:
        """Family of the model, such as bert."""
        return str(self.description["model_type"])

    @cached_property
    def config(self) -> "PretrainedConfig":
        """The config as an instance of its own class; copy it before changing it.

        Raises:
            InputError: The class of this model type rejects a setting.
        """
        from distill.checkpoint.custom_models import register_custom_classes

        register_custom_classes(self.folder)
        return load_config(self.folder, self.role)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the names and contents of all files in the folder."""
        return hash_content(self.folder)

    def load_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Returns a new instance of the tokenizer, because tasks change the settings of theirs.

        Raises:
            InputError: The folder contains no tokenizer, or a damaged one.
        """
        from distill.checkpoint.custom_models import register_custom_classes
        from distill.checkpoint.tokenizer import load_tokenizer

        register_custom_classes(self.folder)
        return load_tokenizer(self.folder, self.role)


def open_checkpoint(name: str, role: str) -> Checkpoint:
    """Locates a checkpoint, downloads it if it is on the hub, and checks config.json and the headers of its weights.

    Args:
        name: A folder, a hub id, or `package:NAME/FOLDER` for a checkpoint in an installed package.
        role: Its role in the command, for error messages.

    Raises:
        InputError: There is no such checkpoint, a file can't be read, config.json is invalid, or there are no weights
            in safetensors.
    """
    folder = locate_checkpoint(name, role)
    return Checkpoint(name, role, folder, check_config(folder, role))
