"""Complete runs of language models: task selection, training on cached signals, export and scores."""

import json
import random
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from distill.data.config import DataConfig
from distill.data.rows.conversations import load_all_conversations
from distill.data.rows.documents import _hold_out_documents, load_documents
from distill.errors import InputError
from pipelines import distill
from pipelines.runs.cli import parse
from pipelines.settings.commands.distill import SHORT_OPTIONS, DistillConfig
from pipelines.settings.defaults import fill_task_defaults
from pipelines.stages.cache.teacher_answers import AnswerGenerator, read_answers
from support.commands import ROOT, rejection_of, run_to_success, small_run
from support.reports import report_of
from support.task_data import WORD_PAIRS, books_data, prose
from support.tiny_models import VOCABULARY, WORDS, build_model, saved, word_tokenizer
from support.two_tokenizers import SENTENCES, byte_level, sentencepiece, wordpiece


@pytest.fixture
def books(tmp_path):
    return books_data(tmp_path / "books")


@pytest.fixture
def masked_teacher(tmp_path, tokenizer):
    return saved(build_model("bert", "ForMaskedLM"), tokenizer, tmp_path / "masked")


def decoder(seed: int = 0, vocabulary: int = len(VOCABULARY)) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=64, **sizes)).eval()


def scores_of(output) -> dict[tuple[str, str], dict[str, float]]:
    return {(each["name"], each["runtime"]): each["scores"] for each in report_of(output)["models"]}


TRAINED = ("--teacher.finetune", "always", "--teacher_train.epochs", "12", "--epochs", "12")
TRAINED += ("--teacher_train.learning_rate", "5e-3", "--learning-rate", "5e-3")
STILL = ("--teacher_train.dropout", "0", "--train.dropout", "0", "--masking.passes", "2")


@pytest.mark.slow
def test_a_masked_language_student_is_trained_exported_and_scored(masked_teacher, books, tmp_path):
    output = tmp_path / "run"
    loss = ("--loss.ce", "1", "--loss.hidden", "1", "--loss.hidden_kind", "cosine", "--keep.signals", "topk")
    loss += ("--keep.k", "8", "--temperature", "2")
    message = run_to_success("distill", small_run(masked_teacher, books, output, *TRAINED, *STILL, *loss))
    assert "task: masked-lm (txt files, and the teacher's language-modelling head)" in message
    scores = scores_of(output)
    assert scores.keys() == {(who, where) for who in ("teacher", "student") for where in ("pytorch", "onnxruntime")}
    student_scores = scores["student", "pytorch"]
    assert student_scores["token accuracy"] > 0.1  # chance level is one in two hundred
    assert 1 < student_scores["perplexity"] < 60
    assert abs(student_scores["token accuracy"] - scores["student", "onnxruntime"]["token accuracy"]) < 1e-6
    cache = next((output / "cache").glob("*/cache/cache.json"))
    assert '"temperature": 2.0' in cache.read_text()
    student = AutoModelForMaskedLM.from_pretrained(output / "student")
    assert student.config.num_hidden_layers == 2


@pytest.mark.slow
def test_a_decoder_student_is_trained_exported_and_scored(tokenizer, books, tmp_path):
    teacher, output = saved(decoder(), tokenizer, tmp_path / "decoder"), tmp_path / "run"
    message = run_to_success(
        "distill", small_run(teacher, books, output, *TRAINED, "--loss.ce", "0.5", "--temperature", "1")
    )
    assert "task: causal-lm (txt files, and the teacher's language-modelling head)" in message
    scores = scores_of(output)
    assert scores["student", "pytorch"]["token accuracy"] > 0.3  # every second word is determined by the previous one
    assert scores["student", "pytorch"]["perplexity"] < 30
    assert abs(scores["student", "pytorch"]["perplexity"] - scores["student", "onnxruntime"]["perplexity"]) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("online", ["false", "true"])
def test_a_decoder_student_is_trained_in_windows_of_a_document(online, tokenizer, books, tmp_path):
    teacher, output = saved(decoder(), tokenizer, tmp_path / "decoder"), tmp_path / "run"
    windows = ("--train.backward_window", "8", "--teacher_train.backward_window", "12", "--teacher.online", online)
    memory = ("--train.checkpointing", "full", "--train.offload", "activations")
    loss = ("--loss.ce", "0.5", "--temperature", "1", "--export", "huggingface")
    run_to_success("distill", small_run(teacher, books, output, *TRAINED, *windows, *memory, *loss))
    scores = scores_of(output)["student", "pytorch"]
    assert scores["token accuracy"] > 0.3  # every second word is determined by the previous one
    assert scores["perplexity"] < 30
    (manifest,) = (output / "distill").glob("*/manifest.json")
    settings = json.loads(manifest.read_text())["config"]["train"]
    assert settings["backward_window"] == 8
    assert not {"offload", "checkpointing"} & settings.keys()


