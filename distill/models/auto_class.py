"""The part of an auto class that builds models from configs."""

from typing import Protocol

from transformers import PretrainedConfig, PreTrainedModel


class AutoClass(Protocol):
    """An auto class of transformers such as `AutoModelForCausalLM`, or `PooledModel`."""

    def from_config(self, config: PretrainedConfig, **settings: object) -> PreTrainedModel:
        """Builds a new model of the class that fits the config."""
