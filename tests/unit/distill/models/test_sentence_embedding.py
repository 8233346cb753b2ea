"""Tests of sentence embedding: data, rows, scores, loss terms, and training on a teacher's vectors of plain text."""

from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from torch import Tensor, nn

from distill.checkpoint.sentence_form import DenseProjection, SentenceForm, set_form
from distill.data.batches.batches import EvalBatches
from distill.data.batches.data_module import TextDataModule
from distill.data.config import DataConfig
from distill.data.rows.sentences import _load_unlabelled_sentences, load_sentences
from distill.data.splits.examples import Examples, Splits
from distill.errors import InputError
from distill.losses.compose import compute_loss_terms, scale_by_share
from distill.losses.config import LossConfig
from distill.losses.features import embedding_cosine, embedding_mse, pairwise_cosines, similarity_kl, similarity_mse
from distill.losses.logits import IGNORED
from distill.models.layer_sizes import read_layer_sizes
from distill.models.sentence_encoder import PooledModel
from distill.student.build import build_student
from distill.tasks.sentence_embedding import SentenceEmbedding
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from support.tiny_models import FILLERS, build_model, make_rows
from support.tolerances import float32_tolerance

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")

TASK = SentenceEmbedding(())
BOTH = LossConfig(kl=0, embedding=1, similarity=10)


MEAN = SentenceForm("mean", normalize=True)


def pooled_bert(form: SentenceForm = MEAN) -> PooledModel:
    body = build_model("bert", "Model")
    set_form(body.config, form)
    torch.manual_seed(7)
    model = PooledModel.from_config(body.config)
    model.load_state_dict(body.state_dict(), strict=False)
    return model


# --- data


def write_split(folder: Path, rows: list[dict[str, Any]], split: str = "train") -> Path:
    folder.mkdir(exist_ok=True)
    pa.parquet.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    return folder


def pair_row(i: int, j: int, number: object = 1.5) -> dict[str, Any]:
    return {"sentence1": f"text {i}", "sentence2": f"text {j}", "score": number}


def test_each_distinct_sentence_is_trained_on_once_and_dropped_rows_are_counted(tmp_path):
    folder = write_split(
        tmp_path / "data", [pair_row(1, 2), pair_row(2, 3, None), pair_row(4, 4), {"sentence1": " ", "sentence2": "5"}]
    )
    write_split(folder, [pair_row(1, 9, 0.5), pair_row(8, 7, 2)], "dev")
    write_split(folder, [pair_row(2, 9, 4)], "test")
    (tmp_path / "more.txt").write_text("text 3\r\n\nnew line\r\nnew line\n", encoding="utf-8")
    splits = load_sentences(DataConfig(path=str(folder), unlabelled=str(tmp_path / "more.txt")))
    assert splits.train == Examples(["text 1", "text 2", "text 3", "text 4", "5"], None)
    assert splits.unlabelled == Examples(["new line"], None)
    assert splits.validation == Examples(["text 1", "text 8"], ["text 9", "text 7"], [0.5, 2.0])
    assert splits.test == Examples(["text 2"], ["text 9"], [4.0])
    assert splits.labels == ()
    assert splits.notes == {
        "test_from": "the data set", "validation_from": "the data set", "dropped_empty": 3, "dropped_duplicates": 4,
        "dropped_held_out": 0, "test_texts_also_in_train": 1, "validation_texts_also_in_train": 1,
        "test_texts_also_in_validation": 1, "unlabelled_dropped_in_test": 0, "unlabelled_dropped_in_validation": 0,
        "unlabelled_texts_also_in_train": 0, "train_dropped_empty": 1, "validation_dropped_empty": 0,
        "test_dropped_empty": 0, "unlabelled_dropped_empty": 2,
    }  # fmt: skip


def test_sentences_of_held_out_pairs_are_not_trained_on(tmp_path):
    rows = [pair_row(2 * i, 2 * i + 1, i / 10) for i in range(40)] + [pair_row(3, 200, 1), pair_row(0, 201, 1)]
    config = DataConfig(path=str(write_split(tmp_path / "data", rows)), validation_fraction=0.25, test_fraction=0.25)
    splits = load_sentences(config, seed=3)
    parts = [set(part.texts) | set(part.pairs or []) for part in (splits.train, splits.validation, splits.test)]
    assert not parts[0] & parts[1]
    assert not parts[0] & parts[2]
    assert len(set.union(*parts)) == 82
    assert splits.notes["test_from"] == f"{len(splits.test)} rows held out of train, stratified, seed 3"
    assert splits.notes["dropped_held_out"] == len(parts[1]) + len(parts[2]) - len(parts[1] & parts[2]) + sum(
        each in parts[1] | parts[2] for each in ("text 3", "text 0")
    )
    assert load_sentences(config, seed=3) == splits
    assert load_sentences(config, seed=4) != splits


