"""The answers stage: training conversations with teacher-generated answers, for sequence-level distillation."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from distill.data.rows.chat import Chat, PromptCompletion, encode_prompts
from distill.data.rows.chat_template import Turns
from distill.data.rows.conversations import Conversations
from distill.errors import InputError
from distill.models.generation import find_end_tokens, generate
from distill.tasks.language import ChatTask
from pipelines.runs.manifest import SCRATCH, JsonObject
from pipelines.runs.stage import Artefact, Run
from pipelines.runs.strategies.by_layout import choose_device
from pipelines.settings.commands.distill import DistillConfig
from pipelines.stages.cache.writing import load_teacher
from pipelines.stages.prepare.data import read_data, read_task, read_task_settings, write_splits
from pipelines.stages.prepare.teacher import MODEL
from pipelines.stages.prepare.vocabulary import load_student_tokenizer

VERSION = 2  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
ANSWERS = "answers.jsonl"  # in the stage's scratch folder, one answer per line, so that a killed stage can resume


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

    def work(folder: Path) -> JsonObject:
        splits, task, source = read_data(data), read_task(data), teacher.folder / MODEL
        assert isinstance(task, ChatTask)
        chats = list(splits.train.texts)
        count = round(config.sequences.share * len(chats))
        if not count:
            raise InputError(
                f"sequences.share {config.sequences.share:g}: expected at least one conversation, found none of "
                f"{len(chats)}: the teacher would generate nothing; set a larger share"
            )
        chosen = np.sort(np.random.default_rng(run.seed).permutation(len(chats))[:count])
        generator = AnswerGenerator(run, config, source, task, folder / SCRATCH / ANSWERS)
        answers = generator.generate_answers([chats[i] for i in chosen])
        for number, answer in zip(chosen.tolist(), answers, strict=True):
            chats[number] = replace_answer(chats[number], answer) if answer else chats[number]
        used = sum(bool(answer) for answer in answers)
        if not used:
            raise InputError(
                f"sequences.new_tokens {config.sequences.new_tokens}: expected answers that end, found none among "
                f"{len(answers)}: the student would learn nothing from the teacher; raise it, or use a teacher whose "
                "answers end"
            )
        discarded = len(answers) - used
        counts: dict[str, int | str] = {"answers_by_teacher": used, "answers_discarded": discarded}
        changed = replace(splits, train=Conversations(chats), notes=splits.notes | counts)
        write_splits(changed, folder, read_task_settings(data))
        run.console.say(f"  answers: {used:,} of {len(chats):,} are the teacher's, {discarded:,} were discarded")
        return {**data.metrics, **counts}

    return run.stage("answers", settings, {"data": data, "teacher": teacher}, work, version=VERSION)


class AnswerGenerator:
    """Generates answers with the teacher and saves each batch to a file as soon as it is complete."""

    def __init__(self, run: Run, config: DistillConfig, source: Path, task: ChatTask, file: Path):
        self.run, self.settings, self.file = run, config.sequences, file
        self.tokenizer: PreTrainedTokenizerBase = load_student_tokenizer(source)
        self.model = load_teacher(source)
        self.model.to(choose_device(config.machine.accelerator))  # type: ignore[arg-type]
        self.task, self.length = task, config.data.max_length
        self.ends = find_end_tokens(self.model, self.tokenizer)
        self.model.generation_config.eos_token_id = self.ends or None

    def generate_answers(self, chats: Sequence[Chat]) -> list[str]:
        """Returns an answer for each conversation, empty where none could be used."""
        limit = min(self.length, self.tokenizer.model_max_length)
        rows = enumerate(encode_prompts(self.tokenizer, chats, self.length, self.task.chat))
        prompts = {number: row for number, row in rows if row is not None and len(row) < limit}
        order = sorted(prompts, key=lambda number: len(prompts[number]))
        answers, size = dict(read_answers(self.file)), self.settings.batch_size
        with self.run.console.track("answers: generating", len(order)) as advance, self.file.open("a") as file:
            for start in range(0, len(order), size):
                # Batches stay the same after a restart: the longest prompt limits the length of all its answers.
                batch = order[start : start + size]
                if not answers.keys() >= set(batch):
                    generated = self._generate_batch([prompts[number] for number in batch], limit)
                    file.writelines(json.dumps(pair) + "\n" for pair in zip(batch, generated, strict=True))
                    file.flush()
                    answers |= dict(zip(batch, generated, strict=True))
                advance(len(batch))
        return [answers.get(number, "") for number in range(len(chats))]

    def _generate_batch(self, prompts: Sequence[np.ndarray], limit: int) -> list[str]:
        """Returns the teacher's answers to a batch of prompts; see `decode_answer`."""
        device, settings = next(self.model.parameters()).device, self.settings
        rows = [torch.from_numpy(row).to(device) for row in prompts]
        new_tokens = min(settings.new_tokens, limit - max(map(len, prompts)))
        generated = generate(
            self.model,
            rows,
            new_tokens=new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=self.run.seed,
        )
        ids, _ = generated.split_rows()
        return [self.decode_answer(prompt.tolist(), row.tolist()) for prompt, row in zip(prompts, ids, strict=True)]

    def decode_answer(self, prompt: list[int], ids: list[int]) -> str:
        """Returns a finished continuation as text, without its end token; empty if it is blank or didn't end."""
        if not ids or ids[-1] not in self.ends:
            return ""
        # Decoded separately, a text loses its leading space: SentencePiece takes it for the prefix of every text.
        before, whole, alone = (self._decode(each) for each in (prompt, [*prompt, *ids[:-1]], ids[:-1]))
        answer = whole.removeprefix(before) if whole.startswith(before) else alone
        return answer if answer.strip() else ""

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def read_answers(file: Path) -> Iterator[tuple[int, str]]:
    """Yields the (number, answer) pairs of an earlier attempt, and truncates the file after its last complete line."""
    if not file.exists():
        return
    content = file.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    os.truncate(file, len(complete))
    for line in complete.decode("ascii").splitlines():
        number, answer = json.loads(line)
        yield number, answer


def replace_answer(chat: Chat, answer: str) -> Chat:
    """Returns the conversation with `answer` as its last assistant turn."""
    if isinstance(chat, PromptCompletion):
        return PromptCompletion(chat.prompt, answer)
    messages = chat.messages[:-1] if chat.messages[-1]["role"] == "assistant" else chat.messages
    return Turns([*messages, {"role": "assistant", "content": answer.strip()}])