CHATML = "{% for m in messages %}[CLS] {{ m['role'] }} {{ m['content'] }} [SEP]{% endfor %}"
CHATML += "{% if add_generation_prompt %}[CLS] assistant {% endif %}"


@pytest.fixture
def chats(tmp_path):
    """Questions of one word, each answered by the word that is paired with it."""
    rng, folder = random.Random(0), tmp_path / "chats"
    folder.mkdir()
    for split, count in (("train", 60), ("validation", 12), ("test", 12)):
        words = rng.choices([*WORD_PAIRS][:6], k=count)
        turns = [[{"role": "user", "content": w}, {"role": "assistant", "content": WORD_PAIRS[w]}] for w in words]
        (folder / f"{split}.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in turns))
    (tmp_path / "chatml.jinja").write_text(CHATML)
    return folder


@pytest.mark.slow
def test_an_on_policy_chat_student_is_trained_exported_and_scored(chats, tmp_path):
    tokenizer = word_tokenizer(eos_token="[SEP]")
    teacher, output = saved(decoder(), tokenizer, tmp_path / "decoder"), tmp_path / "run"
    options = ("--on_policy.share", "0.5", "--on_policy.new_tokens", "4", "--teacher.online", "true")
    more = ("--chat.template", str(tmp_path / "chatml.jinja"), "--temperature", "1", "--machine.log_every", "5")
    message = run_to_success("distill", small_run(teacher, chats, output, *TRAINED, *options, *more))
    assert "task: chat (column messages, and the teacher's language-modelling head)" in message
    scores = scores_of(output)
    assert scores["student", "pytorch"]["token accuracy"] > 0.5  # the answers' end tokens alone are half of the tokens
    assert "onnx-decoder: reloaded, largest difference" in message
    assert (output / "student" / "onnx-decoder" / "model.onnx").is_file()
    for folder in (output / "student", output / "student" / "onnx-decoder"):
        assert AutoTokenizer.from_pretrained(folder).chat_template == CHATML
        assert tokenizer.sep_token_id in json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    logged = (output / "distill").glob("*/logs/attempt-*/metrics.csv")
    assert "train/generation_share" in next(logged).read_text()


@pytest.mark.slow
def test_packed_conversations_are_cached_and_trained_on(chats, tmp_path):
    tokenizer = word_tokenizer(eos_token="[SEP]")
    teacher, output = saved(decoder(), tokenizer, tmp_path / "decoder"), tmp_path / "run"
    more = ("--chat.template", str(tmp_path / "chatml.jinja"), "--until", "distill")
    run_to_success("distill", small_run(teacher, chats, output, *TRAINED, *more))
    about = json.loads(next((output / "data").glob("*/data.json")).read_text())
    assert about["task_arguments"]["packing"] == "documents"
    cache = json.loads(next((output / "cache").glob("*/manifest.json")).read_text())
    assert cache["metrics"]["samples"] < 30  # 60 conversations of about six tokens in rows of 32
    manifest = json.loads(next((output / "distill").glob("*/manifest.json")).read_text())
    assert manifest["metrics"]["val/score"] > 0.5


@pytest.mark.slow
def test_teacher_answers_replace_their_share_of_the_data_and_keep_the_questions(chats, tmp_path):
    tokenizer = word_tokenizer(eos_token="[SEP]")
    template = ("--chat.template", str(tmp_path / "chatml.jinja"), "--temperature", "1")
    rows = [json.loads(line)["messages"] for line in (chats / "train.jsonl").read_text().splitlines()]
    stubborn = [{"messages": [question, answer | {"content": WORDS[50]}]} for question, answer in rows]
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(map(json.dumps, stubborn)))
    first = small_run(saved(decoder(), tokenizer, tmp_path / "decoder"), other, tmp_path / "first", *TRAINED, *template)
    run_to_success("distill", [*first, "--until", "teacher"])
    (teacher,) = (tmp_path / "first" / "teacher").glob("*/model")
    output, options = (
        tmp_path / "run",
        ("--sequences.share", "0.5", "--sequences.new_tokens", "6", "--until", "distill"),
    )
    message = run_to_success(
        "distill", small_run(teacher, chats, output, *template, *options, "--teacher.finetune", "never")
    )
    (expected,) = (output / "answers").glob("*/train.parquet")
    files = (next((output / "data").glob("*/train.parquet")), expected)
    before, after = (load_all_conversations(DataConfig(path=str(file))).texts for file in files)
    assert [chat.messages[0] for chat in before] == [chat.messages[0] for chat in after]
    changed = [b.messages[1]["content"] for a, b in zip(before, after, strict=True) if a != b]
    assert changed == [WORDS[50]] * 30
    assert "30 of 60 are the teacher's, 0 were discarded" in message
    cache = json.loads(next((output / "cache").glob("*/cache/cache.json")).read_text())
    assert "/answers/" in cache["made_from"]["data"]["path"]
    assert_made_again_after_a_kill_within_an_answer(
        expected,
        small_run(teacher, chats, output, *template, *options, "--teacher.finetune", "never", "--until", "cache"),
    )


