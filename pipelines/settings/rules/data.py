"""Invalid combinations of settings of cleaning, augmentation, selection and sampling."""

from pathlib import Path

from distill.data.augment.config import DRAWN
from distill.data.augment.lexicon import read_lexicon
from distill.data.augment.templates import read_slot_templates
from distill.data.clean.config import check_clean_packages
from distill.data.clean.spelling import read_known_words
from distill.losses.config import LAYER_TERMS
from distill.tasks.names import LANGUAGE_TASKS
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.facts import Facts
from pipelines.settings.places import path_exists
from pipelines.settings.rules.conditions import is_on_several
from pipelines.settings.rules.rule import Check, Rule


def has_step(settings: DistillConfig, name: str) -> bool:
    """Returns whether cleaning has a step."""
    return any(step.name == name for step in settings.clean.find_steps())


def is_drawn(settings: DistillConfig) -> bool:
    """Returns whether augmentation draws whole rows."""
    return any(kind in DRAWN for kind in settings.augment.find_rates())


def chooses_rows(settings: DistillConfig) -> bool:
    """Returns whether a student trains on other rows in each epoch."""
    return settings.sampling.by != "uniform" or bool(settings.augment.ratio)


def check_augment_files(f: Facts) -> None:
    """Checks the lexicon and the templates of augmentation.

    Raises:
        InputError: A file is missing or has another form, or a template has a slot without fillers.
    """
    augment = f.settings.augment
    if augment.lexicon:
        read_lexicon(Path(augment.lexicon).expanduser())
    if augment.templates:
        read_slot_templates(Path(augment.templates).expanduser())


def check_clean_words(f: Facts) -> None:
    """Checks the user's list of words for spelling.

    Raises:
        InputError: The file is missing, or isn't text in UTF-8.
    """
    if f.settings.clean.words:
        read_known_words(Path(f.settings.clean.words).expanduser())


CLEANING_RULES: tuple[Rule | Check, ...] = (
    Check(lambda facts: check_clean_packages(facts.settings.clean.find_steps())),
    Check(check_clean_words),
    Rule(
        lambda s, f: s.clean.requested and f.task in ("question-answering", "chat"),
        "data.clean {s.clean.steps}: expected another task than {f.task}: answers are found by their position in the "
        "text, and conversations have roles; clean the file beforehand",
        ("task",),
    ),
    Rule(
        lambda s, f: has_step(s, "names") and f.task == "token-classification",
        "data.clean: step names: expected a task on whole texts, found {f.task}: words are cleaned one by one, and a "
        "name is found by the words around it",
        ("task",),
    ),
    Rule(
        lambda s, f: has_step(s, "labels") and f.task not in ("text-classification", "multi-label"),
        "data.clean: step labels: expected text-classification or multi-label, found {f.task}: doubtful labels are "
        "found by the probabilities of classes",
        ("task",),
    ),
    Rule(
        lambda s, f: has_step(s, "labels") and f.processes > 1,
        "data.clean: step labels: expected one process, found {f.processes}: the teacher of each fold is trained on "
        "one; clean with --devices 1 and --until teacher first, and run the same command on several",
    ),
)


AUGMENTATION_RULES: tuple[Rule | Check, ...] = (
    Rule(
        lambda s, f: s.augment.requested and f.task in ("masked-lm", "causal-lm", "chat"),
        "data.augment {s.augment.kinds}: expected a task on rows of text with answers, found {f.task}: a language "
        "model would learn the changes themselves",
        ("task",),
    ),
    Rule(
        lambda s, f: s.augment.requested and f.task == "question-answering" and is_drawn(s),
        "data.augment {s.augment.kinds}: expected kinds that change a row, found templates or ngrams: a context that "
        "is drawn has no answer",
        ("task",),
    ),
    Rule(
        lambda s, f: (
            s.augment.agreement and f.task not in ("text-classification", "multi-label", "token-classification")
        ),
        "augment.agreement {s.augment.agreement:g}: expected text-classification, multi-label or token-classification, "
        "found {f.task}: the overlap of probabilities compares classes",
        ("task",),
    ),
    Rule(
        lambda s, f: s.augment.requested and s.augment.labels == "teacher" and not s.loss.needs_teacher,
        "augment.labels teacher: expected a loss with a term of the teacher, found loss.ce alone: the student would "
        "learn nothing from synthetic rows; set augment.labels to row",
    ),
    Rule(
        lambda s, f: s.augment.requested and s.student.trained,
        "data.augment {s.augment.kinds}: expected a student that is trained, found one that is used as it is: "
        "synthetic rows would be made for nothing",
    ),
    Check(check_augment_files),
)


