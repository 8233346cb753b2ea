"""Tests that importance scores match their definitions, independently of batching."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from compress.errors import CompressError
from compress.prune.importance.estimate import (
    measure_layer_losses,
    score_by_activation,
    score_by_gradients,
    score_by_magnitude,
)
from compress.prune.importance.gates import LAYERS, Gates
from compress.prune.importance.scores import Scores
from distill.slicing import find_axes
from support.pruning_axes import tiny_llama, tiny_model_with_axes, without_layer

Batch = dict[str, Tensor]
METHODS = ("taylor", "absolute", "fisher")


def loss(model, batch: Batch) -> Tensor:
    """Returns the cross-entropy [batch] of each sample with a class derived from its ids."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return F.cross_entropy(model(**inputs).logits, batch["input_ids"].sum(dim=1) % 5, reduction="none")


@pytest.fixture
def bert():
    model, axes = tiny_model_with_axes("bert")
    return model.double(), axes


def rebatched(batch: Batch) -> list[Batch]:
    """Returns the same samples reordered in batches of 1, 2 and 3, with different amounts of padding."""
    order, batches = torch.tensor([4, 0, 5, 3, 1, 2]), []
    for rows in order.split([1, 2, 3]):
        part = {name: value[rows] for name, value in batch.items()}
        length = int(part["attention_mask"].sum(dim=1).max()) + 3
        batches.append({name: F.pad(value, (0, 3))[:, :length] for name, value in part.items()})
    return batches


def assert_same_scores(a: Scores, b: Scores) -> None:
    assert a.values.keys() == b.values.keys()
    for name in a.values:
        torch.testing.assert_close(a.values[name], b.values[name], rtol=1e-6, atol=1e-12, msg=name)
    torch.testing.assert_close(a.layers, b.layers, rtol=1e-6, atol=1e-12)
    assert (a.method, a.samples, a.tokens, a.fingerprint) == (b.method, b.samples, b.tokens, b.fingerprint)


def test_scores_do_not_depend_on_the_batches(bert, token_batch: Batch):
    model, axes = bert
    one, other = (
        score_by_gradients(model, axes, [token_batch], loss, METHODS),
        score_by_gradients(model, axes, rebatched(token_batch), loss, METHODS),
    )
    for method in METHODS:
        assert_same_scores(one[method], other[method])
    assert_same_scores(
        score_by_activation(model, axes, [token_batch]), score_by_activation(model, axes, rebatched(token_batch))
    )
    whole, parts = (
        measure_layer_losses(model, axes, batches, loss) for batches in ([token_batch], rebatched(token_batch))
    )
    torch.testing.assert_close(whole, parts, rtol=1e-6, atol=1e-12)
    assert (one["fisher"].samples, one["fisher"].tokens) == (6, 37)


def test_scores_match_a_loop_over_single_samples(bert, token_batch: Batch):
    model, axes = bert
    gates, gradients = Gates(model, axes), []
    for row in range(6):
        gates.set({name: one.double().requires_grad_() for name, one in gates.make_open().items()})
        with gates:
            loss(model, {name: value[row : row + 1] for name, value in token_batch.items()}).sum().backward()
        gradients.append({name: gate.grad for name, gate in gates.values.items()})
    scores = score_by_gradients(model, axes, [token_batch], loss, METHODS)
    for name in gates.make_open():
        each = torch.stack([gradient[name] for gradient in gradients])
        expected = {"taylor": each.mean(0).abs(), "absolute": each.abs().mean(0), "fisher": each.square().mean(0)}
        for method, value in expected.items():
            found = scores[method].layers if name == LAYERS else scores[method].values[name]
            torch.testing.assert_close(found, value, rtol=1e-8, atol=1e-14, msg=f"{method} of {name}")
            assert (value > 0).any()


@pytest.mark.parametrize("name", ["layers.2.heads", "layers.0.ffn", "hidden", LAYERS])
def test_taylor_scores_match_numerical_slopes_of_the_loss_along_the_gate(bert, token_batch: Batch, name: str):
    model, axes = bert
    scores = score_by_gradients(model, axes, [token_batch], loss)["taylor"]
    gates, step = Gates(model, axes), 1e-5
    for unit in (0, 3):
        with gates, torch.no_grad():
            sides = []
            for sign in (1, -1):
                gate = gates.make_open()[name].double()
                gate[unit] += sign * step
                gates.set({name: gate})
                sides.append(loss(model, token_batch).mean())
        slope = float((sides[0] - sides[1]) / (2 * step))
        score = scores.layers[unit] if name == LAYERS else scores.values[name][unit]
        assert float(score) == pytest.approx(abs(slope), rel=1e-5, abs=1e-9)


