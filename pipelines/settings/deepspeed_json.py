"""DeepSpeed's settings, read and checked without importing DeepSpeed or torch."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from distill.errors import InputError

STAGE = re.compile(r"deepspeed_stage_([123])(_offload)?")
FORMS = "deepspeed_stage_1, 2 or 3, each with or without _offload, or a JSON file of DeepSpeed's settings"
# Keys of DeepSpeed's file that would conflict with this project's own settings -> those settings.
OURS = {
    "optimizer": "--learning-rate and --train.*",
    "scheduler": "--train.schedule and --train.warmup",
    "gradient_accumulation_steps": "--train.accumulate",
    "gradient_clipping": "--train.max_grad_norm",
    "train_batch_size": "--batch-size",
    "bf16": "--precision bf16-mixed",
    "fp16": "--precision 16-mixed",
}


def check_strategy(strategy: str) -> None:
    """Checks that DeepSpeed is installed and that the strategy is a ZeRO stage or a valid file of settings.

    Raises:
        InputError: DeepSpeed isn't installed; the strategy is neither a stage nor a file; or the file contains settings
            that this project's own settings determine.
    """
    if STAGE.fullmatch(strategy) is None:
        read_deepspeed_json(strategy)
    if importlib.util.find_spec("deepspeed") is None:
        raise InputError(
            f"machine.strategy {strategy!r}: DeepSpeed isn't installed: pip install -e '.[deepspeed]', or use "
            "--student.layout zero1, zero2 or fsdp=N, which need nothing"
        )


def read_deepspeed_json(file: str) -> dict[str, Any]:
    """Returns DeepSpeed's settings from a JSON file.

    Raises:
        InputError: The file doesn't exist, can't be read or isn't a JSON object with zero_optimization; or it contains
            settings that this project's own settings determine.
    """
    where = f"machine.strategy {file!r}"
    try:
        text = Path(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{where}: expected {FORMS}; found no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{where}: expected {FORMS}; the file can't be read: {reason}") from error
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: expected JSON in the file, found other text: {error}") from error
    if not isinstance(settings, dict) or "zero_optimization" not in settings:
        raise InputError(f"{where}: expected an object with zero_optimization in it")
    for key in (key for key in OURS if key in settings):
        raise InputError(f"{where}: {key} is decided by {OURS[key]}; take it out of the file")
    return settings
