"""Tests instruction data: roles are written by the template, and only the assistant's tokens are targets."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from distill.data.batches.packing import PackedRows, find_padding_id
from distill.data.config import DataConfig
from distill.data.rows.chat import (
    Chat,
    ChatConfig,
    PromptCompletion,
    TargetBlocks,
    Turns,
    encode_chats,
    encode_prompts,
    mask_targets,
)
from distill.data.rows.conversations import load_all_conversations
from distill.errors import InputError
from distill.losses.logits import IGNORED

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MARKED = """{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant
{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}
{%- else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HEADERS = """{{ bos_token }}{% for m in messages %}{{ '<|head|>' + m['role'] + '<|/head|>\n\n' }}
{{- m['content'] | trim + '<|eot|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"""
BRACKETS = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"""
# Keeps thoughts in the last turn only, as the templates of reasoning models do.
DROPS_THOUGHTS = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}")
NO_GENERATION_PROMPT = CHATML.split("{% if add_generation_prompt")[0]
SPECIALS = ["<s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "<pad>"]

TALK = [
    {"role": "system", "content": "you are kind"},
    {"role": "user", "content": "what is it"},
    {"role": "assistant", "content": "it is good"},
    {"role": "user", "content": " and the  other? "},
    {"role": "assistant", "content": "also\n\ngood \U0001f642"},
]
WHOLE = Turns(TALK)


def tokenizer_of(template: str | None = None, kind: str = "bytes", *, bos: bool = False, **tokens: str):
    """Builds a byte-level BPE tokenizer; `trimmed` excludes blanks from a token's offsets, as RoBERTa's does; `marked`
    isn't byte-level but writes blanks as a character, as Llama 2's does.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=SPECIALS
    )
    if kind == "marked":
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer.initial_alphabet = [*map(chr, range(33, 127)), "\n", "\U0001f642"]
    else:
        backend.post_processor = processors.ByteLevel(trim_offsets=kind == "trimmed")
    backend.train_from_iterator([m["content"] for m in TALK] * 4, trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    names = {"bos_token": "<s>", "eos_token": "<|im_end|>"} | tokens
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **{k: v for k, v in names.items() if v})
    tokenizer.chat_template = template
    return tokenizer


def target_texts(tokenizer, blocks: TargetBlocks, row: int = 0) -> list[str]:
    """Returns the runs of target tokens, decoded."""
    ids, requested = blocks.input_ids[row], blocks.targets[row]
    edges = np.flatnonzero(np.diff(np.concatenate([[False], requested, [False]]).astype(int)))
    return [tokenizer.decode(ids[first:last]) for first, last in edges.reshape(-1, 2)]


def rejection(call, *args) -> str:
    with pytest.raises(InputError) as caught:
        call(*args)
    return str(caught.value)


# --- training targets

ANSWERS = ["it is good", "also\n\ngood \U0001f642"]


@pytest.mark.parametrize("kind", ["bytes", "trimmed", "marked"])
@pytest.mark.parametrize(
    ("template", "end"),
    [(MARKED, "<|im_end|>"), (CHATML, "<|im_end|>"), (HEADERS, "<|eot|>"), (BRACKETS, "<|im_end|>")],
)
def test_answers_are_training_targets_and_prompts_are_not(template, end, kind):
    tokenizer = tokenizer_of(template, kind)
    messages = TALK[1:] if template == BRACKETS else TALK
    blocks = encode_chats(tokenizer, [Turns(messages)], 500)
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    assert blocks.input_ids[0].tolist() == whole
    blank = " " if template == BRACKETS and kind != "marked" else ""  # that decoder strips the first blank
    assert target_texts(tokenizer, blocks) == [blank + answer + end for answer in ANSWERS]
    last = encode_chats(tokenizer, [Turns(messages)], 500, ChatConfig(turns="last"))
    assert target_texts(tokenizer, last) == [blank + ANSWERS[1] + end]
    assert last.input_ids[0].tolist() == whole
    assert not any(last.counted.values())


def test_marked_tokens_equal_the_assistant_mask_of_transformers():
    tokenizer = tokenizer_of(MARKED)
    blocks = encode_chats(tokenizer, [WHOLE], 500)
    stock = tokenizer.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    assert blocks.input_ids[0].tolist() == stock["input_ids"]
    assert blocks.targets[0].astype(int).tolist() == stock["assistant_masks"]
    unmarked = encode_chats(tokenizer_of(CHATML), [WHOLE], 500)
    assert np.array_equal(blocks.targets[0], unmarked.targets[0]), "turns rendered one at a time"


def test_a_template_that_rewrites_earlier_turns_is_rejected_unless_only_the_last_is_a_target():
    tokenizer = tokenizer_of(DROPS_THOUGHTS)
    rewritten = [dict(message) for message in TALK]
    rewritten[2]["content"] = "<think>hm</think>it is good"
    output = rejection(encode_chats, tokenizer, [WHOLE, Turns(rewritten)], 500)
    assert output == (
        "chat 2: expected a chat template that renders the first messages alike whatever follows, found one that "
        "doesn't at message 3: the assistant's tokens can't be distinguished from the others; mark them in the "
        "template with {% generation %}, or train on the last turn only (--chat.turns last)"
    )
    blocks = encode_chats(tokenizer, [Turns(rewritten)], 500, ChatConfig(turns="last"))
    assert target_texts(tokenizer, blocks) == [ANSWERS[1] + "<|im_end|>"]


def test_a_template_without_a_generation_prompt_is_rejected():
    message = rejection(encode_chats, tokenizer_of(NO_GENERATION_PROMPT), [WHOLE], 500)
    assert (
        "found one that writes '<|im_start|>assistant\\n' with the answer only: the model would learn to write it"
        in message
    )


def test_greetings_and_blank_answers_are_no_training_targets():
    tokenizer = tokenizer_of(CHATML)
    hello = {"role": "assistant", "content": "also"}
    blank = {"role": "assistant", "content": " "}
    blocks = encode_chats(tokenizer, [Turns([TALK[0], hello, *TALK[1:3]]), Turns([TALK[1], blank, *TALK[3:]])], 500)
    assert target_texts(tokenizer, blocks, 0) == ["it is good<|im_end|>"]
    assert target_texts(tokenizer, blocks, 1) == [ANSWERS[1] + "<|im_end|>"]


def test_a_conversation_that_the_template_cannot_render_is_rejected():
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    message = rejection(encode_chats, tokenizer_of(strict), [Turns(TALK[1:]), WHOLE], 500)
    assert message == "chat 2: the chat template can't render the conversation: no system"
    assert "chat 1: the chat template can't render" in rejection(encode_chats, tokenizer_of("{% for %}"), [WHOLE], 500)


# --- prompts with completions


@pytest.mark.parametrize("bos", [False, True])
def test_a_completion_is_joined_to_its_prompt_and_ends_in_eos(bos):
    tokenizer = tokenizer_of(bos=bos)
    blocks = encode_chats(tokenizer, [PromptCompletion("what is it", " it is good")], 500)
    ids = tokenizer("what is it it is good")["input_ids"]
    assert blocks.input_ids[0].tolist() == [*ids, tokenizer.eos_token_id]
    assert (ids[0] == 0) == bos
    assert target_texts(tokenizer, blocks) == [" it is good<|im_end|>"]
    prompts = encode_prompts(
        tokenizer, [PromptCompletion("what is it", " it is good"), PromptCompletion("also", "")], 500
    )
    assert [row.tolist() for row in prompts] == [tokenizer(text)["input_ids"] for text in ("what is it", "also")]


def test_a_token_shared_by_prompt_and_completion_is_counted():
    tokenizer = tokenizer_of()
    blocks = encode_chats(tokenizer, [PromptCompletion("wha", "t is it"), PromptCompletion("what is", " it")], 500)
    assert blocks.counted["answers_that_share_a_token"] == 1
    assert target_texts(tokenizer, blocks, 0) == ["what is it<|im_end|>"]


def test_an_answer_keeps_its_tokens_without_characters():
    offsets = np.array([[0, 2], [3, 3], [4, 5], [6, 6], [6, 8], [0, 0]])
    requested, shared = mask_targets(offsets, [(2, 6)])
    assert (requested.tolist(), shared) == ([False, True, True, True, False, False], 0)
    requested, shared = mask_targets(offsets, [(1, 2), (6, 7)])
    assert (requested.tolist(), shared) == ([True, False, False, False, True, False], 2)


# --- prompts alone


@pytest.mark.parametrize("template", [MARKED, CHATML, HEADERS])
def test_prompts_equal_the_template_with_its_generation_prompt(template):
    tokenizer = tokenizer_of(template)
    open_end = Turns(TALK[:2])
    *prompts, empty, without_user = encode_prompts(tokenizer, [WHOLE, open_end, Turns([]), Turns(TALK[:1])], 500)
    wanted = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        for messages in (TALK[:4], TALK[:2])
    ]
    assert [row.tolist() for row in prompts] == wanted
    assert empty is without_user is None
    blocks = encode_chats(tokenizer, [WHOLE], 500)
    start = len(prompts[0])
    assert blocks.input_ids[0][:start].tolist() == wanted[0]
    assert blocks.targets[0][start:].any()
    assert not blocks.targets[0][start - 1]


