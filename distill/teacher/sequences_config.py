"""How many of the answers to learn from a teacher writes."""

from dataclasses import dataclass

from distill.errors import expect


@dataclass(frozen=True)
class SequencesConfig:
    """Answers that the teacher writes, in the place of those that the data has (sequence-level distillation).

    Args:
        share: Of the training conversations, drawn by the seed; 0 leaves all as they are.
        new_tokens: At most so many an answer; one that hasn't ended by then isn't taken.
        temperature: At which the teacher writes; 0 takes its likeliest token each time.
        top_p: It writes the likeliest tokens only, as few as have this mass together.
        at_once: Answers that are written side by side.
    """

    share: float = 0.0
    new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    at_once: int = 16

    def __post_init__(self) -> None:
        expect(self, "sequences.share", 0 <= self.share <= 1, "a share from 0 to 1")
        expect(self, "sequences.new_tokens", self.new_tokens >= 1, "at least 1")
        expect(self, "sequences.temperature", self.temperature >= 0, "at least 0")
        expect(self, "sequences.top_p", 0 < self.top_p <= 1, "a share above 0, up to 1")
        expect(self, "sequences.at_once", self.at_once >= 1, "at least 1")
