"""Tests of dynamic and learned layer maps: the best rising map, its loss and gradients, and caches with all layers."""

import csv
import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor
from transformers import BertTokenizerFast, PreTrainedModel

from compress.prune.vocabulary.vocabulary import choose_tokens, count_tokens, prune_vocabulary
from distill.cache import CacheReader, Dense, Hidden, Identity, write_cache
from distill.cache.samples import build_samples
from distill.data.batches.data_module import TextDataModule
from distill.data.batches.encode import Encoded, encode_samples
from distill.data.batches.sharding import shard_batch
from distill.data.splits.examples import Examples, Splits
from distill.errors import InputError
from distill.losses.config import LayerSizes, LossConfig, pair_layers
from distill.losses.features import HIDDEN_DISTANCES, hidden_mse
from distill.losses.matching import compute_layer_distances, find_increasing_map
from distill.models.inputs import select_inputs
from distill.student.build import build_student
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines import distill
from pipelines.stages.cache.stage import choose_loss_signals
from pipelines.stages.prepare.vocabulary import TranslatedSignals
from support.commands import rejection_of, small_run
from support.processes.ranks import run_ranks
from support.processes.training_ranks import Training, train
from support.tiny_models import LABELS, SIZES, VOCABULARY, build_model, make_rows, saved

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")  # its hints on workers and loggers

LAYERS, WIDTH = SIZES["layers"], SIZES["hidden"]
DYNAMIC = LossConfig(kl=1, hidden=0.5, layer_map="dynamic")
# The gradient of a key's bias consists of rounding errors only, which Adam scales to full steps.
SLOW = TrainConfig(epochs=1, batch_size=7, accumulate=2, learning_rate=2e-4, max_grad_norm=0.1, dropout=0.0, patience=3)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rising_maps(layers: int, teacher_layers: int) -> list[tuple[int, ...]]:
    """Returns every strictly rising map, with layers counted from 0, in lexicographic order."""
    return list(combinations(range(teacher_layers), layers))


# --- the map


@pytest.mark.parametrize(
    ("layers", "teacher_layers"), [(s, t) for t in (1, 2, 4, 6, 9) for s in range(1, min(t, 6) + 1)]
)
def test_the_rising_map_has_the_smallest_sum(layers, teacher_layers):
    for seed in range(20):
        costs = draw(layers, teacher_layers - layers + 1, seed=seed).abs()
        sums = {
            each: sum(float(costs[i, t - i]) for i, t in enumerate(each))
            for each in rising_maps(layers, teacher_layers)
        }
        chosen = tuple(find_increasing_map(costs))
        assert sums[chosen] == pytest.approx(min(sums.values()), abs=1e-6)


def test_among_equal_sums_the_lower_layers_are_chosen():
    for seed in range(50):
        costs = torch.randint(0, 3, (3, 4), generator=torch.Generator().manual_seed(seed)).float()
        chosen = find_increasing_map(costs)
        sums = {each: sum(float(costs[i, t - i]) for i, t in enumerate(each)) for each in rising_maps(3, 6)}
        best = [each for each in sums if sums[each] == min(sums.values())]
        assert tuple(chosen) in best
        assert chosen[-1] == min(each[-1] for each in best)
    assert find_increasing_map(torch.zeros(3, 4)) == [0, 1, 2]


def test_two_student_layers_are_matched_to_distinct_teacher_layers_in_ascending_order():
    """Both student layers are closest to the teacher's layer 1, but no rising map gives it to both."""
    student_states, teacher_states = draw(2, 1, 3, 4, seed=1), draw(4, 1, 3, 4, seed=2)
    teacher_states[1] = student_states.mean(0)
    distances = compute_layer_distances(
        list(student_states), list(teacher_states), torch.ones(1, 3, dtype=torch.long), hidden_mse
    )
    assert find_increasing_map(distances) in ([1, 2], [1, 3], [0, 1])


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_distances_are_those_of_their_layer_pair_without_padding(kind):
    student_states, teacher_states = draw(2, 3, 5, 4, seed=1), draw(5, 3, 5, 4, seed=2)
    mask = (torch.arange(5) < torch.tensor([5, 3, 1])[:, None]).long()
    distances = compute_layer_distances(list(student_states), list(teacher_states), mask, HIDDEN_DISTANCES[kind])
    assert distances.shape == (2, 4)
    rows = mask.bool()
    for i in range(2):
        for k in range(4):
            s, t = student_states[i][rows].double(), teacher_states[i + k][rows].double()
            cosine = 1 - (s * t).sum(-1) / (s.norm(dim=-1) * t.norm(dim=-1))
            wanted = ((s - t) ** 2).mean() if kind == "mse" else cosine.mean()
            assert float(distances[i, k]) == pytest.approx(float(wanted), rel=1e-5)


