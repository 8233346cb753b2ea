"""The augment stage: the data with synthetic rows for the student, made from the training rows."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from transformers import AutoModelForMaskedLM, PreTrainedModel

from distill.checkpoint.checkpoint import Checkpoint
from distill.checkpoint.weights import load_model
from distill.data.augment.agreement import measure_tag_agreement, overlap_distributions
from distill.data.augment.config import AugmentConfig
from distill.data.augment.kinds import Resources, SourceText, build_kinds
from distill.data.augment.lexicon import check_lexicon_language, read_lexicon
from distill.data.augment.masked import propose_words
from distill.data.augment.rows import (
    SyntheticRow,
    build_part,
    describe_rows,
    find_name_types,
    make_rows,
    split_sources,
)
from distill.data.augment.templates import check_template_labels, read_slot_templates
from distill.data.batches.encode import Batch
from distill.data.batches.packing import find_padding_id
from distill.data.clean.rows import JoinedTexts
from distill.data.rows.tagged import Tagged
from distill.data.splits.examples import Splits
from distill.errors import InputError
from distill.tasks.logit_rows import flatten_rows
from distill.tasks.task import Task
from pipelines.runs.console import TEXTS
from pipelines.runs.manifest import JsonObject
from pipelines.runs.stage import Artefact, Run
from pipelines.runs.strategies.by_layout import choose_device
from pipelines.settings.plan import RunPlan
from pipelines.stages.prepare.data import print_new_remarks, read_data, read_task, read_task_settings, write_splits
from pipelines.stages.prepare.scoring import compute_logits, compute_outputs
from pipelines.stages.prepare.teacher import MODEL, load_stage_teacher, open_stage_checkpoint

VERSION = 2  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
AUGMENT_RECORD = "augment.jsonl"
# In the notes of the splits: the number of synthetic rows, and of those that an epoch uses.
ROWS, EPOCH_ROWS = "augment_rows", "augment_epoch_rows"


def check_augmentation(config: AugmentConfig, splits: Splits) -> None:
    """Checks the files of the settings against the data.

    Raises:
        InputError: The lexicon is of another language, templates are of a label that the data doesn't have, there are
            no names to exchange, or rows of pairs are to be drawn.
    """
    rates = config.find_rates()
    if config.lexicon:
        texts = JoinedTexts(splits.train)
        check_lexicon_language(read_lexicon(Path(config.lexicon).expanduser()), texts, config.lexicon)
    if config.templates:
        file = read_slot_templates(Path(config.templates).expanduser())
        check_template_labels(file, splits.labels, config.templates)
    drawn = [kind for kind in ("templates", "ngrams") if kind in rates]
    if drawn and splits.train.pairs is not None:
        raise InputError(
            f"data.augment {drawn[0]}: expected rows of one text, found pairs: both texts would be drawn independently"
        )
    if "names" in rates and not find_name_types(splits.labels):
        raise InputError(
            f"data.augment names: expected tags such as B-PER and I-PER, found {', '.join(splits.labels[:4])}: no name "
            "could be found"
        )


def augment_stage(run: Run, plan: RunPlan, data: Artefact, teacher: Artefact) -> Artefact:
    """Writes a copy of the data with synthetic rows, after those that were there, and `augment.jsonl` with each.

    Rows without labels of their own go to the unlabelled texts, others to train. Validation and test stay as they are,
    and no synthetic row equals one of them.
    """
    config = plan.settings.augment
    settings: JsonObject = {"rates": config.find_rates(), "times": config.times, "labels": config.labels}
    settings |= {"ratio": config.ratio} if config.ratio else {}
    inputs: dict[str, Artefact | str] = {"data": data}
    for name in ("lexicon", "templates"):
        if getattr(config, name):
            inputs[name] = run.content_hash(Path(getattr(config, name)).expanduser())
    if plan.proposer is not None:
        inputs["model"] = run.digest(plan.proposer)
    if plan.proposer is not None or config.agreement:
        settings["max_length"] = plan.settings.data.max_length
    if config.agreement:
        settings["agreement"] = config.agreement
        inputs["teacher"] = teacher

    def work(folder: Path) -> JsonObject:
        splits = read_data(data)
        synthetic = make_synthetic_rows(run, plan, splits)
        count = len(synthetic)
        if config.agreement:
            synthetic = drop_disagreeing(run, plan, splits, read_task(data), teacher, synthetic)
        write_record(folder / AUGMENT_RECORD, synthetic)
        part = build_part(splits.train, synthetic, splits.labels, is_labelled=config.labels == "row")
        split = "train" if config.labels == "row" else "unlabelled"
        joined = append_rows(getattr(splits, split), part)
        notes: dict[str, int | str] = {
            f"augment_{kind}": number for kind, number in Counter(row.kind for row in synthetic).items()
        }
        notes |= {ROWS: len(synthetic), "augment_dropped": count - len(synthetic), "augment_in": split}
        notes |= {EPOCH_ROWS: round(config.ratio * len(splits.train))} if config.ratio else {}
        remarks = describe_augmentation(splits, synthetic, count)
        changed = replace(splits, notes=splits.notes | notes, remarks=[*splits.remarks, *remarks], **{split: joined})
        write_splits(changed, folder, read_task_settings(data))
        run.console.say(
            f"  augment: {len(synthetic):,} synthetic rows from {len(splits.train):,}; {AUGMENT_RECORD} has each "
            "of them"
        )
        return {**data.metrics, split: len(joined), **notes, "remarks": [*data.metrics.get("remarks", []), *remarks]}

    done = run.stage("augment", settings, inputs, work, version=VERSION)
    print_new_remarks(run.console, done, data)
    return done


def make_synthetic_rows(run: Run, plan: RunPlan, splits: Splits) -> list[SyntheticRow]:
    """Returns the synthetic rows of the training rows.

    Raises:
        InputError: None of the kinds could change any row.
    """
    config = plan.settings.augment
    rows = split_sources(splits.train, splits.labels)
    sources = [source for row in rows for source in row]
    resources = Resources(
        splits.labels if not isinstance(splits.train, Tagged) else (),
        find_name_types(splits.labels),
        read_lexicon(Path(config.lexicon).expanduser()) if config.lexicon else None,
        read_slot_templates(Path(config.templates).expanduser()) if config.templates else None,
        find_proposals(run, plan, plan.proposer, rows) if plan.proposer is not None else (),
    )
    known = (text for name in ("validation", "test", "unlabelled") for text in JoinedTexts(getattr(splits, name)))
    with run.console.track("augment", len(rows), TEXTS) as advance:
        kinds = build_kinds(config.find_rates(), sources, resources)
        synthetic = list(make_rows(rows, kinds, config.times, run.seed, known, advance))
    if not synthetic:
        raise InputError(
            f"data.augment {config.kinds}: expected training rows that can be changed so, found none of "
            f"{len(rows):,}: the student would have no synthetic rows"
        )
    return synthetic


def compute_rows(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Returns the logits at a batch's `positions`, [rows, tokens], also of a model whose head computes all."""
    return flatten_rows(batch, compute_logits(model, batch), 2)


