"""Teacher to student. The public names load on first use, so that importing the package touches no torch."""

from importlib import import_module

EXPORTS = {
    "CacheReader": "distill.teacher.cache",
    "DataConfig": "distill.data.config",
    "Dense": "distill.teacher.cache",
    "DistillationModule": "distill.module",
    "Generated": "distill.teacher.cache",
    "Hidden": "distill.teacher.cache",
    "Identity": "distill.teacher.cache",
    "InputError": "distill.errors",
    "LossConfig": "distill.losses.config",
    "OnPolicy": "distill.onpolicy",
    "OnPolicyConfig": "distill.onpolicy_config",
    "OnlineTeacher": "distill.teacher.online",
    "PackedRows": "distill.data.packing",
    "PooledModel": "distill.pooling",
    "Relations": "distill.teacher.cache",
    "Sampled": "distill.teacher.cache",
    "TextClassification": "distill.tasks.text_classification",
    "TextDataModule": "distill.data.module",
    "TopK": "distill.teacher.cache",
    "TrainConfig": "distill.training",
    "build_student": "distill.student.build",
    "load_splits": "distill.data.splits",
    "samples_of": "distill.samples",
    "write_cache": "distill.teacher.cache",
}
__all__ = list(EXPORTS)


def __getattr__(name: str) -> object:
    if name in EXPORTS:
        return getattr(import_module(EXPORTS[name]), name)
    raise AttributeError(f"module 'distill' has no attribute {name!r}")