def test_lines_of_a_text_file_are_trained_on(tmp_path):
    folder = write_split(tmp_path / "data", [{"text": "a b", "text2": "b c", "label": 3}] * 2, "test")
    write_split(folder, [{"text": "d", "text2": "e", "label": "0.5"}] * 2, "validation")
    (folder / "train.txt").write_text("one sentence\nanother \n", encoding="utf-8")
    splits = load_sentences(DataConfig(path=str(folder)))
    assert splits.train.texts == ["one sentence", "another"]
    assert splits.validation.labels == [0.5, 0.5]
    named = load_sentences(DataConfig(path=str(folder), text="text", text_pair="text2", label="label"))
    assert named == splits


@pytest.mark.parametrize(
    ("train", "test", "error"),
    [
        (
            [{"text": "a"}],
            None,
            "train: expected pairs of texts with a number each, found no validation and no test",
        ),
        (
            [{"text": "a"}],
            [{"text": "a", "label": 1}],
            "test: expected pairs of texts with a number each, found none",
        ),
        (
            [{"text": "a"}],
            [{"text": "a", "text2": "b"}],
            "among the columns text, text2: no student could be evaluated",
        ),
        (
            [pair_row(1, 2, "entailment"), pair_row(3, 4, "1")],
            None,
            "row 1, column 'score': expected a number, found 'entailment'",
        ),
        ([{"text": "", "score": 1}], [pair_row(1, 2)], "train: expected sentences that aren't held out, found none"),
        ([{"score": 1}], [pair_row(1, 2)], "train: no text column"),
    ],
)
def test_data_without_texts_or_scored_pairs_is_rejected(train, test, error, tmp_path):
    folder = write_split(tmp_path / "data", train)
    for split in ("validation", "test") if test else ():
        write_split(folder, test, split)
    with pytest.raises(InputError, match=error):
        load_sentences(DataConfig(path=str(folder)))


# --- rows and scores


def some_pairs(count: int = 30) -> Examples:
    """Returns pairs of texts of various lengths that share more words the higher their score."""
    rng = np.random.default_rng(0)
    firsts, seconds, numbers = [], [], []
    for i in range(count):
        words = list(rng.permutation(FILLERS)[: rng.integers(2, 12)])
        share = i % 5 / 4
        other = [word if rng.random() < share else str(rng.choice(FILLERS)) for word in words]
        firsts.append(" ".join(words))
        seconds.append(" ".join(other[: rng.integers(1, len(words) + 1)]))
        numbers.append(float(i % 5))
    return Examples(firsts, seconds, numbers)


@torch.no_grad()
def vectors_of(model: PooledModel, batch: dict[str, Tensor]) -> Tensor:
    return model(**{name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}).logits


def cosines_of(model: PooledModel, tokenizer: Any, part: Examples) -> np.ndarray:
    """Returns the cosine of each pair; all first sentences form one batch, all second sentences another."""
    first, second = (
        vectors_of(model, tokenizer(texts, padding=True, return_tensors="pt")).double().numpy()
        for texts in (part.texts, part.pairs)
    )
    return np.array([a @ b / (a @ a * (b @ b)) ** 0.5 for a, b in zip(first, second, strict=True)])


def test_pairs_split_across_batches_or_processes_are_scored_as_whole_pairs(tokenizer):
    model, part = pooled_bert(), some_pairs()
    rows = TASK.encode(tokenizer, part, 32)
    assert len(rows) == 60
    cosines = cosines_of(model, tokenizer, part)
    exact = cosines_of(pooled_bert().double(), tokenizer, part)
    wanted = spearmanr(cosines, part.labels).statistic
    scorer, batches = TASK.scorer(rows), EvalBatches(rows, 7, 0)
    for numbers, batch in zip(batches.order, batches, strict=True):
        scorer.record(numbers, batch, vectors_of(model, batch))
    assert list(scorer.scores()) == ["Spearman", "Pearson"]
    assert scorer.scores()["Spearman"] == pytest.approx(wanted, abs=1e-9)
    # With each side as a vector, a correlation changes by at most the norm of the change over the norm of the side.
    shift = float32_tolerance(torch.from_numpy(cosines), torch.from_numpy(exact)) * len(exact) ** 0.5
    moves = 2 * shift / float(np.linalg.norm(exact - exact.mean()))
    assert moves < 1e-4
    assert scorer.scores()["Pearson"] == pytest.approx(pearsonr(exact, part.labels).statistic, abs=moves)
    np.testing.assert_allclose(scorer.decisions(), cosines.round(1), atol=1e-9)
    # In training, a batch of one text leaves one of two processes without a row; it gets a row that doesn't count.
    gathered = TASK.scorer()
    for rank in range(2):
        for batch in EvalBatches(rows, 59, 0, rank=rank, ranks=2):
            gathered.update(vectors_of(model, batch), batch["labels"])
    assert sum(map(len, gathered.vectors)) == 60
    assert gathered.compute() == pytest.approx(wanted, abs=1e-5)


