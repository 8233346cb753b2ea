"""Settings of the commands: frozen dataclasses that don't import torch, so that --help is fast."""

from dataclasses import dataclass, field, replace
from typing import Literal

from compress.export.common.targets import by_scheme, check_float, check_installed, formats_of
from compress.prune.budget import Budget
from compress.prune.config import PruneConfig
from compress.quantize.config import QuantizeConfig
from compress.sparsity.recipe import SparseConfig
from distill.data.config import DataConfig
from distill.data.masking.config import MaskConfig
from distill.data.rows.chat_config import ChatConfig
from distill.errors import InputError
from distill.losses.across_config import AcrossConfig
from distill.losses.config import MAPS, LossConfig
from distill.student.spec import StudentConfig, is_relative
from distill.teacher.config import TeacherConfig
from distill.teacher.sequences_config import SequencesConfig
from distill.train.config import TrainConfig
from distill.train.steps.on_policy_config import OnPolicyConfig
from pipelines.settings.cache_config import LONGEST, KeepConfig

TaskName = Literal[
    "auto", "text-classification", "multi-label", "regression", "token-classification", "question-answering",
    "sentence-embedding", "masked-lm", "causal-lm", "chat",
]  # fmt: skip
SHORT = {
    "teacher": "teacher.model",
    "student": "student.spec",
    "data": "data.path",
    "epochs": "train.epochs",
    "learning_rate": "train.learning_rate",
    "batch_size": "train.batch_size",
    "patience": "train.patience",
    "temperature": "loss.temperature",
    "speedup": "budget.speedup",
    "latency_ms": "budget.latency_ms",
    "max_bytes": "budget.max_bytes",
    "min_score": "budget.min_score",
    "uniform": "budget.uniform",
    "quantize": "quantize.scheme",
    "wandb": "machine.wandb",
    "precision": "machine.precision",
    "devices": "machine.devices",
    "strategy": "machine.strategy",
    "accelerator": "machine.accelerator",
    "threads": "machine.threads",
}


@dataclass(frozen=True)
class MachineConfig:
    """Hardware, processes, precision and logging of training.

    Args:
        accelerator: Device that trains: cpu, gpu (or cuda), mps, or auto, which uses what the machine has.
        devices: Number of processes on this machine, at least 1, each with its own GPU if there are GPUs; with
            torchrun, its own options determine the number.
        restarts: Number of times that all processes are restarted after one has died; above 0 only with 2 or more
            devices.
        timeout: Seconds that a process waits for the others in a collective operation before the run fails; above 0, at
            most 31536000 (one year).
        strategy: Train with DeepSpeed: deepspeed_stage_1, deepspeed_stage_2 or deepspeed_stage_3, each with or without
            _offload, or a JSON file with DeepSpeed's settings. Empty: use the layout that student.layout requests.
        compress: Format in which replicas of the student send gradients: none (uncompressed), fp16, bf16, or powersgd
            (rank 4).
        bucket_mb: Size in MiB, at least 1, of the gradient buckets that replicas send together during the backward
            pass.
        prefetch: Number of layers whose weights FSDP gathers ahead of the layer that computes; 0 or more.
        precision: Precision of training: 32, bf16-mixed, 16-mixed (GPUs only), fp8 (GPUs that support it),
            bf16-stochastic (bfloat16 weights, updates rounded stochastically) or int8-mixed (8-bit matrix products,
            experimental). auto times a few steps of each of the first four that the machine supports and uses the
            fastest.
        threads: CPU threads for training; 0 uses PyTorch's default.
        wandb: Also log to Weights & Biases: off, offline or online.
        log_every: Steps between two rows of the logs, at least 1; limited to a quarter of an epoch.
    """

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto"
    devices: int = 1
    restarts: int = 0
    timeout: float = 1800.0
    strategy: str = ""
    compress: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    bucket_mb: int = 25
    prefetch: int = 1
    precision: Literal["auto", "32", "bf16-mixed", "16-mixed", "fp8", "bf16-stochastic", "int8-mixed"] = "auto"
    threads: int = 0
    wandb: Literal["off", "offline", "online"] = "off"
    log_every: int = 25

    def __post_init__(self) -> None:
        for name, least in (
            ("devices", 1),
            ("log_every", 1),
            ("bucket_mb", 1),
            ("prefetch", 0),
            ("threads", 0),
            ("restarts", 0),
        ):
            if getattr(self, name) < least:
                raise InputError(f"machine.{name}: expected at least {least}, found {getattr(self, name)}")
        if self.restarts and self.devices == 1:
            raise InputError(
                f"machine.restarts {self.restarts}: expected machine.devices of 2 or more, found 1: one process is "
                "started by nobody who could start it again"
            )
        if not 0 < self.timeout <= LONGEST:
            raise InputError(f"machine.timeout: expected more than 0 seconds, at most {LONGEST}, found {self.timeout}")


