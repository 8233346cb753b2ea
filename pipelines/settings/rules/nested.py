"""Invalid combinations of settings with a nested family of students."""

from collections.abc import Iterator

from distill.errors import InputError
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.facts import Facts

NESTED_TASKS = ("text-classification", "multi-label", "regression", "token-classification")


def check_nested(f: Facts) -> None:
    """Checks the settings of a run whose students are slices of one set of weights.

    Raises:
        InputError: A setting can't be used with it.
    """
    s = f.settings
    if not s.prune.nested:
        return
    for name, found, expected in list_nested_conflicts(s):
        raise InputError(f"{name}: expected {expected} with prune.nested, found {found}")
    if f.task is not None and f.task not in NESTED_TASKS:
        raise InputError(
            f"prune.nested: expected task {', '.join(NESTED_TASKS)}, found {f.task}: train its students apart"
        )


def list_nested_conflicts(s: DistillConfig) -> Iterator[tuple[str, object, str]]:
    """Yields (setting, its value, what is expected) of the settings that a nested family can't be trained with."""
    if len(s.budget.speedups) < 2:
        yield "budget.speedup", s.budget.speedup or "none", "two or more speeds, such as 4,10,15,"
    if s.prune.schedule != "oneshot":
        yield "prune.schedule", s.prune.schedule, "oneshot"
    if s.prune.reconstruct:
        yield "prune.reconstruct", s.prune.reconstruct, "false"
    if s.prune.embedding_rank:
        yield "prune.embedding_rank", s.prune.embedding_rank, "0"
    if s.loss != s.loss.without_layer_terms:
        yield "loss", "terms on layers, which slices lack", "terms on outputs"
    if s.loss.balance_every:
        yield "loss.balance_every", s.loss.balance_every, "0"
    if s.sparsity.requested:
        yield "sparsity.pattern", s.sparsity.pattern, "none"
    if s.fit_class_biases:
        yield "fit_class_biases", s.fit_class_biases, "false"
    if s.machine.asynchronous:
        yield "machine.strategy", s.machine.asynchronous, "none"
