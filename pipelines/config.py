"""Settings of the commands: frozen dataclasses, no torch behind them, so that --help is quick."""

from dataclasses import dataclass, field, replace
from typing import Literal

from compress.export.targets import by_scheme, check_float, check_installed, formats_of
from compress.prune.budget import Budget
from compress.prune.config import PruneConfig
from compress.quantize.config import QuantizeConfig
from compress.sparsity.recipe import SparseConfig
from distill.data.chat_config import ChatConfig
from distill.data.config import DataConfig
from distill.data.mask_config import MaskConfig
from distill.errors import InputError
from distill.losses.across_config import AcrossConfig
from distill.losses.config import MAPS, LossConfig
from distill.onpolicy_config import OnPolicyConfig
from distill.sequences_config import SequencesConfig
from distill.student.spec import StudentConfig, is_relative
from distill.teacher.config import TeacherConfig
from distill.training import TrainConfig
from pipelines.cache_config import LONGEST, KeepConfig
from pipelines.schemes import check_processor

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
    """Where and how training runs.

    Args:
        accelerator: cpu, gpu (or cuda) or mps; auto takes what is there.
        devices: Processes on this machine, a GPU each where there are GPUs; under torchrun it says how many.
        restarts: How often all processes are started again after one died.
        timeout: Seconds that a process waits in a collective for the others before the run ends.
        strategy: Leaves what is trained to DeepSpeed: deepspeed_stage_1, 2 or 3, with or without _offload, or a JSON
            file of its settings; empty lays it out as student.layout says.
        compress: What copies of a student send their gradients as: whole, fp16, bf16, or powersgd (rank 4).
        bucket_mb: Gradients that copies send together, while the backward pass goes on.
        prefetch: Layers whose weights FSDP gathers ahead of the one at work.
        precision: 32, bf16-mixed, 16-mixed (GPUs), fp8 (GPUs that have it), bf16-stochastic (weights in bfloat16,
            updates rounded by chance) or int8-mixed (products in 8 bits, a prototype); auto measures a few steps of the
            first four, as far as they can be here, and takes the fastest.
        threads: CPU threads for training; 0 leaves it to PyTorch.
        wandb: Also log to Weights & Biases.
        log_every: Steps between two rows of the logs.
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
    """How speed is measured.

    Args:
        texts: Texts of the test split that are timed, drawn by the seed.
        rounds: Times each of them is run.
        batch: Rows of the larger of the two batch sizes; the other is 1.
        threads: Threads of the runtime.
        parity: Texts on which every exported artefact is compared with the model.
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
    """Distillation on plain text, before the task: from the teacher as it came, not yet fine-tuned.

    Args:
        data: Text to learn on: txt files or a table, see `python -m pipelines.cache`; empty leaves this phase out.
        text: Column of a table; `text` when left out.
        length: Tokens of a block; texts are joined and cut into blocks.
        blocks: Most of them, of texts drawn by the seed; 0 takes all.
        loss: What is learnt. hidden, attention and relations need no head; kl and ce, the words behind the masks, need
            a teacher with a masked-language head.
        train: How.
        masking: Which words are hidden, for kl and ce.
        progressive: Share of the steps in which the student's layers learn one after another (MobileBERT); 0: together.
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
        output: Folder for everything the run writes.
        teacher: The model to learn from.
        teacher_train: How the teacher is trained on the task, where it has to be.
        student: The model to train.
        general: Distillation on plain text before that on the task.
        budget: A speed that the student is pruned to, measured here; without one it is built as `student` says.
        prune: How it is pruned.
        sparsity: Which weights become zero while the student trains.
        quantize: In how many bits it computes in the end, and how it is trained for that.
        export: Formats that the student is handed over in, beside its checkpoint: onnx, onnxruntime, openvino,
            executorch, litert, torchao, compressed-tensors, separated by commas.
        data: The texts.
        task: What they are about: text-classification (one class a text), multi-label, regression,
            token-classification, question-answering, sentence-embedding, masked-lm, causal-lm or chat; auto goes by the
            teacher's head, else by the data's columns.
        masking: Which words are hidden, of masked-lm.
        chat: What of conversations is learnt.
        sequences: Share of the conversations whose answers the teacher writes before the training; 0 for none.
        across: How a causal or masked student with another tokenizer, a checkpoint of its own, is compared with the
            teacher.
        on_policy: Share of the steps in which a causal student learns from what it writes itself; 0 for none.
        keep: What is cached of a language teacher's words (signals: sampled, topk or logits); of other tasks the loss
            decides all but dtype and compression. It is cached at the temperature of the loss.
        loss: What the student learns.
        train: How the student is trained.
        machine: Where it runs.
        measure: How speed is measured.
        seed: Seed of splits, initial weights, order and dropout.
        until: The last stage that runs: general, teacher, cache, distill, or report for all of them. The same command
            without it goes on from there.
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
        check_processor(self)
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
        """
        Raises:
            InputError: A budget of which something would be passed over.
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
