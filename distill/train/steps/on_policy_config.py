"""Settings of on-policy distillation."""

from dataclasses import dataclass

from distill.errors import check_setting


@dataclass(frozen=True)
class OnPolicyConfig:
    """Settings of training on sequences that the student generates itself.

    Args:
        share: Share of the steps on generated sequences, drawn independently for each step: 0 trains on the dataset's
            texts alone, 1 on the student's alone.
        new_tokens: Maximum number of tokens that the student generates after a prompt.
        prompt_tokens: Number of tokens at the start of a plain-text row that form the prompt.
        temperature: Sampling temperature of the student; 0 is greedy decoding.
        top_p: Sampling is restricted to the smallest set of most probable tokens with this total probability.
    """

    share: float = 0.5
    new_tokens: int = 64
    prompt_tokens: int = 32
    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_setting(self, "on_policy.share", 0 <= self.share <= 1, "a share from 0 to 1")
        check_setting(self, "on_policy.new_tokens", self.new_tokens >= 1, "at least 1")
        check_setting(self, "on_policy.prompt_tokens", self.prompt_tokens >= 1, "at least 1")
        check_setting(self, "on_policy.temperature", self.temperature >= 0, "at least 0")
        check_setting(self, "on_policy.top_p", 0 < self.top_p <= 1, "a share above 0, up to 1")