def test_the_metric_of_incomplete_pairs_is_0_and_pairs_are_joined_across_updates():
    metric = TASK.scorer()
    vectors = torch.tensor([[1.0, 0], [0, 1], [1, 1], [1, 0], [1, 2], [2, 1], [5, 5]])
    labels = torch.tensor([[4.0, 3], [1, 2], [1, 2], [4, 3], [0, 1], [0, 1], [IGNORED, IGNORED]])
    metric.update(vectors[:2], labels[:2])
    assert metric.compute() == 0
    metric = TASK.scorer()
    for rows in ([6, 5, 0], [2, 4], [3], [1]):
        metric.update(vectors[rows], labels[rows])
    assert metric.compute() == pytest.approx(0.5, abs=1e-5)  # cosines .8, .71 and 1 of pairs with scores 1, 2 and 3


def test_texts_without_a_score_get_ignored_labels(tokenizer):
    rows = TASK.encode(tokenizer, Examples(["badi", "goka"], None), 32)
    assert (rows.labels == IGNORED).all()
    joined = TASK.encode(tokenizer, some_pairs(2), 32).join(rows)
    assert joined.labels.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1], [IGNORED] * 2, [IGNORED] * 2]
    assert rows.join(TASK.encode(tokenizer, Examples([], None), 32)) is rows


# --- loss terms


@pytest.mark.parametrize(
    ("settings", "functions"),
    [
        ({}, (embedding_cosine, similarity_mse)),
        ({"embedding_kind": "mse", "similarity_kind": "kl"}, (embedding_mse, similarity_kl)),
    ],
)
def test_embedding_terms_compare_projected_vectors_and_similarity_terms_the_students_own(settings, functions):
    student_vectors, projected, teacher_vectors = (
        torch.randn(6, width, generator=torch.Generator().manual_seed(3)) for width in (4, 8, 8)
    )
    config = LossConfig(kl=0, embedding=2, similarity=0.5, **settings)
    pairs = {"embedding": [(projected, teacher_vectors)], "similarity": [(student_vectors, teacher_vectors)]}
    mask = torch.ones(6, 3, dtype=torch.long)
    terms = compute_loss_terms(config, None, None, mask, {}, pairs)
    assert terms == {
        "embedding": functions[0](projected, teacher_vectors),
        "similarity": functions[1](student_vectors, teacher_vectors),
    }
    assert scale_by_share(config, terms, {"rows": 0.5, "labels": 9, "tokens": 9})["embedding"] == terms["embedding"] / 2
    assert compute_loss_terms(LossConfig(kl=0, similarity=1, **settings), None, None, mask, {}, pairs).keys() == {
        "similarity"
    }
    assert config.teacher_outputs == ("embedding",)
    assert (config.uses_outputs, config.uses_logits, config.without_layer_terms.embedding) == (True, False, 2)


def test_embedding_terms_beside_kl_or_ce_and_unknown_kinds_are_rejected():
    for settings in ({"embedding": 1}, {"kl": 0, "ce": 1, "similarity": 1}):
        with pytest.raises(InputError, match="expected kl and ce 0 beside them"):
            LossConfig(**settings)
    with pytest.raises(InputError, match="loss.similarity_kind: expected mse, kl, found 'cosine'"):
        LossConfig(kl=0, similarity=1, similarity_kind="cosine")  # type: ignore[arg-type]


def test_cached_and_online_teacher_vectors_give_the_same_terms(tokenizer):
    teacher = pooled_bert(SentenceForm("cls", (DenseProjection(12),)))
    student = build_student(pooled_bert(), "layers=2,hidden=16")
    batch = TASK.encode(tokenizer, Examples([text for text, _ in make_rows(6, 1)], None), 32).collate(range(6), 0)
    module = DistillationModule(
        student,
        loss=BOTH,
        train=TrainConfig(),
        signals=OnlineTeacher(teacher, BOTH.teacher_outputs),
        output_rows=TASK.output_rows,
        teacher_sizes=read_layer_sizes(teacher.config),
    )
    assert module.layer_terms.vector_projection.weight.shape == (12, 16)
    teacher_vectors, student_vectors = vectors_of(teacher, batch), vectors_of(student, batch)
    terms = module.compute_terms(batch)
    assert terms["similarity"].item() == pytest.approx(
        similarity_mse(student_vectors, teacher_vectors).item(), abs=1e-6
    )
    wanted = embedding_cosine(module.layer_terms.vector_projection(student_vectors), teacher_vectors)
    assert terms["embedding"].item() == pytest.approx(wanted.item(), abs=1e-6)
    cached = module.compute_terms(batch | {"signals": {"embedding": teacher_vectors}})
    torch.testing.assert_close(cached, terms)
    with pytest.raises(InputError, match="expected vectors of texts in the teacher's signals, found hidden"):
        module.compute_terms(batch | {"signals": {"hidden": teacher_vectors}})
    without_sizes = DistillationModule(
        student, loss=BOTH, train=TrainConfig(), signals=module.signals, output_rows=TASK.output_rows
    )
    with pytest.raises(
        InputError, match="expected vectors of width 16, found the teacher's of 12: .*pass teacher_sizes"
    ):
        without_sizes.compute_terms(batch)


