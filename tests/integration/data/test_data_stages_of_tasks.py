"""Augmentation and selection for other tasks than single-label classification."""

import pyarrow.parquet as pq
import pytest

from support.commands import run_to_success, small_run
from support.run_inputs import stage_folder
from support.task_data import multi_label_data, pair_data, question_data, regression_data, tagged_data

pytestmark = pytest.mark.slow
UNTIL = ("--until", "distill", "--epochs", "1", "--teacher_train.epochs", "1", "--augment.times", "2")


def read_split(output, stage: str, split: str) -> list[dict]:
    return pq.read_table(stage_folder(output, stage) / f"{split}.parquet").to_pylist()


@pytest.mark.parametrize("labels", ["teacher", "row"])
def test_a_tagger_learns_from_synthetic_sentences_with_their_tags(labels, body_folder, tmp_path):
    more = ("--data.augment", "names,swap,delete,insert", "--augment.labels", labels, "--augment.agreement", "0.2")
    data = tagged_data(tmp_path / "tagged")
    run_to_success("distill", small_run(body_folder, data, tmp_path / "run", *UNTIL, *more))
    before = read_split(tmp_path / "run", "data", "train")
    after = read_split(tmp_path / "run", "augment", "train" if labels == "row" else "unlabelled")
    added = after[len(before) :] if labels == "row" else after
    assert added
    assert all(len(row["label"]) == len(row["text"]) for row in added) if labels == "row" else "label" not in added[0]


def test_the_positions_of_answers_follow_the_augmented_context(body_folder, tmp_path):
    more = ("--data.augment", "swap,delete,insert,crop", "--augment.labels", "row", "--data.max_length", "64")
    data = question_data(tmp_path / "questions")
    run_to_success("distill", small_run(body_folder, data, tmp_path / "run", *UNTIL, *more))
    before, after = (read_split(tmp_path / "run", stage, "train") for stage in ("data", "augment"))
    assert len(after) > len(before)
    for row in after:
        for answer in row["label"]:
            assert row["text_pair"][answer["start"] :].startswith(answer["text"])


def test_pairs_of_sentence_vectors_get_synthetic_sentences(body_folder, tmp_path):
    more = ("--task", "sentence-embedding", "--data.augment", "swap,delete")
    data = pair_data(tmp_path / "pairs")
    run_to_success("distill", small_run(body_folder, data, tmp_path / "run", *UNTIL, *more))
    assert read_split(tmp_path / "run", "augment", "unlabelled")


@pytest.mark.parametrize(
    ("make_data", "selection"),
    [
        (multi_label_data, ("entropy",)),
        (regression_data, ("k-centre",)),
        (tagged_data, ("margin", "--select.prefer", "easy")),
        (tagged_data, ("mixture", "--select.vectors", "embeddings")),
    ],
)
def test_rows_of_every_task_can_be_selected(make_data, selection, body_folder, tmp_path):
    more = ("--data.augment", "swap", "--data.select", *selection, "--select.share", "0.5", "--select.source", "all")
    data = make_data(tmp_path / "data")
    run_to_success("distill", small_run(body_folder, data, tmp_path / "run", *UNTIL, *more))
    counts = {
        stage: sum(len(read_split(tmp_path / "run", stage, split)) for split in ("train", "unlabelled"))
        for stage in ("augment", "select")
    }
    assert counts["select"] == round(0.5 * counts["augment"])
