"""Defaults that depend on other settings are filled in once."""

from pipelines.runs import cli
from pipelines.settings.commands.distill import SHORT_OPTIONS, DistillConfig
from pipelines.settings.defaults import fill_defaults


def fill_settings(*arguments: str) -> DistillConfig:
    required = ("--teacher", "teacher", "--data", "data", "--output", "runs/x")
    return fill_defaults(
        cli.parse(DistillConfig, [*required, *arguments], prog="distill", about="", examples="", short=SHORT_OPTIONS)
    )


def test_the_auto_scheme_is_int8_with_a_minimum_score():
    chosen = fill_settings("--quantize", "auto").quantize
    assert (chosen.scheme, chosen.min_score_share) == ("int8", 0.99)
    assert fill_settings("--quantize", "auto", "--quantize.min_score_share", "0.5").quantize.min_score_share == 0.5


def test_the_budgets_minimum_score_holds_for_quantization_without_a_target_speed():
    arguments = ("--quantize", "int8", "--budget.min_score_share", "0.9")
    assert fill_settings(*arguments).quantize.min_score_share == 0.9
    assert fill_settings(*arguments, "--speedup", "2").quantize.min_score_share == 0


def test_the_student_is_the_teacher_itself_with_a_target_speed_and_distilbert_without():
    assert fill_settings().student.spec == "distilbert"
    assert fill_settings("--speedup", "2").student.spec == "teacher"
