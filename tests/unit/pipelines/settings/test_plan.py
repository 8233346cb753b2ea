"""The plan of a run: complete before the first stage, and true to the stages that run."""

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from distill.errors import InputError
from pipelines.runs import cli
from pipelines.runs.console import Console
from pipelines.runs.stage import Run
from pipelines.settings.commands.distill import SHORT_OPTIONS, DistillConfig
from pipelines.settings.facts import Facts
from pipelines.settings.plan import RunPlan
from pipelines.settings.resolve import resolve
from pipelines.settings.rules.rule import Rule
from pipelines.settings.rules.table import RULES
from pipelines.stages.run_stages import run_stages
from support.run_inputs import write_csv
from support.tiny_models import build_model, make_rows, saved, word_tokenizer


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    tokenizer = word_tokenizer()
    saved(build_model("bert"), tokenizer, folder / "teacher")
    saved(build_model("bert", "ForMaskedLM"), tokenizer, folder / "body")
    (folder / "data").mkdir()
    for split, count, seed in (("train", 60, 1), ("test", 20, 2)):
        write_csv(folder / "data" / f"{split}.csv", make_rows(count, seed))
    (folder / "prose.txt").write_text("\n".join(text for text, _ in make_rows(60, 3)))
    return folder


def plan_for(inputs: Path, output: Path, *arguments: str) -> RunPlan:
    defaults = {
        "teacher": str(inputs / "teacher"),
        "data": str(inputs / "data"),
        "output": str(output),
        "precision": "32",
    }
    names = {word.removeprefix("--").replace("-", "_") for word in arguments if word.startswith("--")}
    usual = [f"--{name}={value}" for name, value in defaults.items() if name not in names]
    filled = [word.replace("{inputs}", str(inputs)) for word in arguments]
    settings = cli.parse(DistillConfig, [*usual, *filled], prog="x", about="", examples="", short=SHORT_OPTIONS)
    return resolve(settings, 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--student", "layers=1"),
        ("--student", "layers=1", "--teacher.online", "true"),
        ("--student", "layers=1", "--precision", "auto"),
        ("--student", "layers=1", "--until", "cache"),
        ("--student", "layers=1", "--teacher.additional", '["{inputs}/teacher"]'),
        ("--student", "layers=1", "--quantize", "int8", "--export", "onnx,onnxruntime"),
        (
            "--teacher",
            "{inputs}/body",
            "--student",
            "layers=1",
            "--general.data",
            "{inputs}/prose.txt",
            "--general.length",
            "64",
        ),
        ("--student", "teacher", "--student.trained", "--quantize", "int8"),
        ("--student", "{inputs}/teacher", "--student.trained", "--quantize", "int8-dynamic"),
        ("--speedup", "2,4"),
        ("--speedup", "2", "--quantize", "int8", "--until", "distill"),
        ("--speedup", "2", "--prune.schedule", "gradual"),
        ("--speedup", "2", "--prune.schedule", "iterative", "--prune.rounds", "3"),
    ],
    ids=lambda arguments: " ".join(arguments).replace("{inputs}/", ""),
)
def test_the_planned_stages_are_those_of_a_dry_run(inputs, tmp_path, arguments):
    plan = plan_for(inputs, tmp_path / "run", *arguments)
    run = Run(tmp_path / "run", 0, Console(quiet=True), dry=True)
    run_stages(run, plan)
    dry_run_stages = [name for name, _, _ in run.plan]
    assert dry_run_stages == [name for name in plan.stages if name in dry_run_stages]
    assert set(plan.stages) - set(dry_run_stages) <= {"report"}, "run_stages ends with the evaluation"


def test_a_plan_leaves_no_default_open(inputs, tmp_path):
    plan = plan_for(inputs, tmp_path / "run", "--speedup", "4")
    settings = plan.settings
    assert (settings.task, settings.student.spec) == ("text-classification", "teacher")
    assert settings.budget.precision == "int8"
    assert settings.data.max_length == 256
    assert settings.loss.temperature == 2
    assert plan.teacher.folder == inputs / "teacher"
    assert plan.student_config.num_hidden_layers == plan.student_sizes.layers == 4
    assert dict(plan.rows())["task"] == "text-classification (the teacher's head)"


def test_settings_and_plan_never_change(inputs, tmp_path):
    plan = plan_for(inputs, tmp_path / "run")
    before = repr(plan.settings)
    for each in (plan, plan.settings, plan.settings.quantize, plan.teacher):
        with pytest.raises(FrozenInstanceError):
            setattr(each, fields(each)[0].name, "other")
    assert repr(plan.settings) == before


def test_every_rule_formats_its_message(inputs, tmp_path):
    """A template that names a setting or fact that doesn't exist would end in a traceback instead of the message."""
    plan = plan_for(inputs, tmp_path / "run")
    layouts = plan.layouts.teacher, plan.layouts.student, plan.layouts.finetuning
    models = plan.teacher, plan.teacher
    facts = Facts(plan.settings, 1, plan.task, *models, *layouts, precision="32", own_tokenizer=False)
    rules = [rule for rule in RULES if isinstance(rule, Rule)]
    assert len(rules) > 30
    for rule in rules:
        assert not rule.rejects(plan.settings, facts)
        assert "{" not in rule.message.format(s=plan.settings, f=facts).replace(repr({}), "")
        assert all(hasattr(facts, name) for name in rule.needs)


def test_a_rule_waits_for_the_facts_that_it_needs():
    from pipelines.settings.rules import table as rules

    rule = Rule(lambda s, f: True, "rejected", ("task",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "RULES", (rule,))
        rules.check_rules(Facts(None, 1))  # type: ignore[arg-type]
        with pytest.raises(InputError, match="rejected"):
            rules.check_rules(Facts(None, 1, task="chat"))  # type: ignore[arg-type]
