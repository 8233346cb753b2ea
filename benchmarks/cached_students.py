"""Students of a small language model, taught by the dense teacher, by sampled cached signals, or by labels alone.

    python -m benchmarks.small_lm --config configs/small-lm.yaml --output runs/small-lm
    python -m benchmarks.cached_students --lm runs/small-lm --output runs/cached-students

Every way trains the same students on the same batches in the same order; only the target differs. A student has the
teacher's embeddings and head, frozen or not, and layers of its own whose first weights the seed decides. A run that is
already in the output's results.jsonl is not made again, so ways, seeds and steps can be given in several calls.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.kept import keep_to
from benchmarks.small_lm import mean_nats
from distill.cache import CacheReader, Identity, Sampled, TopK, write_cache
from distill.cache.samples import samples_of
from distill.data.batches.batches import TrainBatches
from distill.data.batches.token_blocks import LanguageBlocks
from distill.losses.compose import distribution_loss, weighted_sum
from distill.losses.config import LossConfig
from distill.teacher.fingerprint import weights_fingerprint
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines.runs.console import Console

WAYS = ("dense", "sampled", "topk", "labels")
BATCH = 8
LEARNING_RATE = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", default="runs/small-lm")
    parser.add_argument("--output", default="runs/cached-students")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["dense", "sampled", "labels"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--draws", type=int, default=13)
    parser.add_argument("--k", type=int, default=12)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--frozen", action="store_true", help="leave the teacher's embeddings and head as they are")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    console, output = Console(), Path(given.output)
    keep_to(output, given, free=("ways", "seeds", "steps"))
    teacher = LlamaForCausalLM.from_pretrained(Path(given.lm) / "model").eval()
    blocks = {name: np.load(Path(given.lm) / f"{name}.npy") for name in ("train", "dev")}
    data = LanguageBlocks([row.astype(np.int64) for row in blocks["train"][: given.steps * BATCH]])
    for way in given.ways:
        seeds = [seed for seed in given.seeds if (way, seed, given.steps) not in done(output)]
        if seeds:
            results = students_of(given, way, seeds, teacher, data, blocks["dev"][:400], output, console)
            with (output / "results.jsonl").open("a") as file:
                file.writelines(json.dumps(result) + "\n" for result in results)
    show(console, output, given.steps)


def done(output: Path) -> dict[tuple[str, int, int], dict[str, Any]]:
    file = output / "results.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {(line["way"], line["seed"], line["steps"]): line for line in lines}


def students_of(
    given: argparse.Namespace,
    way: str,
    seeds: list[int],
    teacher: LlamaForCausalLM,
    data: LanguageBlocks,
    dev: np.ndarray,
    output: Path,
    console: Console,
) -> list[dict[str, Any]]:
    """Trains a student a seed, side by side so that the teacher is asked once a batch, and measures on unseen text."""
    signals: Any = None
    if way == "dense":
        signals = exact(OnlineTeacher(teacher))
    elif way in ("sampled", "topk"):
        signals = cached(given, way, teacher, data, output, console)
    loss = LossConfig(kl=0, ce=1) if way == "labels" else LossConfig(kl=1, temperature=1)
    modules = [DistillationModule(new_student(given, seed, teacher), loss=loss, train=TrainConfig()) for seed in seeds]
    seconds = train(modules, TrainBatches(data, BATCH, 0, seed=0, signals=signals), given.steps, way, console)
    return [
        {
            "way": way,
            "seed": seed,
            "steps": given.steps,
            "dev_nats": mean_nats(module.student, dev),
            "dev_kl": mean_kl(module.student, teacher, dev),
            "seconds": seconds / len(seeds),
            "trained": module.student.num_parameters(only_trainable=True),
        }
        for seed, module in zip(seeds, modules, strict=True)
    ]


def new_student(given: argparse.Namespace, seed: int, teacher: LlamaForCausalLM) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    student = LlamaForCausalLM(LlamaConfig(**teacher.config.to_dict() | {"num_hidden_layers": given.layers}))
    student.get_input_embeddings().load_state_dict(teacher.get_input_embeddings().state_dict())
    student.get_output_embeddings().load_state_dict(teacher.get_output_embeddings().state_dict())
    student.get_input_embeddings().requires_grad_(not given.frozen)
    student.get_output_embeddings().requires_grad_(not given.frozen)
    return student.train()


def exact(teacher: OnlineTeacher) -> Any:
    """The teacher in float32, as the cache's was, though the student trains in bfloat16."""

    def ask(batch: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return teacher(batch)

    return ask


def cached(
    given: argparse.Namespace,
    way: str,
    teacher: LlamaForCausalLM,
    data: LanguageBlocks,
    output: Path,
    console: Console,
) -> CacheReader:
    width = teacher.config.vocab_size
    signal = Sampled(width, draws=given.draws) if way == "sampled" else TopK(width, k=given.k)
    identity = Identity(weights_fingerprint(teacher), "small-lm", (signal,))
    folder, samples = output / f"cache-{way}", samples_of(data, 0)
    with console.track("cache: asking the teacher", len(samples)) as advance:
        write_cache(folder, identity, samples, OnlineTeacher(teacher), on_progress=advance)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    console.say(f"cache of {signal}: {size / samples.lengths.sum():.2f} bytes a token, all files counted")
    return CacheReader(folder, identity)


def train(
    modules: list[DistillationModule],
    batches: TrainBatches,
    steps: int,
    label: str,
    console: Console,
    rate: float = LEARNING_RATE,
) -> float:
    """AdamW, warm-up and cosine, products in bfloat16; returns the seconds it took."""
    settings = {"lr": rate, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    optimizers = [
        torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], **settings) for module in modules
    ]  # type: ignore[arg-type]
    start, step = time.perf_counter(), 0
    with console.track(label, steps, "steps") as advance:
        while step < steps:
            for batch in batches:
                for module, optimizer in zip(modules, optimizers, strict=True):
                    for group in optimizer.param_groups:
                        group["lr"] = rate * min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * step / steps))
                    with torch.autocast("cpu", torch.bfloat16):
                        value = weighted_sum(module.loss, module.terms(batch))
                    value.backward()
                    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                advance(1, f"loss {value.item():.3f}")
                step += 1
                if step == steps:
                    break
    return time.perf_counter() - start


@torch.inference_mode()
def mean_kl(student: LlamaForCausalLM, teacher: LlamaForCausalLM, blocks: np.ndarray) -> float:
    """Mean KL(teacher, student) in nats a token; blocks [blocks, length]."""
    student.eval()
    values = []
    for ids in torch.from_numpy(blocks).long().split(1):  # each counts alike
        dense = {"logits": teacher(ids).logits.flatten(0, 1)}
        values.append(distribution_loss(student(ids).logits.flatten(0, 1), dense, 1.0))
    return torch.stack(values).mean().item()


def show(console: Console, output: Path, steps: int) -> None:
    rows = []
    for way in WAYS:
        found = [line for (w, _, s), line in done(output).items() if w == way and s == steps]
        if found:
            columns = [[line[name] for line in found] for name in ("dev_nats", "dev_kl", "seconds")]
            rows.append((way, str(len(found)), *(f"{statistics.mean(c):.4f} ± {spread(c):.4f}" for c in columns)))
    console.table(f"Students after {steps} steps", ("taught by", "seeds", "dev nats", "dev KL", "seconds"), rows)


def spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


if __name__ == "__main__":
    main()
