"""Tests objectives on logits, layers and texts against textbook versions in float64, and their identities."""

import inspect
from collections.abc import Callable
from functools import partial

import jaxtyping
import pytest
import torch
from torch import Tensor

from distill.errors import InputError
from distill.losses import features, logits, teachers
from support.distributions import IGNORED, draw, draw_labels, draw_mask, same_value_and_gradient, softmax

SHAPES = [(1, 3), (3, 5), (7, 41)]
T = 2.5

# The textbook: probabilities, sums over plain loops, in the precision of the inputs.


def rowwise(
    divergence: Callable[[Tensor, Tensor], Tensor], temperature: float = T
) -> Callable[[Tensor, Tensor], Tensor]:
    def mean(student: Tensor, teacher: Tensor) -> Tensor:
        p, q = softmax(teacher / temperature), softmax(student / temperature)
        return temperature**2 * sum(divergence(a, b) for a, b in zip(p, q, strict=True)) / len(p)

    return mean


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum()


def jsd(p: Tensor, q: Tensor, beta: float) -> Tensor:
    m = beta * p + (1 - beta) * q
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def dkd(student: Tensor, teacher: Tensor, labels: Tensor, alpha: float, beta: float) -> Tensor:
    total, count = torch.zeros((), dtype=student.dtype), 0
    for s, t, label in zip(student, teacher, labels.tolist(), strict=True):
        if label == IGNORED:
            continue
        p, q = softmax(t / T), softmax(s / T)
        rest = [i for i in range(len(p)) if i != label]
        pairs = [torch.stack([each[label], each[rest].sum()]) for each in (p, q)]
        within = [each[rest] / each[rest].sum() for each in (p, q)]
        total, count = total + alpha * kl(*pairs) + beta * kl(*within), count + 1
    return T**2 * total / count


TEXTBOOK = {
    "forward_kl": rowwise(kl),
    "reverse_kl": rowwise(lambda p, q: kl(q, p)),
    "jensen_shannon": rowwise(lambda p, q: jsd(p, q, 0.5)),
    "skewed_kl": rowwise(lambda p, q: kl(p, 0.1 * p + 0.9 * q)),
    "skewed_reverse_kl": rowwise(lambda p, q: kl(q, 0.9 * p + 0.1 * q)),
    "total_variation": rowwise(lambda p, q: 0.5 * (p - q).abs().sum()),
    "soft_cross_entropy": rowwise(lambda p, q: -(p * q.log()).sum()),
    "logit_mse": lambda s, t: ((s - t) ** 2).mean(),
    "logit_cosine": lambda s, t: (1 - (s * t).sum(-1) / ((s * s).sum(-1) * (t * t).sum(-1)).sqrt()).mean(),
}
OF_LOGITS = {
    name: partial(loss, temperature=T) for name, loss in logits.DIVERGENCE_FUNCTIONS.items() if name in TEXTBOOK
}


def test_every_objective_has_a_textbook_version_and_a_source():
    assert set(TEXTBOOK) | {"decoupled_kl"} == set(logits.DIVERGENCE_FUNCTIONS)
    assert all(
        "Source: " in inspect.getdoc(loss)
        for name, loss in logits.DIVERGENCE_FUNCTIONS.items()
        if name != "logit_cosine"
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TEXTBOOK)
def test_value_and_gradient_match_the_textbook(name, shape):
    teacher = draw(*shape, seed=2)
    same_value_and_gradient(
        lambda s: OF_LOGITS[name](s, teacher), lambda s: TEXTBOOK[name](s, teacher.double()), draw(*shape, seed=1)
    )


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_beta_of_jensen_shannon_weights_the_teacher(beta):
    student, teacher = draw(5, 9, seed=1), draw(5, 9, seed=2)
    same_value_and_gradient(
        lambda s: logits.jensen_shannon(s, teacher, temperature=T, beta=beta),
        lambda s: rowwise(lambda p, q: jsd(p, q, beta))(s, teacher.double()),
        student,
    )


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 8.0), (0.3, 0.0), (0.0, 2.0)])
@pytest.mark.parametrize("shape", [(1, 2), *SHAPES])
def test_value_and_gradient_of_decoupled_kl_match_the_textbook(shape, alpha, beta):
    teacher, labels = draw(*shape, seed=2), draw_labels(*shape)
    same_value_and_gradient(
        lambda s: logits.decoupled_kl(s, teacher, labels, temperature=T, alpha=alpha, beta=beta),
        lambda s: dkd(s, teacher.double(), labels, alpha, beta),
        draw(*shape, seed=1),
    )


