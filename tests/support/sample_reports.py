"""Sample reports of one student and of a family, and parsers for the rendered pages and cards."""

import random
from html.parser import HTMLParser

import yaml

VOID = {"meta", "link", "br", "hr", "img", "input"}


def entry(name, runtime, score, params, size, ms, ratio, agreement):
    def describe_latency(batch, best):
        times = {"median_ms": best * 1.1, "p10_ms": best * 1.03, "p90_ms": best * 1.31, "best_ms": best}
        return {"batch": batch, "length": 14, "threads": 1, "repeats": 320} | times

    speedup = {"vs_teacher_pytorch": ratio * 1.1, "vs_teacher_same_runtime": ratio}
    parity = {"rows": 256, "max_difference": 1.4e-6, "mean_difference": 1e-7, "agreement": 1.0}
    return {
        "name": name,
        "stage": "teacher" if name == "teacher" else "distill",
        "path": f"runs/x/{name}/{runtime}",
        "runtime": runtime,
        "precision": "fp32",
        "score": score,
        "params": params,
        "bytes": size,
        "latency": describe_latency(1, ms),
        "latency_batched": describe_latency(32, ms * 19),
        "speedup": speedup,
        "speedup_batched": speedup,
        "agreement_with_teacher": agreement,
        "parity": None if runtime == "pytorch" else parity,
    }


def sample_report():
    """Returns a report of two models on two runtimes."""
    return {
        "task": "text-classification",
        "metric": "accuracy",
        "seed": 7,
        "license": None,
        "data": {
            "path": "examples/data/banking77",
            "train": 9003,
            "validation": 1000,
            "test": 3080,
            "unlabelled": 0,
            "classes": 77,
            "test_texts_also_in_train": 29,
            "truncated": 0,
            "remarks": ["test: 29 of 3,080 texts also occur in train, and stay in both"],
        },
        "models": [
            entry("teacher", "pytorch", 0.9305, 22713221, 91_000_000, 9.5, 1.0, 1.0),
            entry("teacher", "onnxruntime", 0.9305, 22713221, 91_400_000, 4.5, 1.0, 1.0),
            entry("student", "pytorch", 0.9154, 4_800_077, 19_300_000, 3.6, 2.64, 0.9512),
            entry("student", "onnxruntime", 0.9154, 4_800_077, 19_500_000, 1.25, 3.6, 0.9512),
        ],
        "stages": [stage("teacher", True), stage("distill", False)],
        "config": {"teacher": {"model": "minilm"}, "data": {"max_length": 64}, "loss": {"kl": 1.0, "ce": 0.5}},
        "machine": {"processor": "Xeon", "cores": 2, "platform": "Linux-6.1-x86_64", "threads": 2},
        "versions": {"python": "3.11.9", "torch": "2.13.0", "onnxruntime": "1.23.0"},
        "commit": "abc1234",
        "created": "2026-11-21T07:00:00+00:00",
    }


def stage(name, skipped):
    folder = f"runs/x/{name}/0a1b2c3d4e5f"
    times = {"wall_seconds": 1234.56, "peak_memory_bytes": 1_260_000_000}
    return {"name": name, "folder": folder, "resumed": False, "skipped": skipped, "metrics": {}} | times


def without_teacher(report):
    report["models"] = report["models"][3:]
    for model in report["models"]:
        model |= {"speedup": None, "speedup_batched": None, "agreement_with_teacher": None}
    return report


def sample_curves():
    """Returns the curves of a stage with one loss term and of a stage with two."""
    draw = random.Random(0)
    teacher, student = [], []
    for step in range(0, 1700, 25):
        ce, kl = (0.1 + 4 * 0.5 ** (step / scale) * draw.uniform(0.8, 1.2) for scale in (200, 300))
        teacher.append({"step": step, "train/loss": ce, "train/ce": ce, "train/ce_weight": 1.0, "lr": 1e-4})
        student.append(
            {"step": step, "train/loss": kl + ce / 2, "train/kl": kl, "train/ce": ce, "train/kl_weight": 1.0}
        )
        student[-1] |= {"train/ce_weight": 0.5, "train/kl_gradient_share": 0.7, "train/ce_gradient_share": 0.3}
    for number in range(1, 7):
        student.append({"step": 281 * number, "val/score": 0.92 - 0.3 * 0.4**number, "val/loss": 0.3})
    return {"teacher": teacher, "distill": student}


STUDENTS = {  # target: (fp32 accuracy, int8 accuracy, parameters, fp32 and int8 bytes, fp32 and int8 speed-up)
    "2x": (0.9292, 0.9286, 12_900_000, 52_100_000, 13_400_000, 1.31, 2.06),
    "4x": (0.9240, 0.9211, 7_900_000, 32_000_000, 8_300_000, 2.14, 4.03),
    "8x": (0.9136, 0.9088, 4_900_000, 19_900_000, 5_200_000, 3.97, 8.11),
    "15x": (0.8904, 0.8811, 3_070_000, 12_600_000, 3_430_000, 6.80, 14.21),
}
SIZES = {
    "2x": {"hidden": 384, "heads": [12, 9, 11, 10, 12, 12], "ffn": [640, 608, 704, 512, 576, 448]},
    "4x": {"hidden": 288, "heads": [12, 8, 11, 12], "ffn": [352, 288, 320, 224]},
    "8x": {"hidden": 192, "heads": [10, 9, 12], "ffn": [256, 224, 192]},
    "15x": {"hidden": 192, "heads": [9], "ffn": [96]},
}
WHOLE = {"hidden": 384, "heads": [12] * 6, "ffn": [1536] * 6}


