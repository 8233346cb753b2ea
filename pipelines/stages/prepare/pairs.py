"""What can't be had of pairs of texts; whether rows are pairs is known once the data have been read."""

from dataclasses import replace

from compress.export.common.targets import FORMATS, parse_formats
from distill.errors import InputError
from distill.student.spec import is_attention_free
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.attention_free_names import name_attention_free_students
from pipelines.settings.plan import RunPlan
from pipelines.stages.prepare.data import read_data


def adapt_to_pairs(run: Run, plan: RunPlan, data: Artefact) -> RunPlan:
    """Returns the plan for the data's rows, before any training: a frontier leaves out what pairs of texts rule out.

    Raises:
        InputError: The rows are pairs, and a file to export holds vectors of single texts only, or a requested student
            without attention couldn't tell the two texts apart.
    """
    if data.digest is None or getattr(read_data(data).train, "pairs", None) is None:
        return plan
    check_pair_formats(plan)
    settings, tokenizer = plan.settings, plan.teacher.load_tokenizer()
    beside = list(name_attention_free_students(settings.student).values())
    unable = beside + [settings.student.spec] * is_attention_free(settings.student.spec)
    if not unable or "token_type_ids" in tokenizer.model_input_names:
        return plan
    reason = (
        f"student {unable[0]}: expected a tokenizer with token_type_ids for pairs of texts, found "
        f"{type(tokenizer).__name__} without: a student without attention couldn't tell the two texts apart"
    )
    if not settings.budget.frontier:
        raise InputError(f"{reason}; take a student with attention, such as layers=2")
    run.console.say(f"  no students without attention: {reason}")
    return replace(plan, settings=replace(settings, student=replace(settings.student, attention_free="")))


def check_pair_formats(plan: RunPlan) -> None:
    """Checks that the files to export can hold a student of pairs of texts.

    Raises:
        InputError: A file holds vectors of single texts only.
    """
    name = next((name for name in parse_formats(plan.settings.export) if FORMATS[name].reads_texts), None)
    if name:
        raise InputError(
            f"export {name}: expected rows of one text, found pairs in {plan.settings.data.path!r}: the library has no "
            "vector of a pair; numpy's files hold such a student"
        )
