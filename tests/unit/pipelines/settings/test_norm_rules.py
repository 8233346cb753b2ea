"""Combinations with another normalization of the student that are rejected before a run starts."""

from pathlib import Path

import pytest

from distill.checkpoint.checkpoint import Checkpoint
from distill.errors import InputError
from distill.parallel.layout import parse_layout
from pipelines.runs import cli
from pipelines.settings.commands.distill import SHORT_OPTIONS, DistillConfig
from pipelines.settings.defaults import fill_defaults
from pipelines.settings.facts import Facts
from pipelines.settings.rules.rule import Rule
from pipelines.settings.rules.student import check_norms
from pipelines.settings.rules.table import RULES


def parse_settings(*more: str) -> DistillConfig:
    arguments = ["--teacher=t", "--data=d", "--output=o", *more]
    return fill_defaults(cli.parse(DistillConfig, arguments, prog="x", about="", examples="", short=SHORT_OPTIONS))


def apply_norm_rules(facts: Facts) -> None:
    """Applies the rules on the student's normalization whose facts are known; others need files."""
    for rule in RULES:
        is_norm_rule = "norm" in rule.message if isinstance(rule, Rule) else rule.apply is check_norms
        if is_norm_rule and all(getattr(facts, name) is not None for name in rule.needs):
            rule.apply(facts)


def build_teacher(model_type: str, **description: object) -> Checkpoint:
    return Checkpoint("t", "teacher", Path("t"), {"model_type": model_type, **description})


@pytest.mark.parametrize(
    ("arguments", "known", "message"),
    [
        (["--student=layers=1,norm=rmsnorm", "--speedup=2"], {}, "expected no norm= with a budget"),
        (
            ["--student=teacher", "--speedup=2"],
            {"teacher": build_teacher("custom_norms_bert", norms={"a": "nonorm"}), "opened": True},
            "it can't be pruned",
        ),
        (["--student=layers=1,norm=nonorm"], {"task": "sentence-embedding"}, "stored with a stock body"),
        (["--student=layers=1,norm=batchnorm", "--train.checkpointing=full"], {}, "in the running statistics twice"),
        (
            ["--student=x", "--train.checkpointing=full"],
            {"student": build_teacher("custom_norms_bert", norms={"a": "batchnorm"})},
            "in the running statistics twice",
        ),
        (["--student=layers=1,norm=nonorm"], {"teacher": build_teacher("modernbert")}, "can't be exchanged"),
        (["--student=layers=1,norm=batchnorm"], {"teacher": build_teacher("llama")}, "tokens that follow"),
        (["--student=layers=1,norm=batchnorm"], {"student_layout": parse_layout("replicated", 2)}, "found 2: each"),
        (["--student=layers=1,norm=rmsnorm"], {"student_layout": parse_layout("tp=2", 2)}, "are for stock classes"),
    ],
)
def test_a_normalization_is_rejected_where_it_cannot_work(arguments, known, message):
    with pytest.raises(InputError, match=message):
        apply_norm_rules(Facts(parse_settings(*arguments), 1, **known))


@pytest.mark.parametrize(
    ("arguments", "known"),
    [
        (["--student=layers=1"], {"teacher": build_teacher("modernbert"), "student_layout": parse_layout("tp=2", 2)}),
        (["--student=mobilebert,norm=batchnorm"], {"teacher": build_teacher("modernbert")}),
        (
            ["--student=layers=1,norm=rmsnorm"],
            {"teacher": build_teacher("llama"), "student_layout": parse_layout("fsdp=2", 2)},
        ),
        (["--student=layers=1,norm=nonorm", "--train.checkpointing=full"], {"teacher": build_teacher("bert")}),
    ],
)
def test_a_normalization_is_accepted_elsewhere(arguments, known):
    apply_norm_rules(Facts(parse_settings(*arguments), 1, **known))