def test_a_head_with_zero_output_weights_has_zero_importance(bert, token_batch: Batch):
    model, axes = bert
    model.bert.encoder.layer[1].attention.output.dense.weight.data[:, 8:16] = 0
    for scores in score_by_gradients(model, axes, [token_batch], loss, METHODS).values():
        heads = scores.values["layers.1.heads"]
        assert heads[1] == 0
        assert (heads[[0, 2, 3]] > 0).all()


def test_measuring_leaves_the_model_unchanged(bert, token_batch: Batch):
    model, axes = bert
    model.train()
    model.bert.encoder.layer[2].eval()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    score_by_gradients(model, axes, [token_batch], loss)
    score_by_activation(model, axes, [token_batch])
    measure_layer_losses(model, axes, [token_batch], loss)
    assert model.training
    assert not model.bert.encoder.layer[2].training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_queries_of_a_group_share_one_score(token_batch: Batch):
    model, axes = tiny_model_with_axes("llama")

    def token_loss(model, batch: Batch) -> Tensor:
        return (model(**batch).logits.square().mean(-1) * batch["attention_mask"]).sum(dim=1)

    scores = score_by_gradients(model, axes, [token_batch], token_loss)["fisher"]
    assert scores.values["layers.0.heads"].shape == (2,)
    assert score_by_activation(model, axes, [token_batch]).values["layers.0.heads"].shape == (2,)
    assert "vocabulary" not in scores.values


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda model, batch: loss(model, batch).mean(), "expected one value for each of 6 samples"),
        (lambda model, batch: loss(model, batch).detach(), "expected gradients on the gates, found none"),
        (lambda model, batch: model.classifier.bias.sum().expand(6), "expected gradients on the gates, found none"),
    ],
)
def test_a_loss_without_per_sample_values_or_gate_gradients_is_rejected(
    bert, token_batch: Batch, wrong: Callable, message: str
):
    with pytest.raises(CompressError, match=message):
        score_by_gradients(*bert, [token_batch], wrong)


def test_the_divergence_of_a_model_from_itself_is_rejected_as_a_loss(token_batch: Batch):
    model, axes = tiny_model_with_axes("bert")
    with torch.no_grad():
        teacher = model(**token_batch).logits.softmax(dim=-1)

    def divergence(model, batch: Batch) -> Tensor:
        return F.kl_div(model(**batch).logits.log_softmax(dim=-1), teacher, reduction="none").sum(dim=-1)

    with pytest.raises(CompressError, match="distance of the model to itself"):
        score_by_gradients(model, axes, [token_batch], divergence)


def test_fisher_scores_of_sampled_labels_predict_the_divergence_of_removing_a_unit(token_batch: Batch):
    """Uses every label once, weighted by its sampling probability; units are small enough for second order."""
    model, axes = tiny_model_with_axes("bert")
    model = model.double()
    model.bert.encoder.layer[1].output.dense.weight.data[:, :16] *= 0.1
    with torch.no_grad():
        whole = model(**token_batch).logits
    batch = {name: value.repeat_interleave(5, dim=0) for name, value in token_batch.items()}
    batch |= {"label": torch.arange(5).repeat(6), "weight": (5 * whole.softmax(dim=-1)).flatten().sqrt()}

    def drawn(model, batch: Batch) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return batch["weight"] * F.cross_entropy(logits, batch["label"], reduction="none")

    scores = score_by_gradients(model, axes, [batch], drawn)["fisher"]
    gates = Gates(model, axes)
    for unit in scores.values["layers.1.ffn"][:16].topk(3).indices:
        gates.set({"layers.1.ffn": torch.ones(64).index_fill(0, unit, 0)})
        with gates, torch.no_grad():
            without = model(**token_batch).logits
        truth = F.kl_div(without.log_softmax(-1), whole.softmax(-1), reduction="batchmean").item()
        assert 0.5 * float(scores.values["layers.1.ffn"][unit]) == pytest.approx(truth, rel=0.1)


def test_missing_batches_and_unknown_methods_are_rejected(bert, token_batch: Batch):
    for function in (
        lambda: score_by_gradients(*bert, [], loss),
        lambda: measure_layer_losses(*bert, [], loss),
        lambda: score_by_activation(*bert, []),
    ):
        with pytest.raises(CompressError, match="no batch"):
            function()
    with pytest.raises(CompressError, match="'guess'"):
        score_by_gradients(*bert, [token_batch], loss, ["guess"])