def test_rows_without_a_label_have_no_effect_on_decoupled_kl():
    student, teacher, labels = draw(8, 5, seed=1).requires_grad_(), draw(8, 5, seed=2), draw_labels(8, 5)
    (grad,) = torch.autograd.grad(logits.decoupled_kl(student, teacher, labels), student)
    assert grad[labels == IGNORED].abs().max() == 0
    assert grad[labels != IGNORED].abs().amax(-1).min() > 0
    value = logits.decoupled_kl(student, teacher, torch.full((8,), IGNORED))
    assert value.item() == 0
    assert torch.autograd.grad(value, student)[0].abs().max() < 1e-6


@pytest.mark.parametrize("name", [name for name in TEXTBOOK if name != "soft_cross_entropy"])
def test_a_model_has_zero_divergence_from_itself(name):
    model_logits = draw(9, 31, seed=1).requires_grad_()
    value = OF_LOGITS[name](model_logits, model_logits.detach().clone())
    assert value.abs() < 2e-6
    assert torch.autograd.grad(value, model_logits)[0].abs().max() < 1e-5


def test_objectives_agree_in_their_limits_and_respect_their_bounds():
    student, teacher = draw(7, 11, seed=1), draw(7, 11, seed=2)
    forward, reverse = logits.forward_kl(student, teacher), logits.reverse_kl(student, teacher)
    torch.testing.assert_close(reverse, logits.forward_kl(teacher, student))
    double = student.double(), teacher.double()
    torch.testing.assert_close(logits.jensen_shannon(*double, beta=1e-6).float() / 1e-6, forward, rtol=0.01, atol=0)
    torch.testing.assert_close(logits.jensen_shannon(*double, beta=1 - 1e-6).float() / 1e-6, reverse, rtol=0.01, atol=0)
    torch.testing.assert_close(logits.skewed_kl(student, teacher, skew=1e-6), forward, rtol=0.01, atol=0)
    torch.testing.assert_close(logits.skewed_reverse_kl(student, teacher, skew=1e-6), reverse, rtol=0.01, atol=0)
    entropy = logits.soft_cross_entropy(teacher, teacher)
    torch.testing.assert_close(logits.soft_cross_entropy(student, teacher), forward + entropy)
    assert logits.skewed_kl(student * 50, -teacher * 50, skew=0.1) <= -torch.tensor(0.1).log() + 1e-5
    assert logits.total_variation(student * 50, teacher * 50) <= 1


@pytest.mark.parametrize("name", TEXTBOOK)
def test_padding_of_the_vocabulary_has_no_effect(name):
    student, teacher = draw(6, 9, seed=1), draw(6, 9, seed=2)
    wide = [torch.cat([each, torch.full((6, 3), -torch.inf)], -1) for each in (student, teacher)]
    wide[0].requires_grad_()
    value = OF_LOGITS[name](*wide)
    torch.testing.assert_close(value, OF_LOGITS[name](student, teacher))
    (grad,) = torch.autograd.grad(value, wide[0])
    assert grad.isfinite().all()
    assert grad[:, 9:].abs().max() == 0


@pytest.mark.parametrize("name", TEXTBOOK)
@pytest.mark.parametrize("seed", range(2))
def test_bf16_logits_lose_only_their_own_rounding(name, seed):
    student, teacher = draw(64, 77, seed=seed), draw(64, 77, seed=seed + 100)
    half = student.bfloat16(), teacher.bfloat16()
    exact = TEXTBOOK[name](student.double(), teacher.double())
    error, naive = (abs(float(loss(*half)) - float(exact)) for loss in (OF_LOGITS[name], TEXTBOOK[name]))
    assert error <= 2 * naive + 1e-3 * abs(float(exact))
    rounded = TEXTBOOK[name](*(each.double() for each in half))
    torch.testing.assert_close(OF_LOGITS[name](*half).double(), rounded, rtol=1e-5, atol=1e-6)


# --- layers


def score_pairs(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    batch, heads, length, _ = student.shape
    errors = []
    for b in range(batch):
        tokens = mask[b] == 1
        for i in range(length):
            if tokens[i]:
                errors.append(((student[b, :, i, tokens] - teacher[b, :, i, tokens]) ** 2).sum() / heads / tokens.sum())
    return sum(errors) / len(errors)


def score_kl(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    batch, heads, length, _ = student.shape
    divergences = []
    for b in range(batch):
        tokens = mask[b] == 1
        for h in range(heads):
            for i in range(length):
                if tokens[i]:
                    divergences.append(kl(softmax(teacher[b, h, i, tokens]), softmax(student[b, h, i, tokens])))
    return sum(divergences) / len(divergences)


def book_relations(student: Tensor, teacher: Tensor, mask: Tensor, heads: int) -> Tensor:
    scores = []
    for each in (student, teacher):
        width = each.shape[-1] // heads
        parts = [each[..., h * width : (h + 1) * width] for h in range(heads)]
        scores.append(torch.stack([part @ part.mT / width**0.5 for part in parts], 1))
    return score_kl(*scores, mask)


def normalized(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    pairs = zip(student[mask == 1], teacher[mask == 1], strict=True)
    return sum(((s / (s @ s).sqrt() - t / (t @ t).sqrt()) ** 2).sum() for s, t in pairs) / mask.sum()


MAPS = {"mse": (features.attention_mse, score_pairs), "kl": (features.attention_kl, score_kl)}


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 5, 5), (3, 2, 7, 7)])
def test_value_and_gradient_of_attention_losses_match_the_textbook(kind, shape):
    ours, book = MAPS[kind]
    teacher, mask = draw(*shape, seed=4), draw_mask(shape[0], shape[2])
    same_value_and_gradient(
        lambda s: ours(s, teacher, mask), lambda s: book(s, teacher.double(), mask), draw(*shape, seed=3)
    )