def test_the_dynamic_map_considers_every_pair_that_a_rising_map_can_contain():
    assert pair_layers("dynamic", 2, 4) == [(0, 0), (1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (2, 4)]
    assert pair_layers("dynamic", 3, 3) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    for student in range(1, 7):
        assert {t for _, t in pair_layers("dynamic", student, 6)} == set(range(7))


def test_more_student_layers_than_teacher_layers_are_rejected():
    with pytest.raises(InputError, match="at most 4 student layers, the teacher's number, found 5"):
        pair_layers("dynamic", 5, 4)


# --- training


@pytest.fixture(scope="module")
def word_tokenizer() -> BertTokenizerFast:
    return BertTokenizerFast(vocab={word: i for i, word in enumerate(VOCABULARY)}, model_max_length=64)


@pytest.fixture(scope="module")
def rows(word_tokenizer) -> Encoded:
    texts = [text for text, _ in make_rows(24, 3)]
    return encode_samples(word_tokenizer, Examples(texts, None, [i % 5 for i in range(24)]), 32)


def module(loss: LossConfig, signals: Any = None, spec: str = "layers=2,hidden=16") -> DistillationModule:
    """Returns a module with the same weights and projections for every loss."""
    teacher = build_model("bert")
    torch.manual_seed(0)
    return DistillationModule(
        build_student(teacher, spec),
        loss=loss,
        train=TrainConfig(epochs=1, learning_rate=1e-2, batch_size=8, accumulate=2, dropout=0.0),
        signals=signals if signals is not None else OnlineTeacher(teacher, loss.teacher_outputs),
        teacher_sizes=(LAYERS, WIDTH),
    )


def fixed_map_loss(kind: str, pairs: Sequence[tuple[int, int]]) -> LossConfig:
    return LossConfig(kl=0, hidden=1, hidden_kind=kind, layer_map=",".join(f"{s}:{t}" for s, t in pairs))


def hidden_term_gradients(distiller: DistillationModule, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    value = distiller.compute_terms(batch)["hidden"]
    grads = torch.autograd.grad(value, list(distiller.parameters()), allow_unused=True)
    return value.detach(), [torch.zeros(()) if grad is None else grad for grad in grads]


@pytest.mark.parametrize("kind", ["mse", "cosine"])
@pytest.mark.parametrize("spec", ["layers=2,hidden=16", "layers=1", "layers=3"])
def test_the_dynamic_map_is_the_best_fixed_map_with_its_loss_and_gradients(kind, spec, rows):
    batch = rows.collate(range(8), 0)
    distiller = module(LossConfig(kl=0, hidden=1, hidden_kind=kind, layer_map="dynamic"), spec=spec)
    value, grads = hidden_term_gradients(distiller, batch)
    others = {}
    for each in rising_maps(distiller.student.config.num_hidden_layers, LAYERS):
        pairs = ((0, 0), *((s + 1, t + 1) for s, t in enumerate(each)))
        others[pairs] = hidden_term_gradients(module(fixed_map_loss(kind, pairs), spec=spec), batch)
    assert all(value <= other * (1 + 1e-6) for other, _ in others.values())
    expected_value, expected = others[tuple(distiller.layer_terms.layer_matches)]
    assert value == expected_value
    assert all(torch.equal(g, e) for g, e in zip(grads, expected, strict=True))
    assert sum(not torch.equal(value, other) for other, _ in others.values()) == len(others) - 1


def test_a_copied_layer_is_matched_to_the_teacher_layer_it_came_from(rows):
    """The student is built of the teacher's layers 0 and 1, so its hidden states are the teacher's 0, 1 and 2."""
    distiller = module(LossConfig(kl=0, hidden=1, layer_map="dynamic"), spec="layers=0,1")
    assert distiller.compute_terms(rows.collate(range(8), 0))["hidden"] < 1e-10
    assert distiller.layer_terms.layer_matches == [(0, 0), (1, 1), (2, 2)]


def test_a_narrow_student_has_one_projection_per_layer_and_one_for_the_embeddings():
    assert len(module(DYNAMIC).layer_terms.projections) == 3  # embeddings and two layers


LEARNED = LossConfig(kl=0, hidden=1, layer_map="learned")


@pytest.mark.parametrize("spec", ["layers=2,hidden=16", "layers=1"])
def test_a_learned_map_targets_weighted_means_of_teacher_layers_and_trains_the_weights(spec, rows):
    batch, distiller = rows.collate(range(8), 0), module(LEARNED, spec=spec)
    layers = distiller.student.config.num_hidden_layers
    with torch.no_grad():
        student_states = distiller.student(**select_inputs(batch), output_hidden_states=True).hidden_states
        teacher_states = build_model("bert")(**select_inputs(batch), output_hidden_states=True).hidden_states
        shares = [mix.double().softmax(0) for mix in distiller.layer_terms.mixture_logits]
        targets = [
            teacher_states[0],
            *(sum(s * h for s, h in zip(share, teacher_states[1:], strict=True)) for share in shares),
        ]
        mask = batch["attention_mask"].bool()
        distances = [
            (project(each) - target)[mask].square().mean()
            for project, each, target in zip(distiller.layer_terms.projections, student_states, targets, strict=True)
        ]
    value = distiller.compute_terms(batch)["hidden"]
    torch.testing.assert_close(value.double(), torch.stack(distances).mean().double(), rtol=1e-5, atol=1e-6)
    middles = [t for _, t in distiller.layer_terms.layer_matches]
    assert middles == sorted(middles)
    assert len(distiller.layer_terms.mixture_logits) == layers
    value.backward()
    assert all(mix.grad is not None and mix.grad.abs().sum() > 0 for mix in distiller.layer_terms.mixture_logits)


@pytest.mark.slow
def test_a_learned_map_finds_the_teacher_layers_that_the_student_was_built_from(rows):
    """The student has the teacher's layers 0 and 1, so a map trained by itself moves from layers 2 and 4 to 1 and 2."""
    distiller = module(LEARNED, spec="layers=0,1")
    batch, optimizer = (
        rows.collate(range(24), 0),
        torch.optim.Adam(distiller.layer_terms.mixture_logits.parameters(), lr=0.1),
    )
    for _ in range(300):
        optimizer.zero_grad()
        distiller.compute_terms(batch)["hidden"].backward()
        optimizer.step()
    assert [share.softmax(0).argmax().item() + 1 for share in distiller.layer_terms.mixture_logits] == [1, 2]


def cached(rows: Encoded, folder: Path, layers: tuple[int, ...] = tuple(range(LAYERS + 1))) -> CacheReader:
    identity = Identity("t", "t", (Dense(5), Hidden(WIDTH, layers=layers)))
    write_cache(folder, identity, build_samples(rows, 0), OnlineTeacher(build_model("bert"), ("logits", "hidden")))
    return CacheReader(folder, identity)


def test_an_8_bit_cache_matches_the_same_layers_as_the_teacher_in_memory(rows, tmp_path):
    batch, reader = rows.collate(range(8), 0), cached(rows, tmp_path / "c")
    online, offline = module(DYNAMIC), module(DYNAMIC, reader)
    expected, found = online.compute_terms(batch), offline.compute_terms(batch)
    assert offline.layer_terms.layer_matches == online.layer_terms.layer_matches
    torch.testing.assert_close(found["hidden"], expected["hidden"], rtol=2e-3, atol=1e-4)
    with_batch_signals = module(DYNAMIC, reader)
    assert torch.equal(with_batch_signals.compute_terms(batch | {"signals": reader(batch)})["hidden"], found["hidden"])


def test_a_cache_that_lacks_a_layer_is_rejected(rows, tmp_path):
    with pytest.raises(InputError, match="hidden states of layer 3"):
        module(DYNAMIC, cached(rows, tmp_path / "c", (0, 1, 2, 4))).compute_terms(rows.collate(range(8), 0))


def test_a_student_with_a_pruned_vocabulary_learns_from_the_same_hidden_states(rows, word_tokenizer, tmp_path):
    texts = [text for text, _ in make_rows(24, 3)]
    student = build_student(build_model("bert"), "layers=2")
    token_ids = choose_tokens(word_tokenizer, count_tokens(word_tokenizer, texts), coverage=1.0, unseen=1.0)
    small, pruned_tokenizer = prune_vocabulary(student, word_tokenizer, token_ids)
    pruned_rows = encode_samples(pruned_tokenizer, Examples(texts, None, [i % 5 for i in range(24)]), 32)
    reader = cached(rows, tmp_path / "c")
    whole, cut = (
        module(DYNAMIC, reader, spec="layers=2"),
        module(DYNAMIC, TranslatedSignals(reader, token_ids), spec="layers=2"),
    )
    assert len(token_ids) < len(VOCABULARY)
    cut.student = small
    expected, found = (
        whole.compute_terms(rows.collate(range(8), 0)),
        cut.compute_terms(pruned_rows.collate(range(8), 0)),
    )
    assert cut.layer_terms.layer_matches == whole.layer_terms.layer_matches
    torch.testing.assert_close(found["hidden"], expected["hidden"])


def examples(count: int, seed: int) -> Examples:
    drawn = make_rows(count, seed)
    return Examples([text for text, _ in drawn], None, [LABELS.index(label) for _, label in drawn])


def train_epoch(word_tokenizer: BertTokenizerFast, folder: Path) -> tuple[dict[str, Tensor], list[dict[str, str]]]:
    """Returns the weights after an epoch of 5 batches, two per step, and the rows of the log."""
    splits = Splits(LABELS, examples(40, 1), examples(10, 2), examples(10, 3), Examples([], None), {})
    data = TextDataModule(splits, word_tokenizer, batch_size=8, max_length=32)
    distiller = module(DYNAMIC)
    logger = lightning.pytorch.loggers.CSVLogger(folder, name="", version="0")
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    lightning.seed_everything(3, verbose=False)
    lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=logger, log_every_n_steps=1, accumulate_grad_batches=2, **quiet
    ).fit(distiller, datamodule=data)  # type: ignore[arg-type]
    with (folder / "0/metrics.csv").open() as file:
        return {k: v.clone() for k, v in distiller.state_dict().items()}, list(csv.DictReader(file))


def test_training_matches_reproducibly_and_logs_the_matched_layers(word_tokenizer, tmp_path):
    one, logged = train_epoch(word_tokenizer, tmp_path / "one")
    other, again = train_epoch(word_tokenizer, tmp_path / "other")
    assert all(torch.equal(one[name], other[name]) for name in one)
    matched = [
        (float(row["train/matched_1"]), float(row["train/matched_2"])) for row in logged if row["train/matched_1"]
    ]
    assert len(matched) >= 2
    assert all(1 <= first < second <= LAYERS for first, second in matched)
    assert "train/matched_0" not in logged[0]
    assert [row["train/matched_1"] for row in logged] == [row["train/matched_1"] for row in again]


def test_the_distances_of_a_process_are_weighted_by_its_tokens(rows):
    """The mean over two processes with 3 and 2 texts of a batch equals the distances over the whole batch."""
    batch, reduced = rows.collate(range(5), 0), []
    for part in (batch, shard_batch(batch, 0, 2), shard_batch(batch, 1, 2)):
        distiller = module(DYNAMIC)
        strategy = SimpleNamespace(reduce=lambda values, reduce_op: reduced.append(values) or values)
        distiller._trainer = SimpleNamespace(world_size=2, strategy=strategy)
        distiller.compute_terms(part)
    whole, first, second = reduced
    torch.testing.assert_close((first + second) / 2, whole)
    assert not torch.allclose(first, second, rtol=0.05)


def with_similar_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Scales the layers' outputs down so that the nearest layer depends on the texts of a batch; returns the model."""
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            for output in (layer.attention.output, layer.output):
                output.dense.weight.mul_(0.01)
                output.dense.bias.zero_()
                output.LayerNorm.weight.fill_(1.0)
                output.LayerNorm.bias.zero_()
    return model


def matched_in(folder: Path) -> list[tuple[str, str]]:
    (log,) = folder.glob("logs/attempt-0/metrics.csv")
    with log.open() as file:
        return [(r["train/matched_1"], r["train/matched_2"]) for r in csv.DictReader(file) if r["train/matched_1"]]


@pytest.mark.slow
def test_two_processes_match_the_same_layers_as_one(tmp_path, word_tokenizer):
    """Batches of 7 texts are split unevenly, and by its own texts alone a process would match other layers."""
    student = saved(build_model("bert", num_hidden_layers=2), word_tokenizer, tmp_path / "student")
    teacher_folder = saved(with_similar_layers(build_model("bert")), word_tokenizer, tmp_path / "teacher")
    one, two = (Training(student, tmp_path / name, SLOW, DYNAMIC, teacher=teacher_folder) for name in ("one", "two"))
    alone = train(0, 1, one, "replicated")
    both = run_ranks(train, 2, 2, two, "replicated", limit=120)
    assert matched_in(two.folder) == matched_in(one.folder)
    for each in both:
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(each["weights"][name], weight, rtol=0, atol=1e-5, msg=name)


# --- whole runs


@pytest.mark.parametrize(
    ("loss", "pruned", "layers"),
    [
        (DYNAMIC, False, "0,1,2,3,4,5,6"),
        (DYNAMIC, True, "0,1,2,3,4,5,6"),
        (LossConfig(hidden=1), False, "0,2,4,6"),
        (LossConfig(hidden=1), True, "0,2,3,4,6"),  # for the student's 3 layers, or the 2 or 1 that pruning leaves
        (LossConfig(hidden=1, layer_map="0:0,3:5"), True, "0,5"),
        (LossConfig(), True, None),
    ],
)
def test_the_cache_stores_the_layers_that_the_loss_reads(loss, pruned, layers):
    keep = choose_loss_signals(loss, LayerSizes(6, 32, 4), LayerSizes(3, 32, 4), pruned=pruned)
    assert keep.layers == layers if layers else keep.signals == "logits"


@pytest.mark.slow
def test_a_run_with_a_dynamic_map_caches_all_layers_and_logs_the_matches(tmp_path, word_tokenizer, data_folder):
    teacher_folder = saved(build_model("bert"), word_tokenizer, tmp_path / "teacher")
    output = tmp_path / "run"
    flags = ("--loss.hidden", "1", "--loss.layer_map", "dynamic", "--epochs", "2", "--until", "distill")
    distill.main(small_run(teacher_folder, data_folder, output, *flags, "--machine.log_every", "1"))
    (manifest,) = (output / "cache").glob("*/manifest.json")
    assert json.loads(manifest.read_text())["config"]["layers"] == "0,1,2,3,4"
    (log,) = (output / "distill").glob("*/logs/attempt-0/metrics.csv")
    with log.open() as file:
        logged = [row for row in csv.DictReader(file) if row["train/matched_2"]]
    assert logged
    assert all(float(row["train/matched_1"]) < float(row["train/matched_2"]) for row in logged)
    assert all(float(row["train/hidden"]) >= 0 for row in logged)


def test_a_run_with_a_student_deeper_than_its_teacher_is_rejected(
    tmp_path, word_tokenizer, data_folder, monkeypatch, capsys
):
    teacher_folder = saved(build_model("bert", num_hidden_layers=2), word_tokenizer, tmp_path / "teacher")
    deep = saved(build_model("bert"), word_tokenizer, tmp_path / "deep")
    flags = ("--loss.hidden", "1", "--loss.layer_map", "dynamic", "--student", str(deep))
    message = rejection_of(
        distill, small_run(teacher_folder, data_folder, tmp_path / "run", *flags), monkeypatch, capsys
    )
    assert "expected at most 2 student layers, the teacher's number, found 4" in message
