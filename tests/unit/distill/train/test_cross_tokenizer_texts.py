"""Tests of losses across tokenizers on batches of text: the compared positions, and training on such a teacher."""

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from distill import DistillationModule, LossConfig, OnlineTeacher, TrainConfig
from distill.data.alignment.encoded import encode_aligned, select_teacher_inputs
from distill.data.alignment.tokens import shared_vocabulary
from distill.data.masking.config import MaskConfig
from distill.data.masking.twice_masked import MaskedAlignedRows
from distill.errors import InputError
from distill.losses.cross_tokenizer import cross_tokenizer_loss, find_labelled_spans, sorted_distance
from distill.losses.cross_tokenizer_config import CrossTokenizerConfig
from distill.losses.logits import cross_entropy
from distill.models.inputs import select_inputs
from distill.train.steps.cross_tokenizer import CrossTokenizerKL
from support.distributions import draw
from support.two_tokenizers import SENTENCES, byte_level, wordpiece


def tiny_decoder(vocabulary: int, seed: int) -> GPT2LMHeadModel:
    sizes = {"n_layer": 2, "n_embd": 48, "n_head": 4, "n_positions": 64}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, bos_token_id=0, eos_token_id=0, **sizes)).eval()


def test_the_loss_of_causal_models_compares_logits_one_position_before_each_aligned_span():
    student, teacher = wordpiece(), byte_level()
    rows = encode_aligned(student, teacher, SENTENCES, 20, 30)
    batch = rows.collate([0, 3], 0)
    student_logits = draw(*batch["input_ids"].shape, len(student), seed=1)
    teacher_logits = draw(*batch["teacher_input_ids"].shape, len(teacher), seed=2)
    value = cross_tokenizer_loss(student_logits, teacher_logits, batch, CrossTokenizerConfig(kind="sorted"))
    before = [[], []]
    for k, i in enumerate((0, 3)):
        for first, _, teacher_first, _ in rows.spans[i].tolist():
            if teacher_first > 0:
                before[0].append(student_logits[k, first - 1])
                before[1].append(teacher_logits[k, teacher_first - 1])
    torch.testing.assert_close(value, sorted_distance(torch.stack(before[0]), torch.stack(before[1])))
    labelled = find_labelled_spans(batch["spans"], batch["labels"], batch["teacher_labels"])
    for row, (first, end, teacher_first, teacher_end) in zip(
        labelled.nonzero()[:, 0], batch["spans"][labelled].tolist(), strict=True
    ):
        student_text = student.decode(batch["input_ids"][row, first + 1 : end + 1], skip_special_tokens=True)
        teacher_text = teacher.decode(
            batch["teacher_input_ids"][row, teacher_first + 1 : teacher_end + 1], skip_special_tokens=True
        )
        teacher_text = student.backend_tokenizer.normalizer.normalize_str(teacher_text)
        assert student_text.replace("##", "").replace(" ", "") == teacher_text.replace(" ", "")


def test_the_loss_of_masked_models_has_gradients_at_the_masked_positions_only():
    student, teacher = wordpiece(), byte_level(masked=True)
    rows = encode_aligned(student, teacher, SENTENCES, 20, 30)
    batch = MaskedAlignedRows.build(rows, MaskConfig(rate=0.4), student, teacher).collate(range(len(rows)), 0)
    student_logits = draw(*batch["input_ids"].shape, len(student), seed=1).requires_grad_()
    teacher_logits = draw(*batch["teacher_input_ids"].shape, len(teacher), seed=2)
    shared = torch.from_numpy(shared_vocabulary(student, teacher))
    cross_tokenizer_loss(student_logits, teacher_logits, batch, CrossTokenizerConfig(), shared).backward()
    assert torch.equal(student_logits.grad.abs().sum(-1) > 0, batch["positions"])


