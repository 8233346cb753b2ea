"""The cache stage: what the teacher says about every training text, asked once."""

from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from distill.data.encode import Encoded
from distill.data.module import TextDataModule
from distill.teacher.cache import Identity, write_cache
from distill.teacher.load import frozen, load_tokenizer, tokenizer_fingerprint, weights_fingerprint
from distill.teacher.online import OnlineTeacher
from pipelines.config import DistillConfig
from pipelines.data import read_data
from pipelines.stage import Artefact, Run
from pipelines.teacher import MODEL

CACHE = "cache"


def cache_stage(run: Run, config: DistillConfig, data: Artefact, teacher: Artefact) -> Artefact:
    """Writes `cache/`: the logits of every training and unlabelled text."""
    settings = {"signal": "logits", "max_length": config.data.max_length}

    def work(folder: Path) -> dict[str, Any]:
        model = load_teacher(teacher.folder / MODEL)
        tokenizer = load_tokenizer(teacher.folder / MODEL)
        module = TextDataModule(read_data(data), tokenizer, max_length=config.data.max_length)
        train = module.train
        with run.console.track("cache: asking the teacher", len(train)) as advance:
            written = write_cache(
                folder / CACHE,
                identity(model, tokenizer),
                train.input_ids,
                train.token_type_ids,
                lambda rows: ask(model, train, rows, module.pad_id),
                advance,
            )
        for damage in written.damaged:
            run.console.say(f"  cache: {damage}; computed again")
        size = sum(file.stat().st_size for file in (folder / CACHE).iterdir())
        return {"samples": written.rows, "bytes": size, "shards_found": written.reused}

    return run.stage("cache", settings, {"data": data, "teacher": teacher}, work)


def load_teacher(folder: Path) -> PreTrainedModel:
    return frozen(AutoModelForSequenceClassification.from_pretrained(folder, use_safetensors=True))


def identity(model: PreTrainedModel, tokenizer: Any) -> Identity:
    classes = model.config.num_labels or 0
    return Identity(weights_fingerprint(model), tokenizer_fingerprint(tokenizer), "logits", classes)


def ask(model: PreTrainedModel, train: Encoded, rows: list[int], pad_id: int) -> np.ndarray:
    """Logits [len(rows), classes] float32."""
    return OnlineTeacher(model)(train.collate(rows, pad_id))["logits"].float().cpu().numpy()  # type: ignore[union-attr]
