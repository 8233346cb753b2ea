"""Knowledge distillation of transformers; public names are imported on first use, so importing loads no torch."""

from importlib import import_module

EXPORTS = {
    "CacheReader": "distill.cache",
    "DataConfig": "distill.data.config",
    "Dense": "distill.cache",
    "DistillationModule": "distill.train.module",
    "Generated": "distill.cache",
    "Hidden": "distill.cache",
    "Identity": "distill.cache",
    "InputError": "distill.errors",
    "LossConfig": "distill.losses.config",
    "OnPolicy": "distill.train.steps.on_policy",
    "OnPolicyConfig": "distill.train.steps.on_policy_config",
    "OnlineTeacher": "distill.teacher.online",
    "PackedRows": "distill.data.batches.packing",
    "PooledModel": "distill.models.sentence_encoder",
    "Relations": "distill.cache",
    "Sampled": "distill.cache",
    "TextClassification": "distill.tasks.text_classification",
    "TextDataModule": "distill.data.batches.data_module",
    "TopK": "distill.cache",
    "TrainConfig": "distill.train.config",
    "build_student": "distill.student.build",
    "load_splits": "distill.data.splits.labelled",
    "build_samples": "distill.cache.samples",
    "write_cache": "distill.cache",
}
__all__ = list(EXPORTS)


def __getattr__(name: str) -> object:
    if name in EXPORTS:
        return getattr(import_module(EXPORTS[name]), name)
    raise AttributeError(f"module 'distill' has no attribute {name!r}")
