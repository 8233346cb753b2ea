"""TextBrewer's students and its training, called through its package as in its examples.

TextBrewer 0.2.1 is used as in its README, its SST-2 notebook and `examples/matches`: `GeneralDistiller` with the
teacher in every step, cross-entropy with the softened teacher, each student layer matched to a teacher layer by
`hidden_mse` with weight 1 (and a linear projection if widths differ), AdamW with a linear schedule and a tenth of
warm-up, no gradient clipping, all weights trained. The students are its T3 (fewer layers, the first ones copied as in
`run_conll2003_distill_T3.sh`), and T3-small, T4-tiny and T12-nano (narrower and shallower, from random weights as in
`run_mnli_distill_T4tiny.sh`), with widths in proportion to the teacher's. Two settings are those that scored better for
it on Banking77 (one layer, 1,500 texts, 3 epochs, validation): without the `mmd` matches that its experiments add (76.2
% against 73.3 %; logits alone 74.8 %), and without dropout, like all students here.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler
from transformers import PreTrainedModel, get_linear_schedule_with_warmup
from transformers.utils import ModelOutput

from distill.data.batches.encode import Encoded
from distill.slicing.attributes import FFN, HIDDEN, LAYER_ATTRIBUTES, find_attribute
from distill.student.family import find_family
from distill.train.optimizer import set_dropout

# Share of the teacher's width and of its feed-forward width: TextBrewer's students over BERT-base's 768 and 3072.
NARROW = {
    "T3-small": (384 / 768, 1536 / 3072),
    "T4-tiny": (312 / 768, 1200 / 3072),
    "T12-nano": (256 / 768, 1024 / 3072),
}
Match: TypeAlias = dict[str, object]  # an entry of TextBrewer's `intermediate_matches`


@dataclass(frozen=True)
class TextBrewerSize:
    """The size of a student; one of the teacher's own width starts from the teacher's first layers."""

    kind: str
    layers: int
    hidden: int
    ffn: int

    @property
    def label(self) -> str:
        """The name in the table."""
        return f"{self.kind}: {self.layers} layers x {self.hidden}, ffn {self.ffn}"


@dataclass(frozen=True)
class TextBrewerSettings:
    """The settings of TextBrewer's training."""

    epochs: int
    batch_size: int
    rate: float
    temperature: float
    seed: int


def list_sizes(teacher: PreTrainedModel) -> list[TextBrewerSize]:
    """Returns every depth of every kind for a teacher.

    A narrow student has as many heads as its teacher, as in TextBrewer's configurations.
    """
    teacher_sizes = find_family(teacher.config).sizes(teacher.config)
    sizes = [
        TextBrewerSize("T3", depth, teacher_sizes.hidden, teacher_sizes.ffn)
        for depth in range(1, len(teacher_sizes.layers))
    ]
    for kind, (width, ffn) in NARROW.items():
        hidden = max(1, int(teacher_sizes.hidden * width) // teacher_sizes.heads) * teacher_sizes.heads
        depths = range(1, len(teacher_sizes.layers) + 1)
        sizes += [TextBrewerSize(kind, depth, hidden, int(teacher_sizes.ffn * ffn)) for depth in depths]
    return sizes


def build_textbrewer_student(teacher: PreTrainedModel, size: TextBrewerSize, seed: int) -> PreTrainedModel:
    """Returns the student before it is trained."""
    config, old = copy.deepcopy(teacher.config), find_family(teacher.config).sizes(teacher.config)
    for names, value in ((LAYER_ATTRIBUTES, size.layers), (HIDDEN, size.hidden), (FFN, size.ffn)):
        setattr(config, find_attribute(config, names), value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        student = type(teacher)(config)
    if size.hidden == old.hidden:
        missing = student.load_state_dict(teacher.state_dict(), strict=False).missing_keys
        if missing:
            raise ValueError(f"{size.label}: the teacher has no weights for {', '.join(missing)}")
    return student


def match_layers(student_layers: int, teacher_layers: int, widths: tuple[int, int]) -> list[Match]:
    """Returns TextBrewer's `intermediate_matches` for any depth.

    Args:
        student_layers: The student's layers; layer 0 is the embeddings.
        teacher_layers: The teacher's layers.
        widths: The student's and the teacher's width.
    """
    projected = widths[0] != widths[1]
    pairs = [
        (student_layer, round(student_layer * teacher_layers / student_layers))
        for student_layer in range(student_layers + 1)
    ]
    return [
        {"layer_T": teacher_layer, "layer_S": student_layer, "feature": "hidden", "loss": "hidden_mse", "weight": 1}
        | ({"proj": ["linear", *widths]} if projected else {})  # a list for each, because TextBrewer appends to it
        for student_layer, teacher_layer in pairs
    ]


def train_with_textbrewer(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    data: Encoded,
    pad_id: int,
    settings: TextBrewerSettings,
    folder: Path,
) -> None:
    """Trains `student` in place by TextBrewer's own loop, which writes a checkpoint to `folder`."""
    import textbrewer

    torch.manual_seed(settings.seed)
    set_dropout(student, 0.0)
    batches = load_random_batches(data, pad_id, settings)
    steps = len(batches) * settings.epochs
    student_sizes, teacher_sizes = (find_family(model.config).sizes(model.config) for model in (student, teacher))
    matches = match_layers(
        len(student_sizes.layers), len(teacher_sizes.layers), (student_sizes.hidden, teacher_sizes.hidden)
    )
    distiller = textbrewer.GeneralDistiller(
        train_config=textbrewer.TrainingConfig(
            device="cpu", output_dir=str(folder), ckpt_epoch_frequency=settings.epochs
        ),
        distill_config=textbrewer.DistillationConfig(temperature=settings.temperature, intermediate_matches=matches),
        model_T=teacher,
        model_S=student,
        adaptor_T=adapt_output,
        adaptor_S=adapt_output,
    )
    with distiller:
        distiller.train(
            torch.optim.AdamW(student.parameters(), lr=settings.rate, fused=True),
            batches,
            settings.epochs,
            scheduler_class=get_linear_schedule_with_warmup,
            scheduler_args={"num_warmup_steps": int(0.1 * steps), "num_training_steps": steps},
            output_hidden_states=True,
        )


def adapt_output(batch: Mapping[str, Tensor], output: ModelOutput) -> dict[str, object]:
    """Returns logits, hidden states and padding mask under TextBrewer's names."""
    return {"logits": output["logits"], "hidden": output["hidden_states"], "inputs_mask": batch["attention_mask"]}


def load_random_batches(data: Encoded, pad_id: int, settings: TextBrewerSettings) -> "DataLoader[int]":
    """Returns random batches, as in TextBrewer's examples, each padded to its longest text."""

    def collate(rows: Sequence[int]) -> dict[str, Tensor]:
        return {name: value for name, value in data.collate(rows, pad_id).items() if name != "labels"}

    numbers = range(len(data))
    order = RandomSampler(numbers, generator=torch.Generator().manual_seed(settings.seed))
    return DataLoader(cast("Dataset[int]", numbers), settings.batch_size, sampler=order, collate_fn=collate)