# --- skipped and truncated conversations


def test_skipped_and_truncated_conversations_are_counted():
    tokenizer = tokenizer_of(CHATML)
    chats = [WHOLE, Turns(TALK[:3]), Turns(TALK[:2]), Turns([]), Turns([{"role": "user", "content": " "}])]
    full = [len(row) for row in encode_chats(tokenizer, chats[:2], 500).input_ids]
    blocks = encode_chats(tokenizer, chats, full[0] - 1)
    assert blocks.lengths.tolist() == full[1:]
    counts = {"skipped_empty": 2, "skipped_without_answer": 1, "skipped_too_long": 1, "cut": 0}
    assert blocks.counted == counts | {"answers_that_share_a_token": 0}
    blocks = encode_chats(tokenizer, chats, full[1], ChatConfig(too_long="cut"))
    assert blocks.lengths.tolist() == [full[1], full[1]]
    assert (blocks.counted["cut"], blocks.counted["skipped_too_long"]) == (1, 0)
    assert np.array_equal(blocks.input_ids[0], blocks.input_ids[1])
    tokenizer.model_max_length = full[1]
    assert encode_chats(tokenizer, chats, 500).lengths.tolist() == full[1:]
    message = rejection(encode_chats, tokenizer, chats[2:], 500)
    assert message.startswith(
        "data: expected conversations with an answer, found none in 3 (skipped_empty 2, skipped_with"
    )
    message = rejection(encode_chats, tokenizer, chats[:1], 12, ChatConfig(too_long="cut"))
    assert message.endswith("(skipped_too_long 1)"), "the cut would be before the answer"


