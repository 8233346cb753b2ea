"""How much of a training is on what the student writes itself."""

from dataclasses import dataclass

from distill.errors import expect


@dataclass(frozen=True)
class OnPolicyConfig:
    """How much of the training is on sequences that the student writes itself.

    Args:
        share: Of the steps, drawn step by step: 0 trains on the data's texts alone, 1 on the student's alone.
        new_tokens: At most so many that the student writes after a prompt.
        prompt_tokens: Of plain text, how many tokens of a row are its prompt.
        temperature: At which the student writes; 0 takes its likeliest token each time.
        top_p: It writes the likeliest tokens only, as few as have this mass together.
    """

    share: float = 0.5
    new_tokens: int = 64
    prompt_tokens: int = 32
    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        expect(self, "on_policy.share", 0 <= self.share <= 1, "a share from 0 to 1")
        expect(self, "on_policy.new_tokens", self.new_tokens >= 1, "at least 1")
        expect(self, "on_policy.prompt_tokens", self.prompt_tokens >= 1, "at least 1: nothing follows nothing")
        expect(self, "on_policy.temperature", self.temperature >= 0, "at least 0")
        expect(self, "on_policy.top_p", 0 < self.top_p <= 1, "a share above 0, up to 1")