def assert_made_again_after_a_kill_within_an_answer(file: Path, arguments: list[str]) -> None:
    """Checks that the stage is rebuilt identically after a kill while `say "]…` was written, right after its `"]`."""
    before, stage = file.read_bytes(), file.parent
    scratch = stage.with_name(f"{stage.name}.partial") / "scratch"
    scratch.mkdir(parents=True)
    (scratch / "answers.jsonl").write_text('[0, "say \\"]')
    shutil.rmtree(stage)
    run_to_success("distill", arguments)
    assert file.read_bytes() == before


def test_a_completion_keeps_the_space_after_its_prompt():
    tokenizer = sentencepiece()
    ids = tokenizer("The old mill stood by the river")["input_ids"]
    writer = AnswerGenerator.__new__(AnswerGenerator)
    writer.tokenizer, writer.ends = tokenizer, [tokenizer.eos_token_id]
    for cut in (k for k in range(2, len(ids)) if tokenizer.convert_ids_to_tokens(ids[k]).startswith("▁")):
        answer = writer.decode_answer(ids[:cut], [*ids[cut:], tokenizer.eos_token_id])
        assert tokenizer.decode(ids[:cut], skip_special_tokens=True) + answer == "The old mill stood by the river"
    assert writer.decode_answer(ids, ids) == "", "it has no end"
    assert writer.decode_answer(ids, [*tokenizer("\n")["input_ids"], tokenizer.eos_token_id]) == "", "it is blank"


def test_a_share_too_small_for_one_conversation_is_rejected(chats, tmp_path, monkeypatch, capsys):
    tokenizer = word_tokenizer(eos_token="[SEP]")
    teacher, template = saved(decoder(), tokenizer, tmp_path / "decoder"), ("--chat.template", "~/chatml.jinja")
    monkeypatch.setenv("HOME", str(tmp_path))  # the folder of the template
    options = ("--sequences.share", "0.001", "--teacher.finetune", "never")
    message = rejection_of(
        distill, small_run(teacher, chats, tmp_path / "run", *template, *options), monkeypatch, capsys
    )
    assert "sequences.share 0.001: expected at least one conversation, found none of 60" in message


def test_a_dry_run_of_conversations_reports_the_cache_size_and_writes_nothing(chats, tmp_path, monkeypatch, capsys):
    tokenizer = word_tokenizer(eos_token="[SEP]")
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": WORDS[number], "completion": f" {WORDS[number + 1]}"} for number in range(40)]
    pairs.write_text("\n".join(map(json.dumps, rows)))
    teacher, template = saved(decoder(), tokenizer, tmp_path / "decoder"), str(tmp_path / "chatml.jinja")
    for data in (chats, pairs):
        distill.main(
            [
                *small_run(teacher, data, tmp_path / "run", "--chat.template", template),
                "--dry-run",
                "--predict",
                "false",
            ]
        )
        message = capsys.readouterr().out
        assert "nothing was written" in message
        assert "at most" in message