@pytest.mark.parametrize(
    ("tokenizer", "chat", "message"),
    [
        (
            tokenizer_of(),
            WHOLE,
            "found none: the text would not show who speaks; name a file with one in chat.template",
        ),
        (
            tokenizer_of(eos_token=""),
            PromptCompletion("a", "b"),
            "tokenizer: expected an eos or a sep token, found neither",
        ),
    ],
)
def test_a_tokenizer_without_the_required_template_or_end_token_is_rejected(tokenizer, chat, message):
    assert message in rejection(encode_chats, tokenizer, [chat], 500)
    other = PromptCompletion("a", "b") if isinstance(chat, Turns) else WHOLE
    if isinstance(chat, PromptCompletion):
        tokenizer.chat_template = CHATML
    assert len(encode_chats(tokenizer, [other], 500)) == 1


def test_a_template_file_overrides_the_template_of_the_tokenizer(tmp_path):
    (tmp_path / "mine.jinja").write_text(HEADERS, "utf-8")
    config = ChatConfig(template=str(tmp_path / "mine.jinja"))
    for tokenizer_template in (None, CHATML):
        blocks = encode_chats(tokenizer_of(tokenizer_template), [WHOLE], 500, config)
        assert target_texts(tokenizer_of(), blocks)[0] == "it is good<|eot|>"
    assert "none.jinja': expected a file" in rejection(
        encode_chats, tokenizer_of(), [WHOLE], 9, ChatConfig("none.jinja")
    )
    for setting in ({"turns": "first"}, {"too_long": "wrap"}):
        assert "chat." in rejection(lambda setting=setting: ChatConfig(**setting))