SELECTION_RULES: tuple[Rule | Check, ...] = (
    Rule(
        lambda s, f: (
            s.select.requested and f.task in ("masked-lm", "causal-lm", "chat") and s.select.method != "random"
        ),
        "data.select {s.select.method}: expected random for {f.task}, whose rows are joined into blocks",
        ("task",),
    ),
    Rule(
        lambda s, f: (
            s.select.requested
            and f.task != "text-classification"
            and (s.select.method == "balanced" or s.select.needs_dynamics or s.select.needed_score == "loss")
        ),
        "data.select {s.select.method}: expected text-classification, found {f.task}: rows have no single class",
        ("task",),
    ),
    Rule(
        lambda s, f: (
            s.select.needs_outputs and f.task not in ("text-classification", "multi-label", "token-classification")
        ),
        "data.select {s.select.method}: expected text-classification, multi-label or token-classification, found "
        "{f.task}: difficulty is judged by the probabilities of classes",
        ("task",),
    ),
    Rule(
        lambda s, f: s.select.requested and s.augment.ratio,
        "data.select {s.select.method}: expected augment.ratio 0, found {s.augment.ratio:g}: the synthetic rows that "
        "are left have no fixed ratio",
    ),
    Rule(
        lambda s, f: s.select.needs_dynamics and f.processes > 1,
        "data.select {s.select.method}: expected one process, found {f.processes}: the teacher's training is recorded "
        "on one; set machine.devices to 1",
    ),
    Rule(
        lambda s, f: s.select.needs_dynamics and s.teacher_train.batch_tokens,
        "data.select {s.select.method}: expected teacher_train.batch_tokens 0, found {s.teacher_train.batch_tokens}: "
        "where the teacher's training is recorded, its batches count rows",
    ),
    Rule(
        lambda s, f: s.select.requested and s.student.trained,
        "data.select {s.select.method}: expected a student that is trained, found one that is used as it is",
    ),
    Rule(
        lambda s, f: s.select.target and not path_exists(s.select.target, "select.target"),
        "select.target: expected a file or folder, found none at {s.select.target!r}",
    ),
)


SAMPLING_RULES: tuple[Rule | Check, ...] = (
    Rule(
        lambda s, f: s.sampling.by != "uniform" and s.augment.ratio,
        "sampling.by {s.sampling.by}: expected augment.ratio 0, found {s.augment.ratio:g}: both choose the rows of an "
        "epoch",
    ),
    Rule(
        lambda s, f: (
            chooses_rows(s) and any((s.train.batch_tokens, s.loss.computes(*LAYER_TERMS) and s.sampling.unbiased))
        ),
        "sampling.by {s.sampling.by}, augment.ratio {s.augment.ratio:g}: expected batches of rows and, with "
        "sampling.unbiased, kl and ce alone, found train.batch_tokens {s.train.batch_tokens}, loss.hidden "
        "{s.loss.hidden:g}, attention {s.loss.attention:g} and relations {s.loss.relations:g}: the number of batches "
        "would differ between epochs, and terms on layers have no rows to weigh",
    ),
    Rule(
        lambda s, f: chooses_rows(s) and s.student.attention_free and s.attention_free_train.batch_tokens,
        "sampling.by {s.sampling.by}, augment.ratio {s.augment.ratio:g}: expected attention_free_train.batch_tokens 0, "
        "found {s.attention_free_train.batch_tokens}: the number of batches would differ between epochs",
    ),
    Rule(
        lambda s, f: s.sampling.by == "balanced" and f.task != "text-classification",
        "sampling.by balanced: expected text-classification, found {f.task}: its rows have no single class",
        ("task",),
    ),
    Rule(
        lambda s, f: (
            s.sampling.by in ("difficulty", "distance")
            and f.task not in ("text-classification", "multi-label", "token-classification")
        ),
        "sampling.by {s.sampling.by}: expected text-classification, multi-label or token-classification, found "
        "{f.task}: rows are compared by the teacher's probabilities of classes",
        ("task",),
    ),
    Rule(
        lambda s, f: (
            (s.sampling.by == "length" or s.augment.ratio) and f.task in (*LANGUAGE_TASKS, "question-answering")
        ),
        "sampling.by {s.sampling.by}, augment.ratio {s.augment.ratio:g}: expected a task with a row for each text, "
        "found {f.task}",
        ("task",),
    ),
    Rule(
        lambda s, f: s.sampling.by in ("difficulty", "distance") and (s.teacher.online or not s.loss.computes("kl")),
        "sampling.by {s.sampling.by}: expected cached signals (teacher.online false) and loss.kl above 0, found "
        "{s.teacher.source} ones and {s.loss.kl:g}: the teacher's answers are read from the cache",
    ),
    Rule(
        lambda s, f: s.sampling.by == "distance" and is_on_several(f),
        "sampling.by distance: expected one process, found {f.student_processes}: each would measure the distances "
        "of all rows",
        ("student_layout",),
    ),
)
