"""Four ways to train a student; Torch-Pruning and TextBrewer are called through their packages as their examples do.

Torch-Pruning 1.6.1 follows its `examples/transformers/prune_hf_bert.py`: `MetaPruner`, L2 magnitude averaged over each
group, whole heads removed (`prune_num_heads`, not `prune_head_dims`), one step, the same ratio for channels and heads;
sizes are multiples of 8, as its README recommends. The classifier is left alone. Ranked over the whole model, as in the
example, or with `even` the same share of every layer. The numbers of heads that its modules hold are corrected
afterwards, as the example does; with transformers 5.23 nothing else is needed.

TextBrewer 0.2.1 follows its README, its SST-2 notebook and `examples/matches`: `GeneralDistiller` with the teacher in
every step, cross-entropy with the softened teacher, each student layer matched to the teacher's by `hidden_mse` of
weight 1 (a linear projection where widths differ), AdamW with a linear schedule and a tenth of warm-up, no clipping of
gradients, every weight trained. Students are its T3 (fewer layers, the first ones copied as
`run_conll2003_distill_T3.sh` does), T3-small, T4-tiny and T12-nano (narrower and shallower, from random weights as
`run_mnli_distill_T4tiny.sh` does), their widths in proportion to the teacher's. Two of its settings are those that
served it better on Banking77 (one layer, 1,500 texts, 3 epochs, validation): without the `mmd` matches that its
experiments add (76.2 % against 73.3 %; logits alone 74.8 %), and without dropout as all students here.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, RandomSampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_linear_schedule_with_warmup

from compress.prune.candidates import outline_of
from compress.prune.checkpoint import load_pruned
from compress.prune.trace import find_axes
from distill.data.encode import Encoded, encode
from distill.data.module import TextDataModule
from distill.module import DistillationModule
from distill.optimizer import set_dropout
from distill.student.build import build_student
from distill.student.family import family_of
from distill.tasks.text_classification import TextClassification
from distill.teacher.load import load_tokenizer
from distill.training import TrainConfig
from pipelines.config import DistillConfig
from pipelines.console import Console
from pipelines.data import read_data
from pipelines.distill import check_inputs, road
from pipelines.layouts import layouts_of
from pipelines.stage import Run, write_json
from pipelines.student import cached_signals
from pipelines.teacher import MODEL
from pipelines.trainer import fit
from pipelines.words import tokenizer_of

# Share of the teacher's width and of its feed-forward width: its students over BERT-base's 768 and 3072.
NARROW = {
    "T3-small": (384 / 768, 1536 / 3072),
    "T4-tiny": (312 / 768, 1200 / 3072),
    "T12-nano": (256 / 768, 1024 / 3072),
}
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


@dataclass(frozen=True)
class Brewed:
    """A student of TextBrewer's kind; of the teacher's own width it starts from the teacher's first layers."""

    kind: str
    layers: int
    hidden: int
    ffn: int

    @property
    def label(self) -> str:
        return f"{self.kind}: {self.layers} layers x {self.hidden}, ffn {self.ffn}"