# --- batches


def test_an_eos_that_also_pads_is_a_label_at_the_end_of_each_answer_only():
    tokenizer = tokenizer_of(CHATML)
    assert find_padding_id(tokenizer) == tokenizer.eos_token_id
    blocks = encode_chats(tokenizer, [WHOLE, Turns(TALK[1:3]), PromptCompletion("also", " good")], 500)
    for rows in (blocks, PackedRows.build(blocks, int(blocks.lengths.max()) + 5)):
        batch = rows.collate(range(len(rows)), find_padding_id(tokenizer))
        assert torch.equal(batch["positions"], batch["labels"] != IGNORED)
        assert not batch["positions"][batch["attention_mask"] == 0].any()
        assert int((batch["labels"] == tokenizer.eos_token_id).sum()) == 4, "one for every answer"
        assert int(batch["positions"].sum()) == sum(int(requested[1:].sum()) for requested in blocks.targets)
    plain = blocks.collate([1], 0)
    places = blocks.positions[1]
    assert plain["positions"][0].tolist() == places.tolist()
    assert tokenizer.decode(plain["labels"][0][places]) == "it is good<|im_end|>"


# --- tables


def chats_at(path: str) -> list[Chat]:
    return load_all_conversations(DataConfig(path=path)).texts


def test_every_conversation_format_is_read_from_jsonl_and_parquet(tmp_path):
    rows = {
        "messages": [{"messages": TALK}, {"messages": TALK[:2], "id": 3}],
        "pairs": [{"prompt": "a", "completion": " b"}, {"prompt": "c", "completion": None}],
        "alpaca": [{"instruction": "a", "input": "b", "output": "c"}, {"instruction": "d", "input": "", "output": ""}],
    }
    wanted = {
        "messages": [WHOLE, Turns(TALK[:2])],
        "pairs": [PromptCompletion("a", " b"), PromptCompletion("c", "")],
        "alpaca": [
            Turns([{"role": "user", "content": "a\n\nb"}, {"role": "assistant", "content": "c"}]),
            Turns([{"role": "user", "content": "d"}]),
        ],
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(line) for line in lines), "utf-8")
        pq.write_table(pa.Table.from_pylist(lines), tmp_path / f"{name}.parquet")
        for ending in ("jsonl", "parquet"):
            assert chats_at(str(tmp_path / f"{name}.{ending}")) == wanted[name]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"messages": [{"role": "user", "content": "caf\xe9"}]}', "row 1 is not JSON in UTF-8"),
        (b'{"messages": "not messages"}', "row 1: expected messages or JSON of them, found 'not messages'"),
        (b'{"messages": []}\n{"messages": {"role": "user"}}', "row 2: expected a list of messages"),
        (b'{"messages": [{"from": "human", "value": "a"}]}', "row 1: expected messages with a role and a content"),
        (b'{"text": "a"}', "expected columns messages; prompt and completion; or instruction, output"),
    ],
)
def test_rows_that_are_not_conversations_are_rejected(tmp_path, content, message):
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)
    assert message in rejection(chats_at, str(file))
    assert str(file) in rejection(chats_at, str(file))


def test_a_list_in_the_prompt_column_is_rejected(tmp_path):
    pq.write_table(pa.table({"prompt": [["a"]], "completion": ["b"]}), tmp_path / "a.parquet")
    assert "column 'prompt': expected text, found list<" in rejection(chats_at, str(tmp_path / "a.parquet"))
    assert "no path is set" in rejection(chats_at, "")
