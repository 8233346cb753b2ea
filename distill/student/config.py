"""Settings of the student."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class StudentConfig:
    """The student to train.

    Args:
        spec: A hub id or folder; a preset (distilbert: every second layer; half: half of every width; tinybert4,
            tinybert6, minilm-l6-h384: sized relative to the teacher as these models are to BERT-base; mobilebert,
            mobilebert-tiny: bottleneck blocks; inverted-bottleneck: a teacher for these; static, cnn, gru: token
            embeddings without attention; teacher: the entire teacher); sizes such as `layers=2`, `layers=0,2,5` or
            `layers=3,hidden=192,heads=6,ffn=768`, also after a preset; `fresh` before them for random weights; `norm=`
            layernorm, rmsnorm, nonorm or batchnorm among the sizes for another normalization; for bottleneck blocks
            also `inner=` and `stacks=`, for students without attention `pooling=`, `ngrams=`, `kernel=` and
            `positions=`. If omitted, distilbert, or teacher if a budget determines the pruning.
        layout: Layout on the processes: replicated, zero1, zero2, fsdp=N, hsdp=RxS, tp=N, fsdp=N,tp=M, dp=N,tp=M, pp=N,
            pp=N,dp=M; for long texts cp=N, dp=N,cp=M, fsdp=N,cp=M; auto is replicated where training either model takes
            at most half of a process's memory, otherwise that of the fastest pair as `pipelines.plan` predicts it. N,
            M, R and S are numbers of processes, see docs/howto/distributed.md.
        trained: The student is already trained and is used unchanged; `spec` is then teacher or a checkpoint.
        offload: With FSDP, keep weights, gradients and optimizer state in CPU memory.
        attention_free: Students without attention to train as well, as specs separated by semicolons, such as
            `static;cnn,hidden=128`; if omitted with `budget.frontier`, several of each kind that can do the task.
        pipeline_split: How layers are divided among pipeline stages: size minimizes the parameters of the largest; time
            minimizes the time of the slowest one, as measured on its parts.
    """

    spec: str = ""
    layout: str = "auto"
    trained: bool = False
    offload: bool = False
    attention_free: str = ""
    pipeline_split: Literal["size", "time"] = "size"