def test_an_answer_truncated_by_a_kill_is_dropped(tmp_path):
    file = tmp_path / "answers.jsonl"
    for cut in ('[5, "cut sh', '[5, "say \\"]', '[5, "no end of its line"]'):
        file.write_text('[3, "whole"]\n[4, ""]\n' + cut)
        assert list(read_answers(file)) == [(3, "whole"), (4, "")]
        assert file.read_text() == '[3, "whole"]\n[4, ""]\n', "the next line would be written behind it"


def teacher_and_student_with_other_vocabularies(tmp_path) -> tuple[Path, Path, Path]:
    """Returns a teacher, a student with a different vocabulary, and texts for both."""
    teacher_tokenizer, student_tokenizer = byte_level(), wordpiece()
    teacher = saved(decoder(vocabulary=len(teacher_tokenizer)), teacher_tokenizer, tmp_path / "teacher")
    student = saved(decoder(1, len(student_tokenizer)), student_tokenizer, tmp_path / "student")
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": " ".join(SENTENCES[:5])}) for _ in range(30)))
    return teacher, student, texts


@pytest.mark.slow
def test_a_decoder_with_another_vocabulary_learns_from_its_teacher(tmp_path):
    teacher, student, texts = teacher_and_student_with_other_vocabularies(tmp_path)
    output = tmp_path / "run"
    arguments = ("--student", str(student), "--teacher.online", "true", "--loss.ce", "0.2", "--temperature", "1")
    run_to_success("distill", small_run(teacher, texts, output, *TRAINED, *arguments))
    scores = scores_of(output)
    assert scores["student", "pytorch"]["token accuracy"] > 0.3
    models = {(each["name"], each["runtime"]): each for each in report_of(output)["models"]}
    assert models["student", "pytorch"]["agreement_with_teacher"] is None
    assert AutoTokenizer.from_pretrained(output / "student").get_vocab() == wordpiece().get_vocab()


def masked_models_with_other_vocabularies(tmp_path) -> tuple[Path, Path, Path]:
    """Like `teacher_and_student_with_other_vocabularies` for masked models, byte-level RoBERTa and WordPiece BERT.

    One word is six in ten words.
    """
    rng, folder = random.Random(0), tmp_path / "texts"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(" ".join(rng.choices(WORDS[:5], [6, 1, 1, 1, 1], k=400)))
    teacher_tokenizer = byte_level(masked=True, texts=(" ".join(WORDS[:5] * 9),))
    student_tokenizer = word_tokenizer()
    vocabulary = {
        "vocab_size": len(teacher_tokenizer),
        "pad_token_id": teacher_tokenizer.pad_token_id,
        "type_vocab_size": 1,
    }
    teacher = saved(build_model("roberta", "ForMaskedLM", **vocabulary), teacher_tokenizer, tmp_path / "teacher")
    return teacher, saved(build_model("bert", "ForMaskedLM"), student_tokenizer, tmp_path / "student"), folder


@pytest.mark.slow
def test_a_masked_student_with_another_vocabulary_learns_from_its_teacher(tmp_path):
    teacher, student, texts = masked_models_with_other_vocabularies(tmp_path)
    output, arguments = (
        tmp_path / "run",
        ("--student", str(student), "--teacher.online", "true", "--temperature", "1"),
    )
    message = run_to_success("distill", small_run(teacher, texts, output, *TRAINED, *arguments))
    assert "task: masked-lm (txt files, and the teacher's language-modelling head)" in message
    scores = scores_of(output)
    # Without labels, the student learns the frequent word only from the teacher, where its id is a different one.
    assert scores["student", "pytorch"]["token accuracy"] > 0.5
    assert scores["student", "pytorch"]["perplexity"] < 8
    assert scores["student", "pytorch"]["token accuracy"] == scores["student", "onnxruntime"]["token accuracy"]
    assert AutoTokenizer.from_pretrained(output / "student").get_vocab().keys() == set(VOCABULARY)
    assert AutoModelForMaskedLM.from_pretrained(output / "student").config.vocab_size == len(VOCABULARY)


@pytest.mark.parametrize("make", [teacher_and_student_with_other_vocabularies, masked_models_with_other_vocabularies])
def test_invalid_settings_for_a_student_with_another_vocabulary_are_rejected(make, tmp_path, monkeypatch, capsys):
    teacher, student, texts = make(tmp_path)
    for more, message in (
        ((), "teacher.online: expected true"),
        (("--teacher.online", "true", "--loss.hidden", "1"), "loss: expected kl and ce"),
        (("--teacher.online", "true", "--data.max_length", "3"), "expected at least"),
        (
            ("--teacher.online", "true", "--temperature", "4"),
            "cross_tokenizer.temperature softens both distributions",
        ),
        (
            ("--teacher.online", "true", "--cross_tokenizer.kind", "sorted"),
            "cross_tokenizer.kind sorted: expected loss.ce above 0, found 0",
        ),
    ):
        arguments = small_run(teacher, texts, tmp_path / "run", "--student", str(student), *more)
        assert message in rejection_of(distill, arguments, monkeypatch, capsys)
        assert not (tmp_path / "run" / "data").exists()


