"""A causal language model scored by the real lm-eval library on a local task."""

import json
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipelines import harness
from support.commands import rejection_of, start
from support.tiny_models import build_model, saved
from support.two_tokenizers import SENTENCES, byte_level

TASK = """\
task: endings
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}]
"""


WORDS = sorted({word for text in SENTENCES[:5] for word in text.split() if word.isalpha()})


@pytest.fixture
def decoder(tmp_path):
    torch.manual_seed(0)
    tokenizer = byte_level()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes))
    return saved(model.eval(), tokenizer, tmp_path / "decoder"), model


@pytest.mark.slow
def test_the_harness_score_matches_the_models_log_likelihoods(decoder, tmp_path, monkeypatch):
    (folder, model), tokenizer = decoder, byte_level()
    rows = [{"question": WORDS[i], "choices": [WORDS[i + 1], WORDS[i + 2]], "answer": i % 2} for i in range(20)]
    file, tasks = tmp_path / "endings.jsonl", tmp_path / "tasks"
    file.write_text("\n".join(map(json.dumps, rows)))
    tasks.mkdir()
    (tasks / "endings.yaml").write_text(TASK.format(file=file))
    output = tmp_path / "out"
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    arguments = ["--model", str(folder), "--tasks", "endings", "--include", str(tasks), "--output", str(output)]
    process = start("harness", arguments, fresh=True)  # libraries read that variable on import
    message, _ = process.communicate(timeout=300)
    assert process.returncode == 0, message
    accuracy = json.loads((output / "harness.json").read_text())["model"]["endings"]["acc"]
    right = 0
    for row in rows:
        prompt = tokenizer(row["question"])["input_ids"]
        scores = []
        for choice in row["choices"]:
            ids = tokenizer(f"{row['question']} {choice}")["input_ids"]
            with torch.no_grad():
                logs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            scores.append(sum(logs[i - 1, ids[i]].item() for i in range(len(prompt), len(ids))))
        right += max(range(2), key=scores.__getitem__) == row["answer"]
    assert math.isclose(accuracy, right / len(rows), abs_tol=0.051)  # one of the twenty rows may be a tie


@pytest.mark.slow
def test_unknown_tasks_and_models_without_a_causal_head_are_rejected(decoder, tokenizer, tmp_path, monkeypatch, capsys):
    folder, _ = decoder
    arguments = ["--model", str(folder), "--output", str(tmp_path / "out")]
    assert "found no-such-task" in rejection_of(harness, [*arguments, "--tasks", "no-such-task"], monkeypatch, capsys)
    classifier = saved(build_model("bert"), tokenizer, tmp_path / "bert")
    arguments = ["--model", str(classifier), "--output", str(tmp_path / "out"), "--tasks", "hellaswag"]
    assert "expected a head for causal-lm" in rejection_of(harness, arguments, monkeypatch, capsys)


@pytest.mark.slow
def test_unreachable_task_data_ends_with_one_message(decoder, tmp_path):
    tasks, missing = tmp_path / "tasks", tmp_path / "nowhere"
    tasks.mkdir()
    local = TASK.format(file="x.jsonl").splitlines()
    hub = [line for line in local if not line.startswith("dataset")]
    (tasks / "endings.yaml").write_text("\n".join([*hub, "dataset_path: nobody/nothing-of-this-name", ""]))
    arguments = ["--model", str(decoder[0]), "--tasks", "endings", "--include", str(tasks), "--output", str(missing)]
    process = start("harness", arguments)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2, output
    assert "error: --tasks endings: expected their data, but it is unavailable" in output
    assert "Traceback" not in output
