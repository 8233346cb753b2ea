"""Tests losses against textbook formulas in float64, their identities, weighted sums and gradient shares."""

import jaxtyping
import pytest
import torch
from torch import Tensor

from distill.errors import InputError
from distill.losses.compose import compute_gradient_shares, compute_loss_terms, weighted_sum
from distill.losses.config import LossConfig, pair_layers
from distill.losses.features import hidden_cosine, hidden_mse
from distill.losses.logits import (
    cross_entropy,
    decoupled_kl,
    forward_kl,
    jensen_shannon,
    skewed_kl,
    skewed_reverse_kl,
)
from support.distributions import IGNORED, draw, draw_labels, draw_mask, same_value_and_gradient, softmax

SHAPES = [(1, 2), (3, 5), (17, 77), (5, 1001)]  # rows, classes
CUBES = [(1, 1, 1), (2, 7, 3), (5, 13, 33)]  # batch, length, width


# The textbook: probabilities by exp and division, sums over plain loops, in the precision of the inputs.


def textbook_kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    q, p = softmax(student / temperature), softmax(teacher / temperature)
    return temperature**2 * sum((a * (a / b).log()).sum() for a, b in zip(p, q, strict=True)) / len(student)


def textbook_ce(student: Tensor, labels: Tensor) -> Tensor:
    losses = [-softmax(row)[label].log() for row, label in zip(student, labels, strict=True) if label != IGNORED]
    return sum(losses) / len(losses)


def textbook_mse(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    pairs = zip(student[mask == 1], teacher[mask == 1], strict=True)
    return sum(((s - t) ** 2).sum() for s, t in pairs) / (mask.sum() * student.shape[-1])


def textbook_cosine(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    pairs = zip(student[mask == 1], teacher[mask == 1], strict=True)
    return sum(1 - (s @ t) / ((s @ s).sqrt() * (t @ t).sqrt()) for s, t in pairs) / mask.sum()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 7.0])
