"""Biases of classes that are fitted to labelled rows, and the output layers that store them."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification, LlamaConfig

from distill.errors import InputError
from distill.losses.logits import IGNORED
from distill.tasks.class_biases import add_class_biases, check_head_biases, fit_class_biases


def draw_rows(rows: int, biases: torch.Tensor, scale: float = 1.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logits, and labels drawn from the probabilities of `scale * logits + biases`."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, len(biases), generator=generator)
    probabilities = torch.softmax(scale * logits + biases, -1)
    return logits, torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def measure_accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return float((logits.argmax(-1) == labels).double().mean())


def test_the_biases_that_labels_were_drawn_with_are_found_whatever_the_scale():
    true = torch.tensor([1.0, -0.5, 0.0, -0.5])
    for scale in (0.5, 1.0, 2.0):
        fitted = fit_class_biases(*draw_rows(20_000, true, scale))
        assert fitted.dtype == torch.float64
        assert (fitted - true / scale).abs().max() < 0.1 / scale


def test_a_class_that_is_predicted_too_rarely_is_found_in_other_rows():
    true = torch.tensor([3.0, 0.0, 0.0, 0.0])
    logits, labels = draw_rows(2000, true)
    others, their_labels = draw_rows(2000, true, seed=1)
    fitted = fit_class_biases(logits, labels)
    assert fitted.argmax() == 0
    gain = measure_accuracy(others + fitted, their_labels) - measure_accuracy(others, their_labels)
    best = measure_accuracy(others + true, their_labels) - measure_accuracy(others, their_labels)
    assert gain > 0.9 * best > 0.05


def test_few_rows_move_the_biases_little():
    logits, labels = draw_rows(20_000, torch.zeros(50))
    many, few = fit_class_biases(logits, labels), fit_class_biases(logits[:100], labels[:100])
    assert many.abs().max() < 0.5
    assert few.abs().max() < 2.5, "without a prior, classes without a row would go to minus infinity"


def test_classes_that_are_told_apart_without_error_have_finite_biases():
    labels = torch.arange(4).repeat(25)
    fitted = fit_class_biases(9 * torch.nn.functional.one_hot(labels), labels)
    assert fitted.abs().max() < 1e-3


def test_rows_without_a_label_are_left_out():
    logits, labels = draw_rows(500, torch.tensor([1.0, 0.0, -1.0]))
    extra = torch.full((100,), IGNORED)
    fitted = fit_class_biases(torch.cat([logits, torch.randn(100, 3)]), torch.cat([labels, extra]))
    assert torch.allclose(fitted, fit_class_biases(logits, labels))


def test_added_biases_shift_the_logits_and_nothing_else(token_batch):
    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3
    )
    model = BertForSequenceClassification(config).eval()
    biases = torch.tensor([0.5, -1.0, 0.25], dtype=torch.float64)
    inputs = {name: token_batch[name] % 64 for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        before = model(**inputs).logits
        add_class_biases(model, biases)
        torch.testing.assert_close(model(**inputs).logits, before + biases.float())


def test_an_output_layer_without_biases_is_rejected():
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    auto = AutoModelForSequenceClassification
    check_head_biases(BertConfig(**sizes, intermediate_size=16, num_labels=3), auto)
    with pytest.raises(InputError, match="found none in LlamaForSequenceClassification"):
        check_head_biases(LlamaConfig(**sizes, intermediate_size=16, num_labels=3), auto)
