"""Settings of `python -m pipelines.cache`."""

from dataclasses import dataclass, field
from typing import Literal

from distill.data.chat_config import ChatConfig
from distill.data.config import DataConfig
from distill.data.mask_config import MaskConfig
from distill.errors import InputError

SHORT = {"data": "data.path", "signals": "keep.signals", "draws": "keep.draws", "k": "keep.k", "layers": "keep.layers"}
NAMES = ("logits", "topk", "sampled", "hidden", "relations", "embedding", "generated")
Task = Literal[
    "auto", "text-classification", "token-classification", "question-answering", "masked-lm", "causal-lm", "chat",
    "sentence-embedding",
]  # fmt: skip
LONGEST = 31_536_000  # seconds that processes may wait for one another; a year


@dataclass(frozen=True)
class KeepConfig:
    """What is kept of the teacher's answer.

    Args:
        signals: Names joined by commas: logits, topk, sampled, hidden, relations, embedding, generated. `auto` takes
            logits for a classifier, sampled for a language model, embedding for a sentence encoder.
        draws: Of `sampled`: draws a position; fewer different ids are kept.
        k: Of `topk`: ids a position.
        step: Of `topk`: grid of the log-probabilities in nats.
        layers: Of `hidden` and `relations`: numbers joined by commas; 0 of `hidden` is the embeddings' output, 0 of
            `relations` the first layer. `last` is the last.
        vectors: Of `relations`, where they are others than `layers`.
        dtype: Of `logits` and `embedding`.
        temperature: Of `topk` and `sampled`: the logits are divided by it. Of `generated`: 0 takes the likeliest.
        new_tokens: Of `generated`: most tokens a sequence.
        compression: `zstd` also compresses each record; coded ids don't get smaller by it, features a little.
    """

    signals: str = "auto"
    draws: int = 24
    k: int = 64
    step: float = 0.125
    layers: str = "last"
    vectors: str = ""
    dtype: Literal["float32", "float16"] = "float32"
    temperature: float | None = None
    new_tokens: int = 64
    compression: Literal["none", "zstd"] = "none"

    def __post_init__(self) -> None:
        unknown = [name for name in self.signals.split(",") if name not in (*NAMES, "auto")]
        if unknown:
            raise InputError(f"keep.signals: expected names among {', '.join(NAMES)}, found {', '.join(unknown)}")


@dataclass(frozen=True)
class WriteConfig:
    """Settings of `write`.

    Args:
        cache: Folder of the cache; one that is there goes on, and grows by what is new in the data.
        teacher: A hub id or a local folder.
        task: `auto` takes it from the teacher's head.
        data: The text. Classifiers read a row a sample, language models blocks of data.max_length tokens.
        keep: What is kept of the answer.
        masking: Masks of a masked language model; the training takes the same ones.
        chat: What of conversations is learnt.
        batch_tokens: Tokens, padding included, that the teacher is asked about at once.
        limit: Only the first so many samples; 0 takes all.
        threads: CPU threads; 0 leaves it to PyTorch.
        device: Where the teacher runs; auto takes a GPU if there is one.
        rank, ranks: Of several writers started by hand at once, where this one begins.
        devices: Processes to start on this machine, which share the work; under torchrun it says how many.
        layout: How the teacher lies on them: replicated, fsdp=N, hsdp=RxS, tp=N, fsdp=N,tp=M.
        timeout: Seconds that a process waits in a collective for the others before the run ends.
        seed: Seed of the draws.
        force: Write although the disk is too small.
        dry_run: Measure, say what it would take, and write nothing.
    """

    cache: str = ""
    teacher: str = ""
    task: Task = "auto"
    data: DataConfig = field(default_factory=DataConfig)
    keep: KeepConfig = field(default_factory=KeepConfig)
    masking: MaskConfig = field(default_factory=MaskConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    batch_tokens: int = 2048
    limit: int = 0
    threads: int = 0
    device: str = "auto"
    rank: int = 0
    ranks: int = 1
    devices: int = 1
    layout: str = "replicated"
    timeout: float = 1800.0
    seed: int = 0
    force: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name, value in (("cache", self.cache), ("teacher", self.teacher), ("data", self.data.path)):
            if not value:
                raise InputError(f"--{name}: missing; see --help for examples")
        if self.batch_tokens < 1 or self.limit < 0 or not 0 <= self.rank < self.ranks:
            raise InputError(
                "expected batch_tokens of at least 1, limit of at least 0 and rank below ranks, "
                f"found {self.batch_tokens}, {self.limit}, {self.rank} of {self.ranks}"
            )
        if not 0 < self.timeout <= LONGEST:
            raise InputError(f"timeout: expected more than 0 seconds, at most {LONGEST}, found {self.timeout}")


@dataclass(frozen=True)
class VerifyConfig:
    """Settings of `verify`.

    Args:
        cache: Folder of the cache.
    """

    cache: str = ""

    def __post_init__(self) -> None:
        if not self.cache:
            raise InputError("--cache: missing; see --help for examples")


@dataclass(frozen=True)
class RebuildConfig(VerifyConfig):
    """Settings of `rebuild`.

    Args:
        cache: Folder of the cache.
        teacher: The teacher, where it isn't any more where it was.
        data: The text, where it isn't any more where it was.
        threads: CPU threads; 0 leaves it to PyTorch.
    """

    teacher: str = ""
    data: str = ""
    threads: int = 0


@dataclass(frozen=True)
class InspectConfig(RebuildConfig):
    """Settings of `inspect`.

    Args:
        cache: Folder of the cache.
        teacher: The teacher, where it isn't any more where it was.
        data: Coverage of this text is told, instead of the one the cache was written for.
        threads: CPU threads; 0 leaves it to PyTorch.
        fidelity: Batches on which the cache is compared with the dense teacher; 0 leaves it out.
        student: Checkpoint whose gradient is looked at; the teacher's first half of layers where left out.
    """

    fidelity: int = 0
    student: str = ""