def pruned(name, requested, figures, code="modeling_pruned.py"):
    """Returns the entries of a student: PyTorch, ONNX Runtime, and ONNX Runtime in int8."""
    whole, rounded, params, size, small, ratio, fast = figures
    entries = [
        entry(name, "pytorch", whole, params, size, 9.5 / ratio, ratio, 0.96),
        entry(name, "onnxruntime", whole, params, size, 4.5 / ratio, ratio, 0.96),
        entry(name, "onnxruntime", rounded, params, small, 4.5 / fast, fast, 0.95) | {"precision": "int8"},
    ]
    targets = ("huggingface", "onnxruntime", "onnxruntime-int8")
    for each, target in zip(entries, targets, strict=True):
        each |= {"stage": f"distill-{requested}", "path": f"runs/x/{name}/{target}"} | ({"code": code} if code else {})
    entries[2]["target"] = target_speed(requested, fast)
    return entries


def target_speed(requested, speedup):
    """Returns the evaluation of a student with a requested speed-up."""

    def estimate(value):
        return {"value": value, "low": 0.99 * value, "high": 1.01 * value}

    wanted = float(requested.removesuffix("x"))
    return {
        "target": {"name": requested, "speedup": wanted, "latency_ms": 0.0, "texts_per_second": 0.0},
        "length": 0,
        "speedup": estimate(speedup),
        "milliseconds": estimate(4.5 / speedup),
        "share": estimate(speedup / wanted),
        "control": estimate(1.004),
        "texts": 144,
        "rounds": 8,
        "settled": True,
        "other_load": 0.02,
        "retries": 0,
        "reason": "",
    }


def pruned_student_details(name, requested, figures, score):
    trials = [
        {"label": "width 384, layers 5:12x608", "divergences": [3.167, 2.339]},
        {"label": "width 192, layers 0:9x96, 4:8x96, 5:12x32", "divergences": [2.607, 2.013, 1.341, 0.957, 0.659]},
        {"label": "width 288, layers 0:12x288, 5:12x128", "divergences": [2.604, 1.818, 1.285, 0.851, 0.893]},
    ]
    speedup = float(requested.removesuffix("x"))
    fast = {"label": "", "teacher_ms": 4.6, "best_ms": 4.6 / (speedup * 1.01), "bytes": figures[4]}
    return {
        "name": name,
        "target": {"name": requested, "speedup": speedup, "latency_ms": 0.0},
        "sizes": SIZES[requested],
        "predicted_ms": 4.5 / (speedup * 0.98),
        "predicted_speedup": speedup * 0.98,
        "measurements": [
            fast | {"speedup": speedup * share, "pooled_speedup": speedup * share} for share in (0.8, 1.01)
        ],
        "trials": trials,
        "teacher_score": 0.9359,
        "score": score,
        "params": figures[2],
    }


def family_report(names=tuple(STUDENTS), min_score_share=0.98):
    report = sample_report()
    folder_names = {name: f"student-{name}" if len(names) > 1 else "student" for name in names}
    report["models"] = report["models"][:2] + [e for n in names for e in pruned(folder_names[n], n, STUDENTS[n])]
    report["stages"] += [stage("start", False)] + [
        stage(f"{kind}-{n}", False) for n in names for kind in ("shape", "distill")
    ]
    report["config"] |= {"budget": {"speedup": ",".join(names), "min_score_share": min_score_share}}
    scores = {"2x": 0.9339, "4x": 0.9299, "8x": 0.9198, "15x": 0.8978}
    report["pruning"] = {
        "conditions": {"runtime": "onnxruntime", "precision": "int8", "batch": 1, "length": 0, "threads": 1},
        "teacher": {"tokens": 30522},
        "start": {"tokens": 11024, "params": 15_255_629, "student": "teacher", "sizes": WHOLE},
        "students": [pruned_student_details(folder_names[n], n, STUDENTS[n], scores[n]) for n in names],
    }
    return report


def family_curves():
    """Returns curves with a student whose layers were matched in each step while its units were masked."""
    curves, rows = sample_curves(), []
    for step in range(0, 1700, 25):
        first, second = (2 if step < 600 else 3), (4 if step < 300 else 5)
        rows.append({"step": step, "train/loss": 1.0 / (1 + step), "train/kl": 0.6 / (1 + step), "train/hidden": 0.3})
        rows[-1] |= {"train/matched_1": first, "train/matched_2": second, "train/matched_10": 6}
        rows[-1] |= {"train/cost": 1 - step / 2000, "train/scheduled_cost": max(0.2, 1 - step / 1800)}
    return curves | {"distill-15x": rows}


class Page(HTMLParser):
    """A parser that checks that every tag is closed, and collects tags, attributes and text."""

    def __init__(self, source):
        super().__init__()
        self.open, self.attributes, self.text, self.tags = [], [], "", []
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def front_matter(card):
    assert card.startswith("---\n")
    return yaml.safe_load(card.split("---\n")[1])


def tiny_model(folder):
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "my", "card", "pin", "how", "."]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    names = {0: "arrival", 1: "pin"}
    config = BertConfig(vocab_size=len(vocabulary), id2label=names, label2id={v: k for k, v in names.items()}, **sizes)
    return BertForSequenceClassification(config).eval(), BertTokenizerFast(str(folder / "vocab.txt"))
