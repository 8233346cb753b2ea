"""All invalid combinations of settings, in one table, in the order in which the rules are applied.

The rules of each subject are in a file of their own. Ranges of single settings, and combinations inside the settings of
one component (`LossConfig`, `Budget`, `QuantizeConfig`, …), are checked where that component's dataclass is defined,
because it can be used without a run. A rule is applied as soon as the facts that it needs are known: most before torch
is imported.
"""

from pipelines.settings.facts import Facts
from pipelines.settings.rules.data import AUGMENTATION_RULES, CLEANING_RULES, SAMPLING_RULES, SELECTION_RULES
from pipelines.settings.rules.general import GENERAL_RULES
from pipelines.settings.rules.layouts import LAYOUT_RULES
from pipelines.settings.rules.processes import PROCESS_RULES
from pipelines.settings.rules.rule import Check, Rule
from pipelines.settings.rules.student import STUDENT_RULES
from pipelines.settings.rules.tasks import TASK_RULES, TEACHER_RULES, TOKENIZER_RULES
from pipelines.settings.rules.window import WINDOW_RULES

RULES: tuple[Rule | Check, ...] = (
    *STUDENT_RULES,
    *PROCESS_RULES,
    *GENERAL_RULES,
    *CLEANING_RULES,
    *AUGMENTATION_RULES,
    *SELECTION_RULES,
    *SAMPLING_RULES,
    *WINDOW_RULES,
    *TASK_RULES,
    *TEACHER_RULES,
    *TOKENIZER_RULES,
    *LAYOUT_RULES,
)


def check_rules(facts: Facts, about: tuple[str, ...] = ()) -> None:
    """Applies all rules whose facts are known.

    Args:
        facts: The settings and what is known.
        about: Names of facts; only rules that need one of them are applied. Empty: all rules.

    Raises:
        InputError: A combination is rejected; the first one in the order of the table is reported.
        CompressError: As above, from a check of the compress package.
    """
    for rule in RULES:
        if about and not set(about) & set(rule.needs):
            continue
        if all(getattr(facts, name) is not None for name in rule.needs):
            rule.apply(facts)
