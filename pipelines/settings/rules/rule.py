"""The two kinds of entries of the table of rules."""

from collections.abc import Callable
from dataclasses import dataclass

from distill.errors import InputError
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.facts import Facts


@dataclass(frozen=True)
class Rule:
    """A combination that is rejected.

    Args:
        rejects: Returns whether the settings `s` and the facts `f` are rejected.
        message: Template of the error message, with `{s.…}` and `{f.…}`.
        needs: Names of the facts that have to be known before the rule is applied.
    """

    rejects: Callable[[DistillConfig, Facts], object]
    message: str
    needs: tuple[str, ...] = ()

    def apply(self, facts: Facts) -> None:
        """Raises an InputError if the combination is rejected."""
        if self.rejects(facts.settings, facts):
            raise InputError(self.message.format(s=facts.settings, f=facts))


@dataclass(frozen=True)
class Check:
    """A check that a component makes of itself, with messages of its own.

    Args:
        apply: Raises an InputError or a CompressError if the facts are rejected.
        needs: As in `Rule`.
    """

    apply: Callable[[Facts], None]
    needs: tuple[str, ...] = ()