def test_magnitude_is_the_root_mean_square_of_a_units_weights(bert):
    model, axes = bert
    scores = score_by_magnitude(model, axes)
    layer = model.bert.encoder.layer[1]
    inner, outer = layer.intermediate.dense, layer.output.dense
    neuron = torch.cat((inner.weight[7], inner.bias[7:8], outer.weight[:, 7]))
    assert float(scores.values["layers.1.ffn"][7]) == pytest.approx(neuron.square().mean().sqrt().item(), rel=1e-12)
    attention = layer.attention.self
    rows = [
        part
        for read in (attention.query, attention.key, attention.value)
        for part in (read.weight[24:], read.bias[24:])
    ]
    head = torch.cat([part.flatten() for part in (*rows, layer.attention.output.dense.weight[:, 24:])])
    assert float(scores.values["layers.1.heads"][3]) == pytest.approx(head.square().mean().sqrt().item(), rel=1e-12)
    every = torch.cat([parameter.flatten() for parameter in layer.parameters()])
    assert float(scores.layers[1]) == pytest.approx(every.square().mean().sqrt().item(), rel=1e-12)


def test_tied_weights_count_once():
    model = tiny_llama(tie_word_embeddings=True)
    vocabulary = next(axis for axis in find_axes(model) if axis.kind == "vocabulary")
    scores = score_by_magnitude(model, [vocabulary]).values["vocabulary"]
    torch.testing.assert_close(scores, model.lm_head.weight.double().square().mean(dim=1).sqrt())
    once = dataclasses.replace(vocabulary, slots=vocabulary.slots[:1])
    torch.testing.assert_close(scores, score_by_magnitude(model, [once]).values["vocabulary"])


def test_activation_scores_are_mean_magnitudes_over_real_tokens(bert, token_batch: Batch):
    model, axes = bert
    recorded: dict[str, list[Tensor]] = {"heads": [], "ffn": [], "hidden": []}
    layer, norms = model.bert.encoder.layer[2], [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]
    layer.attention.output.dense.register_forward_pre_hook(lambda _, inputs: recorded["heads"].append(inputs[0]))
    layer.output.dense.register_forward_pre_hook(lambda _, inputs: recorded["ffn"].append(inputs[0]))
    for norm in norms:
        norm.register_forward_hook(lambda _, inputs, output: recorded["hidden"].append(output))
    with torch.no_grad():
        model(**token_batch)
    real = token_batch["attention_mask"].bool()
    rows = {kind: torch.stack([value[real] for value in values]) for kind, values in recorded.items()}
    for parts in recorded.values():
        parts.clear()
    scores = score_by_activation(model, axes, [token_batch])
    heads = rows["heads"][0].unflatten(-1, (4, 8)).norm(dim=-1).mean(dim=0)
    torch.testing.assert_close(scores.values["layers.2.heads"], heads)
    torch.testing.assert_close(scores.values["layers.2.ffn"], rows["ffn"][0].abs().mean(dim=0))
    torch.testing.assert_close(scores.values["hidden"], rows["hidden"].abs().mean(dim=(0, 1)))
    assert len(norms) == 9


def test_a_layer_that_changes_nothing_has_zero_importance(token_batch: Batch):
    model, axes = tiny_model_with_axes("llama")
    model.model.layers[1].self_attn.o_proj.weight.data.zero_()
    model.model.layers[1].mlp.down_proj.weight.data.zero_()
    influence = score_by_activation(model, axes, [token_batch]).layers
    with torch.no_grad():
        states = model(**token_batch, output_hidden_states=True).hidden_states
    real = token_batch["attention_mask"].bool()
    turned = 1 - torch.cosine_similarity(states[0][real].double(), states[1][real].double(), dim=-1)
    assert float(influence[0]) == pytest.approx(float(turned.mean()), rel=1e-6)
    assert abs(float(influence[1])) < 1e-12


def test_layer_losses_are_loss_increases_of_models_without_the_layer(bert, token_batch: Batch):
    model, axes = bert
    found = measure_layer_losses(model, axes, [token_batch], loss)
    with torch.no_grad():
        whole = loss(model, token_batch).mean()
        expected = torch.stack([loss(without_layer(model, i), token_batch).mean() - whole for i in range(4)])
    torch.testing.assert_close(found, expected)


def test_saved_scores_are_loaded_unchanged(bert, token_batch: Batch, tmp_path: Path):
    model, axes = bert
    scores = score_by_activation(model, axes, [token_batch])
    scores.save(tmp_path / "scores.safetensors")
    back = Scores.load(tmp_path / "scores.safetensors", model)
    assert_same_scores(scores, back)
    assert all(torch.equal(scores.values[name], back.values[name]) for name in scores.values)


def test_scores_of_another_model_are_rejected(bert, tmp_path: Path):
    model, axes = bert
    file = tmp_path / "scores.safetensors"
    score_by_magnitude(model, axes).save(file)
    model.classifier.bias.data[0] += 1
    with pytest.raises(CompressError, match="another model's importance"):
        Scores.load(file, model)


@pytest.mark.parametrize("content", [None, b"", b"no safetensors at all"])
def test_a_missing_or_invalid_score_file_is_rejected(bert, tmp_path: Path, content: bytes | None):
    file = tmp_path / "scores.safetensors"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CompressError, match="can't be read"):
        Scores.load(file, bert[0])