def find_proposals(
    run: Run, plan: RunPlan, checkpoint: Checkpoint, rows: Sequence[tuple[SourceText, ...]]
) -> list[list[list[list[str]]]]:
    """Returns a masked language model's proposals for each word of each row, for each column."""
    model, tokenizer = load_model(AutoModelForMaskedLM, checkpoint.folder), checkpoint.load_tokenizer()
    model.to(choose_device(plan.settings.machine.accelerator))
    length = min(plan.settings.data.max_length, tokenizer.model_max_length)
    columns = [[row[column].words for row in rows] for column in range(len(rows[0]))]
    with run.console.track("augment: proposals for masked words", len(rows) * len(columns), TEXTS) as advance:
        return [
            propose_words(model, tokenizer, column, length, partial(compute_rows, model), advance) for column in columns
        ]


@torch.no_grad()
def drop_disagreeing(
    run: Run, plan: RunPlan, splits: Splits, task: Task, teacher: Artefact, synthetic: list[SyntheticRow]
) -> list[SyntheticRow]:
    """Returns the synthetic rows to which the teacher answers as it does to their originals."""
    checkpoint, length = open_stage_checkpoint(teacher, "teacher"), plan.settings.data.max_length
    tokenizer = checkpoint.load_tokenizer()
    task.configure_tokenizer(tokenizer, teacher.folder / MODEL)
    model = load_stage_teacher(run, plan, teacher, task)
    parts = [splits.train, build_part(splits.train, synthetic, splits.labels, is_labelled=True)]
    encoded = [task.encode(tokenizer, part, length) for part in parts]
    run.console.say(f"  augment: the teacher answers {len(parts[0]):,} rows and {len(synthetic):,} synthetic ones")
    logits = [
        [sample["logits"] for sample in compute_outputs(model, rows, find_padding_id(tokenizer), task).samples]
        for rows in encoded
    ]
    if isinstance(splits.train, Tagged):
        agreements = [
            _compare_tags(row, logits[0][row.source], row_logits, encoded[0], encoded[1], number)
            for number, (row, row_logits) in enumerate(zip(synthetic, logits[1], strict=True))
        ]
    else:
        agreements = [
            float(
                overlap_distributions(
                    *(task.output_rows.logits({}, each) for each in (logits[0][row.source], row_logits))
                ).mean()
            )
            for row, row_logits in zip(synthetic, logits[1], strict=True)
        ]
    return [row for row, each in zip(synthetic, agreements, strict=True) if each >= plan.settings.augment.agreement]


