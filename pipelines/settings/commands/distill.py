"""Settings of the commands: frozen dataclasses that don't import torch, so that --help is fast."""

from dataclasses import dataclass, field
from typing import Literal

from compress.prune.budget import Budget, parse_bytes
from compress.prune.config import PruneConfig
from compress.quantize.config import QuantizeConfig
from compress.sparsity.config import SparsityConfig
from distill.data.augment.config import AugmentConfig
from distill.data.batches.sampling_config import SamplingConfig
from distill.data.clean.config import CleanConfig
from distill.data.config import DataConfig
from distill.data.masking.config import MaskConfig
from distill.data.rows.chat_config import ChatConfig
from distill.data.select.config import SelectConfig
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.losses.cross_tokenizer_config import CrossTokenizerConfig
from distill.student.config import StudentConfig
from distill.teacher.config import TeacherConfig
from distill.teacher.sequences_config import SequencesConfig
from distill.train.config import TrainConfig
from distill.train.steps.on_policy_config import OnPolicyConfig
from pipelines.settings.commands.cache import LONGEST, KeepConfig
from pipelines.settings.launchers import Launcher, check_devices
from pipelines.settings.outer_config import ASYNCHRONOUS, OuterConfig

TaskName = Literal[
    "auto", "text-classification", "multi-label", "regression", "token-classification", "question-answering",
    "sentence-embedding", "masked-lm", "causal-lm", "chat",
]  # fmt: skip
SHORT_OPTIONS = {
    "teacher": "teacher.model",
    "student": "student.spec",
    "data": "data.path",
    "data.clean": "clean.steps",
    "data.clean.deploy": "clean.deploy",
    "data.augment": "augment.kinds",
    "data.select": "select.method",
    "epochs": "train.epochs",
    "learning_rate": "train.learning_rate",
    "batch_size": "train.batch_size",
    "patience": "train.patience",
    "temperature": "loss.temperature",
    "speedup": "budget.speedup",
    "latency_ms": "budget.latency_ms",
    "texts_per_second": "budget.texts_per_second",
    "max_bytes": "budget.max_bytes",
    "min_score_share": "budget.min_score_share",
    "uniform": "budget.uniform",
    "nested": "prune.nested",
    "frontier": "budget.frontier",
    "quantize": "quantize.scheme",
    "wandb": "machine.wandb",
    "precision": "machine.precision",
    "devices": "machine.devices",
    "strategy": "machine.strategy",
    "launcher": "machine.launcher",
    "accelerator": "machine.accelerator",
    "threads": "machine.threads",
}


@dataclass(frozen=True)
class MachineConfig:
    """Hardware, processes, precision and logging of training.

    Args:
        accelerator: Device to train on: cpu, gpu (or cuda), mps, or auto, which uses what the machine has.
        devices: Number of processes on this machine, at least 1, each with its own GPU if there are GPUs; under
            torchrun, its own options set the number.
        launcher: What starts the processes: `torchrun`, on this machine; or `ray`, as Ray Train workers on the cluster
            at RAY_ADDRESS, or else on this machine.
        restarts: Number of times that all processes are restarted after one has died; above 0 only with 2 or more
            devices, or with launcher ray.
        timeout: Seconds that a process waits for the others in a collective operation before the run fails; above 0, at
            most 31536000 (one year).
        strategy: How the student's processes train together; empty: as student.layout says. local-sgd and diloco train
            replicas independently and average them periodically, see `outer`; hogwild updates the same weights from all
            processes without locks; deepspeed_stage_1, deepspeed_stage_2 or deepspeed_stage_3, each with or without
            _offload, or a JSON file of DeepSpeed settings, train with DeepSpeed.
        gradient_compression: Format in which replicas of the student send gradients: none (uncompressed), fp16, bf16,
            or powersgd (rank 4).
        bucket_mb: Size in MiB, at least 1, of the gradient buckets that replicas send together during the backward
            pass.
        prefetch: Number of layers whose weights FSDP gathers in advance; 0 or more.
        precision: Precision of training: 32, bf16-mixed, 16-mixed (GPUs only), fp8 (GPUs that support it),
            bf16-stochastic (bfloat16 weights, gradients and optimizer states, with updates rounded stochastically) or
            int8-mixed (8-bit matrix products, experimental). auto times a few steps in 32, bf16-mixed and, on GPUs that
            support it, fp8 (on GPUs without both, 16-mixed), as far as the layout allows, and uses the fastest. The
            mixed ones keep weights and optimizer states in float32.
        memory: Memory limit of each process in training, such as 8GB, or `auto` for what is free. Of the options that
            fit, the fastest as measured is used: smaller micro-batches, activation checkpointing or offload; 8- or
            4-bit AdamW states only if nothing else fits. Empty: no limit.
        rank_speeds: Relative speeds of the replicas, by which a batch's tokens are divided among them: one number for
            each, separated by commas, or `auto`, which measures them during training. Empty: equal.
        threads: CPU threads for training; 0 uses PyTorch's default.
        wandb: Also log to Weights & Biases: off, offline or online.
        log_every: Steps between two rows of the logs, at least 1; limited to a quarter of an epoch.
    """

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto"
    devices: int = 1
    launcher: Launcher = "torchrun"
    restarts: int = 0
    timeout: float = 1800.0
    strategy: str = ""
    gradient_compression: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    bucket_mb: int = 25
    prefetch: int = 1
    precision: Literal["auto", "32", "bf16-mixed", "16-mixed", "fp8", "bf16-stochastic", "int8-mixed"] = "auto"
    memory: str = ""
    rank_speeds: str = ""
    threads: int = 0
    wandb: Literal["off", "offline", "online"] = "off"
    log_every: int = 25

    def __post_init__(self) -> None:
        for name, least in (
            ("log_every", 1),
            ("bucket_mb", 1),
            ("prefetch", 0),
            ("threads", 0),
            ("restarts", 0),
        ):
            if getattr(self, name) < least:
                raise InputError(f"machine.{name}: expected at least {least}, found {getattr(self, name)}")
        check_devices(self.devices, self.launcher, "machine.devices")
        if self.memory not in ("", "auto"):
            parse_bytes(self.memory, "machine.memory")
        if not 0 < self.timeout <= LONGEST:
            raise InputError(f"machine.timeout: expected more than 0 seconds, at most {LONGEST}, found {self.timeout}")

    @property
    def asynchronous(self) -> str:
        """The strategy, if its replicas of the student don't train in step; otherwise empty."""
        return self.strategy if self.strategy in ASYNCHRONOUS else ""

    @property
    def deepspeed(self) -> str:
        """The strategy, if it is DeepSpeed's; otherwise empty."""
        return "" if self.asynchronous else self.strategy


