"""What of conversations is learnt."""

from dataclasses import dataclass

from distill.errors import InputError


@dataclass(frozen=True)
class ChatConfig:
    """What of a conversation is learned.

    Args:
        template: File with a chat template, in the place of the tokenizer's own.
        asked: `all` of the assistant's turns, or the `last`.
        longer: Conversations of more tokens than there is room for: `skip` leaves them out, `cut` keeps their start.
    """

    template: str | None = None
    asked: str = "all"
    longer: str = "skip"

    def __post_init__(self) -> None:
        for name, known in (("asked", ("all", "last")), ("longer", ("skip", "cut"))):
            value = getattr(self, name)
            if value not in known:
                raise InputError(
                    f"chat.{name}: expected {' or '.join(known)}, found {value!r}: it can't be told what is meant"
                )