@pytest.mark.parametrize("heads", [1, 2, 6])
def test_value_and_gradient_of_the_relation_loss_match_the_textbook(heads):
    teacher, mask = draw(3, 7, 24, seed=4, scale=1), draw_mask(3, 7)
    same_value_and_gradient(
        lambda s: features.relation_kl(s, teacher, mask, heads=heads),
        lambda s: book_relations(s, teacher.double(), mask, heads),
        draw(3, 7, 12, seed=3, scale=1),
    )


def test_a_number_of_relation_heads_that_does_not_divide_the_width_is_rejected():
    values, mask = draw(2, 3, 12, seed=1), draw_mask(2, 3)
    with pytest.raises(InputError, match="expected a divisor of the width 12, found 5"):
        features.relation_kl(values, values, mask, heads=5)


@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 7, 5)])
def test_value_and_gradient_of_the_normalized_mse_match_the_textbook(shape):
    teacher, mask = draw(*shape, seed=4), draw_mask(*shape[:2])
    same_value_and_gradient(
        lambda s: features.hidden_normalized_mse(s, teacher, mask),
        lambda s: normalized(s, teacher.double(), mask),
        draw(*shape, seed=3),
    )
    twice = 2 * features.hidden_cosine(draw(*shape, seed=3), teacher, mask)
    torch.testing.assert_close(features.hidden_normalized_mse(draw(*shape, seed=3), teacher, mask), twice)


OF_LAYERS: dict[str, tuple[Callable, tuple[int, ...]]] = {
    "attention_mse": (features.attention_mse, (3, 2, 7, 7)),
    "attention_kl": (features.attention_kl, (3, 2, 7, 7)),
    "relation_kl": (partial(features.relation_kl, heads=2), (3, 7, 6)),
    "hidden_normalized_mse": (features.hidden_normalized_mse, (3, 7, 6)),
}


@pytest.mark.parametrize("name", OF_LAYERS)
def test_padding_has_no_effect_on_layer_losses(name):
    loss, shape = OF_LAYERS[name]
    mask = draw_mask(3, 7)
    student, teacher = draw(*shape, seed=1, scale=1).requires_grad_(), draw(*shape, seed=2, scale=1)
    hole = (mask == 0)[..., None] if len(shape) == 3 else (features.same_text_pairs(mask) == 0)[:, None]
    value = loss(student, teacher, mask)
    other = [draw(*shape, seed=seed, scale=1e4) for seed in (6, 7)]
    changed = [torch.where(hole, noise, each) for noise, each in zip(other, (student.detach(), teacher), strict=True)]
    torch.testing.assert_close(loss(*changed, mask), value)
    (grad,) = torch.autograd.grad(value, student)
    assert grad.isfinite().all()
    assert grad.masked_select(hole).abs().max() == 0
    assert loss(teacher, teacher, mask).abs() < 1e-6
    assert loss(student, teacher, torch.zeros_like(mask)).item() == 0


@pytest.mark.parametrize("name", OF_LAYERS)
def test_texts_of_one_row_are_not_compared_with_each_other(name):
    loss, shape = OF_LAYERS[name]
    sizes, documents = [(2, 4), (3, 1), (5,)], torch.zeros(3, 7, dtype=torch.long)
    student, teacher = (draw(*shape, seed=seed, scale=1) for seed in (1, 2))
    apart, total = 0.0, sum(map(sum, sizes))
    for row, lengths in enumerate(sizes):
        first = 0
        for number, length in enumerate(lengths, 1):
            part = slice(first, first + length)
            documents[row, part] = number
            index = (row, slice(None), part, part) if len(shape) == 4 else (row, part)
            one = loss(student[index][None], teacher[index][None], torch.ones(1, length, dtype=torch.long))
            apart, first = apart + one * length / total, first + length
    torch.testing.assert_close(loss(student, teacher, documents), apart)


