"""Invalid combinations of settings of distillation on plain text."""

from distill.losses.config import LAYER_MAPS, LAYER_TERMS
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.rules.rule import Check, Rule


def teaches_single_layers(s: DistillConfig) -> bool:
    """Returns whether the loss of the general phase pairs each layer of the student with one layer of the teacher."""
    loss = s.general.loss
    named = loss.layer_map in LAYER_MAPS and loss.layer_map != "uniform"
    return not (named or loss.balance_every or loss.ramps)


GENERAL_RULES: tuple[Rule | Check, ...] = (
    Rule(
        lambda s, f: s.general.data and s.budget.requested,
        "general.data: expected a student that is built and trained, found a budget, whose students are pruned from "
        "the teacher; leave one of the two out, or prune the result of this run in a second run",
    ),
    Rule(
        lambda s, f: s.general.data and (s.student.trained or s.student.spec == "teacher"),
        "general.data: expected a student that is built and trained, found one that is already trained; leave "
        "general.data out",
    ),
    Rule(
        lambda s, f: not s.general.loss.needs_teacher,
        "general.loss: expected a term that uses the teacher, found ce alone: nothing would be distilled",
    ),
    Rule(
        lambda s, f: s.general.train.patience,
        "general.train.patience: expected 0, found {s.general.train.patience}: plain text has no validation score",
    ),
    Rule(
        lambda s, f: s.general.progressive_share and not teaches_single_layers(s),
        "general.progressive_share: expected loss.layer_map uniform or pairs, no ramps and no balance, found "
        "{s.general.loss.layer_map}, {s.general.loss.ramps} and {s.general.loss.balance_every}: a layer that is "
        "trained alone needs one layer of the teacher",
    ),
    Rule(
        lambda s, f: s.general.progressive_share == 1 and s.general.loss.uses_outputs,
        "general.progressive_share: expected less than 1 with kl or ce, found 1: these terms train the whole "
        "student, after "
        "its layers",
    ),
    Rule(
        lambda s, f: s.general.progressive_share and not s.general.loss.computes(*LAYER_TERMS),
        "general.progressive_share: expected a term on layers (hidden, attention, relations), found kl alone: a "
        "single layer "
        "outputs no tokens",
    ),
)
