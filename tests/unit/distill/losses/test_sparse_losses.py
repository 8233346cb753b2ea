"""Tests losses on sparse teacher targets against dense losses, and students with logits for every token."""

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from distill.errors import InputError
from distill.losses.compose import distribution_loss
from distill.losses.config import LossConfig
from distill.losses.logits import IGNORED, forward_kl
from distill.losses.sparse import sampled_cross_entropy, topk_kl
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from support.distributions import draw, same_value_and_gradient, softmax
from support.tiny_models import build_model

SHAPES = [(1, 2, 1), (3, 5, 2), (17, 77, 9), (5, 1001, 24), (4, 13, 12)]  # positions, vocabulary, k
TRAIN = TrainConfig(dropout=0)

# The textbook: full distributions by exp and division, loops over ids, in the precision of the inputs.


def textbook_sampled(student: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    dense = torch.zeros_like(student)
    for row, (columns, shares) in enumerate(zip(ids, weights, strict=True)):
        for column, share in zip(columns, shares, strict=True):
            dense[row, column] += share
    return -(dense * softmax(student).log()).sum() / len(student)


def textbook_topk(student: Tensor, ids: Tensor, log_probs: Tensor, tail: Tensor) -> Tensor:
    total = student.new_zeros(())
    for q, columns, logs, rest in zip(softmax(student), ids, log_probs, tail, strict=True):
        pairs = [(column, log) for column, log in zip(columns.tolist(), logs, strict=True) if log > -torch.inf]
        others = [column for column in range(len(q)) if column not in [c for c, _ in pairs]]
        total = total + sum(log.exp() * (log - q[column].log()) for column, log in pairs)
        if rest > 0:
            total = total + rest * (rest.log() - q[others].sum().log())
    return total / len(student)


def sampled(positions: int, vocabulary: int, k: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Returns draws with some repeated ids, of which the last is padding in every second position."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (positions, k), generator=generator)
    weights = torch.rand(positions, k, generator=generator) + 0.1
    ids[1::2, -1], weights[1::2, -1] = 0, 0
    return ids, weights


def top(teacher: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    log_probs, ids = teacher.double().log_softmax(-1).topk(k, -1)
    return ids, log_probs.float(), (1 - log_probs.exp().sum(-1)).clamp(min=0).float()


def pad_ids(ids: Tensor, filling: Tensor, value: float) -> tuple[Tensor, Tensor]:
    return F.pad(ids, (0, 3)), F.pad(filling, (0, 3), value=value)


@pytest.mark.parametrize("shape", SHAPES)
def test_value_and_gradient_of_sampled_cross_entropy_match_the_textbook(shape):
    ids, weights = sampled(*shape)
    same_value_and_gradient(
        lambda s: sampled_cross_entropy(s, ids, weights),
        lambda s: textbook_sampled(s, ids, weights.double()),
        draw(*shape[:2], seed=1),
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_value_and_gradient_of_topk_kl_match_the_textbook(shape):
    ids, log_probs, tail = top(draw(*shape[:2], seed=2), shape[2])
    same_value_and_gradient(
        lambda s: topk_kl(s, ids, log_probs, tail),
        lambda s: textbook_topk(s, ids, log_probs.double(), tail.double()),
        draw(*shape[:2], seed=1),
    )


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_the_custom_backward_equals_the_numerical_derivative(ids_dtype):
    student = draw(4, 7, seed=1).double().requires_grad_()
    ids, weights = sampled(4, 7, 3)
    top_ids, log_probs, tail = top(draw(4, 7, seed=2), 3)
    top_ids, log_probs = pad_ids(top_ids, log_probs, -torch.inf)
    assert sampled_cross_entropy(student, ids.to(ids_dtype), weights).dtype == torch.float64
    assert torch.autograd.gradcheck(lambda s: 0.3 * sampled_cross_entropy(s, ids.to(ids_dtype), weights), student)
    assert torch.autograd.gradcheck(lambda s: 0.3 * topk_kl(s, top_ids.to(ids_dtype), log_probs, tail), student)


@pytest.mark.parametrize("loss", ["sampled", "topk"])
def test_a_second_backward_pass_gives_the_same_gradient(loss):
    student = draw(4, 7, seed=1).requires_grad_()
    calls = {"sampled": (sampled_cross_entropy, sampled(4, 7, 3)), "topk": (topk_kl, top(draw(4, 7, seed=2), 3))}
    function, target = calls[loss]
    value = function(student, *target)
    first, second = (torch.autograd.grad(value, student, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_sampled_cross_entropy_of_full_distributions_is_soft_cross_entropy():
    student, teacher = draw(9, 31, seed=1), draw(9, 31, seed=2)
    ids, p = torch.arange(31).expand(9, 31), teacher.softmax(-1)
    value = sampled_cross_entropy(student, ids, p)
    torch.testing.assert_close(value, F.cross_entropy(student, p))
    entropy = -(p * teacher.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(value - entropy, forward_kl(student, teacher), rtol=1e-5, atol=1e-5)
    labels = torch.randint(0, 31, (9, 1), generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(
        sampled_cross_entropy(student, labels, torch.ones(9, 1)), F.cross_entropy(student, labels[:, 0])
    )


@pytest.mark.parametrize("left_over", [0.0, 1e-7])
def test_topk_kl_of_every_id_is_the_dense_kl(left_over):
    student, teacher = draw(9, 31, seed=1).requires_grad_(), draw(9, 31, seed=2)
    ids, log_probs, _ = top(teacher, 31)
    value, dense = topk_kl(student, ids, log_probs, torch.full((9,), left_over)), forward_kl(student, teacher)
    torch.testing.assert_close(value, dense, rtol=1e-6, atol=1e-6)
    grads = [torch.autograd.grad(loss, student)[0] for loss in (value, dense)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-7)


def test_topk_kl_is_zero_for_equal_distributions_and_grows_with_k():
    student, teacher = draw(9, 31, seed=1), draw(9, 31, seed=2).requires_grad_()
    value = topk_kl(teacher, *top(teacher.detach(), 5))
    assert value.abs() < 1e-6
    assert torch.autograd.grad(value, teacher)[0].abs().max() < 1e-6
    values = [topk_kl(student, *top(teacher.detach(), k)).item() for k in (1, 3, 9, 27, 31)]
    assert values == sorted(values)
    assert values[0] > 0


def test_padded_ids_have_no_effect():
    student = draw(9, 31, seed=1).requires_grad_()
    ids, weights = sampled(9, 31, 4)
    top_ids, log_probs, tail = top(draw(9, 31, seed=2), 4)
    calls = [
        (sampled_cross_entropy(student, ids, weights), sampled_cross_entropy(student, *pad_ids(ids, weights, 0))),
        (topk_kl(student, top_ids, log_probs, tail), topk_kl(student, *pad_ids(top_ids, log_probs, -torch.inf), tail)),
    ]
    assert 0 < (top_ids == 0).any(-1).sum() < len(top_ids), "id 0 should be kept in some positions only"
    for value, longer in calls:
        torch.testing.assert_close(longer, value, rtol=1e-6, atol=0)
        grads = [torch.autograd.grad(loss, student)[0] for loss in (value, longer)]
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("extreme", [60.0, 1e4])
def test_value_and_gradient_of_an_overconfident_student_are_accurate(extreme):
    student = draw(3, 11, seed=1)
    student[:, 2] += extreme  # the mass of the other ids is below the resolution of float32 at 1
    ids, log_probs = torch.tensor([[2, 5]] * 3), torch.tensor([[0.6, 0.3]] * 3).log()
    for tail in (torch.full((3,), 0.1), torch.zeros(3)):
        x, y = student.clone().requires_grad_(), student.double().requires_grad_()
        value = topk_kl(x, ids, log_probs, tail)
        # log-softmax and logsumexp in float64: the textbook's exp would underflow to 0 at 1e4
        log_q, others = y.log_softmax(-1), [0, 1, 3, 4, 6, 7, 8, 9, 10]
        p, rest = log_probs.double().exp(), tail.double()
        wanted = (p * (p.log() - log_q[:, [2, 5]])).sum(-1) + torch.special.xlogy(rest, rest)
        wanted = (wanted - rest * log_q[:, others].logsumexp(-1)).mean()
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-6)
        (grad,), (wanted_grad,) = torch.autograd.grad(value, x), torch.autograd.grad(wanted, y)
        torch.testing.assert_close(grad.double(), wanted_grad, rtol=1e-5, atol=1e-6)


def test_an_id_of_zero_student_probability_gives_finite_losses_and_gradients():
    student = draw(3, 11, seed=1)
    student[:, 0] = -torch.inf
    student.requires_grad_()
    ids, weights = torch.tensor([[4, 0]] * 3), torch.tensor([[1.0, 0.0]] * 3)
    everything = torch.arange(1, 11).expand(3, 10)
    calls = [
        sampled_cross_entropy(student, ids, weights),
        topk_kl(student, ids, weights.log(), torch.zeros(3)),
        topk_kl(student, everything, torch.full((3, 10), 0.1).log(), torch.zeros(3)),
    ]
    for value in calls:
        assert value.isfinite()
        (grad,) = torch.autograd.grad(value, student)
        assert grad.isfinite().all()
        assert grad[:, 0].abs().max() == 0


@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_of_samples_is_unbiased(seed):
    student, teacher = draw(5, 13, seed=seed).requires_grad_(), draw(5, 13, seed=seed + 50)
    p, draws, times = teacher.softmax(-1), 8, 4000
    (dense,) = torch.autograd.grad(F.cross_entropy(student, p), student)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.multinomial(p.repeat(times, 1), draws, replacement=True, generator=generator)
    many = student.repeat(times, 1)
    (mean,) = torch.autograd.grad(sampled_cross_entropy(many, ids, torch.full(ids.shape, 1 / draws)), student)
    # 5 standard deviations of an id's share in draws · times draws, divided by the 5 positions, and rounding.
    spread = (p * (1 - p) / (draws * times)).sqrt() / 5
    assert ((mean - dense).abs() <= 5 * spread + 1e-6).all()
    assert (mean - dense).abs().max() > 1e-6, "these samples tell as much as the distributions"


@pytest.mark.parametrize("seed", range(3))
def test_bf16_inputs_lose_only_their_own_rounding(seed):
    student, (ids, weights) = draw(64, 77, seed=seed), sampled(64, 77, 9)
    top_ids, log_probs, tail = top(draw(64, 77, seed=seed + 100), 9)
    cases = [
        (sampled_cross_entropy, textbook_sampled, (ids,), (weights,)),
        (topk_kl, textbook_topk, (top_ids,), (log_probs, tail)),
    ]
    for ours, book, fixed, target in cases:
        exact = book(student.double(), *fixed, *(part.double() for part in target))
        half = [part.bfloat16() for part in target]
        value, naive = ours(student.bfloat16(), *fixed, *target), book(student.bfloat16(), *fixed, *half)
        assert value.dtype == torch.float32
        assert (value - exact).abs() <= 2 * (naive - exact).abs() + 1e-3 * exact.abs()
        rounded = book(student.bfloat16().double(), *fixed, *(part.double() for part in target))
        torch.testing.assert_close(value.double(), rounded, rtol=1e-5, atol=1e-6)


def test_a_batch_without_positions_has_zero_loss():
    student, ids, numbers = (
        torch.zeros(0, 5, requires_grad=True),
        torch.zeros(0, 2, dtype=torch.long),
        torch.zeros(0, 2),
    )
    for value in (sampled_cross_entropy(student, ids, numbers), topk_kl(student, ids, numbers, numbers[:, 0])):
        assert value.item() == 0
        value.backward()


@pytest.mark.parametrize(
    "call",
    [
        lambda s, i, w: sampled_cross_entropy(s, i, w[:, :2]),
        lambda s, i, w: sampled_cross_entropy(s[:1], i, w),  # would take all ids from the first position
        lambda s, i, w: sampled_cross_entropy(s, w, w),
        lambda s, i, w: topk_kl(s, i, w, w[:, :1]),  # would give every position every tail
    ],
)
def test_wrong_shapes_and_dtypes_are_rejected(call):
    with pytest.raises(jaxtyping.TypeCheckError):
        call(torch.zeros(3, 5), torch.zeros(3, 3, dtype=torch.long), torch.ones(3, 3))


# --- losses selected by the teacher's signals


def test_the_form_of_the_signals_selects_the_loss():
    student, teacher = draw(9, 31, seed=1), draw(9, 31, seed=2)
    ids, weights = sampled(9, 31, 4)
    top_ids, log_probs, tail = top(teacher, 4)
    losses = [
        distribution_loss(student, {"logits": teacher}, 3.0),
        distribution_loss(student, {"ids": ids, "weights": weights}, 1.0),
        distribution_loss(student, {"ids": top_ids, "log_probs": log_probs, "tail": tail}, 1.0),
    ]
    assert losses == [
        forward_kl(student, teacher, temperature=3.0),
        sampled_cross_entropy(student, ids, weights),
        topk_kl(student, top_ids, log_probs, tail),
    ]


def test_sparse_signals_reject_another_temperature():
    student, (ids, weights), (top_ids, log_probs, tail) = (
        draw(9, 31, seed=1),
        sampled(9, 31, 4),
        top(draw(9, 31, seed=2), 4),
    )
    for teacher in ({"ids": ids, "weights": weights}, {"ids": top_ids, "log_probs": log_probs, "tail": tail}):
        with pytest.raises(InputError, match=r"loss.temperature: expected 1.0, found 2.0: .* it was written with"):
            distribution_loss(student, teacher, 2.0)


@pytest.mark.parametrize(
    ("names", "found"), [((), "nothing"), (("ids", "tail"), "ids, tail"), (("weights",), "weights")]
)
def test_signals_without_a_distribution_are_rejected(names, found):
    with pytest.raises(InputError, match=rf"loss.kl: expected .*, found {found}: there is no distribution"):
        distribution_loss(torch.zeros(2, 3), dict.fromkeys(names, torch.zeros(2)), 1.0)


# --- students with logits for every token


@pytest.fixture
def labelled(token_batch) -> dict[str, Tensor]:
    """Returns the padded batch with labels per token: 5 classes, none at every fourth token, meaningless in padding."""
    labels = torch.randint(0, 5, token_batch["input_ids"].shape, generator=torch.Generator().manual_seed(8))
    labels[:, 3::4] = IGNORED
    return token_batch | {"labels": labels.masked_fill(token_batch["attention_mask"] == 0, 4)}


def tagger(loss: LossConfig, signals=None) -> DistillationModule:
    return DistillationModule(build_model("bert", "ForTokenClassification"), loss=loss, train=TRAIN, signals=signals)


def test_padding_has_no_effect_on_a_student_with_logits_for_every_token(labelled):
    teacher = OnlineTeacher(build_model("bert", "ForTokenClassification", hidden_act="relu"))
    module = tagger(LossConfig(kl=1, ce=1), teacher)
    tokens = labelled["attention_mask"].bool()
    logits, teachers = module(labelled).logits, teacher(labelled)["logits"]
    assert logits.shape == teachers.shape == (*tokens.shape, 5)
    terms = module.compute_terms(labelled)
    torch.testing.assert_close(terms["kl"], forward_kl(logits[tokens], teachers[tokens], temperature=2.0))
    wanted = F.cross_entropy(logits[tokens], labelled["labels"][tokens], ignore_index=IGNORED)
    torch.testing.assert_close(terms["ce"], wanted)
    changed = labelled | {"labels": torch.where(tokens, labelled["labels"], 1)}
    assert module.compute_terms(changed)["ce"] == terms["ce"]
    # A batch without padding takes another code path.
    full = {name: value[:1] for name, value in labelled.items()}
    torch.testing.assert_close(
        module.compute_terms(full)["kl"], forward_kl(logits[0], teachers[0], temperature=2.0), rtol=1e-4, atol=1e-5
    )


def test_only_the_selected_positions_of_a_batch_count(labelled):
    positions = torch.zeros(6, 11, dtype=torch.long)
    positions[:, ::3] = 1  # in the padding too, for which no cache has signals
    inside = labelled["attention_mask"].bool() & positions.bool()
    student = tagger(LossConfig(kl=0, ce=1))
    logits = student(labelled).logits[inside]
    ids, weights = sampled(int(inside.sum()), 5, 2)
    module = tagger(
        LossConfig(kl=1, ce=1, temperature=1.0),
        lambda batch: {"ids": ids, "weights": weights, "hidden": (torch.zeros(1),)},
    )
    terms = module.compute_terms(labelled | {"positions": positions})
    torch.testing.assert_close(terms["kl"], sampled_cross_entropy(logits, ids, weights))
    wanted = F.cross_entropy(logits, labelled["labels"][inside], ignore_index=IGNORED)
    torch.testing.assert_close(terms["ce"], wanted)
    terms["kl"].backward()
    assert all(p.grad is not None for name, p in module.named_parameters() if "classifier" in name)


def test_validation_ignores_padding_and_weights_batches_by_labels(labelled):
    updates = []

    class Keep(torch.nn.Module):
        def update(self, *rows: Tensor) -> None:
            updates.append(rows)

    module = tagger(LossConfig(kl=0, ce=1))
    module.metric = Keep()
    logged = {}
    module.log = lambda name, value, **settings: logged.update({name: (value, settings["batch_size"])})
    module.validation_step(labelled, 0)
    tokens = labelled["attention_mask"].bool()
    logits, labels = module(labelled).logits[tokens], labelled["labels"][tokens]
    value, rows = logged["val/loss"]
    torch.testing.assert_close(value.compute(), F.cross_entropy(logits, labels, ignore_index=IGNORED).detach())
    assert rows == (labels != IGNORED).sum() < tokens.sum()
    assert torch.equal(updates[0][0], logits)
    assert torch.equal(updates[0][1], labels)