def train_model(model: PreTrainedModel, steps: int, rate: float, loss) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def test_a_causal_student_learns_from_a_teacher_with_another_tokenizer():
    """Sorted distances alone would make the student confident in any token; as in their paper, they need labels."""
    student_words, teacher_words = wordpiece(), byte_level()
    rows = encode_aligned(student_words, teacher_words, SENTENCES[:4], 64, 64)
    batch = rows.collate(range(len(rows)), 0)
    teacher, student = tiny_decoder(len(teacher_words), 1), tiny_decoder(len(student_words), 2)
    labels = batch["teacher_labels"].flatten()
    train_model(
        teacher, 80, 5e-3, lambda: cross_entropy(teacher(**select_teacher_inputs(batch)).logits.flatten(0, 1), labels)
    )
    with torch.no_grad():
        teacher_logits = teacher(**select_teacher_inputs(batch)).logits
    assert cross_entropy(teacher_logits.flatten(0, 1), labels) < 0.3
    shared = torch.from_numpy(shared_vocabulary(student_words, teacher_words))

    def logits() -> Tensor:
        return student(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits

    def next_token_loss() -> float:
        with torch.no_grad():
            return cross_entropy(logits().flatten(0, 1), batch["labels"].flatten()).item()

    before = next_token_loss()
    train_model(
        student, 60, 5e-3, lambda: cross_tokenizer_loss(logits(), teacher_logits, batch, CrossTokenizerConfig(), shared)
    )
    assert next_token_loss() < before / 4


def tiny_encoder(vocabulary: int, seed: int) -> BertForMaskedLM:
    sizes = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 96}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BertForMaskedLM(BertConfig(vocab_size=vocabulary, max_position_embeddings=64, **sizes)).eval()


def test_a_masked_student_learns_from_a_teacher_with_another_tokenizer():
    student_words, teacher_words = wordpiece(), byte_level(masked=True)
    rows = encode_aligned(student_words, teacher_words, [" ".join(SENTENCES[:5])], 32, 32)
    data = MaskedAlignedRows.build(rows, MaskConfig(passes=1), student_words, teacher_words)
    batch = data.collate(range(len(rows)), student_words.pad_token_id)
    teacher, student = tiny_encoder(len(teacher_words), 1), tiny_encoder(len(student_words), 2)
    labels = batch["teacher_labels"].flatten()
    train_model(
        teacher, 80, 5e-3, lambda: cross_entropy(teacher(**select_teacher_inputs(batch)).logits.flatten(0, 1), labels)
    )
    module = DistillationModule(
        student,
        loss=LossConfig(kl=1),
        train=TrainConfig(),
        cross_tokenizer=CrossTokenizerKL.from_tokenizers(
            OnlineTeacher(teacher), CrossTokenizerConfig(), student_words, teacher_words
        ),
    )

    def guessed() -> float:
        with torch.no_grad():
            predictions = student(**select_inputs(batch)).logits[batch["positions"]].argmax(-1)
        return (predictions == batch["labels"][batch["positions"]]).double().mean().item()

    assert guessed() < 0.2
    train_model(student, 80, 5e-3, lambda: module.compute_terms(batch)["kl"])
    assert guessed() > 0.9


def test_a_term_whose_weight_rises_from_0_is_computed():
    student_words, teacher_words = wordpiece(), byte_level()
    batch = encode_aligned(student_words, teacher_words, SENTENCES[:4], 64, 64).collate(range(4), 0)
    divergence = CrossTokenizerKL.from_tokenizers(
        OnlineTeacher(tiny_decoder(len(teacher_words), 1)), CrossTokenizerConfig(), student_words, teacher_words
    )
    student = tiny_decoder(len(student_words), 2)
    for loss in (LossConfig(kl=1, ce=0, ramps={"ce": (0, 1)}), LossConfig(kl=0, ce=1, ramps={"kl": (0, 1)})):
        assert set(divergence.compute_terms(student, loss, batch)) == {"kl", "ce"}
    assert set(divergence.compute_terms(student, LossConfig(kl=1, ce=0), batch)) == {"kl"}


def test_a_teacher_with_another_tokenizer_and_non_finite_logits_is_rejected():
    student_words, teacher_words = wordpiece(), byte_level()
    batch = encode_aligned(student_words, teacher_words, SENTENCES[:4], 64, 64).collate(range(4), 0)
    teacher = tiny_decoder(len(teacher_words), 1)
    divergence = CrossTokenizerKL.from_tokenizers(
        OnlineTeacher(teacher), CrossTokenizerConfig(), student_words, teacher_words
    )
    student_logits = draw(*batch["input_ids"].shape, len(student_words), seed=1)
    assert divergence(student_logits, batch).isfinite()
    teacher.transformer.ln_f.bias.data[0] = torch.nan
    with pytest.raises(InputError, match="teacher: expected finite logits"):
        divergence(student_logits, batch)