@pytest.mark.parametrize("name", OF_LAYERS)
def test_bf16_layers_lose_only_their_own_rounding(name):
    loss, shape = OF_LAYERS[name]
    mask = draw_mask(3, 7)
    half = [draw(*shape, seed=seed, scale=1).bfloat16() for seed in (1, 2)]
    torch.testing.assert_close(
        loss(*half, mask).double(), loss(*(each.double() for each in half), mask), rtol=1e-5, atol=1e-6
    )


# --- texts


def book_cosines(vectors: Tensor) -> list[list[Tensor]]:
    return [[(a @ b) / ((a @ a) * (b @ b)).sqrt() for b in vectors] for a in vectors]


def book_similarity(student: Tensor, teacher: Tensor) -> Tensor:
    student_cosines, teacher_cosines, count = book_cosines(student), book_cosines(teacher), range(len(student))
    differences = [(student_cosines[i][j] - teacher_cosines[i][j]) ** 2 for i in count for j in count if i != j]
    return sum(differences) / len(differences)


def book_similarity_kl(student: Tensor, teacher: Tensor) -> Tensor:
    student_cosines, teacher_cosines, count = book_cosines(student), book_cosines(teacher), range(len(student))
    rows = [
        [softmax(torch.stack([each[i][j] for j in count if j != i]) / 0.05) for i in count]
        for each in (teacher_cosines, student_cosines)
    ]
    return sum(kl(p, q) for p, q in zip(*rows, strict=True)) / len(student)


TEXTS = {
    "embedding_mse": (features.embedding_mse, lambda s, t: ((s - t) ** 2).mean(), 6),
    "embedding_cosine": (features.embedding_cosine, TEXTBOOK["logit_cosine"], 6),
    "similarity_mse": (features.similarity_mse, book_similarity, 9),
    "similarity_kl": (features.similarity_kl, book_similarity_kl, 9),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("texts", [2, 7])
def test_value_and_gradient_of_embedding_losses_match_the_textbook(name, texts):
    ours, book, width = TEXTS[name]
    teacher = draw(texts, width, seed=2)
    same_value_and_gradient(
        lambda s: ours(s, teacher), lambda s: book(s, teacher.double()), draw(texts, 6, seed=1), tolerance=1e-4
    )
    assert ours(teacher, teacher).abs() < 1e-6


@pytest.mark.parametrize("loss", [features.similarity_mse, features.similarity_kl])
def test_a_single_text_has_zero_similarity_loss_and_gradient(loss):
    student = draw(1, 6, seed=1).requires_grad_()
    value = loss(student, draw(1, 9, seed=2))
    assert value.abs() < 1e-6
    assert torch.autograd.grad(value, student)[0].abs().max() < 1e-6


# --- several teachers


def test_a_mixture_is_the_weighted_sum_of_its_parts():
    teacher_logits, weights = [draw(5, 7, seed=seed) for seed in (1, 2, 3)], torch.rand(5, 3)
    weights = weights / weights.sum(1, keepdim=True)
    wanted = sum(weights[:, i, None] * softmax(each / T) for i, each in enumerate(teacher_logits))
    mixed = teachers.mix_logits(teacher_logits, weights, temperature=T)
    torch.testing.assert_close(softmax(mixed / T), wanted)
    torch.testing.assert_close(
        softmax(
            teachers.mix_logits(
                teacher_logits, teachers.constant_weights(teacher_logits, [0.0, 2.0, 0.0]), temperature=T
            )
        ),
        softmax(teacher_logits[1]),
    )


def test_confident_teachers_get_larger_weights():
    sure, guess = torch.tensor([[9.0, 0, 0], [0.0, 0, 0]]), torch.tensor([[0.0, 0, 0], [0.0, 9, 0]])
    weights = teachers.confidence_weights([sure, guess], [1.0, 1.0], sharpness=2.0)
    torch.testing.assert_close(weights.sum(1), torch.ones(2))
    assert weights[0, 0] > 0.85
    assert weights[1, 1] > 0.85
    torch.testing.assert_close(
        teachers.confidence_weights([sure, guess], [1.0, 3.0], sharpness=0.0)[0], torch.tensor([0.25, 0.75])
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda: logits.reverse_kl(torch.zeros(2, 5), torch.zeros(1, 5)),
        lambda: logits.decoupled_kl(torch.zeros(2, 5), torch.zeros(2, 5), torch.zeros(3, dtype=torch.long)),
        lambda: features.attention_kl(torch.zeros(1, 2, 3, 3), torch.zeros(1, 4, 3, 3), torch.ones(1, 3).long()),
        lambda: features.similarity_mse(torch.zeros(2, 5), torch.zeros(3, 5)),
    ],
)
def test_wrong_shapes_are_rejected(call):
    with pytest.raises(jaxtyping.TypeCheckError):
        call()