# --- training


def cosine_rank_correlation(student: PooledModel, teacher: PooledModel, batch: dict[str, Tensor]) -> float:
    apart = torch.ones(len(batch["labels"]), len(batch["labels"])).triu(1).bool()
    return spearmanr(
        pairwise_cosines(vectors_of(student, batch))[apart], pairwise_cosines(vectors_of(teacher, batch))[apart]
    ).statistic


@pytest.mark.parametrize("spec", ["layers=2", "layers=2,hidden=16"])
def test_training_brings_a_students_vectors_closer_to_its_teachers(spec, tokenizer, tmp_path):
    teacher = pooled_bert()
    with torch.no_grad():
        teacher.get_input_embeddings().weight.mul_(5)  # so that texts of different tokens get different vectors
    student = build_student(teacher, spec)
    texts, pairs = Examples([text for text, _ in make_rows(160, 1)], None), some_pairs()
    splits = Splits((), texts, pairs, pairs, Examples([], None), {})
    data = TextDataModule(splits, tokenizer, encode=TASK.encode, batch_size=16)
    module = DistillationModule(
        student,
        loss=BOTH,
        train=TrainConfig(epochs=8, learning_rate=2e-3, warmup=0, batch_size=16, dropout=0),
        signals=OnlineTeacher(teacher, BOTH.teacher_outputs),
        metric=TASK.scorer(),
        output_rows=TASK.output_rows,
        teacher_sizes=read_layer_sizes(teacher.config),
    )
    unseen = TASK.encode(tokenizer, Examples([text for text, _ in make_rows(40, 9)], None), 32).collate(range(40), 0)
    before, rank, unread = (
        module.compute_terms(unseen),
        cosine_rank_correlation(student, teacher, unseen),
        copy_state(student.pooler),
    )
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=8, logger=False, **quiet)
    trainer.fit(module, datamodule=data)
    student.eval()
    after = module.compute_terms(unseen)
    assert after["embedding"] < 0.3 * before["embedding"]
    assert after["similarity"] < 0.8 * before["similarity"]
    assert cosine_rank_correlation(student, teacher, unseen) > rank + 0.15
    torch.testing.assert_close(copy_state(student.pooler), unread, rtol=0, atol=0)
    # The score reported in training equals the scorer's score of the trained weights.
    scorer, batches = TASK.scorer(data.test), EvalBatches(data.test, 32, 0)
    for numbers, each in zip(batches.order, batches, strict=True):
        scorer.record(numbers, each, vectors_of(student, each))
    assert trainer.callback_metrics["val/score"] == pytest.approx(scorer.scores()["Spearman"], abs=1e-5)
    assert "val/loss" not in trainer.callback_metrics
    # The projection isn't saved with the student.
    student.save_pretrained(tmp_path)
    again, report = PooledModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(vectors_of(again, unseen), vectors_of(student, unseen))
    assert vectors_of(again, unseen).shape[1] == student.config.hidden_size


def copy_state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_a_missing_text_file_is_rejected_with_its_path(tmp_path):
    with pytest.raises(InputError, match=r"nowhere.txt'?: no such file"):
        _load_unlabelled_sentences(DataConfig(str(tmp_path), unlabelled=str(tmp_path / "nowhere.txt")))


def test_cosines_that_differ_by_rounding_only_count_as_ties(tokenizer):
    rows = TASK.encode(tokenizer, some_pairs(6), 32)
    rng, correlations = np.random.default_rng(0), []
    for _ in range(2):
        scorer = TASK.scorer(rows)
        vectors = torch.ones(12, 8) + torch.from_numpy(rng.normal(0, 1e-7, (12, 8)))
        vectors[:4] *= torch.tensor([1.0, -1.0]).repeat(4)
        vectors[1] = vectors[0].flip(0)
        scorer.record(np.arange(12), {}, vectors.float())
        correlations.append(scorer.scores()["Spearman"])
    assert correlations[0] == pytest.approx(correlations[1], abs=1e-12)
