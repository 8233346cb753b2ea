"""One scorer a task: validation counts rows on several processes, evaluation records samples of a split."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from distill.data.batches.encode import Encoded
from distill.losses.logits import IGNORED
from distill.tasks.language import CausalLM, TokenScorer
from distill.tasks.scorer import Scorer
from distill.tasks.sentence_embedding import SentenceEmbedding
from distill.tasks.task import Task
from distill.tasks.text_classification import MultiLabel, Regression, TextClassification
from distill.tasks.token_classification import TagScorer

ROWS = 60


def encoded(labels: np.ndarray) -> Encoded:
    return Encoded([np.arange(3)] * len(labels), None, labels, 0)


def draw_pair_labels(rng: np.random.Generator) -> np.ndarray:
    pairs = np.stack([np.arange(ROWS // 2), rng.integers(0, 6, ROWS // 2)], 1)
    return np.repeat(pairs, 2, 0).astype(np.float32)


def draw_token_labels(rng: np.random.Generator) -> np.ndarray:
    labels = rng.integers(0, 11, (ROWS, 8))
    labels[:, ::3] = IGNORED
    return labels


CASES: dict[str, tuple[Task, Callable[[np.random.Generator], np.ndarray], tuple[int, ...]]] = {
    "classes": (TextClassification(tuple("abcd")), lambda rng: rng.integers(0, 4, ROWS), (4,)),
    "several labels": (
        MultiLabel(tuple("abc")),
        lambda rng: rng.integers(0, 2, (ROWS, 3)).astype(np.float32),
        (3,),
    ),
    "numbers": (Regression(("number",)), lambda rng: rng.normal(size=ROWS).astype(np.float32), (1,)),
    "pairs": (SentenceEmbedding(()), draw_pair_labels, (16,)),
    "tokens": (CausalLM(()), draw_token_labels, (8, 11)),
}


def draw_case(name: str, rng: np.random.Generator) -> tuple[Task, np.ndarray, torch.Tensor]:
    """Returns (task, labels of ROWS rows, logits of the rows)."""
    task, draw_labels, shape = CASES[name]
    return task, draw_labels(rng), torch.from_numpy(rng.normal(size=(ROWS, *shape))).float()


def update_with(scorer: Scorer, task: Task, labels: np.ndarray, logits: torch.Tensor, rows: np.ndarray) -> None:
    mask = torch.ones(logits.shape[:2], dtype=torch.long)
    batch = {"labels": torch.from_numpy(labels[rows]), "attention_mask": mask[rows]}
    scorer.update(task.output_rows.logits(batch, logits[rows]), task.output_rows.labels(batch))


@pytest.mark.parametrize("case", CASES)
def test_validation_and_evaluation_report_the_same_metric(case):
    rng = np.random.default_rng(0)
    task, labels, logits = draw_case(case, rng)
    validation, rows = task.scorer(), rng.permutation(ROWS)
    evaluation: Any = task.scorer(encoded(labels))
    for part in np.array_split(rows, 4):
        update_with(validation, task, labels, logits, part)
        evaluation.record(part, {"labels": torch.from_numpy(labels[part])}, logits[part])
    name, score = next(iter(evaluation.scores().items()))
    assert name == task.metric_name
    assert float(validation.compute()) == float(np.float32(score))
    assert type(validation) is type(evaluation)


@pytest.mark.parametrize("case", CASES)
def test_processes_sum_their_counts_to_the_score_of_all_rows(case):
    task, labels, logits = draw_case(case, np.random.default_rng(0))
    together, shares = task.scorer(), [task.scorer() for _ in range(3)]
    update_with(together, task, labels, logits, np.arange(ROWS))
    for rank, share in enumerate(shares):
        update_with(share, task, labels, logits, np.arange(rank, ROWS, 3))
    states = [share.metric_state for share in shares]
    for name in states[0]:
        parts = [state[name] for state in states]
        joined = (
            sum(parts) if isinstance(parts[0], torch.Tensor) else torch.cat([rows for each in parts for rows in each])
        )
        setattr(shares[0], name, joined)
    shares[0]._computed = None
    assert float(shares[0].compute()) == pytest.approx(float(together.compute()), abs=1e-7)


def test_counts_beyond_the_integers_of_float32_stay_exact():
    scorer = TokenScorer()
    scorer.correct += 2**25 + 1
    scorer.total += 2**26
    scorer.update(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))
    assert (int(scorer.correct), int(scorer.total)) == (2**25 + 2, 2**26 + 1)
    assert scorer.accuracy() == (2**25 + 2) / (2**26 + 1)


def test_the_f1_without_an_outside_class_is_the_accuracy():
    rng = np.random.default_rng(0)
    logits, labels = torch.from_numpy(rng.normal(size=(50, 4))), torch.from_numpy(rng.integers(0, 4, 50))
    labels[::7] = IGNORED
    f1, accuracy = TagScorer(None, tuple("abcd"), spans=False), TokenScorer()
    for scorer in (f1, accuracy):
        scorer.update(logits, labels)
    assert float(f1.compute()) == float(accuracy.compute())


def test_a_correlation_that_is_undefined_is_nan_in_reports_and_0_in_validation():
    task = Regression(("number",))
    scorer: Any = task.scorer(encoded(np.arange(4, dtype=np.float32)))
    scorer.record(np.arange(4), {}, torch.ones(4, 1))
    assert np.isnan(scorer.scores()["Spearman"])
    validation = task.scorer()
    validation.update(torch.ones(4, 1), torch.arange(4.0))
    assert float(validation.compute()) == 0
