"""Four ways to train a student; Torch-Pruning and TextBrewer are called through their packages as their examples do.

Torch-Pruning 1.6.1 follows its `examples/transformers/prune_hf_bert.py`: `MetaPruner`, L2 magnitude averaged over each
group, whole heads removed (`prune_num_heads`, not `prune_head_dims`), one step, the same ratio for channels and heads;
sizes are multiples of 8, as its README recommends. The classifier is left alone. Ranked over the whole model, as in the
example, or with `even` the same share of every layer. The numbers of heads that its modules hold are corrected
afterwards, as the example does; with transformers 5.23 nothing else is needed. TextBrewer: see `pruning_textbrewer.py`.
"""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lightning
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.pruning_textbrewer import Brewed, Brewing, brew, brewed_student
from compress.prune.search.candidates import outline_of
from compress.prune.slicing.checkpoint import load_pruned
from compress.prune.tracing.trace import find_axes
from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.batches.data_module import TextDataModule
from distill.data.batches.encode import encode
from distill.student.build import build_student
from distill.tasks.text_classification import TextClassification
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines.distill import check_inputs, run_stages
from pipelines.runs.console import Console
from pipelines.runs.stage import SCRATCH, Run, write_json
from pipelines.runs.trainer import fit
from pipelines.settings.distill_config import DistillConfig
from pipelines.settings.layouts import layouts_of
from pipelines.settings.task_settings import resolve_task
from pipelines.stages.data import read_data
from pipelines.stages.distill import cached_signals
from pipelines.stages.teacher import MODEL
from pipelines.stages.vocabulary import tokenizer_of

MULTIPLE = 8
MOST = 0.95  # ratio
HALVINGS = 8
Size = dict[str, Any]
CONFIG = "config.json"  # as `pipelines.distill` writes it
CLOSE = 1.025  # measured over asked: as near as our own shapes are searched


