"""Tests the sampled losses that score units and the divergences that compare students, for every kind of output."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from distill.data.batches.encode import pad_tokens
from distill.data.rows.questions import Questions
from distill.data.rows.tagged import Tagged
from distill.data.rows.tagged_rows import encode_tagged
from distill.data.rows.windows import encode_questions
from distill.errors import InputError
from distill.losses.logits import IGNORED
from distill.tasks.logit_rows import LabelRows, OutputRows, SpanRows
from distill.tasks.question_answering import QuestionAnswering
from distill.tasks.sentence_embedding import VectorRows
from distill.tasks.token_classification import TokenClassification
from pipelines.stages.prepare.scoring import TeacherComparison, compute_outputs
from pipelines.stages.prune.importance import Distance
from support.task_data import TAGS
from support.tiny_models import VOCABULARY, WORDS, build_model, word_tokenizer

DRAWS = 20_000


def batch_of(kind: str, samples: int) -> tuple[OutputRows, torch.Tensor, dict[str, torch.Tensor]]:
    """Returns (output rows, logits of one sample [1, ...], a batch that repeats that sample)."""
    torch.manual_seed(0)
    tokens = {name: each.expand(samples, -1) for name, each in pad_tokens([torch.ones(3).long().numpy()], 0).items()}
    shapes = {"classes": (1, 4), "tags": (1, 3, 4), "labels": (1, 4), "numbers": (1, 1), "spans": (1, 3, 2)}
    shapes |= {"vectors": (1, 4)}
    labels = {
        "classes": torch.zeros(samples, dtype=torch.long),
        "tags": torch.zeros(samples, 3, dtype=torch.long),
        "labels": torch.zeros(samples, 4),
        "numbers": torch.zeros(samples),
        "spans": torch.zeros(samples, dtype=torch.long),
        "vectors": torch.zeros(samples, 2),
    }
    more = {"ends": labels["spans"]} if kind == "spans" else {}
    others = {"labels": LabelRows(), "spans": SpanRows(), "vectors": VectorRows()}
    output_rows = others.get(kind, OutputRows())
    return output_rows, torch.randn(shapes[kind]), {**tokens, "labels": labels[kind], **more}


@pytest.mark.parametrize("kind", ["classes", "tags", "labels", "numbers", "spans", "vectors"])
def test_sampled_targets_have_the_curvature_of_the_divergence(kind):
    """The mean square of the log-likelihood's slope equals the divergence's second derivative for every row type."""
    distance = Distance(batch_of(kind, 1)[0], 2.0)

    def build_student(samples: int) -> tuple[Callable[..., dict[str, torch.Tensor]], torch.Tensor, dict]:
        """Returns a student, its step along a direction in each sample, and the batch."""
        _, teacher_logits, batch = batch_of(kind, samples)
        direction = torch.randn(teacher_logits.shape, generator=torch.Generator().manual_seed(1))
        step = torch.zeros(samples, *[1] * (teacher_logits.dim() - 1), requires_grad=True)
        signals = teacher_logits.expand(samples, *teacher_logits.shape[1:])
        batch |= {"signals": {"logits": signals.flatten(0, 1) if kind == "spans" else signals}}
        return lambda **inputs: {"logits": teacher_logits + step * direction}, step, batch

    student, step, batch = build_student(DRAWS)
    drawn = distance.draw_targets(batch, torch.Generator().manual_seed(0))
    (slopes,) = torch.autograd.grad(distance.surprise(student, drawn).sum(), step)
    student, step, batch = build_student(1)  # the divergence is the same in every sample
    (first,) = torch.autograd.grad(distance.divergence(student, batch).sum(), step, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), step)
    assert slopes.square().mean() == pytest.approx(float(second), rel=0.05)
    assert abs(slopes.mean()) < 0.05 * slopes.square().mean().sqrt()


def test_samples_with_other_token_counts_are_left_out_of_the_comparison(tokenizer):
    task = TokenClassification(tuple(TAGS))
    names = {"id2label": dict(enumerate(TAGS))}
    teacher, student = (build_model("bert", "ForTokenClassification", **names) for _ in range(2))
    torch.nn.init.normal_(student.classifier.weight, generator=torch.Generator().manual_seed(0))
    words = [WORDS[:3], WORDS[3:5], WORDS[5:9]]
    rows = encode_tagged(tokenizer, Tagged(words, [[0] * len(each) for each in words]), 16)
    outputs = compute_outputs(teacher, rows, 0, task)
    assert TeacherComparison(task, rows, 0, outputs).divergence(teacher) == pytest.approx(0, abs=1e-6)
    whole = TeacherComparison(task, rows, 0, outputs).divergence(student)
    other = [{"logits": outputs.samples[0]["logits"][:-1] + 9}, *outputs.samples[1:]]
    part = TeacherComparison(task, rows, 0, replace(outputs, samples=other)).divergence(student)
    remaining = encode_tagged(tokenizer, Tagged(words[1:], [[0] * len(each) for each in words[1:]]), 16)
    assert part == pytest.approx(
        TeacherComparison(task, remaining, 0, compute_outputs(teacher, remaining, 0, task)).divergence(student),
        rel=1e-5,
    )
    assert part != pytest.approx(whole, rel=1e-3)
    assert (rows.collate([0], 0)["labels"] != IGNORED).sum() == 3


def test_a_limited_comparison_uses_samples_evenly_spaced_over_the_split(tokenizer):
    task = TokenClassification(tuple(TAGS))
    names = {"id2label": dict(enumerate(TAGS))}
    teacher, student = (build_model("bert", "ForTokenClassification", **names) for _ in range(2))
    torch.nn.init.normal_(student.classifier.weight, generator=torch.Generator().manual_seed(0))
    words = [WORDS[:length] for length in (3, 7, 2, 5, 4)]
    rows, first_middle_last = (
        encode_tagged(tokenizer, Tagged(each, [[0] * len(sentence) for sentence in each]), 16)
        for each in (words, words[::2])
    )
    limited = TeacherComparison(task, rows, 0, compute_outputs(teacher, rows, 0, task), limit=3)
    assert len(limited) == 3
    expected = compute_outputs(teacher, first_middle_last, 0, task)
    assert limited.divergence(student) == pytest.approx(
        TeacherComparison(task, first_middle_last, 0, expected).divergence(student), rel=1e-5
    )
    assert len(TeacherComparison(task, rows, 0, limited.teacher, limit=9)) == 5


def test_only_contexts_with_identical_windows_are_compared(tokenizer):
    """A student with a smaller vocabulary needs more pieces and splits long contexts into more, different windows."""
    absent = WORDS[20]  # its letters stay in the vocabulary
    fewer = word_tokenizer([word for word in VOCABULARY if word != absent])
    contexts = [" ".join(WORDS[:12]), " ".join(WORDS[:16] + [absent] * 8 + WORDS[16:20]), " ".join(WORDS[2:14])]
    part = Questions([WORDS[0]] * 3, contexts)
    task = QuestionAnswering(())
    theirs, ours = (encode_questions(each, part, 24) for each in (tokenizer, fewer))
    assert [theirs.owners.tolist().count(i) for i in range(3)] == [1, 2, 1]
    assert [ours.owners.tolist().count(i) for i in range(3)] == [1, 4, 1]
    teacher, student = (build_model("bert", "ForQuestionAnswering", id2label={0: "start", 1: "end"}) for _ in range(2))
    torch.nn.init.normal_(student.qa_outputs.weight, generator=torch.Generator().manual_seed(0))
    divergence = TeacherComparison(task, ours, 0, compute_outputs(teacher, theirs, 0, task)).divergence(student)
    alike = encode_questions(fewer, Questions(part.texts[::2], contexts[::2]), 24)
    outputs = compute_outputs(teacher, encode_questions(tokenizer, alike.part, 24), 0, task)
    assert divergence == pytest.approx(TeacherComparison(task, alike, 0, outputs).divergence(student), rel=1e-5)
    lost = encode_questions(fewer, Questions(part.texts[1:2], contexts[1:2]), 24)
    outputs = compute_outputs(teacher, encode_questions(tokenizer, lost.part, 24), 0, task)
    with pytest.raises(InputError, match="found none of 4: students can't be compared"):
        TeacherComparison(task, lost, 0, outputs).divergence(student)
