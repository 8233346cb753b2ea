"""Tests of the batch normalization over tokens that a model with custom norms ships."""

import copy

import pytest
import torch

from distill.checkpoint.custom_models.modeling_custom_norms import TokenBatchNorm
from distill.student.build import build_student
from support.tiny_families import model_of, padded_batch

LENGTHS = (9, 7, 4, 2)


def norms_of(model):
    return [module for module in model.modules() if isinstance(module, TokenBatchNorm)]


def test_statistics_are_those_of_torchs_batch_norm_over_the_tokens_that_arent_padding():
    torch.manual_seed(0)
    hidden, mask = torch.randn(4, 9, 6) * 3 + 1, torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    norm, reference = TokenBatchNorm(6), torch.nn.BatchNorm1d(6)
    norm.mask = mask.long()
    for _ in range(3):
        found, expected = norm(hidden)[mask], reference(hidden[mask])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(norm.running_mean, reference.running_mean)
    count, initial = int(mask.sum()), 0.9**3  # torch's running variance is that of a sample, ours that of the batch
    sample = (norm.running_var - initial) * count / (count - 1) + initial
    torch.testing.assert_close(sample, reference.running_var, atol=1e-5, rtol=1e-5)
    norm.eval()
    reference.eval()
    reference.running_var.copy_(norm.running_var)
    torch.testing.assert_close(norm(hidden)[mask], reference(hidden[mask]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["bert", "distilbert", "electra-projected"])
def test_padding_changes_neither_the_outputs_nor_the_statistics_of_training(family):
    student = build_student(model_of(family), "layers=2,norm=batchnorm").train()
    for module in student.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    batch = padded_batch(student)
    wider = {name: torch.nn.functional.pad(value, (0, 5)) for name, value in batch.items()}
    other = copy.deepcopy(student)
    first, second = student(**batch).logits, other(**wider).logits
    torch.testing.assert_close(first, second, atol=1e-4, rtol=1e-4)
    for one, two in zip(norms_of(student), norms_of(other), strict=True):
        torch.testing.assert_close(one.running_mean, two.running_mean, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(one.running_var, two.running_var, atol=1e-4, rtol=1e-4)


def test_the_mask_reaches_the_norms_by_position_too():
    student = build_student(model_of("bert"), "layers=1,norm=batchnorm").train()
    batch = padded_batch(student)
    student.base_model(batch["input_ids"], batch["attention_mask"])
    assert all(torch.equal(norm.mask, batch["attention_mask"]) for norm in norms_of(student))
    student(input_ids=batch["input_ids"])  # without padding
    assert all(norm.mask is None for norm in norms_of(student))


def test_a_mask_of_pairs_of_tokens_is_rejected_in_training_only():
    student = build_student(model_of("bert"), "layers=1,norm=batchnorm")
    batch = padded_batch(student)
    pairs = batch["attention_mask"].bool()[:, None, None, :].expand(4, 1, 9, 9)
    with torch.no_grad():
        expected = student(**batch).logits
        torch.testing.assert_close(student(batch["input_ids"], pairs).logits, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="expected an attention mask"):
        student.train()(batch["input_ids"], pairs)


def test_eval_mode_does_not_change_the_statistics():
    student = build_student(model_of("bert"), "layers=1,norm=batchnorm")
    before = copy.deepcopy(student.state_dict())
    student(**padded_batch(student))
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())