def test_a_student_without_a_mask_token_is_rejected_before_the_data_stage(tmp_path, monkeypatch, capsys):
    teacher, _, texts = masked_models_with_other_vocabularies(tmp_path)
    maskless_tokenizer = byte_level(size=300)
    vocabulary = {"vocab_size": len(maskless_tokenizer), "pad_token_id": maskless_tokenizer.pad_token_id}
    student = saved(build_model("roberta", "ForMaskedLM", **vocabulary), maskless_tokenizer, tmp_path / "unmasked")
    arguments = small_run(teacher, texts, tmp_path / "run", "--student", str(student), "--teacher.online", "true")
    assert "expected a mask token, found none" in rejection_of(distill, arguments, monkeypatch, capsys)
    assert not (tmp_path / "run" / "data").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data.label", "category"), "expected none for a language model"),
        (("--sequences.share", "0.5"), "expected chat, found masked-lm"),
        (("--task", "causal-lm"), "expected a head for causal-lm (ForCausalLM, LMHeadModel), found BertForMaskedLM"),
        (("--keep.signals", "hidden"), "expected signals sampled, topk or logits"),
        (("--keep.layers", "1"), "keep.layers: expected none for masked-lm, found '1'"),
        (("--masking.rate", "1.5"), "expected a share between 0 and 1"),
        (("--on_policy.share", "0.5"), "expected causal-lm or chat, found masked-lm"),
        (("--loss.ramps", '{"temperature": [4, 1]}'), "a constant temperature with cached sampled signals"),
        (("--loss.divergence", "reverse_kl"), "with cached sampled signals, found reverse_kl: they contain too little"),
        (("--loss.divergence", "logit_mse", "--keep.signals", "topk"), "with cached topk signals, found logit_mse"),
    ],
)
def test_invalid_language_model_settings_are_rejected_before_the_teacher_stage(
    arguments, message, masked_teacher, books, tmp_path, monkeypatch, capsys
):
    output = tmp_path / "run"
    assert message in rejection_of(distill, small_run(masked_teacher, books, output, *arguments), monkeypatch, capsys)
    assert not (output / "teacher").exists()


@pytest.mark.parametrize("random", ["0.1", "0"])
def test_a_tokenizer_with_more_tokens_than_the_model_has_rows_is_rejected(
    random, tokenizer, books, tmp_path, monkeypatch, capsys
):
    longer = deepcopy(tokenizer)
    longer.add_tokens([f"added{i}" for i in range(20)])
    teacher = saved(build_model("bert", "ForMaskedLM"), longer, tmp_path / "masked")
    arguments = small_run(
        teacher, books, tmp_path / "run", "--dry-run", "--predict", "false", "--masking.random", random
    )
    expected = rejection_of(distill, arguments, monkeypatch, capsys)
    assert f"found 20 beyond ('added0' is {len(tokenizer)})" in expected


def test_prompts_and_new_tokens_beyond_the_positions_are_rejected_in_a_dry_run(
    tokenizer, books, tmp_path, monkeypatch, capsys
):
    options = (
        "--on_policy.share",
        "0.5",
        "--teacher.online",
        "true",
        "--on_policy.new_tokens",
        "60",
        "--dry-run",
        "--predict",
        "false",
    )
    arguments = small_run(saved(decoder(), tokenizer, tmp_path / "decoder"), books, tmp_path / "run", *options)
    message = rejection_of(distill, arguments, monkeypatch, capsys)
    assert "on_policy.prompt_tokens and on_policy.new_tokens together: expected at most 64 tokens" in message