def brewed_sizes(teacher: PreTrainedModel) -> list[Brewed]:
    """Every depth of every kind, for this teacher; a narrow student keeps the number of heads, as its configs do."""
    own = family_of(teacher.config).sizes(teacher.config)
    found = [Brewed("T3", depth, own.hidden, own.ffn) for depth in range(1, len(own.layers))]
    for kind, (width, ffn) in NARROW.items():
        hidden = max(1, int(own.hidden * width) // own.heads) * own.heads
        found += [Brewed(kind, depth, hidden, int(own.ffn * ffn)) for depth in range(1, len(own.layers) + 1)]
    return found


def brewed_student(teacher: PreTrainedModel, size: Brewed, seed: int) -> PreTrainedModel:
    """The student before it is trained."""
    config, family = copy.deepcopy(teacher.config), family_of(teacher.config)
    changes = {family.layers: size.layers, family.hidden: size.hidden, family.ffn: size.ffn}
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        student = type(teacher)(config)
    if size.hidden == getattr(teacher.config, family.hidden):
        missing = student.load_state_dict(teacher.state_dict(), strict=False).missing_keys
        assert not missing, missing
    return student


def matches(student_layers: int, teacher_layers: int, widths: tuple[int, int]) -> list[dict[str, Any]]:
    """Its `intermediate_matches` for any depth: layer 0 is the embeddings, `widths` the student's and the teacher's."""
    projected = {} if widths[0] == widths[1] else {"proj": ["linear", *widths]}
    pairs = [(own, round(own * teacher_layers / student_layers)) for own in range(student_layers + 1)]
    return [
        {"layer_T": other, "layer_S": own, "feature": "hidden", "loss": "hidden_mse", "weight": 1}
        | copy.deepcopy(projected)  # it adds to the list
        for own, other in pairs
    ]


@dataclass(frozen=True)
class Brewing:
    """What TextBrewer is told."""

    epochs: int
    batch_size: int
    rate: float
    temperature: float
    seed: int


def brew(
    teacher: PreTrainedModel, student: PreTrainedModel, data: Encoded, pad_id: int, told: Brewing, folder: Path
) -> None:
    """Trains `student` in place by TextBrewer's own loop; its checkpoint goes into `folder`."""
    import textbrewer

    torch.manual_seed(told.seed)
    set_dropout(student, 0.0)
    batches = random_batches(data, pad_id, told)
    steps = len(batches) * told.epochs
    sizes = [family_of(model.config).sizes(model.config) for model in (student, teacher)]
    pairs = matches(len(sizes[0].layers), len(sizes[1].layers), (sizes[0].hidden, sizes[1].hidden))
    distiller = textbrewer.GeneralDistiller(
        train_config=textbrewer.TrainingConfig(device="cpu", output_dir=str(folder), ckpt_epoch_frequency=told.epochs),
        distill_config=textbrewer.DistillationConfig(temperature=told.temperature, intermediate_matches=pairs),
        model_T=teacher,
        model_S=student,
        adaptor_T=adapted,
        adaptor_S=adapted,
    )
    with distiller:
        distiller.train(
            torch.optim.AdamW(student.parameters(), lr=told.rate, fused=True),
            batches,
            told.epochs,
            scheduler_class=get_linear_schedule_with_warmup,
            scheduler_args={"num_warmup_steps": int(0.1 * steps), "num_training_steps": steps},
            output_hidden_states=True,
        )


def adapted(batch: dict[str, torch.Tensor], out: Any) -> dict[str, Any]:
    """What TextBrewer calls an adaptor: where logits and hidden states are, and which positions are padding."""
    return {"logits": out.logits, "hidden": out.hidden_states, "inputs_mask": batch["attention_mask"]}


def random_batches(data: Encoded, pad_id: int, told: Brewing) -> DataLoader:
    """Batches drawn at random, as in its examples, each padded to its longest text only."""

    def collate(rows: Sequence[int]) -> dict[str, torch.Tensor]:
        return {name: value for name, value in data.collate(rows, pad_id).items() if name != "labels"}

    order = RandomSampler(range(len(data)), generator=torch.Generator().manual_seed(told.seed))
    return DataLoader(range(len(data)), told.batch_size, sampler=order, collate_fn=collate)  # type: ignore[arg-type]


class Lesson:
    """What all students of one seed are taught with: the splits, the teacher, and its cached logits."""

    def __init__(self, config: DistillConfig, console: Console):
        self.config, self.console = config, console
        self.source = check_inputs(config)
        self.layouts = layouts_of(config, self.source, 1)
        self.run = Run(Path(config.output), config.seed, console)
        if not (self.run.output / CONFIG).exists():
            write_json(self.run.output / CONFIG, asdict(config))
        self.made, _ = road(self.run, replace(config, until="cache"), self.source, self.layouts)
        self.folder = self.made["teacher"].folder / MODEL
        self.splits, self.tokenizer = read_data(self.made["data"]), load_tokenizer(self.folder)

    def teacher(self) -> PreTrainedModel:
        return load_pruned(self.folder)

    def train(self, rate: float) -> TrainConfig:
        return replace(self.config.train, learning_rate=rate)

    def distil(self, student: PreTrainedModel, rate: float, folder: Path, label: str) -> None:
        """Trains a student in place as the distil stage does; a killed training goes on from `folder`."""
        config, seed = self.config, self.run.seed
        lightning.seed_everything(seed, verbose=False)
        task = TextClassification(self.splits.labels)
        fit(
            DistillationModule(student, loss=config.loss, train=self.train(rate), metric=task.metric()),
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
    made, students = road(lesson.run, config, lesson.source, lesson.layouts)
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
    told = Brewing(config.train.epochs, config.train.batch_size, rate, config.loss.temperature, lesson.run.seed)
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
