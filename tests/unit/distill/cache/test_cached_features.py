"""Tests that distillation from cached features matches a teacher in memory up to 8-bit rounding."""

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from distill.cache import CacheReader, Dense, Hidden, Identity, write_cache
from distill.cache.samples import build_samples
from distill.data.batches.encode import encode_samples
from distill.data.splits.examples import Examples
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.student.build import build_student
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from support.tiny_models import SIZES, build_model, make_rows

LOSS = LossConfig(kl=1, hidden=1, layer_map="0:0,2:4")


@pytest.fixture
def rows(tokenizer: PreTrainedTokenizerBase):
    texts = [text for text, _ in make_rows(24, 3)]
    return encode_samples(tokenizer, Examples(texts, None, [i % 5 for i in range(24)]), 32)


def module(signals) -> DistillationModule:
    torch.manual_seed(0)
    student = build_student(build_model("bert"), "layers=2")
    sizes = (SIZES["layers"], SIZES["hidden"])
    return DistillationModule(student, loss=LOSS, train=TrainConfig(), signals=signals, teacher_sizes=sizes)


def cached(rows, folder, layers: tuple[int, ...]) -> CacheReader:
    identity = Identity("t", "t", (Dense(5), Hidden(SIZES["hidden"], layers=layers)))
    write_cache(folder, identity, build_samples(rows, 0), OnlineTeacher(build_model("bert"), ("logits", "hidden")))
    return CacheReader(folder, identity)


def test_cached_features_give_the_losses_and_gradients_of_the_teacher_in_memory(rows, tmp_path):
    batch = rows.collate(range(8), 0)
    online, offline = module(OnlineTeacher(build_model("bert"), LOSS.teacher_outputs)), module(None)
    batch_with_signals = batch | {"signals": cached(rows, tmp_path / "c", (0, 4))(batch)}
    expected, found = online.compute_terms(batch), offline.compute_terms(batch_with_signals)
    torch.testing.assert_close(found["kl"], expected["kl"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["hidden"], expected["hidden"], rtol=2e-3, atol=1e-4)
    flat_gradients = []
    for terms, distiller in ((expected, online), (found, offline)):
        gradients = torch.autograd.grad(terms["hidden"], list(distiller.student.parameters()), allow_unused=True)
        flat_gradients.append(torch.cat([g.flatten() for g in gradients if g is not None]))
    assert torch.cosine_similarity(*flat_gradients, dim=0) > 0.999


def test_a_layer_missing_from_the_cache_is_rejected(rows, tmp_path):
    reader = cached(rows, tmp_path / "c", (0, 2))
    with pytest.raises(InputError, match="hidden states of layer 4"):
        module(reader).compute_terms(rows.collate(range(8), 0))