def test_packed_documents_are_cached_once_for_each_masking_pass(masked_teacher, books, tmp_path):
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n".join(json.dumps({"text": line}) for line in prose(60, 1).splitlines()))
    output, more = tmp_path / "run", ("--data.packing", "documents", "--masking.passes", "2", "--until", "distill")
    run_to_success(
        "distill", small_run(masked_teacher, lines, output, *more, "--epochs", "2", "--teacher.finetune", "never")
    )
    about = json.loads(next((output / "data").glob("*/data.json")).read_text())
    assert about["task_arguments"]["packing"] == "documents"
    samples = json.loads(next((output / "cache").glob("*/manifest.json")).read_text())["metrics"]["samples"]
    assert samples % 2 == 0
    assert samples < 60  # two masks of about fifty lines, several lines to a row


@pytest.mark.parametrize(
    "more", [("--keep.signals", "logits"), ("--teacher.online", "true"), ("--loss.kl", "0", "--loss.hidden", "1")]
)
def test_a_loss_that_the_signals_support_is_accepted(more, masked_teacher, books, tmp_path):
    arguments = small_run(
        masked_teacher,
        books,
        tmp_path / "run",
        "--loss.ramps",
        '{"temperature": [4, 1]}',
        "--dry-run",
        "--predict",
        "false",
    )
    distill.main([*arguments, "--loss.divergence", "reverse_kl", *more])


def test_a_body_without_a_language_modelling_head_is_rejected(body_folder, books, tmp_path, monkeypatch, capsys):
    arguments = small_run(body_folder, books, tmp_path / "run", "--task", "masked-lm")
    assert "a new head would have to learn every token from scratch" in rejection_of(
        distill, arguments, monkeypatch, capsys
    )


def test_held_out_documents_are_disjoint_and_depend_on_the_seed_alone(books, tmp_path):
    first, again, other = (load_documents(DataConfig(str(books)), seed) for seed in (3, 3, 4))
    parts = [first.train.texts, first.validation.texts, first.test.texts]
    assert list(map(len, parts)) == [4, 1, 1]
    assert len({text for part in parts for text in part}) == 6
    assert first == again
    assert first.test.texts != other.test.texts or first.validation.texts != other.validation.texts


def test_a_single_document_is_split_between_lines(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text(prose(40, 1))
    splits = load_documents(DataConfig(str(file)), 0)
    cut = splits.train.texts + splits.validation.texts + splits.test.texts
    assert sorted("".join(cut)) == sorted(prose(40, 1))
    assert all(text.endswith(".\n") for text in (*splits.train.texts, *splits.validation.texts))
    with pytest.raises(InputError, match="found a single line"):
        _hold_out_documents(0, ["one line"], 0.1)


@pytest.mark.parametrize(
    ("head", "more", "expected"),
    [
        ("ForMaskedLM", (), 1.0),
        ("ForMaskedLM", ("--loss.ce", "0.2"), 1.0),
        ("ForMaskedLM", ("--temperature", "2"), 2.0),
        ("ForSequenceClassification", (), 2.0),
        ("ForSequenceClassification", ("--loss.hidden", "1"), 2.0),
    ],
)
def test_the_default_temperature_is_1_for_tokens_and_2_for_classes(head, more, expected, tokenizer, tmp_path):
    teacher = saved(build_model("bert", head), tokenizer, tmp_path / "teacher")
    task = "masked-lm" if head == "ForMaskedLM" else "text-classification"
    arguments = ["--teacher", str(teacher), "--student", "layers=1", "--data", "unread", "--output", "unused", *more]
    config = parse(DistillConfig, [*arguments, "--task", task], prog="test", about="", examples="", short=SHORT_OPTIONS)
    assert fill_task_defaults(config, task).loss.temperature == expected


def test_the_recipe_for_sampled_logits_runs_with_the_requested_draws(tokenizer, books, tmp_path):
    teacher, output = saved(decoder(), tokenizer, tmp_path / "teacher"), tmp_path / "run"
    recipe = ROOT / "configs" / "recipes" / "sampled.yaml"
    arguments = ["--data", str(books), "--data.max_length", "24", "--keep.draws", "3", "--until", "distill"]
    more = ["--teacher", str(teacher), "--output", str(output), "--epochs", "1"]
    distill.main(["--config", str(recipe), *arguments, *more])
    (expected,) = (output / "cache").glob("*/cache/cache.json")
    (signal,) = json.loads(expected.read_text())["signals"].values()
    assert (signal["kind"], signal["draws"]) == ("sampled", 3)
    (model,) = (output / "distill").glob("*/model")
    assert LlamaForCausalLM.from_pretrained(model).config.num_hidden_layers == 2
