"""A student before its training, and what it is trained on."""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase

from distill.data.batches.data_module import TextDataModule
from distill.teacher.remote import RemoteTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule

STUDENT_TRAINING = "student: distilling"  # what the console and the logs call it


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizers of a student and of its teacher.

    Args:
        student: The student's tokenizer.
        teacher: The teacher's tokenizer; the same object if the student has none of its own.
        differ: Whether the student's differs from the teacher's, so that the same text has other tokens.
    """

    student: PreTrainedTokenizerBase
    teacher: PreTrainedTokenizerBase
    differ: bool


@dataclass(frozen=True)
class PreparedTraining:
    """A student and what it is trained on.

    Args:
        module: Contains the student.
        texts: Data of the task, with the teacher's signals if they are cached.
        tokenizers: Of student and teacher.
        train: Settings of the training.
        mesh: Processes that a sharded student is on.
        remote: A teacher on processes of its own.
    """

    module: DistillationModule
    texts: TextDataModule
    tokenizers: Tokenizers
    train: TrainConfig
    mesh: DeviceMesh | None
    remote: RemoteTeacher | None
