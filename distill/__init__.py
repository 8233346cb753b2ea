"""Teacher to student. The public names load on first use, so that importing the package touches no torch."""

from importlib import import_module

EXPORTS = {
    "DataConfig": "distill.data.config",
    "DistillationModule": "distill.module",
    "InputError": "distill.errors",
    "LossConfig": "distill.losses.config",
    "OnlineTeacher": "distill.teacher.online",
    "TextClassification": "distill.tasks.text_classification",
    "TextDataModule": "distill.data.module",
    "TrainConfig": "distill.training",
    "build_student": "distill.student.build",
    "load_splits": "distill.data.splits",
}
__all__ = list(EXPORTS)


def __getattr__(name: str) -> object:
    if name in EXPORTS:
        return getattr(import_module(EXPORTS[name]), name)
    raise AttributeError(f"module 'distill' has no attribute {name!r}")
