"""The form of a sentence encoder: how a text's vector is computed from the states of its tokens."""

from dataclasses import asdict, dataclass

from transformers import PretrainedConfig

from distill.errors import InputError

POOLINGS = ("mean", "cls", "max", "lasttoken")
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU")


@dataclass(frozen=True)
class DenseProjection:
    """A linear map of the pooled vector, followed by an element-wise activation, one of `_ACTIVATIONS`."""

    width: int
    bias: bool = True
    activation: str = "Tanh"


@dataclass(frozen=True)
class SentenceForm:
    """The computation of a text's vector from the last hidden states of its tokens.

    Args:
        pooling: `mean` of the tokens, `cls` (the first token), `max` of each coordinate, or `lasttoken`.
        projections: Projections applied after pooling.
        normalize: Whether vectors are finally divided by their Euclidean norm.
        max_length: Maximum text length in tokens that the model is meant for; None if unknown.
    """

    pooling: str = "mean"
    projections: tuple[DenseProjection, ...] = ()
    normalize: bool = False
    max_length: int | None = None

    def __post_init__(self) -> None:
        for found, known, what in (
            (self.pooling, POOLINGS, "pooling"),
            *((each.activation, _ACTIVATIONS, "activation of a Dense") for each in self.projections),
        ):
            if found not in known:
                raise InputError(
                    f"sentence embedding: expected a {what} among {', '.join(known)}, found {found!r}: the vectors "
                    "would differ from the model's"
                )

    def __str__(self) -> str:
        maps = [f"projected to {each.width}" for each in self.projections]
        names = {"mean": "mean of the tokens", "cls": "first token", "max": "maximum of the tokens"}
        return ", ".join([names.get(self.pooling, "last token"), *maps, *["normalized"] * self.normalize])


def get_form(config: PretrainedConfig) -> SentenceForm | None:
    """Returns the form that a model's config contains under `sentence`; None if there is none."""
    stored = getattr(config, "sentence", None)
    if stored is None:
        return None
    return SentenceForm(**stored | {"projections": tuple(DenseProjection(**each) for each in stored["projections"])})


def set_form(config: PretrainedConfig, form: SentenceForm) -> None:
    """Stores the form in a model's config, under `sentence`."""
    config.sentence = asdict(form)


def vector_width(config: PretrainedConfig) -> int:
    """Returns the width of a text's vector."""
    form, pooled = get_form(config), getattr(config, "pooled_features", 0)  # pooled: of a model without attention
    return form.projections[-1].width if form and form.projections else int(pooled or config.hidden_size)
