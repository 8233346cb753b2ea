"""The answers stage: training conversations with teacher-generated answers, for sequence-level distillation."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from distill.data.rows.chat import Chat, Completed, prompt_rows
from distill.data.rows.chat_template import Turns
from distill.data.rows.conversations import Conversations
from distill.errors import InputError
from distill.models.generation import find_end_tokens, generate
from distill.tasks.language import Chatting
from pipelines.runs.manifest import SCRATCH
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.distill_config import DistillConfig
from pipelines.stages.cache_writing import load_teacher
from pipelines.stages.data import read_data, read_task, write_splits
from pipelines.stages.teacher import MODEL
from pipelines.stages.vocabulary import tokenizer_of

VERSION = 1  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
WRITTEN = "answers.jsonl"  # in the stage's scratch folder, one answer per line, so that a killed stage can resume


def answers_stage(run: Run, config: DistillConfig, data: Artefact, teacher: Artefact) -> Artefact:
    """Writes a copy of the data in which the teacher generates a share of the training split's answers.

    All other conversations are copied unchanged. An answer that is empty or doesn't end within `sequences.new_tokens`
    is discarded, because the student would learn to stop at arbitrary points. Discarded answers are counted, as are
    prompts that leave no room for an answer.

    Raises:
        InputError: The share amounts to no conversation, or none of the generated answers ended.

    Source: Kim & Rush 2016, sequence-level knowledge distillation (arXiv 1606.07947), section 3.2; the teacher's answer
    is sampled or decoded greedily, where the paper uses beam search.
    """
    settings = {"sequences": asdict(config.sequences), "max_length": config.data.max_length}

    def work(folder: Path) -> dict[str, Any]:
        splits, task, source = read_data(data), read_task(data), teacher.folder / MODEL
        assert isinstance(task, Chatting)
        chats = list(splits.train.texts)
        count = round(config.sequences.share * len(chats))
        if not count:
            raise InputError(
                f"sequences.share {config.sequences.share:g}: expected one conversation or more, found none of "
                f"{len(chats)}: the teacher would write nothing; ask for a larger share"
            )
        asked = np.sort(np.random.default_rng(run.seed).permutation(len(chats))[:count])
        writer = Writer(run, config, source, task, folder / SCRATCH / WRITTEN)
        answers = writer.answers([chats[i] for i in asked])
        for number, answer in zip(asked.tolist(), answers, strict=True):
            chats[number] = replace_answer(chats[number], answer) if answer else chats[number]
        taken = sum(bool(answer) for answer in answers)
        if not taken:
            raise InputError(
                f"sequences.new_tokens {config.sequences.new_tokens}: expected answers that end, found none among "
                f"{len(answers)}: nothing of the teacher's would be learnt; let it write more, or take one that ends"
            )
        left = len(answers) - taken
        told: dict[str, int | str] = {"answers_by_teacher": taken, "answers_not_taken": left}
        found = replace(splits, train=Conversations(chats), notes=splits.notes | told)
        write_splits(found, folder, data.manifest["config"])
        run.console.say(f"  answers: {taken:,} of {len(chats):,} are the teacher's, {left:,} weren't taken")
        return {**data.metrics, **told}

    return run.stage("answers", settings, {"data": data, "teacher": teacher}, work, version=VERSION)


class Writer:
    """Generates answers with the teacher and saves each batch to a file as soon as it is complete."""

    def __init__(self, run: Run, config: DistillConfig, source: Path, task: Chatting, kept: Path):
        self.run, self.how, self.kept = run, config.sequences, kept
        self.tokenizer: PreTrainedTokenizerBase = tokenizer_of(source)
        self.model = load_teacher(source)
        self.task, self.length = task, config.data.max_length
        self.ends = find_end_tokens(self.model, self.tokenizer)
        self.model.generation_config.eos_token_id = self.ends or None

    def answers(self, chats: Sequence[Chat]) -> list[str]:
        """Returns an answer for each conversation, empty where none could be used."""
        limit = min(self.length, self.tokenizer.model_max_length)
        rows = enumerate(prompt_rows(self.tokenizer, chats, self.length, self.task.chat))
        prompts = {number: row for number, row in rows if row is not None and len(row) < limit}
        order = sorted(prompts, key=lambda number: len(prompts[number]))
        found, size = dict(read_lines(self.kept)), self.how.at_once
        with self.run.console.track("answers: the teacher writes", len(order)) as advance, self.kept.open("a") as file:
            for start in range(0, len(order), size):
                # Batches stay the same after a restart: the longest prompt limits the length of all its answers.
                batch = order[start : start + size]
                if not found.keys() >= set(batch):
                    said = self.written([prompts[number] for number in batch], limit)
                    file.writelines(json.dumps(pair) + "\n" for pair in zip(batch, said, strict=True))
                    file.flush()
                    found |= dict(zip(batch, said, strict=True))
                advance(len(batch))
        return [found.get(number, "") for number in range(len(chats))]

    def written(self, prompts: Sequence[np.ndarray], limit: int) -> list[str]:
        """Returns the teacher's answers to a batch of prompts; see `spoken`."""
        device, how = next(self.model.parameters()).device, self.how
        rows = [torch.from_numpy(row).to(device) for row in prompts]
        room = min(how.new_tokens, limit - max(map(len, prompts)))
        found = generate(
            self.model, rows, new_tokens=room, temperature=how.temperature, top_p=how.top_p, seed=self.run.seed
        )
        ids, _ = found.split_rows()
        return [self.spoken(prompt.tolist(), row.tolist()) for prompt, row in zip(prompts, ids, strict=True)]

    def spoken(self, prompt: list[int], ids: list[int]) -> str:
        """Returns a finished continuation as text, without its end token; empty if it didn't end."""
        if not ids or ids[-1] not in self.ends:
            return ""
        # Decoded separately, a text loses its leading space: SentencePiece takes it for the prefix of every text.
        before, whole, alone = (self.text(each) for each in (prompt, [*prompt, *ids[:-1]], ids[:-1]))
        return whole.removeprefix(before) if whole.startswith(before) else alone

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def read_lines(kept: Path) -> Iterator[tuple[int, str]]:
    """Yields the (number, answer) pairs of an earlier attempt, and truncates the file after its last complete line."""
    if not kept.exists():
        return
    written = kept.read_bytes()
    whole = written[: written.rfind(b"\n") + 1]
    os.truncate(kept, len(whole))
    for line in whole.decode("ascii").splitlines():
        number, answer = json.loads(line)
        yield number, answer


def replace_answer(chat: Chat, answer: str) -> Chat:
    """Returns the conversation with `answer` as its last assistant turn."""
    if isinstance(chat, Completed):
        return Completed(chat.prompt, answer)
    messages = chat.messages[:-1] if chat.messages[-1]["role"] == "assistant" else chat.messages
    return Turns([*messages, {"role": "assistant", "content": answer.strip()}])
