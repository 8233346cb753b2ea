"""Tests that losses fused with the language-modelling head have the values and gradients of the plain losses."""

import pytest
import torch
from torch import Tensor

from distill.losses import fused
from distill.losses.fused import fused_sampled_cross_entropy, fused_topk_kl
from distill.losses.logits import cross_entropy
from distill.losses.sparse import sampled_cross_entropy, topk_kl
from support.distributions import draw

SHAPES = [(1, 3, 5, 1), (13, 8, 37, 4), (29, 16, 301, 7)]  # positions, width, vocabulary, k
KINDS = ("sampled", "topk")


def head(shape: tuple[int, ...], kind: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Returns hidden states, weight and bias."""
    positions, width, vocabulary, _ = shape
    drawn = draw(positions, width, seed=1, scale=1), draw(vocabulary, width, seed=2, scale=1), draw(vocabulary, seed=3)
    return tuple(each.to(kind).requires_grad_() for each in drawn)  # type: ignore[return-value]


def targets(kind: str, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Returns sparse targets in which the last id of every second row is padding."""
    positions, _, vocabulary, k = shape
    log_probs = draw(positions, vocabulary, seed=4).log_softmax(-1)
    largest, ids = log_probs.topk(k)
    padding = torch.zeros(positions, k, dtype=torch.bool)
    padding[1::2, -1] = k > 1
    if kind == "sampled":
        return ids.masked_fill(padding, 0), (largest.exp() + 0.1).masked_fill(padding, 0)
    log_probs = largest.masked_fill(padding, -torch.inf)
    return ids.masked_fill(padding, 0), log_probs, 1 - log_probs.exp().sum(-1)


PLAIN = {"sampled": sampled_cross_entropy, "topk": topk_kl}
FUSED = {"sampled": fused_sampled_cross_entropy, "topk": fused_topk_kl}


@pytest.mark.parametrize("chunk", [1, 4000, 1 << 20])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_fusing_preserves_value_and_gradients(kind, shape, chunk):
    hidden, weight, bias = head(shape)
    sparse_targets = targets(kind, shape)
    plain = PLAIN[kind](hidden @ weight.T + bias, *sparse_targets)
    ours = FUSED[kind](hidden, weight, *sparse_targets, bias=bias, chunk_bytes=chunk)
    torch.testing.assert_close(ours, plain, rtol=1e-7, atol=1e-9)
    wanted = torch.autograd.grad(3 * plain, (hidden, weight, bias))
    for mine, book in zip(torch.autograd.grad(3 * ours, (hidden, weight, bias)), wanted, strict=True):
        torch.testing.assert_close(mine, book, rtol=1e-6, atol=1e-9)


def test_one_id_of_weight_one_gives_the_cross_entropy():
    hidden, weight, _ = head(SHAPES[1], torch.float32)
    labels = torch.randint(0, 37, (13,), generator=torch.Generator().manual_seed(5))
    ours = fused_sampled_cross_entropy(hidden, weight, labels[:, None], torch.ones(13, 1))
    torch.testing.assert_close(ours, cross_entropy(hidden @ weight.T, labels))


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_backward_pass_gives_the_same_gradients(kind):
    hidden, weight, _ = head(SHAPES[1])
    ours = FUSED[kind](hidden, weight, *targets(kind, SHAPES[1]))
    first = torch.autograd.grad(2 * ours, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(2 * ours, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_head_gets_no_gradients(kind, monkeypatch):
    hidden, weight, _ = head(SHAPES[1])
    sparse_targets, products = targets(kind, SHAPES[1]), []
    monkeypatch.setattr(fused, "add_product", lambda *_: products.append(1))
    FUSED[kind](hidden, weight.detach(), *sparse_targets).backward()
    assert not products
    torch.testing.assert_close(
        hidden.grad, torch.autograd.grad(PLAIN[kind](hidden @ weight.detach().T, *sparse_targets), hidden)[0]
    )
    with torch.no_grad():
        assert FUSED[kind](hidden, weight, *sparse_targets).requires_grad is False


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_value_and_gradient_of_an_overconfident_student_are_accurate(kind, scale):
    """At a scale of 40 the probability of the likeliest id rounds to 1 in float32."""
    hidden, weight, _ = head(SHAPES[2], torch.float32)
    sparse_targets = targets(kind, SHAPES[2])
    sure = (hidden * scale).detach().requires_grad_()
    exact = sure.detach().double().requires_grad_()
    ours = FUSED[kind](sure, weight, *sparse_targets)
    plain = PLAIN[kind](exact @ weight.double().T, *sparse_targets)
    torch.testing.assert_close(ours.double(), plain, rtol=1e-4, atol=1e-5)
    (mine,), (book,) = torch.autograd.grad(ours, sure), torch.autograd.grad(plain, exact)
    torch.testing.assert_close(mine.double(), book, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_the_error_is_no_larger_than_twice_that_of_the_plain_loss(kind):
    hidden, weight, _ = head(SHAPES[2], torch.float32)
    sparse_targets = targets(kind, SHAPES[2])
    exact = torch.autograd.grad(PLAIN[kind](hidden.double() @ weight.double().T, *sparse_targets), weight)[0]
    with torch.autocast("cpu", torch.bfloat16):
        plain, ours = PLAIN[kind](hidden @ weight.T, *sparse_targets), FUSED[kind](hidden, weight, *sparse_targets)
    errors = [(torch.autograd.grad(each, weight)[0] - exact).norm() for each in (ours, plain)]
    assert errors[0] <= 2 * errors[1] + 1e-3 * exact.norm()
    assert ours.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_positions_has_zero_loss_and_gradient(kind):
    shape = (0, 8, 37, 4)
    hidden, weight, _ = head(shape)
    value = FUSED[kind](hidden, weight, *targets(kind, shape))
    assert value.item() == 0
    assert torch.autograd.grad(value, weight)[0].abs().max() == 0
