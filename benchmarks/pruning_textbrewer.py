"""TextBrewer's students and its training, called through its package as its examples do.

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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler
from transformers import PreTrainedModel, get_linear_schedule_with_warmup

from distill.data.batches.encode import Encoded
from distill.student.family import family_of
from distill.train.optimizer import set_dropout

# Share of the teacher's width and of its feed-forward width: its students over BERT-base's 768 and 3072.
NARROW = {
    "T3-small": (384 / 768, 1536 / 3072),
    "T4-tiny": (312 / 768, 1200 / 3072),
    "T12-nano": (256 / 768, 1024 / 3072),
}


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
