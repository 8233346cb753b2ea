"""Tests losses across tokenizers against plain loops in float64, and their identities."""

import jaxtyping
import numpy as np
import pytest
import torch
from torch import Tensor

from distill.errors import InputError
from distill.losses.cross_tokenizer import cross_tokenizer_loss, sorted_distance
from distill.losses.cross_tokenizer_config import CrossTokenizerConfig
from distill.losses.logits import IGNORED, forward_kl, jensen_shannon
from distill.losses.spans import sort_ascending
from support.distributions import draw, same_value_and_gradient, softmax

SHAPES = [(1, 2, 3), (3, 5, 2), (17, 77, 61), (5, 101, 1001)]  # rows, the student's vocabulary, the teacher's
CASES = [(3, 11, 13), (1, 5, 4), (2, 23, 7)]  # batch, the student's vocabulary, the teacher's


def case(batch: int, vocabulary: int, teacher_vocabulary: int, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Returns rows of 12 and 14 positions with spans of 1 to 3 tokens per side, some unlabelled, and pairs of ids."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, (batch, 4, 2))
    ends = sizes.cumsum(1)
    spans = torch.from_numpy(np.stack([ends - sizes, ends], -1).reshape(batch, 4, 4))
    spans[:, 3] = 0
    labels = torch.from_numpy(rng.integers(0, vocabulary, (batch, 12)))
    teacher_labels = torch.from_numpy(rng.integers(0, teacher_vocabulary, (batch, 14)))
    teacher_labels[0, spans[0, 1, 2]] = IGNORED
    count = min(vocabulary, teacher_vocabulary) * 2 // 3
    pairs = [rng.permutation(size)[:count] for size in (vocabulary, teacher_vocabulary)]
    return {"labels": labels, "teacher_labels": teacher_labels, "spans": spans}, torch.from_numpy(np.stack(pairs, 1))


def logits_for(batch: dict[str, Tensor], vocabulary: int, teacher_vocabulary: int) -> tuple[Tensor, Tensor]:
    shapes = (*batch["labels"].shape, vocabulary), (*batch["teacher_labels"].shape, teacher_vocabulary)
    return draw(*shapes[0], seed=1, scale=2.0), draw(*shapes[1], seed=2, scale=2.0)


def labelled_spans(batch: dict[str, Tensor]) -> list[tuple[int, list[int]]]:
    labelled = []
    for row, spans in enumerate(batch["spans"].tolist()):
        for span in spans:
            span_labels = [*batch["labels"][row, span[0] : span[1]], *batch["teacher_labels"][row, span[2] : span[3]]]
            if span_labels and all(label != IGNORED for label in span_labels):
                labelled.append((row, span))
    return labelled


# The textbook: distributions as dicts from an outcome's name to its probability, in the precision of the inputs.


def textbook_outcomes(logits: Tensor, ids: list[int], names: list, others: dict) -> dict:
    """Returns outcomes; `names`: the name of each column; `others`: whether a token by name spells the span as well."""
    steps = softmax(logits)
    continued = 1.0
    for step, number in zip(steps[1:], ids[1:], strict=True):
        continued = continued * step[number]
    outcomes: dict = {"span": 0.0}
    for column, name in enumerate(names):
        p = steps[0][column]
        if column == ids[0]:
            outcomes["span"] = outcomes["span"] + p * continued
            p = p * (1 - continued) if len(ids) > 1 else 0 * p
        elif others.get(name):
            outcomes["span"] = outcomes["span"] + p
            p = 0 * p
        outcomes[name] = p
    return outcomes


def textbook_spans(
    student: Tensor, teacher: Tensor, batch: dict, shared: Tensor, config: CrossTokenizerConfig
) -> Tensor:
    names = [[f"own {i}" for i in range(student.shape[-1])], [f"teacher {i}" for i in range(teacher.shape[-1])]]
    for number, (i, j) in enumerate(shared.tolist()):
        names[0][i] = names[1][j] = number
    total, spans = student.new_zeros(()), labelled_spans(batch)
    for row, (first, end, teacher_first, teacher_end) in spans:
        ids, teacher_ids = (
            batch["labels"][row, first:end].tolist(),
            batch["teacher_labels"][row, teacher_first:teacher_end].tolist(),
        )
        spelled = [{names[k][each[0]]: True} if len(each) == 1 else {} for k, each in ((1, teacher_ids), (0, ids))]
        t = config.temperature
        q = textbook_outcomes(student[row, first:end] / t, ids, names[0], spelled[0])
        p = textbook_outcomes(
            teacher[row, teacher_first:teacher_end].to(student.dtype) / t, teacher_ids, names[1], spelled[1]
        )
        common = ["span", *range(len(shared))]
        rest = [sum(v for name, v in each.items() if name not in common) for each in (p, q)]
        pairs = [(p[name], q[name]) for name in common] + [(rest[0], rest[1])]
        mass = sum(a for a, b in pairs if b > 0)
        pairs = [(a / mass, b) for a, b in pairs if b > 0]

        def kl(pairs):
            return sum(a * (a / b).log() for a, b in pairs if a > 0)

        mixture = [(a, b, config.beta * a + (1 - config.beta) * b) for a, b in pairs]
        shared_part = kl(pairs)
        if config.beta:
            shared_part = config.beta * kl([(a, m) for a, _, m in mixture])
            shared_part = shared_part + (1 - config.beta) * kl([(b, m) for _, b, m in mixture])
        lone = [sorted((v for n, v in each.items() if n not in common), reverse=True) for each in (p, q)]
        width = max(map(len, lone))
        padded = [each + [0.0] * (width - len(each)) for each in lone]
        distance = sum(abs(a - b) for a, b in zip(*padded, strict=True))
        total = total + config.shared_weight * shared_part + (1 - config.shared_weight) * distance
    return config.temperature**2 * total / max(1, len(spans))


def textbook_sorted(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    total = student.new_zeros(())
    for a, b in zip(softmax(student / temperature), softmax(teacher.to(student.dtype) / temperature), strict=True):
        pair = [sorted(each, reverse=True) for each in (a, b)]
        for k in range(max(map(len, pair))):
            values = [each[k] if k < len(each) else 0.0 for each in pair]
            total = total + abs(values[0] - values[1])
    return temperature**2 * total / len(student)


# --- values and gradients


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_value_and_gradient_of_the_sorted_distance_match_the_textbook(shape, temperature):
    rows, *widths = shape
    student, teacher = draw(rows, widths[0], seed=1), draw(rows, widths[1], seed=2)
    same_value_and_gradient(
        lambda s: sorted_distance(s, teacher, temperature=temperature, chunk_bytes=2000),
        lambda s: textbook_sorted(s, teacher, temperature),
        student,
    )


@pytest.mark.parametrize("shape", CASES)
@pytest.mark.parametrize(
    "config",
    [
        CrossTokenizerConfig(),
        CrossTokenizerConfig(beta=0.3, temperature=2.0, shared_weight=0.5),
        CrossTokenizerConfig(shared_weight=0),
    ],
    ids=["kl", "jensen_shannon", "rest"],
)
def test_value_and_gradient_of_the_span_loss_match_the_textbook(shape, config):
    batch, shared = case(*shape)
    student, teacher = logits_for(batch, *shape[1:])
    same_value_and_gradient(
        lambda s: cross_tokenizer_loss(s, teacher, batch, config, shared),
        lambda s: textbook_spans(s, teacher, batch, shared, config),
        student,
    )


def test_the_sorted_distance_is_taken_at_the_first_tokens_of_spans():
    batch, _ = case(3, 11, 13)
    student, teacher = logits_for(batch, 11, 13)
    rows = labelled_spans(batch)
    picked = [torch.stack([each[row, span[side]] for row, span in rows]) for each, side in ((student, 0), (teacher, 2))]
    config = CrossTokenizerConfig(kind="sorted", temperature=2.0)
    wanted = textbook_sorted(*picked, 2.0)
    torch.testing.assert_close(cross_tokenizer_loss(student, teacher, batch, config), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [CrossTokenizerConfig(shared_weight=0.4), CrossTokenizerConfig(beta=0.3), CrossTokenizerConfig(kind="sorted")],
)
def test_the_gradient_equals_the_numerical_derivative(config):
    batch, shared = case(1, 5, 4, seed=3)
    sizes = [
        (end - first > 1, teacher_end - teacher_first > 1)
        for _, (first, end, teacher_first, teacher_end) in labelled_spans(batch)
    ]
    assert sizes == [(True, False), (False, True)]
    student, teacher = (each.double() for each in logits_for(batch, 5, 4))
    student.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: 0.3 * cross_tokenizer_loss(s, teacher, batch, config, shared), student)


@pytest.mark.parametrize("kind", ["spans", "sorted"])
def test_chunks_and_a_second_backward_pass_do_not_change_the_gradient(kind):
    batch, shared = case(3, 11, 13)
    student, teacher = logits_for(batch, 11, 13)
    student.requires_grad_()
    results = []
    for chunk_bytes in (1, 300, 1 << 20):
        value = cross_tokenizer_loss(
            student, teacher, batch, CrossTokenizerConfig(kind=kind), shared, chunk_bytes=chunk_bytes
        )
        results += [(value, torch.autograd.grad(value, student, retain_graph=True)[0]) for _ in range(2)]
    for value, gradient in results[1:]:
        torch.testing.assert_close(value, results[0][0])
        torch.testing.assert_close(gradient, results[0][1])


@pytest.mark.parametrize("kind", ["spans", "sorted"])
def test_bf16_loses_only_the_rounding_of_its_logits_and_the_teacher_is_not_trained(kind):
    batch, shared = case(3, 11, 13)
    student, teacher = (each.bfloat16().requires_grad_() for each in logits_for(batch, 11, 13))
    value = cross_tokenizer_loss(student, teacher, batch, CrossTokenizerConfig(kind=kind), shared)
    wide = cross_tokenizer_loss(student.float(), teacher.float(), batch, CrossTokenizerConfig(kind=kind), shared)
    assert value.dtype == torch.float32
    assert torch.equal(value, wide)
    value.backward()
    assert student.grad is not None
    assert student.grad.dtype == torch.bfloat16
    assert teacher.grad is None
    exact = student.detach().float().requires_grad_()
    cross_tokenizer_loss(exact, teacher.float(), batch, CrossTokenizerConfig(kind=kind), shared).backward()
    torch.testing.assert_close(student.grad.float(), exact.grad, rtol=2**-7, atol=1e-6)
    with torch.inference_mode():
        frozen_logits = teacher.detach().clone()  # as a frozen teacher outputs them
    assert torch.equal(
        cross_tokenizer_loss(student, frozen_logits, batch, CrossTokenizerConfig(kind=kind), shared), value
    )


@pytest.mark.parametrize("kind", ["spans", "sorted"])
def test_padding_and_unlabelled_spans_have_no_effect(kind):
    batch, shared = case(3, 11, 13)
    student, teacher = logits_for(batch, 11, 13)
    value = cross_tokenizer_loss(student, teacher, batch, CrossTokenizerConfig(kind=kind), shared)
    compared = [torch.zeros(each.shape[:2], dtype=torch.bool) for each in (student, teacher)]
    for row, (first, end, teacher_first, teacher_end) in labelled_spans(batch):
        compared[0][row, first:end] = compared[1][row, teacher_first:teacher_end] = True
    student[~compared[0]], teacher[~compared[1]] = torch.nan, torch.nan
    student.requires_grad_()
    again = cross_tokenizer_loss(student, teacher, batch, CrossTokenizerConfig(kind=kind), shared)
    assert torch.equal(value, again)
    again.backward()
    assert not student.grad[~compared[0]].any()
    batch["labels"][:] = IGNORED
    none = cross_tokenizer_loss(student, teacher, batch, CrossTokenizerConfig(kind=kind), shared)
    assert none.item() == 0
    assert not torch.autograd.grad(none, student)[0].any()


# --- identities


def test_a_fully_shared_vocabulary_gives_the_plain_divergence():
    student, teacher = draw(2, 6, 9, seed=1), draw(2, 6, 9, seed=2)
    places = torch.arange(6)
    labels = torch.randint(0, 9, (2, 6), generator=torch.Generator().manual_seed(3))
    spans = torch.stack([places, places + 1, places, places + 1], -1).expand(2, 6, 4)
    batch = {"labels": labels, "teacher_labels": labels, "spans": spans}
    shared = torch.stack([torch.arange(9)] * 2, 1)
    rows = student.flatten(0, 1), teacher.flatten(0, 1)
    for temperature in (1.0, 3.0):
        plain = cross_tokenizer_loss(
            student, teacher, batch, CrossTokenizerConfig(temperature=temperature, shared_weight=1), shared
        )
        torch.testing.assert_close(plain, forward_kl(*rows, temperature=temperature))
        config = CrossTokenizerConfig(temperature=temperature, beta=0.3, shared_weight=0.5)
        half = cross_tokenizer_loss(student, teacher, batch, config, shared)
        torch.testing.assert_close(half, 0.5 * jensen_shannon(*rows, temperature=temperature, beta=0.3))


def test_permuted_vocabularies_have_a_sorted_distance_of_zero():
    teacher = draw(7, 31, seed=2)
    student = teacher[:, torch.randperm(31, generator=torch.Generator().manual_seed(1))]
    assert sorted_distance(student, teacher) < 1e-6
    wider = torch.cat([teacher, torch.full((7, 5), -torch.inf)], 1)
    assert sorted_distance(student, wider) < 1e-6


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_student_equal_to_its_teacher_has_zero_loss_and_gradient(beta):
    """This fails if only the probabilities of the shared tokens are compared, since they don't sum to 1."""
    batch, shared = case(3, 11, 11)
    teacher = logits_for(batch, 11, 11)[1]
    rest = [torch.tensor(sorted(set(range(11)) - set(side.tolist()))) for side in shared.T]
    order = torch.empty(11, dtype=torch.long)  # the teacher's column for each of the student's
    order[torch.cat([shared[:, 0], rest[0]])] = torch.cat([shared[:, 1], rest[1]])
    batch["labels"] = order.argsort()[batch["teacher_labels"].clamp(min=0)]
    batch["spans"] = batch["spans"][..., [2, 3, 2, 3]]
    student = teacher[..., order].requires_grad_()
    value = cross_tokenizer_loss(student, teacher, batch, CrossTokenizerConfig(beta=beta, shared_weight=1), shared)
    assert value.abs() < 1e-6
    value.backward()
    assert student.grad.abs().max() < 1e-6


def test_a_word_in_one_token_is_the_same_outcome_as_in_two():
    batch = {
        "labels": torch.tensor([[1, 2]]),
        "teacher_labels": torch.tensor([[0]]),
        "spans": torch.tensor([[[0, 2, 0, 1]]]),
    }
    shared = torch.tensor([[1, 1], [0, 2]])  # the first token of the word, and another word
    student = torch.tensor([[[0.5, 0.4, 0.1], [0.2, 0.2, 0.6]]]).log()  # word: 0.4 · 0.6; begun otherwise: 0.4 · 0.4
    teacher = torch.tensor([[[0.24, 0.16, 0.5, 0.1]]]).log()
    for config in (CrossTokenizerConfig(), CrossTokenizerConfig(beta=0.5)):
        assert cross_tokenizer_loss(student, teacher, batch, config, shared).abs() < 1e-6
    assert cross_tokenizer_loss(student.flip(1), teacher, batch, CrossTokenizerConfig(), shared) > 0.01


def test_the_loss_of_an_overconfident_student_is_finite():
    batch, shared = case(3, 11, 13)
    student, teacher = logits_for(batch, 11, 13)
    student.scatter_(-1, batch["labels"][..., None], 200.0)
    student.requires_grad_()
    for config in (CrossTokenizerConfig(), CrossTokenizerConfig(beta=0.5)):
        value = cross_tokenizer_loss(student, teacher, batch, config, shared)
        assert value.isfinite()
        assert torch.autograd.grad(value, student)[0].isfinite().all()
    # All of the student's tokens are shared, and all but two of the teacher's.
    whole = torch.stack([torch.arange(11), torch.arange(11)], 1)
    assert cross_tokenizer_loss(
        logits_for(batch, 11, 13)[0], teacher, batch, CrossTokenizerConfig(shared_weight=1), whole
    ).isfinite()


# --- bad input


@pytest.mark.parametrize(
    "settings", [{"kind": "gold"}, {"beta": 1.0}, {"beta": -0.1}, {"shared_weight": 1.1}, {"temperature": 0}]
)
def test_invalid_settings_are_rejected(settings):
    with pytest.raises(InputError, match=f"cross_tokenizer.{next(iter(settings))}: expected"):
        CrossTokenizerConfig(**settings)


def test_inconsistent_inputs_are_rejected():
    batch, shared = case(3, 11, 13)
    student, teacher = logits_for(batch, 11, 13)
    for change, match in (
        ({"batch": {"labels": batch["labels"]}}, "found no teacher_labels, spans"),
        ({"teacher_logits": teacher[:, 1:]}, "positions as teacher_labels has"),
        ({"shared": None}, "expected the pairs of shared_vocabulary"),
        ({"shared": shared + 5}, "tokens would be matched to the wrong logits"),
    ):
        arguments = {"student_logits": student, "teacher_logits": teacher, "batch": batch, "shared": shared} | change
        with pytest.raises(InputError, match=match):
            cross_tokenizer_loss(config=CrossTokenizerConfig(), **arguments)
    with pytest.raises(jaxtyping.TypeCheckError):
        sorted_distance(student[0], teacher[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sorting_with_numpy_gives_the_values_and_gradients_of_torch(dtype):
    ours = torch.randn(7, 300, dtype=dtype, generator=torch.Generator().manual_seed(0)).softmax(-1).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    weights = torch.arange(300, dtype=dtype).cos()
    expected, found = theirs.sort(-1).values, sort_ascending(ours)
    assert torch.equal(found, expected)
    for order in (expected, found):
        (order * weights).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)
    assert torch.equal(sort_ascending(ours.detach()), expected)