def _compare_tags(
    row: SyntheticRow, original: torch.Tensor, logits: torch.Tensor, originals: Any, synthetic: Any, number: int
) -> float:
    """Returns the agreement of a tagged row; logits are [words within the maximum length, tags]."""
    table = torch.full((len(originals.tags[row.source]), original.shape[-1]), torch.nan)
    table[torch.as_tensor(originals.words[row.source])] = original.float()
    return measure_tag_agreement(row.columns[0], table, logits, [int(each) for each in synthetic.words[number]])


def append_rows(part: Any, more: Any) -> Any:
    """Returns a split with rows after its own."""
    if not len(part):
        return more
    return type(part).from_table(pa.concat_tables([part.table(), more.table()]))


def write_record(file: Path, rows: Sequence[SyntheticRow]) -> None:
    """Writes a line of JSON for each synthetic row: the number of its training row, its kind and its text."""
    with file.open("w") as lines:
        for row in rows:
            line = {"row": row.source, "kind": row.kind, "text": row.text}
            lines.write(json.dumps(line, ensure_ascii=False) + "\n")


def describe_augmentation(splits: Splits, synthetic: Sequence[SyntheticRow], count: int) -> list[str]:
    """Returns sentences on the kinds, on rows that the teacher disagreed with, and on the mix of classes."""
    shown = {row.source for row in synthetic}
    texts = {row: text for row, text in enumerate(JoinedTexts(splits.train)) if row in shown}
    remarks = describe_rows(synthetic, texts)
    if count > len(synthetic):
        remarks.append(
            f"augment: {count - len(synthetic):,} of {count:,} rows were dropped, because the teacher's answer differs"
        )
    labels = splits.train.labels
    if labels and isinstance(labels[0], int):
        remarks.append(describe_class_mix(labels, [labels[row.source] for row in synthetic], splits.labels))
    return remarks


def describe_class_mix(before: Sequence[int], added: Sequence[int], names: Sequence[str]) -> str:
    """Returns a sentence on the class whose share changes most with the added rows."""
    old, new = Counter(before), Counter([*before, *added])
    shares = {label: (old[label] / len(before), new[label] / (len(before) + len(added))) for label in new}
    label = max(shares, key=lambda each: abs(shares[each][1] - shares[each][0]))
    first, last = shares[label]
    return (
        f"augment: classes: the largest change is that of {names[label]!r}, from {first:.2%} to {last:.2%} of the rows"
    )
