"""Invalid combinations of settings with backward passes in windows."""

from distill.errors import InputError
from distill.losses.config import LAYER_TERMS
from distill.tasks.names import GENERATIVE_TASKS
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.facts import Facts
from pipelines.settings.rules.conditions import list_train_configs
from pipelines.settings.rules.rule import Check, Rule
from pipelines.settings.task_settings import run_task_arguments


def check_window_rows(f: Facts) -> None:
    """Checks that a backward window gets rows of one document each.

    Raises:
        InputError: They are packed.
    """
    s = f.settings
    if (
        window_settings(s)
        and f.task in GENERATIVE_TASKS
        and run_task_arguments(s, f.task).get("packing") == "documents"
    ):
        raise InputError(
            f"{window_settings(s)[0]}.backward_window: expected data.packing none{' or stream' * (f.task != 'chat')}, "
            f"found documents{' by default' * (s.data.packing == 'auto')}: keys of a document would be carried into "
            "the next one in its row"
        )


def check_window_layers(f: Facts) -> None:
    """Checks that the layers of the models that are trained in a backward window keep keys and values.

    Raises:
        InputError: One has another kind of state.
    """
    trained = {"train": f.student or f.teacher, "teacher_train": f.teacher}
    for setting in window_settings(f.settings):
        checkpoint = trained.get(setting)
        kinds = [] if checkpoint is None else checkpoint.description.get("layer_types") or []
        other = sorted({*kinds} - {"full_attention", "sliding_attention"})
        if checkpoint is not None and other:
            raise InputError(
                f"{setting}.backward_window: expected layers of full_attention or sliding_attention, found "
                f"{', '.join(other)} in {checkpoint.name!r}: their state isn't keys and values that could be carried on"
            )


def window_settings(s: DistillConfig) -> list[str]:
    """Returns the names of the trainings that have a backward window."""
    return [name for name, train in list_train_configs(s).items() if train.backward_window]


WINDOW_RULES: tuple[Rule | Check, ...] = (
    Rule(
        lambda s, f: s.student.attention_free and s.attention_free_train.backward_window,
        "attention_free_train.backward_window: expected 0, found {s.attention_free_train.backward_window}: only a "
        "decoder's chunks have losses of their own",
    ),
    Rule(
        lambda s, f: s.general.train.backward_window,
        "general.train.backward_window: expected 0, found {s.general.train.backward_window}: tokens of an encoder read "
        "later ones",
    ),
    Rule(
        lambda s, f: s.train.backward_window and s.loss.computes(*LAYER_TERMS),
        "train.backward_window {s.train.backward_window}: expected kl and ce alone, found loss.hidden "
        "{s.loss.hidden:g}, attention {s.loss.attention:g}, relations {s.loss.relations:g}: terms on layers compare "
        "whole documents",
    ),
    Rule(
        lambda s, f: s.train.backward_window and s.loss.balance_every,
        "train.backward_window {s.train.backward_window}: expected loss.balance_every 0, found {s.loss.balance_every}: "
        "the gradient of a term is known after its last chunk only",
    ),
    Rule(
        lambda s, f: s.train.backward_window and s.on_policy.share,
        "train.backward_window {s.train.backward_window}: expected on_policy.share 0, found {s.on_policy.share:g}: "
        "generated sequences are trained whole",
    ),
    Rule(
        lambda s, f: s.train.backward_window and s.budget.requested,
        "train.backward_window {s.train.backward_window}: expected no target speed: importance scores and trials of "
        "pruning read whole documents",
    ),
    Rule(
        lambda s, f: s.train.backward_window and s.quantize.scheme,
        "train.backward_window {s.train.backward_window}: expected no quantize.scheme, found {s.quantize.scheme}: "
        "chunks would be rounded otherwise than whole documents; quantize the trained student with pipelines.quantize",
    ),
    *(
        Rule(
            lambda s, f, name=name: (
                list_train_configs(s)[name].backward_window and list_train_configs(s)[name].schedule == "find"  # type: ignore[misc]
            ),
            f"{name}.backward_window: expected another schedule than find: its range test trains whole documents",
        )
        for name in ("train", "teacher_train")
    ),
    *(
        Rule(
            lambda s, f, name=name: list_train_configs(s)[name].backward_window and f.task not in GENERATIVE_TASKS,  # type: ignore[misc]
            f"{name}.backward_window: expected causal-lm or chat, found {{f.task}}: only a decoder's chunks have "
            "losses of their own",
            ("task",),
        )
        for name in ("train", "teacher_train")
    ),
    Check(check_window_rows, ("task",)),
    Check(check_window_layers, ("task", "teacher")),
)