def test_value_and_gradient_of_kl_match_the_textbook(shape, temperature):
    student, teacher = draw(*shape, seed=1), draw(*shape, seed=2)
    same_value_and_gradient(
        lambda s: forward_kl(s, teacher, temperature=temperature),
        lambda s: textbook_kl(s, teacher.double(), temperature),
        student,
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_value_and_gradient_of_cross_entropy_match_the_textbook(shape):
    labels = draw_labels(*shape)
    same_value_and_gradient(lambda s: cross_entropy(s, labels), lambda s: textbook_ce(s, labels), draw(*shape, seed=1))


@pytest.mark.parametrize("shape", CUBES)
@pytest.mark.parametrize(("ours", "book"), [(hidden_mse, textbook_mse), (hidden_cosine, textbook_cosine)])
def test_value_and_gradient_of_hidden_losses_match_the_textbook(shape, ours, book):
    teacher, mask = draw(*shape, seed=4), draw_mask(*shape[:2])
    same_value_and_gradient(
        lambda s: ours(s, teacher, mask), lambda s: book(s, teacher.double(), mask), draw(*shape, seed=3)
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_kl_of_a_distribution_with_itself_is_zero(temperature):
    logits = draw(9, 31, seed=1, scale=20).requires_grad_()
    value = forward_kl(logits, logits.detach().clone(), temperature=temperature)
    assert value.item() == 0
    assert torch.autograd.grad(value, logits)[0].abs().max() < 1e-6
    assert forward_kl(logits, logits.detach() + 5.0).abs() < 1e-5, "a constant on all logits changes no distribution"


def test_kl_is_taken_of_the_teacher_relative_to_the_student():
    sure, unsure = torch.tensor([[4.0, 0.0, 0.0]]), torch.zeros(1, 3)
    assert forward_kl(student=unsure, teacher=sure) == pytest.approx(0.9213, abs=1e-3)
    assert forward_kl(student=sure, teacher=unsure) == pytest.approx(1.6040, abs=1e-3)


@pytest.mark.parametrize("temperature", [0.5, 2.0, 8.0])
def test_kl_is_scaled_by_the_square_of_the_temperature(temperature):
    student, teacher = draw(7, 11, seed=1), draw(7, 11, seed=2)
    softened = forward_kl(student * temperature, teacher * temperature, temperature=temperature)
    torch.testing.assert_close(softened, temperature**2 * forward_kl(student, teacher), rtol=1e-5, atol=1e-6)


def test_kl_gradient_approaches_its_limit_at_high_temperature():
    student, teacher = draw(7, 11, seed=1, scale=1), draw(7, 11, seed=2, scale=1)
    apart = student - teacher
    # Hinton et al. 2015, equation 4: the limit of the gradient at high temperature
    limit = (apart - apart.mean(-1, keepdim=True)) / (7 * 11)
    student.requires_grad_()
    (grad,) = torch.autograd.grad(forward_kl(student, teacher, temperature=100.0), student)
    assert (grad - limit).norm() < 0.03 * limit.norm()


def test_ignored_labels_have_no_effect():
    student, labels = draw(8, 5, seed=1).requires_grad_(), draw_labels(8, 5)
    other = torch.where((labels == IGNORED)[:, None], draw(8, 5, seed=6, scale=50), student.detach())
    value = cross_entropy(student, labels)
    assert torch.equal(value, cross_entropy(other, labels))
    assert torch.equal(value, cross_entropy(student, torch.where(labels == IGNORED, -1, labels), ignored=-1))
    (grad,) = torch.autograd.grad(value, student)
    assert grad[labels == IGNORED].abs().max() == 0
    assert grad[labels != IGNORED].abs().amin(0).min() > 0


def test_a_batch_without_labels_has_zero_loss_and_gradient():
    student = draw(4, 5, seed=1).requires_grad_()
    value = cross_entropy(student, torch.full((4,), IGNORED))
    assert value.item() == 0
    assert torch.equal(torch.autograd.grad(value, student)[0], torch.zeros(4, 5))


@pytest.mark.parametrize("loss", [hidden_mse, hidden_cosine])
def test_padding_has_no_effect_on_hidden_losses(loss):
    student, teacher, mask = draw(3, 7, 5, seed=1).requires_grad_(), draw(3, 7, 5, seed=2), draw_mask(3, 7)
    hole = (mask == 0)[..., None]
    value = loss(student, teacher, mask)
    changed = loss(
        torch.where(hole, draw(3, 7, 5, seed=6, scale=1e4), student.detach()),
        torch.where(hole, draw(3, 7, 5, seed=7, scale=1e4), teacher),
        mask,
    )
    assert torch.equal(value, changed)
    longer = torch.nn.functional.pad
    padded = loss(longer(student, (0, 0, 0, 4), value=9.0), longer(teacher, (0, 0, 0, 4)), longer(mask, (0, 4)))
    torch.testing.assert_close(padded, value)
    (grad,) = torch.autograd.grad(value, student)
    assert grad.masked_select(hole).abs().max() == 0
    assert grad.masked_select(~hole).abs().min() > 0
    assert loss(student, teacher, torch.zeros_like(mask)).item() == 0


BF16 = [
    ("kl", (64, 77), lambda s, t: forward_kl(s, t, temperature=2.0), lambda s, t: textbook_kl(s, t, 2.0)),
    ("ce", (64, 77), lambda s, _: cross_entropy(s, LABELS_64), lambda s, _: textbook_ce(s, LABELS_64)),
    ("mse", (4, 9, 33), lambda s, t: hidden_mse(s, t, MASK_4), lambda s, t: textbook_mse(s, t, MASK_4)),
    ("cosine", (4, 9, 33), lambda s, t: hidden_cosine(s, t, MASK_4), lambda s, t: textbook_cosine(s, t, MASK_4)),
]
LABELS_64, MASK_4 = draw_labels(64, 77), draw_mask(4, 9)


@pytest.mark.parametrize(("name", "shape", "ours", "book"), BF16, ids=[case[0] for case in BF16])
@pytest.mark.parametrize("seed", range(3))
def test_bf16_inputs_lose_only_their_own_rounding(name, shape, ours, book, seed):
    student, teacher = draw(*shape, seed=seed), draw(*shape, seed=seed + 100)
    half = student.bfloat16(), teacher.bfloat16()
    exact = book(student.double(), teacher.double())
    error, naive_error = (ours(*half).double() - exact).abs(), (book(*half).double() - exact).abs()
    assert error <= 2 * naive_error + 1e-3 * exact.abs()
    # The computation adds no error: all of the error comes from rounding the inputs.
    assert ours(*half).dtype == torch.float32
    torch.testing.assert_close(ours(*half).double(), book(*(part.double() for part in half)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "call",
    [
        lambda: forward_kl(torch.zeros(2, 5), torch.zeros(2, 6)),
        lambda: forward_kl(torch.zeros(2, 5), torch.zeros(1, 5)),  # would broadcast to a wrong mean
        lambda: cross_entropy(torch.zeros(2, 5), torch.zeros(2)),  # float labels would be read as probabilities
        lambda: hidden_mse(torch.zeros(2, 3, 4), torch.zeros(2, 3, 1), torch.ones(2, 3, dtype=torch.long)),
        lambda: hidden_cosine(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), torch.ones(2, 1, dtype=torch.long)),
    ],
)
def test_wrong_shapes_and_dtypes_are_rejected(call):
    with pytest.raises(jaxtyping.TypeCheckError):
        call()


def three_terms(config: LossConfig) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Returns the terms of a student of two matrices: `inner` gives hidden states, `outer` logits of their mean."""
    inner, outer = draw(6, 4, seed=1, scale=1).requires_grad_(), draw(4, 5, seed=2, scale=1).requires_grad_()
    hidden = draw(3, 7, 6, seed=3) @ inner
    labels = torch.tensor([0, IGNORED, 4])
    pairs = [(hidden, draw(3, 7, 4, seed=4)), (2 * hidden, draw(3, 7, 4, seed=5))]
    signals = {"logits": draw(3, 5, seed=6)}
    terms = compute_loss_terms(config, hidden.mean(1) @ outer, labels, draw_mask(3, 7), signals, {"hidden": pairs})
    return terms, [inner, outer]


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_terms_and_their_weighted_sum_match_the_textbook(kind):
    config = LossConfig(kl=0.7, ce=0.2, hidden=3.0, temperature=3.0, hidden_kind=kind)
    terms, (inner, outer) = three_terms(config)
    inner, outer = inner.detach().double(), outer.detach().double()
    hidden = draw(3, 7, 6, seed=3).double() @ inner
    logits, book = hidden.mean(1) @ outer, {"mse": textbook_mse, "cosine": textbook_cosine}[kind]
    distances = [book(n * hidden, draw(3, 7, 4, seed=3 + n).double(), draw_mask(3, 7)) for n in (1, 2)]
    wanted = {
        "kl": textbook_kl(logits, draw(3, 5, seed=6).double(), 3.0),
        "ce": textbook_ce(logits, torch.tensor([0, IGNORED, 4])),
        "hidden": sum(distances) / 2,
    }
    assert list(terms) == ["kl", "ce", "hidden"]
    for name, value in terms.items():
        torch.testing.assert_close(value.double(), wanted[name], rtol=1e-5, atol=1e-6)
    total = 0.7 * wanted["kl"] + 0.2 * wanted["ce"] + 3.0 * wanted["hidden"]
    torch.testing.assert_close(weighted_sum(config, terms).double(), total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("divergence", "settings", "function", "named"),
    [
        ("jensen_shannon", {"beta": 0.2}, jensen_shannon, {"beta": 0.2}),
        ("skewed_kl", {"skew": 0.3}, skewed_kl, {"skew": 0.3}),
        ("skewed_reverse_kl", {"skew": 0.3}, skewed_reverse_kl, {"skew": 0.3}),
        ("decoupled_kl", {"decoupled": (0.5, 3.0)}, decoupled_kl, {"alpha": 0.5, "beta": 3.0}),
    ],
)
def test_a_divergence_is_computed_with_its_settings(divergence, settings, function, named):
    student, teacher, labels = draw(8, 5, seed=1), draw(8, 5, seed=2), draw_labels(8, 5)
    config = LossConfig(kl=1, temperature=2.0, divergence=divergence, **settings)
    terms = compute_loss_terms(config, student, labels, draw_mask(8, 3), {"logits": teacher})
    extra = {"labels": labels} if divergence == "decoupled_kl" else {}
    assert torch.equal(terms["kl"], function(student, teacher, temperature=2.0, **named, **extra))


def test_a_term_of_weight_zero_is_not_computed():
    assert list(three_terms(LossConfig(kl=0.0, ce=1.0))[0]) == ["ce"]
    assert list(three_terms(LossConfig(kl=2.0, hidden=1.0))[0]) == ["kl", "hidden"]


def test_gradient_shares_are_proportional_to_the_norms_of_the_gradients():
    config = LossConfig(kl=0.7, ce=0.2, hidden=3.0)
    terms, parameters = three_terms(config)
    norms = {}
    for name, weight in (("kl", 0.7), ("ce", 0.2), ("hidden", 3.0)):
        grads = torch.autograd.grad(terms[name], parameters, retain_graph=True, allow_unused=True)
        norms[name] = weight * sum(float((g.double() ** 2).sum()) for g in grads if g is not None) ** 0.5
    assert grads[1] is None, "the hidden term should not reach the head"
    shares = compute_gradient_shares(config, terms, [*parameters, torch.zeros(3)])  # the last one is frozen
    assert sum(shares.values()) == pytest.approx(1, abs=1e-6)
    assert shares == pytest.approx({name: norm / sum(norms.values()) for name, norm in norms.items()}, rel=1e-4)
    weighted_sum(config, terms).backward()  # the shares must leave the graph and the gradients alone
    assert parameters[0].grad is not None


def test_the_share_of_a_single_term_is_one():
    config = LossConfig(kl=2.5)
    assert compute_gradient_shares(config, *three_terms(config)) == {"kl": 1.0}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kl": -1.0}, "loss.kl: expected a weight of at least 0, found -1"),
        ({"kl": 1.0, "ce": -0.1}, "loss.ce: expected a weight of at least 0, found -0.1"),
        ({"kl": 0.0}, "nothing would be learnt"),
        ({"kl": float("nan")}, "nan"),
        ({"temperature": 0.0}, "loss.temperature: expected more than 0, found 0.0"),
        ({"temperature": -2.0}, "loss.temperature"),
        ({"hidden_kind": "l1"}, "loss.hidden_kind: expected mse, cosine, normalized_mse, found 'l1'"),
        ({"layer_map": "every"}, "found 'every'"),
        ({"layer_map": "0:0,2"}, "found '0:0,2'"),
        ({"layer_map": "0:-1"}, "found '0:-1'"),
        ({"layer_map": ""}, "found ''"),
    ],
)
def test_an_invalid_loss_config_is_rejected(settings, named):
    with pytest.raises(InputError, match="loss") as caught:
        LossConfig(**settings)
    assert named in str(caught.value)


def test_the_teacher_is_needed_only_if_a_term_uses_it():
    assert not LossConfig(kl=0.0, ce=1.0).needs_teacher
    assert LossConfig(kl=0.0, ce=1.0, hidden=0.1).needs_teacher
    assert LossConfig(kl=0.5).needs_teacher


@pytest.mark.parametrize(
    ("layer_map", "student", "teacher", "pairs"),
    [
        ("last", 2, 6, [(2, 6)]),
        ("skip", 6, 12, [(1, 2), (2, 4), (3, 6), (4, 8), (5, 10)]),
        ("skip", 3, 4, [(1, 1), (2, 2)]),
        ("learned", 1, 3, [(0, 0), (1, 1), (1, 2), (1, 3)]),
        ("uniform", 2, 6, [(0, 0), (1, 3), (2, 6)]),
        ("uniform", 4, 12, [(0, 0), (1, 3), (2, 6), (3, 9), (4, 12)]),
        ("uniform", 3, 3, [(0, 0), (1, 1), (2, 2), (3, 3)]),
        ("0:0,2:6", 2, 6, [(0, 0), (2, 6)]),
        ("1:5", 1, 5, [(1, 5)]),
    ],
)
def test_layers_are_paired_as_requested(layer_map, student, teacher, pairs):
    assert pair_layers(layer_map, student, teacher) == pairs


def test_layers_of_a_shallower_teacher_cannot_be_skipped():
    with pytest.raises(InputError, match="skip: expected at most 4 student layers, the teacher's number, found 6"):
        pair_layers("skip", 6, 4)


@pytest.mark.parametrize("pair", ["3:6", "2:7"])
def test_a_pair_with_a_layer_out_of_range_is_rejected(pair):
    with pytest.raises(InputError, match=rf"student layers 0 to 2 and teacher layers 0 to 6 .*, found {pair}"):
        pair_layers(f"0:0,{pair}", 2, 6)


def test_distances_over_no_row_are_a_zero_with_a_graph():
    logits = torch.zeros(0, 5, requires_grad=True)
    labels, mask = torch.zeros(0, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long)
    terms = compute_loss_terms(LossConfig(kl=1, ce=1), logits, labels, mask, {"logits": torch.zeros(0, 5)})
    assert {name: float(value.detach()) for name, value in terms.items()} == {"kl": 0, "ce": 0}
    assert all(value.grad_fn is not None for value in terms.values())
