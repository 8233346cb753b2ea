"""Tests of teacher and student with one tokenizer and vocabulary tables padded to different numbers of rows."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from distill.cache import CacheReader, Dense, Identity, Sampled, TopK, write_cache
from distill.cache.samples import build_samples
from distill.data.batches.token_blocks import LanguageBlocks
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.losses.logits import forward_kl
from distill.losses.sparse import topk_kl
from distill.models.inputs import select_inputs
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from support.tiny_models import build_model

TOKENIZER_SIZE = 60  # of the tokenizer
TABLES = [(64, TOKENIZER_SIZE), (TOKENIZER_SIZE, 64), (72, 64), (64, 64)]  # vocabulary rows of teacher and student
SOFT = 1.5
LOSS = LossConfig(kl=1, temperature=SOFT)


def decoder(rows: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=rows, max_position_embeddings=64, **sizes))
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    return model.eval()


@pytest.fixture
def blocks() -> LanguageBlocks:
    rng = np.random.default_rng(0)
    return LanguageBlocks([rng.integers(0, TOKENIZER_SIZE, length) for length in (9, 7, 9, 3)])


def signals_of(kind: str, teacher: LlamaForCausalLM, blocks: LanguageBlocks, folder: Path) -> Callable:
    rows = teacher.config.vocab_size
    signals = {
        "dense": Dense(rows, each="position"),
        "topk": TopK(rows, k=12, temperature=SOFT),
        "sampled": Sampled(rows, draws=9, temperature=SOFT),
    }
    if kind == "online":
        return OnlineTeacher(teacher)
    identity = Identity("t", "t", (signals[kind],))
    write_cache(folder, identity, build_samples(blocks, 0), OnlineTeacher(teacher))
    return CacheReader(folder, identity)


def expected_loss(signals: dict, student_logits: Tensor, teacher_logits: Tensor, mask: Tensor) -> Tensor:
    """Returns the loss on both logits truncated to the vocabulary rows that both models have."""
    width = min(student_logits.shape[-1], teacher_logits.shape[-1])
    student_logits, teacher_logits = student_logits[mask][:, :width], teacher_logits[mask][:, :width]
    if "logits" in signals:
        return forward_kl(student_logits, teacher_logits, temperature=SOFT)
    soft, ids = (student_logits / SOFT).log_softmax(-1), signals["ids"]
    known = ids < width
    if "weights" in signals:
        weights = signals["weights"] * known
        return -(weights * soft.gather(1, ids * known)).sum(1).mean() * SOFT**2
    log_probs = signals["log_probs"].masked_fill(~known, -torch.inf)
    tail = signals["tail"] + (signals["log_probs"].exp() * ~known).sum(1)
    return topk_kl(student_logits / SOFT, ids * known, log_probs, tail) * SOFT**2


@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("kind", ["online", "dense", "sampled", "topk"])
def test_vocabulary_rows_that_only_one_model_has_are_ignored_in_loss_and_gradient(kind, tables, blocks, tmp_path):
    teacher, student = decoder(tables[0], 1), decoder(tables[1], 2)
    batch = blocks.collate(range(4), 0)
    signals = signals_of(kind, teacher, blocks, tmp_path / "cache")
    module = DistillationModule(student, loss=LOSS, train=TrainConfig(dropout=0), signals=signals)
    loss = module.compute_terms(batch)["kl"]
    mask = batch["attention_mask"].bool()
    with torch.no_grad():
        teacher_logits, student_logits = (model(**select_inputs(batch)).logits for model in (teacher, student))
    torch.testing.assert_close(loss, expected_loss(signals(batch), student_logits, teacher_logits, mask))
    loss.backward()
    gradient = student.lm_head.weight.grad
    width = min(tables)
    assert gradient[:width].abs().amax(1).min() > 0
    assert gradient[width:].abs().sum() == 0


def test_vocabulary_rows_at_minus_infinity_in_the_teacher_leave_the_loss_finite(blocks):
    teacher, student = decoder(64, 1), decoder(64, 2)
    teacher.lm_head = torch.nn.Linear(16, 64)
    with torch.no_grad():
        teacher.lm_head.bias[TOKENIZER_SIZE:] = -torch.inf
    batch = blocks.collate(range(4), 0)
    module = DistillationModule(student, loss=LOSS, train=TrainConfig(dropout=0), signals=OnlineTeacher(teacher))
    loss = module.compute_terms(batch)["kl"]
    mask = batch["attention_mask"].bool()
    with torch.no_grad():
        teacher_logits, student_logits = (model(**select_inputs(batch)).logits for model in (teacher, student))
    p = (teacher_logits[mask][:, :TOKENIZER_SIZE] / SOFT).log_softmax(-1)
    q = (student_logits[mask] / SOFT).log_softmax(-1)[:, :TOKENIZER_SIZE]
    torch.testing.assert_close(loss, F.kl_div(q, p, reduction="batchmean", log_target=True) * SOFT**2)


def test_different_numbers_of_classes_are_rejected(token_batch):
    teacher, student = build_model("bert"), build_model("bert", num_labels=3)
    module = DistillationModule(student, loss=LOSS, train=TrainConfig(), signals=OnlineTeacher(teacher))
    with pytest.raises(InputError, match=r"as many classes as the teacher's 5, found the student's 3: classes would"):
        module.compute_terms(token_batch | {"labels": torch.zeros(6, dtype=torch.long)})
