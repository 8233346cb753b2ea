"""What can't be had of pairs of texts; whether rows are pairs is known once the data have been read."""

from dataclasses import replace

from compress.export.common.targets import FORMATS, parse_formats
from distill.errors import InputError
from distill.student.spec import is_attention_free, parse_spec
from distill.student.token_vectors import check_pair_tokenizer
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
    settings = plan.settings
    specs = [settings.student.spec, *name_attention_free_students(settings.student).values()]
    spec = next(filter(is_attention_free, specs), None)
    if spec is None:
        return plan
    try:
        check_pair_tokenizer(parse_spec(spec), plan.teacher.load_tokenizer())
    except InputError as error:
        if not settings.budget.frontier:
            raise
        run.console.say(f"  no students without attention: {error}")
        return replace(plan, settings=replace(settings, student=replace(settings.student, attention_free="")))
    return plan


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
