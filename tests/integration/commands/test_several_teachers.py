"""Ensembles of several teachers: saving, caching and rejecting incompatible members."""

import csv
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from distill.cache import CacheReader, sample_keys
from distill.errors import InputError
from distill.teacher.config import TeacherConfig
from distill.teacher.ensemble import Ensemble, register_ensemble
from distill.teacher.online import OnlineTeacher
from pipelines import distill
from support.commands import rejection_of, run_to_success, small_run
from support.tiny_models import LABELS, VOCABULARY, build_model, saved, word_tokenizer

IDS = torch.randint(5, 60, (6, 12), generator=torch.Generator().manual_seed(3))
BATCH = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


def build_other_teacher(**changes: int):
    """Returns a tiny BERT with different weights."""
    model = build_model("bert", **changes)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.flip(0) if weight.dim() == 1 else weight * 0.9)
        model.classifier.weight.copy_(model.classifier.weight.roll(1, 0))
    return model


@pytest.mark.parametrize("mix", ["weighted", "confidence"])
def test_a_reloaded_ensemble_outputs_the_mixture_of_its_members(mix, tmp_path):
    members = [build_model("bert"), build_other_teacher(num_hidden_layers=2)]
    whole = Ensemble.from_models(members, weights=[3.0, 1.0], mix=mix, sharpness=2.0, mix_temperature=2.0)
    whole.save_pretrained(tmp_path)
    register_ensemble()
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert [again.config.id2label[i] for i in range(5)] == list(LABELS)
    with torch.no_grad():
        logits = [member(**BATCH).logits for member in members]
        reloaded_logits = again(**BATCH).logits
        assert torch.equal(reloaded_logits, whole(**BATCH).logits)
    shares = torch.tensor([0.75, 0.25]).expand(6, 2)
    if mix == "confidence":
        entropies = [-(z.softmax(-1) * z.log_softmax(-1)).sum(-1) for z in logits]
        shares = torch.stack([w * (-2 * h).exp() for w, h in zip((3, 1), entropies, strict=True)], -1)
        shares = shares / shares.sum(-1, keepdim=True)
    wanted = sum(shares[:, i, None] * (each / 2).softmax(-1) for i, each in enumerate(logits))
    torch.testing.assert_close((reloaded_logits / 2).softmax(-1), wanted)


def test_a_run_caches_the_logits_of_the_ensemble(tmp_path, tokenizer, data_folder):
    first = saved(build_model("bert"), tokenizer, tmp_path / "first")
    second = saved(build_other_teacher(), tokenizer, tmp_path / "second")
    run = tmp_path / "run"
    requested = (
        "--teacher.additional",
        f'["{second}"]',
        "--teacher.weights",
        "[1, 3]",
        "--until",
        "distill",
        "--epochs",
        "1",
    )
    message = run_to_success("distill", small_run(first, data_folder, run, *requested))
    assert "ensemble: validation scores: teacher " in message
    (ensemble,) = (run / "ensemble").glob("*/model")
    (written,) = (run / "cache").glob("*/cache")
    register_ensemble()
    whole = OnlineTeacher(AutoModelForSequenceClassification.from_pretrained(ensemble))
    with (data_folder / "train.csv").open() as file:
        texts = [row["text"] for row in csv.DictReader(file)]
    reader = CacheReader(written)
    batches = [dict(tokenizer(text, return_tensors="pt")) for text in texts]
    cached = [batch for batch in batches if reader.contains(sample_keys(batch)).all()]
    assert len(cached) > 80, "all but the texts of the validation split"
    for batch in cached[:8]:
        torch.testing.assert_close(reader(batch)["logits"], whole(batch)["logits"], rtol=1e-4, atol=1e-5)
    assert "ensemble" in json.dumps(json.loads((written / "cache.json").read_text())["made_from"])
    again = run_to_success("distill", small_run(first, data_folder, run, *requested))
    assert "ensemble: already complete, skipped" in again
    assert "teacher-2: already complete, skipped" in again


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--loss.hidden", "1"), "loss.hidden: expected 0 with several teachers"),
        (("--loss.ramps", '{"temperature": [4, 1]}'), "they are mixed at one temperature"),
        (("--teacher.weights", "[1, 2, 3]"), "teacher.weights: expected 2 numbers above 0"),
        (
            ("--teacher.online", "true"),
            "and no processes with 2 teachers, found online ones and processes 0",
        ),
    ],
)
def test_ensemble_settings_that_cannot_be_combined_are_rejected(
    more, expected, tmp_path, tokenizer, data_folder, monkeypatch, capsys
):
    first = saved(build_model("bert"), tokenizer, tmp_path / "first")
    second = saved(build_other_teacher(), tokenizer, tmp_path / "second")
    requested = ("--teacher.additional", f'["{second}"]', *more)
    assert expected in rejection_of(
        distill, small_run(first, data_folder, tmp_path / "run", *requested), monkeypatch, capsys
    )


def test_teachers_with_different_tokenizers_are_rejected(tmp_path: Path, tokenizer, data_folder, monkeypatch, capsys):
    first = saved(build_model("bert"), tokenizer, tmp_path / "first")
    turned = word_tokenizer(VOCABULARY[::-1])
    second = saved(build_other_teacher(), turned, tmp_path / "second")
    requested = small_run(first, data_folder, tmp_path / "run", "--teacher.additional", f'["{second}"]')
    message = rejection_of(distill, requested, monkeypatch, capsys)
    assert f"teacher {str(second)!r}: expected the teacher's tokenizer" in message


def test_a_negative_sharpness_is_rejected():
    with pytest.raises(InputError, match="teacher.sharpness: expected at least 0"):
        TeacherConfig("t", sharpness=-1)
