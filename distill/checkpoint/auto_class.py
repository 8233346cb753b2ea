"""The interface of the classes that load and build models; torch isn't imported here."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class AutoClass(Protocol):
    """An auto class of transformers such as `AutoModelForCausalLM`, or `PooledModel`."""

    def from_config(self, config: "PretrainedConfig", **settings: object) -> "PreTrainedModel":
        """Builds a new model of the class that fits the config."""

    def from_pretrained(self, pretrained_model_name_or_path: Path | str, **settings: Any) -> Any:
        """Loads the model in a folder; with `output_loading_info`, a pair of the model and transformers' report."""