def torch_pruned(teacher: PreTrainedModel, ratio: float, *, even: bool) -> PreTrainedModel:
    """A copy of the teacher without `ratio` of its channels and heads, those of the smallest weights."""
    import torch_pruning

    model = copy.deepcopy(teacher).eval()
    attentions = [module for module in model.modules() if hasattr(module, "num_attention_heads")]
    heads = {
        layer: module.num_attention_heads for module in attentions for layer in (module.query, module.key, module.value)
    }
    given = {name: torch.ones(1, 9, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    with torch.enable_grad():  # it follows the graph of gradients
        pruner = torch_pruning.pruner.MetaPruner(
            model,
            given,
            importance=torch_pruning.importance.MagnitudeImportance(p=2, group_reduction="mean"),
            global_pruning=not even,
            pruning_ratio=ratio,
            head_pruning_ratio=ratio,
            num_heads=heads,
            prune_num_heads=True,
            prune_head_dims=False,
            round_to=MULTIPLE,
            ignored_layers=[model.classifier],
            in_channel_groups={},  # its defaults are shared between pruners
            out_channel_groups={},
            output_transform=lambda out: out.logits.sum(),
        )
        pruner.step()
    for module in attentions:
        module.num_attention_heads = pruner.num_heads[module.query]
        module.all_head_size = module.query.out_features
        module.attention_head_size = module.all_head_size // module.num_attention_heads
    model.zero_grad(set_to_none=True)
    return model


def nearest_ratio(speedup_of: Callable[[float], float], wanted: float) -> float:
    """The smallest ratio whose measured speed-up isn't below `wanted`, by halving; MOST where none reaches it."""
    low, high = 0.0, MOST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        found = speedup_of(middle)
        low, high = (low, middle) if found >= wanted else (middle, high)
        if wanted <= found <= wanted * CLOSE:
            break
    return high


class Lesson:
    """What all students of one seed are taught with: the splits, the teacher, and its cached logits."""

    def __init__(self, config: DistillConfig, console: Console):
        config, _ = resolve_task(config)
        self.config, self.console = config, console
        self.source = check_inputs(config)
        self.layouts = layouts_of(config, self.source, 1)
        self.run = Run(Path(config.output), config.seed, console)
        if not (self.run.output / CONFIG).exists():
            write_json(self.run.output / CONFIG, asdict(config))
        self.made, _ = run_stages(self.run, replace(config, until="cache"), self.source, self.layouts)
        self.folder = self.made["teacher"].folder / MODEL
        self.splits, self.tokenizer = read_data(self.made["data"]), load_tokenizer(self.folder)
        self.task = TextClassification(self.splits.labels)

    def teacher(self) -> PreTrainedModel:
        return load_pruned(self.folder)

    def train(self, rate: float) -> TrainConfig:
        return replace(self.config.train, learning_rate=rate)

    def distil(self, student: PreTrainedModel, rate: float, folder: Path, label: str) -> None:
        """Trains a student in place as the distil stage does; a killed training goes on from `folder`."""
        config, seed = self.config, self.run.seed
        lightning.seed_everything(seed, verbose=False)
        (folder / SCRATCH).mkdir(parents=True, exist_ok=True)
        fit(
            DistillationModule(student, loss=config.loss, train=self.train(rate), metric=self.task.metric()),
            TextDataModule(
                self.splits,
                self.tokenizer,
                batch_size=config.train.batch_size,
                max_length=config.data.max_length,
                seed=seed,
                signals=cached_signals(self.made["cache"]),
            ),
            folder,
            label=label,
            train=self.train(rate),
            machine=config.machine,
            precision=config.machine.precision,
            seed=seed,
            console=self.console,
            wandb_folder=folder / "wandb",
        )


@dataclass(frozen=True)
class Trained:
    """A student as its way hands it over; `search_seconds` were spent on its own shape."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    label: str
    seconds: float
    search_seconds: float = 0.0


def ours(lesson: Lesson, size: Size, rate: float, folder: Path) -> Trained:
    config = replace(lesson.config, train=lesson.train(rate), until="distill")
    made, students = run_stages(lesson.run, config, lesson.source, lesson.layouts)
    done = students[0].made
    model = load_pruned(done.folder / MODEL)
    outline = outline_of(find_axes(model))
    layers = " ".join(f"{heads}x{ffn}" for heads, ffn in zip(outline.heads, outline.ffn, strict=True))
    shared = {lesson.made[name].folder for name in lesson.made}
    search = sum(each.manifest["wall_seconds"] for each in made.values() if each.folder not in shared | {done.folder})
    label = f"{outline.hidden} wide, {layers}"
    return Trained(model, tokenizer_of(done.folder / MODEL), label, done.manifest["wall_seconds"], search)


def fewer_layers(lesson: Lesson, size: Size, rate: float, folder: Path) -> Trained:
    student = build_student(lesson.teacher(), f"layers={size['layers']}")
    return timed(lesson, student, f"layers={size['layers']}", lambda: lesson.distil(student, rate, folder, "layers"))


def brewed(lesson: Lesson, size: Size, rate: float, folder: Path) -> Trained:
    teacher, kind, config = lesson.teacher(), Brewed(**size), lesson.config
    student = brewed_student(teacher, kind, lesson.run.seed)
    told = Brewing(config.train.epochs, config.train.batch_size, rate, config.loss.softness, lesson.run.seed)
    data = encode(lesson.tokenizer, lesson.splits.train, config.data.max_length)
    pad = int(lesson.tokenizer.pad_token_id or 0)
    return timed(lesson, student, kind.label, lambda: brew(teacher, student, data, pad, told, folder))


def torch_pruning(lesson: Lesson, size: Size, rate: float, folder: Path) -> Trained:
    student = torch_pruned(lesson.teacher(), **size)
    label = f"ratio {size['ratio']:.3f}, {'even' if size['even'] else 'global'}"
    return timed(lesson, student, label, lambda: lesson.distil(student, rate, folder, "torch-pruning"))


def timed(lesson: Lesson, student: PreTrainedModel, label: str, train: Callable[[], None]) -> Trained:
    start = time.perf_counter()
    train()
    return Trained(student, lesson.tokenizer, label, time.perf_counter() - start)


TRAIN: Mapping[str, Callable[[Lesson, Size, float, Path], Trained]] = {
    "ours": ours,
    "layers": fewer_layers,
    "textbrewer": brewed,
    "torch-pruning": torch_pruning,
}
