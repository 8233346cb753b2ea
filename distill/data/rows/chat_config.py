"""Settings for training on conversations."""

from dataclasses import dataclass

from distill.errors import InputError


@dataclass(frozen=True)
class ChatConfig:
    """Which parts of a conversation a model is trained on.

    Args:
        template: File with a chat template that replaces the tokenizer's own.
        turns: `all` of the assistant's turns, or only the `last`.
        too_long: How to treat conversations longer than the maximum length: `skip` leaves them out, `cut` keeps their
            start.
    """

    template: str | None = None
    turns: str = "all"
    too_long: str = "skip"

    def __post_init__(self) -> None:
        for name, choices in (("turns", ("all", "last")), ("too_long", ("skip", "cut"))):
            value = getattr(self, name)
            if value not in choices:
                raise InputError(f"chat.{name}: expected {' or '.join(choices)}, found {value!r}")
