"""Conditions that several rules have in common."""

from distill.checkpoint.norm_kinds import BATCHNORM
from distill.parallel.layout import Layout
from distill.student.spec import read_norm
from distill.train.config import TrainConfig
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.facts import Facts


def is_sharded(f: Facts) -> bool:
    """Returns whether no process has all of the student's weights."""
    layout = f.student_layout
    return layout is not None and (layout.sharded or layout.pp > 1 or bool(f.settings.machine.deepspeed))


def is_on_several(f: Facts) -> bool:
    """Returns whether several processes, or DeepSpeed, train the student."""
    layout = f.student_layout
    return layout is not None and (layout.processes > 1 or bool(f.settings.machine.deepspeed))


def list_train_configs(s: DistillConfig) -> dict[str, TrainConfig]:
    """Returns the settings of each kind of training, by their name."""
    trainings = {"train": s.train, "general.train": s.general.train, "teacher_train": s.teacher_train}
    return trainings | ({"attention_free_train": s.attention_free_train} if s.student.attention_free else {})


def find_training_layout(setting: str, facts: Facts) -> Layout:
    """Returns the layout of a training, which is known by then."""
    layout = facts.finetuning_layout if setting == "teacher_train" else facts.student_layout
    assert layout is not None
    return layout


def has_batchnorm(s: DistillConfig, f: Facts) -> bool:
    """Returns whether the student is built with batch norms, or is a checkpoint that has them."""
    stored = f.student.description.get("norms", {}) if f.student is not None else {}
    return read_norm(s.student.spec) == BATCHNORM or BATCHNORM in stored.values()
