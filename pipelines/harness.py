"""Evaluation of causal checkpoints on tasks of the language model evaluation harness (`lm-eval`, an extra).

python -m pipelines.harness --model runs/lm/student --tasks hellaswag,arc_easy --output runs/harness
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distill.checkpoint.checkpoint import Checkpoint, open_checkpoint
from distill.errors import InputError
from pipelines.runs import cli
from pipelines.runs.console import Console
from pipelines.runs.output import check_path
from pipelines.settings.places import check_local, open_local

RESULT = "harness.json"
EXAMPLES = """\
  python -m pipelines.harness --model runs/lm/student --tasks hellaswag,arc_easy --output runs/harness
  python -m pipelines.harness --model runs/lm/student --teacher TEACHER --tasks mine --include my_tasks/ \\
      --output runs/harness"""


@dataclass(frozen=True)
class HarnessConfig:
    """Settings of `python -m pipelines.harness`.

    Args:
        model: Checkpoint of a causal language model: a local folder or a hub id. It runs on a GPU if there is one;
            CUDA_VISIBLE_DEVICES= in front of the command keeps it on the CPU.
        teacher: Checkpoint to compare with: a local folder or a hub id; if omitted, only the model is evaluated.
        tasks: Names of the harness's tasks, separated by commas.
        include: Folder with YAML files of additional tasks.
        output: Folder that harness.json is written to.
        limit: Maximum number of examples per task; 0 uses all.
        fewshot: Number of examples in each prompt; -1 uses each task's default.
        batch_size: Number of rows per batch.
    """

    model: str = ""
    teacher: str = ""
    tasks: str = ""
    include: str = ""
    output: str = ""
    limit: int = 0
    fewshot: int = -1
    batch_size: int = 8

    def __post_init__(self) -> None:
        for name in ("model", "tasks", "output"):
            if not getattr(self, name):
                raise InputError(f"--{name}: missing; see --help for examples")
        check_local("output", self.output)
        for name, least in (("limit", 0), ("fewshot", -1), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise InputError(f"--{name}: expected at least {least}, found {getattr(self, name)}")
        if find_spec("lm_eval") is None:
            raise InputError("lm-eval: not installed: no task could be run; pip install -e '.[lm-eval]'")
        if self.include and not Path(self.include).is_dir():
            raise InputError(
                f"--include {self.include!r}: expected a folder with YAML files of tasks, found none there"
            )


def main(argv: Sequence[str]) -> None:
    """Runs the command with these arguments."""
    config = cli.parse(
        HarnessConfig,
        argv,
        prog="pipelines.harness",
        about="Evaluate a causal language model on lm-eval tasks, alongside its teacher if one is given.",
        examples=EXAMPLES,
        short={},
    )
    console = Console()
    output = Path(config.output)
    check_path(output)
    models = [*([("teacher", config.teacher)] if config.teacher else []), ("model", config.model)]
    for role, name in models:
        open_local(name, role)
    results = {role: evaluate_model(config, open_checkpoint(name, role)) for role, name in models}
    rows = [
        (task, metric, *(f"{results[role][task][metric]:.4f}" for role in results))
        for task, metrics in results["model"].items()
        for metric in metrics
    ]
    console.table("Harness", ("task", "metric", *results), rows)
    output.mkdir(parents=True, exist_ok=True)
    (output / RESULT).write_text(json.dumps(results, indent=1))
    console.say(f"numbers: {output / RESULT}")


def evaluate_model(config: HarnessConfig, checkpoint: Checkpoint) -> dict[str, dict[str, float]]:
    """Returns task -> metric -> value.

    Raises:
        InputError: The model has no language-modelling head, the harness doesn't have the task, or the task's data are
            unavailable.
    """
    from datasets.exceptions import DatasetNotFoundError
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from distill.checkpoint.custom_models import load_model_folder
    from distill.tasks.language import CausalLM
    from pipelines.runs.strategies.by_layout import choose_device
    from pipelines.settings.tokenizers import load_checked_tokenizer

    CausalLM.check(checkpoint.config, checkpoint.name)
    CausalLM(()).check_weights(checkpoint.folder, checkpoint.role)
    manager = TaskManager(include_path=config.include or None)
    names = [name.strip() for name in config.tasks.split(",") if name.strip()]
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise InputError(
            f"--tasks: expected names of lm-eval's tasks, found {', '.join(unknown)}; `lm-eval ls tasks` lists them, "
            "and --include adds a folder of your own"
        )
    tokenizer = load_checked_tokenizer(checkpoint, CausalLM(()))
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"{checkpoint.role} {checkpoint.name!r}: expected a tokenizer with an eos token, found none: lm-eval "
            "starts every text with it"
        )
    model = load_model_folder(checkpoint.folder)
    model.to(choose_device("auto"))  # type: ignore[arg-type]  # lm-eval leaves it where it is
    adapter = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=config.batch_size)
    try:
        result: Any = simple_evaluate(
            adapter,
            tasks=names,
            task_manager=manager,
            num_fewshot=None if config.fewshot < 0 else config.fewshot,
            limit=config.limit or None,
            bootstrap_iters=0,
            log_samples=False,
        )
    except (ConnectionError, DatasetNotFoundError) as error:
        raise InputError(f"--tasks {config.tasks}: expected their data, but it is unavailable: {error}") from error
    return {
        task: {
            metric.removesuffix(",none"): float(value)
            for metric, value in metrics.items()
            if isinstance(value, int | float) and "stderr" not in metric and metric != "sample_len"
        }
        for task, metrics in result["results"].items()
    }


if __name__ == "__main__":
    cli.run(main)
