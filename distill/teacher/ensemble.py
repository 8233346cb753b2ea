"""Several classifiers as one teacher: a checkpoint whose logits are those of the mixture of their answers."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from distill.losses.teachers import by_confidence, by_weight, mixture

READ = (  # of the first one
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "pad_token_id", "type_vocab_size",
    "max_position_embeddings",
)  # fmt: skip


class EnsembleConfig(PretrainedConfig):
    """
    Args:
        members: Configs of the classifiers, with `model_type`.
        weights: How much each counts.
        mix: `weighted`, or `confidence`: in each text the surer ones count more.
        sharpness: Of `confidence`: how much more, a nat of entropy.
        mix_temperature: At which the answers are mixed; the logits belong to it.
    """

    model_type = "stillroom-ensemble"

    def __init__(
        self,
        members: Sequence[dict[str, Any]] = (),
        weights: Sequence[float] = (),
        mix: str = "weighted",
        sharpness: float = 1.0,
        mix_temperature: float = 1.0,
        **more: Any,
    ):
        super().__init__(**more)
        self.members, self.weights = list(members), list(weights)
        self.mix, self.sharpness, self.mix_temperature = mix, sharpness, mix_temperature


class Ensemble(PreTrainedModel):
    """Classifiers that read the same inputs and have the same labels in the same order."""

    config_class = EnsembleConfig
    base_model_prefix = "members"

    def __init__(self, config: EnsembleConfig):
        super().__init__(config)
        configs = [AutoConfig.for_model(**each) for each in config.members]
        self.members = nn.ModuleList(AutoModelForSequenceClassification.from_config(each) for each in configs)
        self.post_init()

    @classmethod
    def of(cls, models: Sequence[PreTrainedModel], **settings: Any) -> "Ensemble":
        """The models as one; `settings` are those of `EnsembleConfig`."""
        first = models[0].config
        read = {name: getattr(first, name) for name in READ if hasattr(first, name)}
        config = EnsembleConfig(
            [model.config.to_dict() for model in models], id2label=first.id2label, label2id=first.label2id,
            **read, **settings,
        )  # fmt: skip
        made = cls(config)
        for own, model in zip(made.members, models, strict=True):
            own.load_state_dict(model.state_dict())
        return made.eval()

    def forward(self, **inputs: Any) -> SequenceClassifierOutput:
        answers = [member(**inputs).logits for member in self.members]
        return SequenceClassifierOutput(logits=self.mixed(answers))

    def mixed(self, answers: Sequence[Tensor]) -> Tensor:
        """[batch, classes]"""
        own = self.config
        if own.mix == "confidence":
            shares = by_confidence(answers, own.weights, sharpness=own.sharpness)
        else:
            shares = by_weight(answers, own.weights)
        return mixture(answers, shares, temperature=own.mix_temperature)

    def _init_weights(self, module: nn.Module) -> None:
        """Members are never without weights of their own."""


def register() -> None:
    """Lets the auto classes of this process load an ensemble."""
    AutoConfig.register(EnsembleConfig.model_type, EnsembleConfig, exist_ok=True)
    AutoModelForSequenceClassification.register(EnsembleConfig, Ensemble, exist_ok=True)