@dataclass(frozen=True)
class MeasureConfig:
    """How speed is measured, and how exported models are compared with the original.

    Args:
        texts: Minimum number of test texts that are timed, selected by the seed; at least 1. Up to eight times as many
            are timed until the intervals are narrow enough.
        rounds: Number of timed runs per text, at least 1; batches are run a third as often.
        interval: Timing of a speed-up ends when its 95 % confidence interval is narrower than this share of it; above
            0.
        seconds: Seconds per batch size after which no texts beyond the minimum are timed. In a run with training,
            timing also ends when evaluation has taken a fifth of the run's time.
        batch: Rows of the larger of the two timed batch sizes, at least 1; the other size is 1.
        threads: CPU threads of the runtime, at least 1.
        parity: Number of texts, at least 1, on which every exported model is compared with the original.
    """

    texts: int = 128
    rounds: int = 8
    interval: float = 0.05
    seconds: float = 120.0
    batch: int = 32
    threads: int = 1
    parity: int = 256

    def __post_init__(self) -> None:
        for name in ("texts", "rounds", "batch", "threads", "parity"):
            if getattr(self, name) < 1:
                raise InputError(f"measure.{name}: expected at least 1, found {getattr(self, name)}")
        if self.interval <= 0:
            raise InputError(f"measure.interval: expected more than 0, found {self.interval}")
        if self.seconds < 0:
            raise InputError(f"measure.seconds: expected at least 0, found {self.seconds}")


@dataclass(frozen=True)
class GeneralConfig:
    """Distillation on plain text before the task, from the teacher before its own fine-tuning.

    Args:
        data: Text to train on: a txt file, a folder of them, or a table, as in `data.path`; empty disables this phase.
        text: Column of a table that contains the text; `text` if omitted.
        length: Tokens per block; texts are concatenated and split into blocks of this length.
        blocks: Maximum number of blocks, from texts selected by the seed; 0 uses all.
        loss: Loss terms of this phase. hidden, attention and relations need no head; kl and ce, on the masked tokens,
            need a teacher with a masked-language-modelling head.
        train: Optimizer, schedule and training loop of this phase.
        masking: Which tokens are masked, for kl and ce.
        progressive_share: Share of the steps, from 0 to 1, in which the student's layers are trained one after another
            (MobileBERT); 0 trains all layers together.
    """

    data: str = ""
    text: str | None = None
    length: int = 128
    blocks: int = 0
    loss: LossConfig = field(default_factory=lambda: LossConfig(kl=0, hidden=1))
    train: TrainConfig = field(default_factory=lambda: TrainConfig(epochs=1))
    masking: MaskConfig = field(default_factory=MaskConfig)
    progressive_share: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.progressive_share <= 1:
            raise InputError(f"general.progressive_share: expected a share from 0 to 1, found {self.progressive_share}")
        if self.blocks < 0:
            raise InputError(f"general.blocks: expected at least 0, found {self.blocks}")


