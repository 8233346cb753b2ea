"""Settings of `python -m pipelines.cache`."""

from dataclasses import dataclass, field
from typing import Literal

from distill.data.config import DataConfig
from distill.data.masking.config import MaskConfig
from distill.data.rows.chat_config import ChatConfig
from distill.errors import InputError
from pipelines.settings.launchers import Launcher, check_devices, check_launcher_package
from pipelines.settings.places import check_local

CACHE_SHORT_OPTIONS = {
    "data": "data.path",
    "signals": "keep.signals",
    "draws": "keep.draws",
    "k": "keep.k",
    "layers": "keep.layers",
}
_NAMES = ("logits", "topk", "sampled", "hidden", "relations", "embedding", "generated")
CachedTask = Literal[
    "auto", "text-classification", "token-classification", "question-answering", "masked-lm", "causal-lm", "chat",
    "sentence-embedding",
]  # fmt: skip
LONGEST = 31_536_000  # maximum timeout in seconds: one year


@dataclass(frozen=True)
class KeepConfig:
    """Which signals of the teacher are stored.

    Args:
        signals: Names separated by commas: logits, topk, sampled, hidden, relations, embedding, generated. auto stores
            logits for a classifier, sampled for a language model and embedding for a sentence encoder.
        draws: For `sampled`: number of draws per position; fewer distinct ids are stored.
        k: For `topk`: number of ids per position.
        step: For `topk`: grid spacing of the quantized log-probabilities, in nats.
        layers: For `hidden` and `relations`: layer numbers separated by commas, or `last`. In `hidden`, 0 is the output
            of the embeddings; in `relations`, 0 is the first layer.
        vectors: For `relations`: layer numbers or `last`, if they differ from `layers`.
        dtype: For `logits` and `embedding`: stored data type, float32 or float16.
        temperature: For `topk` and `sampled`: the logits are divided by it; 1 if omitted. For `generated`: sampling
            temperature; 0, or omitting it, is greedy decoding.
        new_tokens: For `generated`: maximum number of tokens per sequence.
        compression: none, or zstd, which also compresses each record; encoded ids don't get smaller, and features only
            slightly.
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
        unknown = [name for name in self.signals.split(",") if name not in _NAMES]
        if unknown and self.signals != "auto":
            raise InputError(
                f"keep.signals: expected auto alone, or names among {', '.join(_NAMES)}, found {', '.join(unknown)}"
            )


@dataclass(frozen=True)
class WriteConfig:
    """Settings of `write`.

    Args:
        cache: Folder of the cache; an existing cache is resumed, and extended by samples that are new in the data.
        teacher: Checkpoint of the teacher: a hub id or a local folder.
        task: Task of the teacher; auto infers it from the teacher's head.
        data: The data set. For classifiers each row is a sample, for language models each block of data.max_length
            tokens.
        keep: Which signals of the teacher are stored.
        masking: Masks for a masked language model; training uses the same masks.
        chat: Which parts of conversations a student is trained on.
        batch_tokens: Tokens per batch of the teacher, including padding; at least 1.
        limit: Use only this number of samples, from the start of the data; 0 uses all.
        threads: CPU threads; 0 uses PyTorch's default.
        accelerator: Device of the teacher, such as cpu or cuda; auto uses a GPU if there is one.
        writer: Number of this writer, from 0 to writers - 1, if several are started by hand; each begins at a different
            shard.
        writers: Number of writers that are started by hand.
        devices: Number of processes to start on this machine, which share the work; under torchrun, its own options set
            the number.
        launcher: What starts the processes: `torchrun`, on this machine; or `ray`, as Ray Train workers on the cluster
            at RAY_ADDRESS, or else on this machine.
        layout: Layout of the teacher on the processes: replicated, fsdp=N, hsdp=RxS, tp=N, pp=N or fsdp=N,tp=M,
            with numbers of processes for the letters, see docs/howto/distributed.md.
        timeout: Seconds that a process waits for the others in a collective operation before the run fails.
        seed: Seed of sampling (`sampled`, `generated`).
        force: Write even if the disk has too little space.
        dry_run: Measure, print the predicted disk space, time and memory, and write nothing.
    """

    cache: str = ""
    teacher: str = ""
    task: CachedTask = "auto"
    data: DataConfig = field(default_factory=DataConfig)
    keep: KeepConfig = field(default_factory=KeepConfig)
    masking: MaskConfig = field(default_factory=MaskConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    batch_tokens: int = 2048
    limit: int = 0
    threads: int = 0
    accelerator: str = "auto"
    writer: int = 0
    writers: int = 1
    devices: int = 1
    launcher: Launcher = "torchrun"
    layout: str = "replicated"
    timeout: float = 1800.0
    seed: int = 0
    force: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name, value in (("cache", self.cache), ("teacher", self.teacher), ("data", self.data.path)):
            if not value:
                raise InputError(f"--{name}: missing; see --help for examples")
        if self.batch_tokens < 1 or self.limit < 0 or not 0 <= self.writer < self.writers:
            raise InputError(
                "expected batch_tokens of at least 1, limit of at least 0 and writer below writers, "
                f"found {self.batch_tokens}, {self.limit}, {self.writer} of {self.writers}"
            )
        if self.devices > 1 and self.writers > 1:
            raise InputError(
                f"writers {self.writers}: expected 1 with devices {self.devices}: a writer started by hand is one "
                "process"
            )
        check_local("cache", self.cache)
        if not 0 < self.timeout <= LONGEST:
            raise InputError(f"timeout: expected more than 0 seconds, at most {LONGEST}, found {self.timeout}")
        check_launcher_package(self.launcher, "launcher")
        check_devices(self.devices, self.launcher, "devices")


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
        teacher: Checkpoint of the teacher, if it has moved since the cache was written.
        data: Path of the data, if it has moved since the cache was written.
        threads: CPU threads; 0 uses PyTorch's default.
    """

    teacher: str = ""
    data: str = ""
    threads: int = 0


@dataclass(frozen=True)
class InspectConfig(RebuildConfig):
    """Settings of `inspect`.

    Args:
        cache: Folder of the cache.
        teacher: Checkpoint of the teacher, if it has moved since the cache was written.
        data: Data whose coverage by the cache is reported; if omitted, the data that the cache was written for.
        threads: CPU threads; 0 uses PyTorch's default.
        fidelity: Number of batches on which the cache is compared with the teacher's full output; 0 disables the
            comparison.
        student: Student checkpoint whose gradients are compared; if omitted, the first half of the teacher's layers.
    """

    fidelity: int = 0
    student: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.student and not self.fidelity:
            raise InputError(
                f"--student {self.student!r}: expected --fidelity with it, found none: no gradients would be compared"
            )
