"""Several classifiers as one teacher: a checkpoint whose logits are those of the mixture of their predictions."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from distill.losses.teachers import confidence_weights, constant_weights, mix_logits

_COPIED_FIELDS = (  # config fields copied from the first member
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "pad_token_id", "type_vocab_size",
    "max_position_embeddings",
)  # fmt: skip


class EnsembleConfig(PretrainedConfig):
    """Configuration of an `Ensemble`.

    Args:
        members: Configs of the classifiers, with `model_type`.
        weights: Weight of each classifier.
        mix: `weighted`, or `confidence`, which for each text gives more weight to the more confident classifiers.
        sharpness: For `confidence`: how strongly a classifier's weight falls with its entropy, per nat.
        mix_temperature: Temperature at which the predictions are mixed; the logits are valid at it.
    """

    model_type = "stillroom-ensemble"

    def __init__(
        self,
        members: Sequence[dict[str, Any]] = (),
        weights: Sequence[float] = (),
        mix: str = "weighted",
        sharpness: float = 1.0,
        mix_temperature: float = 1.0,
        **settings: Any,
    ):
        super().__init__(**settings)
        self.members, self.weights = list(members), list(weights)
        self.mix, self.sharpness, self.mix_temperature = mix, sharpness, mix_temperature


class Ensemble(PreTrainedModel):
    """Classifiers with the same inputs and the same labels in the same order.

    Source: You et al. 2017 (doi 10.1145/3097983.3098135), section 3.2; see `distill.losses.teachers`.
    """

    config_class = EnsembleConfig
    base_model_prefix = "members"

    def __init__(self, config: EnsembleConfig):
        super().__init__(config)
        configs = [AutoConfig.for_model(**each) for each in config.members]
        self.members = nn.ModuleList(AutoModelForSequenceClassification.from_config(each) for each in configs)
        self.post_init()

    @classmethod
    def from_models(cls, models: Sequence[PreTrainedModel], **settings: Any) -> "Ensemble":
        """Builds an ensemble with the models' weights, in eval mode; `settings` are those of `EnsembleConfig`."""
        first = models[0].config
        copied = {name: getattr(first, name) for name in _COPIED_FIELDS if hasattr(first, name)}
        config = EnsembleConfig(
            [model.config.to_dict() for model in models], id2label=first.id2label, label2id=first.label2id,
            **copied, **settings,
        )  # fmt: skip
        ensemble = cls(config)
        for member, model in zip(ensemble.members, models, strict=True):
            member.load_state_dict(model.state_dict())
        ensemble.eval()
        return ensemble

    def forward(self, **inputs: object) -> SequenceClassifierOutput:
        """Returns the logits of the mixture [batch, classes]; the inputs are those of the members."""
        logits: list[Tensor] = [member(**inputs).logits for member in self.members]
        config = self.config
        if config.mix == "confidence":
            weights = confidence_weights(logits, config.weights, sharpness=config.sharpness)
        else:
            weights = constant_weights(logits, config.weights)
        return SequenceClassifierOutput(logits=mix_logits(logits, weights, temperature=config.mix_temperature))

    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing, because members always have weights of their own."""


def register_ensemble() -> None:
    """Registers the ensemble with the auto classes of this process."""
    AutoConfig.register(EnsembleConfig.model_type, EnsembleConfig, exist_ok=True)
    AutoModelForSequenceClassification.register(EnsembleConfig, Ensemble, exist_ok=True)