@dataclass(frozen=True)
class MeasureConfig:
    """How speed is measured, and how exported models are compared with the original.

    Args:
        texts: Number of texts of the test split that are timed, at least 1, selected by the seed.
        rounds: Number of times that each of them is run, at least 1.
        batch: Rows of the larger of the two timed batch sizes, at least 1; the other size is 1.
        threads: CPU threads of the runtime, at least 1.
        parity: Number of texts, at least 1, on which every exported model is compared with the original.
    """

    texts: int = 64
    rounds: int = 30
    batch: int = 32
    threads: int = 1
    parity: int = 256

    def __post_init__(self) -> None:
        for name in ("texts", "rounds", "batch", "threads", "parity"):
            if getattr(self, name) < 1:
                raise InputError(f"measure.{name}: expected at least 1, found {getattr(self, name)}")


@dataclass(frozen=True)
class GeneralConfig:
    """Distillation on plain text before the task, from the teacher before its own fine-tuning.

    Args:
        data: Text to train on: txt files or a table, see `python -m pipelines.cache`; empty disables this phase.
        text: Column of a table that contains the text; `text` if omitted.
        length: Tokens per block; texts are concatenated and split into blocks of this length.
        blocks: Maximum number of blocks, from texts selected by the seed; 0 uses all.
        loss: Loss terms of this phase. hidden, attention and relations need no head; kl and ce, on the masked tokens,
            need a teacher with a masked-language-modelling head.
        train: Optimizer, schedule and training loop of this phase.
        masking: Which tokens are masked, for kl and ce.
        progressive: Share of the steps, from 0 to 1, in which the student's layers are trained one after another
            (MobileBERT); 0 trains all layers together.
    """

    data: str = ""
    text: str | None = None
    length: int = 128
    blocks: int = 0
    loss: LossConfig = field(default_factory=lambda: LossConfig(kl=0, hidden=1))
    train: TrainConfig = field(default_factory=lambda: TrainConfig(epochs=1, learning_rate=5e-4))
    masking: MaskConfig = field(default_factory=MaskConfig)
    progressive: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.progressive <= 1:
            raise InputError(f"general.progressive: expected a share from 0 to 1, found {self.progressive}")
        if self.blocks < 0:
            raise InputError(f"general.blocks: expected at least 0, found {self.blocks}")
        if not self.loss.needs_teacher:
            raise InputError(
                "general.loss: expected a term that reads the teacher, found ce alone: nothing is distilled"
            )
        if self.train.patience:
            raise InputError(
                f"general.train.patience: expected 0, found {self.train.patience}: plain text has no score to wait for"
            )
        if not self.progressive:
            return
        named = self.loss.layer_map in MAPS
        if (named and self.loss.layer_map != "uniform") or self.loss.balance or self.loss.ramps:
            raise InputError(
                "general.progressive: expected loss.layer_map uniform or pairs, no ramps and no balance, found "
                f"{self.loss.layer_map}, {self.loss.ramps or 'none'} and {self.loss.balance}: a layer that learns "
                "alone has one layer to learn from"
            )
        if self.progressive == 1 and self.loss.reads_logits:
            raise InputError(
                "general.progressive: expected less than 1 with kl or ce, found 1: they teach the whole student, after "
                "its layers"
            )
        if not (self.loss.hidden or self.loss.attention or self.loss.relations):
            raise InputError(
                "general.progressive: expected a term on layers (hidden, attention, relations), found kl alone: a "
                "layer by itself says no word"
            )


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
        quantize: Number of bits of the final student, and how the student is trained for them.
        export: Formats in which the student is exported in addition to its checkpoint, separated by commas: onnx,
            onnxruntime, openvino, executorch, litert, torchao, compressed-tensors.
        data: The data set.
        task: text-classification (one class per text), multi-label, regression, token-classification,
            question-answering, sentence-embedding, masked-lm, causal-lm or chat. auto infers the task from the
            teacher's head, or else from the columns of the data.
        masking: Which tokens are masked; for masked-lm.
        chat: Which parts of conversations the student is trained on; for chat.
        sequences: Training conversations whose answers the teacher generates before training; none if share is 0.
        across: How a causal-lm or masked-lm student with its own tokenizer is compared with the teacher; such a student
            must be a checkpoint.
        on_policy: Training of a causal-lm or chat student on text that it generates itself; none if share is 0.
        keep: What is cached of a language model teacher's output; signals: sampled, topk or logits. For other tasks the
            loss determines everything except dtype and compression. The temperature is always that of the loss.
        loss: Loss terms that the student is trained on.
        train: Optimizer, schedule and training loop of the student.
        machine: Hardware, processes, precision and logging.
        measure: How speed is measured.
        seed: Seed of splits, initial weights, data order and dropout, from 0 to 4294967295.
        until: Last stage to run: general, teacher, cache, distill, or report for all stages. The same command without
            it continues from there.
        dry_run: Print the plan and change nothing.
    """

    output: str = ""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    teacher_train: TrainConfig = field(default_factory=lambda: TrainConfig(epochs=3, learning_rate=5e-5, batch_size=16))
    student: StudentConfig = field(default_factory=StudentConfig)
    general: GeneralConfig = field(default_factory=GeneralConfig)
    budget: Budget = field(default_factory=Budget)
    prune: PruneConfig = field(default_factory=PruneConfig)
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    sparsity: SparseConfig = field(default_factory=SparseConfig)
    export: str = "onnx,onnxruntime"
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskName = "auto"
    masking: MaskConfig = field(default_factory=MaskConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    on_policy: OnPolicyConfig = field(default_factory=lambda: OnPolicyConfig(share=0))
    sequences: SequencesConfig = field(default_factory=SequencesConfig)
    across: AcrossConfig = field(default_factory=AcrossConfig)
    keep: KeepConfig = field(default_factory=KeepConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    seed: int = 0
    until: Literal["general", "teacher", "cache", "distill", "report"] = "report"
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name, value in (("output", self.output), ("teacher", self.teacher.model), ("data", self.data.path)):
            if not value:
                raise InputError(f"--{name}: missing; see --help for examples")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed: expected 0 to {2**32 - 1}, found {self.seed}")
        self.check_budget()
        if not self.student.spec:
            spec = "teacher" if self.budget.asked else "distilbert"
            object.__setattr__(self, "student", replace(self.student, spec=spec))
        if self.keep.temperature is not None or self.keep.signals not in ("auto", "sampled", "topk", "logits"):
            raise InputError(
                "keep: expected signals sampled, topk or logits and no temperature, found "
                f"{self.keep.signals} and {self.keep.temperature}: the loss says what else is read, and how soft it is"
            )
        formats = formats_of(self.export)
        if self.quantize.scheme:
            by_scheme(formats, self.quantize.scheme)
        else:
            check_float(formats, "a student without --quantize")
        check_installed(formats)
        if self.quantize.scheme and self.budget.min_score and not self.budget.asked:
            object.__setattr__(self, "quantize", replace(self.quantize, min_score=self.budget.min_score))
        if self.sparsity.asked and self.train.patience:
            raise InputError(
                f"train.patience {self.train.patience}: expected 0 with sparsity.pattern, for the weights that did "
                "best may be those of before the last zeros"
            )
        built = is_relative(self.student.spec) and self.student.spec != "teacher"
        if self.student.given and (built or not self.quantize.scheme):
            raise InputError(
                f"student.given: expected a checkpoint, or teacher, and a scheme that it is quantized by, found "
                f"{self.student.spec!r} and {self.quantize.scheme or 'none'}: there is nothing to do"
            )
        if self.general.data and (self.budget.asked or self.student.given or self.student.spec == "teacher"):
            raise InputError(
                "general.data: expected a student that is built and trained, found "
                + ("a budget, whose students are cut from the teacher" if self.budget.asked else "one that is given")
                + "; leave the general phase out, or the budget for a run on what this one makes"
            )
        cached = (self.loss.kl > 0 or self.loss.of_vectors) and self.teacher.signals == "cached"
        for name, asked, why in (
            ("budget", self.budget.asked, "a pruned student recovers"),
            ("quantize", bool(self.quantize.scheme), "a student in few bits is trained"),
        ):
            if asked and not cached:
                raise InputError(
                    f"{name}: {why} under the teacher's cached logits, so expected loss.kl above 0 and teacher.signals "
                    f"cached, found kl {self.loss.kl:g} and {self.teacher.signals}"
                )

    def check_budget(self) -> None:
        """Checks that every setting of the budget takes effect.

        Raises:
            InputError: A setting of the budget would be ignored.
        """
        budget, plain = self.budget, Budget()
        if budget.asked and self.student.given:
            raise InputError(
                f"budget: expected none for a given student, found {budget.speedup or budget.latency_ms}: it is "
                "quantized as it is, and nothing would be pruned; pipelines.prune and pipelines.distill do both"
            )
        kept = ("min_score",) if self.quantize.scheme else ()
        for name in ("max_bytes", "uniform", "min_score"):
            if getattr(budget, name) != getattr(plain, name) and not budget.asked and name not in kept:
                raise InputError(
                    f"budget.{name}: expected a speedup or a latency_ms beside it, found "
                    f"{getattr(budget, name)} alone: nothing is pruned without one"
                )