@dataclass(frozen=True)
class DistillConfig:
    """Settings of `python -m pipelines.distill`.

    Args:
        output: Folder that everything is written to.
        teacher: The model to learn from.
        teacher_train: How the teacher is trained on the task, if it needs to be.
        student: The model to train.
        general: Distillation on plain text before the distillation on the task.
        budget: Speed to which the student is pruned, measured on this machine; without it, the student is built
            according to `student`.
        prune: How the student is pruned.
        sparsity: Which weights are set to zero while the student trains.
        quantize: Quantization of the final student, and how it is trained for it.
        export: Formats in which the student is exported in addition to its checkpoint, separated by commas: onnx
            (standard operators; causal language models also get onnx-decoder, with a key-value cache), onnxruntime
            (operators fused for its CPU kernels), openvino, executorch, litert, numpy (students without attention),
            model2vec, static-embedding (static students), torchao or compressed-tensors (quantized students).
        data: The data set.
        clean: Cleaning of the data before anything is trained on it; none if `steps` is empty.
        augment: Synthetic examples for the student; none if `kinds` is empty.
        select: Selection of the rows that the student is trained on; all if `method` is empty.
        task: text-classification (one class per text), multi-label, regression, token-classification,
            question-answering, sentence-embedding, masked-lm, causal-lm or chat. auto infers the task from the
            teacher's head, or else from the columns of the data.
        masking: Which tokens are masked; for masked-lm.
        chat: Which parts of conversations the student is trained on; for chat.
        sequences: Training conversations whose answers the teacher generates before training; none if share is 0.
        cross_tokenizer: How a causal-lm or masked-lm student with its own tokenizer is compared with the teacher; such
            a student must be a checkpoint.
        on_policy: Training of a causal-lm or chat student on text that it generates itself; none if share is 0.
        keep: What is cached of a language model teacher's output: signals (sampled, topk or logits), draws, k and step.
            For other tasks the loss determines everything except dtype and compression. The temperature is always
            that of the loss; layers, vectors and new_tokens are for `python -m pipelines.cache write` alone.
        loss: Loss terms that the student is trained on.
        train: Optimizer, schedule and training loop of the student.
        attention_free_train: Optimizer, schedule and training loop of the students in `student.attention_free`.
        fit_class_biases: Add a bias to the logit of each class, fitted to the validation split, in the deployed
            students and in the teacher that they are compared with; for text-classification and token-classification.
        sampling: Which rows the student trains on in each epoch.
        machine: Hardware, processes, precision and logging.
        outer: How replicas that train independently are averaged; for strategies local-sgd and diloco.
        measure: How speed is measured.
        seed: Seed of splits, initial weights, data order and dropout, from 0 to 4294967295.
        until: Last stage to run: general, teacher, cache, distill, or report for all stages. The same command without
            it continues from there.
        dry_run: Print the plan and change nothing.
        predict: With `dry_run`, also predict the memory and time of the stages by running them on a sample of the data
            in a temporary folder (one process only).
    """

    output: str = ""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    teacher_train: TrainConfig = field(default_factory=lambda: TrainConfig(epochs=3, batch_size=16))
    student: StudentConfig = field(default_factory=StudentConfig)
    general: GeneralConfig = field(default_factory=GeneralConfig)
    budget: Budget = field(default_factory=Budget)
    prune: PruneConfig = field(default_factory=PruneConfig)
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    sparsity: SparsityConfig = field(default_factory=SparsityConfig)
    export: str = "onnx,onnxruntime"
    data: DataConfig = field(default_factory=DataConfig)
    clean: CleanConfig = field(default_factory=CleanConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    select: SelectConfig = field(default_factory=SelectConfig)
    task: TaskName = "auto"
    masking: MaskConfig = field(default_factory=MaskConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    on_policy: OnPolicyConfig = field(default_factory=lambda: OnPolicyConfig(share=0))
    sequences: SequencesConfig = field(default_factory=SequencesConfig)
    cross_tokenizer: CrossTokenizerConfig = field(default_factory=CrossTokenizerConfig)
    keep: KeepConfig = field(default_factory=KeepConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    attention_free_train: TrainConfig = field(
        default_factory=lambda: TrainConfig(epochs=20, batch_size=128, dropout=0.2)
    )
    fit_class_biases: bool = False
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    seed: int = 0
    until: Literal["general", "teacher", "cache", "distill", "report"] = "report"
    dry_run: bool = False
    predict: bool = True

    def __post_init__(self) -> None:
        for name, value in (("output", self.output), ("teacher", self.teacher.model), ("data", self.data.path)):
            if not value:
                raise InputError(f"--{name}: missing; see --help for examples")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed: expected 0 to {2**32 - 1}, found {self.seed}")
