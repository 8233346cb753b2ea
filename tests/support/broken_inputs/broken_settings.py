"""Invalid settings: flags, YAML files, specs, output paths and machines."""

from collections.abc import Callable, Iterator
from pathlib import Path

from support.broken_inputs.case import ACCEPTED, Case, Flags, Workspace


def flags(**settings: str) -> Callable[[Workspace], Flags]:
    return lambda workspace: {f"--{name.replace('__', '.')}": value for name, value in settings.items()}


def config(*contents: str | bytes, **settings: str) -> Callable[[Workspace], Flags]:
    """Passes YAML files, in order, and flags."""

    def damage(workspace: Workspace) -> Flags:
        named = [str(workspace.written(f"settings{i}.yaml", content)) for i, content in enumerate(contents)]
        return {"--config": named} | flags(**settings)(workspace)

    return damage


def file_cases() -> Iterator[Case]:
    for what, content, message in (
        ("a key twice", "seed: 1\nseed: 2\n", "seed"),
        ("a key twice in a group", "train:\n  epochs: 1\n  epochs: 2\n", "epochs"),
        ("a key at two depths", "train.epochs: 1\ntrain:\n  epochs: 2\n", r"train\.epochs"),
        ("a key in two spellings", "epochs: 1\ntrain: {epochs: 2}\n", "epochs"),
        ("a key in two spellings, dotted", "temperature: 1\nloss.temperature: 2\n", "temperature"),
        ("a key with a dash and without", "batch_size: 4\nbatch-size: 8\n", "batch.size"),
        ("a group twice", "train: {epochs: 1}\ntrain: {patience: 1}\n", "train"),
        ("an unknown key", "trian: {epochs: 1}\n", "trian"),
        ("an unknown key in a group", "train: {epoch: 1}\n", "epoch"),
        ("a key without a value", "train:\n  epochs:\n", "epochs"),
        ("a group without a value", "train:\n", "train"),
        ("a group that is a number", "train: 3\n", "train"),
        ("a setting that is a group", "seed: {a: 1}\n", "seed"),
        ("a word for a number", "seed: many\n", "seed"),
        ("a fraction for a count", "train: {epochs: 1.5}\n", "epochs"),
        ("a yes for a number", "seed: yes\n", "seed"),
        ("a list for a number", "seed: [1]\n", "seed"),
        ("a number that isn't finite", "loss: {temperature: .nan}\n", "temperature"),
        ("an endless number", "loss: {temperature: .inf}\n", "temperature"),
        ("an object of Python", "seed: !!python/object/apply:os.system ['true']\n", "YAML|tag"),
        ("an anchor that holds itself", "train: &a {epochs: *a}\n", "YAML|circular|epochs|settings0"),
        ("a group that holds itself", "train: &a\n  train: *a\n", "circular|itself|train|settings0"),
        ("groups without end", "{a: " * 3000 + "1" + "}" * 3000, "deep|settings0"),
        ("lists without end", "seed: " + "[" * 5000 + "]" * 5000, "deep|settings0"),
        ("a laugh a billion times", exponential_yaml(), "deep|large|settings0|lol"),
        ("no YAML", "a: [", "YAML"),
        ("a tab", "train:\n\tepochs: 1\n", "YAML"),
        ("a list", "- 1\n- 2\n", "name: value"),
        ("a word", "hello\n", "name: value"),
        ("nothing", "", "name: value|empty"),
        ("two documents", "seed: 1\n---\nseed: 2\n", "YAML|document"),
        ("bytes", b"\xff\xfe\x00", "UTF-8"),
        ("a number for a key", "1: 2\n", "1"),
        ("a list for a key", "? [1, 2]\n: 3\n", "settings0"),
        ("nothing for a key", "~: 3\n", "settings0"),
    ):
        yield Case(f"config: {what}", config(content), message)
    yield Case("config: two files in order", config("seed: 1\n", "seed: 2\ntrain: {epochs: 1}\n"), "", ACCEPTED)
    yield Case("config: an error in the second file", config("seed: 1\n", "sede: 2\n"), "sede")
    yield Case("config: a file that isn't there", lambda p: {"--config": str(p.root / "none.yaml")}, r"none\.yaml")
    yield Case("config: a folder", lambda p: {"--config": str(p.root)}, "config")
    yield Case("config: no name", lambda p: {"--config": ""}, "config")


def exponential_yaml() -> str:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    return "\n".join(lines) + "\n"


def flag_cases() -> Iterator[Case]:
    for name, value, message in (
        ("trane.epochs", "1", "trane"),
        ("epoch", "1", "epoch"),
        ("train.epoch", "1", "train.epoch"),
        ("data.max", "32", r"data\.max"),
        ("see", "3", "--see"),
        ("epochs", "x", "epochs"),
        ("epochs", "0", "epochs"),
        ("epochs", "-1", "epochs"),
        ("epochs", "1.5", "epochs"),
        ("epochs", "", "epochs"),
        ("seed", "-1", "seed"),
        ("seed", "99999999999", "seed"),
        ("seed", "1e3", "seed"),
        ("threads", "-1", "threads"),
        ("threads", "100000", "threads"),
        ("devices", "0", "devices"),
        ("devices", "-2", "devices"),
        ("accelerator", "gpu", "accelerator|GPU"),
        ("accelerator", "quantum", "accelerator|quantum"),
        ("accelerator", "tpu", "accelerator|tpu"),
        ("precision", "64", "precision"),
        ("precision", "fp8", "fp8"),
        ("precision", "16-mixed", "16-mixed"),
        ("learning-rate", "0", "learning_rate"),
        ("learning-rate", "-1", "learning_rate"),
        ("learning-rate", "nan", "learning_rate"),
        ("learning-rate", "inf", "learning_rate"),
        ("batch-size", "0", "batch_size"),
        ("temperature", "0", "temperature"),
        ("temperature", "nan", "temperature"),
        ("patience", "-1", "patience"),
        ("loss.kl", "-1", r"loss\.kl"),
        ("general.loss.kl", "-1", r"general\.loss\.kl"),
        ("general.train.epochs", "0", r"general\.train\.epochs"),
        ("teacher_train.epochs", "-1", r"teacher_train\.epochs"),
        ("loss.kl", "nan", r"loss\.kl"),
        ("loss.divergence", "klx", "divergence"),
        ("loss.ramps", "{", "ramps"),
        ("loss.ramps", '{"temperature": "x"}', "ramps"),
        ("until", "end", "until"),
        ("task", "none", "task"),
        ("speedup", "0", "speedup"),
        ("speedup", "-4", "speedup"),
        ("speedup", "abc", "speedup"),
        ("speedup", "1e9", "speedup"),
        ("latency-ms", "-1", "latency_ms"),
        ("max-bytes", "10XB", "max_bytes"),
        ("max-bytes", "10MB", "max_bytes"),
        ("min-score", "0.9", "min_score"),
        ("quantize", "int7", "int7"),
        ("quantize", "int8x", "int8"),
        ("export", "onnxx", "onnxx"),
        ("export", "", "export"),
        ("wandb", "maybe", "wandb"),
        ("strategy", "deepspeed_stage_9", "deepspeed_stage_9|strategy"),
        ("strategy", "nowhere.json", r"nowhere\.json"),
        ("machine.restarts", "3", "restarts"),
        ("machine.timeout", "0", "timeout"),
        ("machine.timeout", "nan", "timeout"),
        ("student.layout", "zero9", "zero9"),
        ("student.layout", "fsdp=2", "fsdp|layout"),
        ("student.layout", "tp=0", "tp"),
        ("teacher.layout", "auto=2", "layout"),
        ("teacher.signals", "cache", "signals"),
        ("teacher.finetune", "sometimes", "finetune"),
        ("teacher.processes", "3", "processes"),
        ("dry_run", "maybe", "dry_run"),
        ("measure.texts", "0", r"measure\.texts"),
        ("measure.rounds", "-1", r"measure\.rounds"),
        ("on_policy.share", "2", r"on_policy\.share"),
        ("sequences.share", "1", r"sequences\.share"),
        ("sparsity.pattern", "3:2", "pattern|3:2"),
        ("sparsity.amount", "2", "amount"),
        ("keep.signals", "everything", "keep"),
        ("prune.embedding_rank", "-1", "embedding_rank"),
    ):
        yield Case(f"--{name}={value}", lambda p, name=name, value=value: {f"--{name}": value}, message)
    yield Case("a layer that isn't there", flags(loss__hidden="1", loss__layer_map="0:9"), "layer_map")
    yield Case("a speed too few", flags(devices="2", machine__rank_speeds="1"), "rank_speeds.*2 numbers")
    yield Case("a flag twice", lambda p: {"--seed": ["1", "2"]}, "seed")
    yield Case("a flag in two spellings", lambda p: {"--epochs": "1", "--train.epochs": "2"}, "epochs")
    yield Case("a flag given twice in another spelling", lambda p: {"--learning_rate": "1e-3"}, "learning.rate")


def spec_cases() -> Iterator[Case]:
    for spec, message in (
        ("distillbert", "distilbert"),
        ("layers=", "layers"),
        ("layers=0", "layers"),
        ("layers=9", "4 layers"),
        ("layers=-1", "layers"),
        ("layers=x", "layers"),
        ("layers=1,layers=2", "layers"),
        ("layer=2", "layer"),
        ("layers=2,hidden=", "hidden"),
        ("layers=2,heads=3", "heads"),
        ("layers=0,0", "layers|0"),
        ("layers=2,ffn=0", "ffn"),
        ("half,", "half"),
        ("layers=2 hidden=16", "layers|hidden"),
        ("", "student"),
        ("layers=1e9", "layers"),
        ("hidden=99999", "hidden"),
        ("layers=2,hidden=16,hidden=16", "hidden"),
        ("tinybert-l9000", "tinybert"),
    ):
        if spec:
            yield Case(f"--student {spec}", lambda p, spec=spec: {"--student": spec}, message)


def output_cases() -> Iterator[Case]:
    def file(workspace: Workspace) -> Flags:
        return {"--output": str(workspace.written("notes.txt", "mine"))}

    def under_file(workspace: Workspace) -> Flags:
        return {"--output": str(workspace.written("notes.txt", "mine") / "run")}

    def dangling(workspace: Workspace) -> Flags:
        (workspace.root / "link").symlink_to(workspace.root / "gone")
        return {"--output": str(workspace.root / "link")}

    def occupied(workspace: Workspace) -> Flags:
        workspace.written("full/thesis.txt", "years of work")
        return {"--output": str(workspace.root / "full")}

    def itself(workspace: Workspace) -> Flags:
        (workspace.root / "loop").symlink_to(workspace.root / "loop")
        return {"--output": str(workspace.root / "loop")}

    def marker(content: str) -> Callable[[Workspace], Flags]:
        def damage(workspace: Workspace) -> Flags:
            workspace.written("old/stillroom.json", content)
            return {"--output": str(workspace.root / "old")}

        return damage

    yield Case("output is a file", file, "found a file")
    yield Case("output under a file", under_file, r"notes\.txt")
    yield Case("output on a dangling link", dangling, "link")
    yield Case("output on a link to itself", itself, "loop")
    yield Case("output in a folder of something else", occupied, "thesis")
    yield Case("output with a name too long", lambda p: {"--output": str(p.root / ("x" * 300))}, "name|long")
    yield Case("output with a null", lambda p: {"--output": f"{p.root}/a\0b"}, "output")
    yield Case("no output", lambda p: {"--output": ""}, "output")
    yield Case("output is the data", lambda p: {"--output": str(p.data)}, "output")
    yield Case("output is the teacher", lambda p: {"--output": str(p.teacher)}, "output")
    yield Case(
        "output with brackets", lambda p: {"--output": str(p.root / "[bold]run[/]")}, r"\[bold\]run\[/\]", ACCEPTED
    )
    yield Case("output is the root", lambda p: {"--output": str(Path("/"))}, "output")
    yield Case("a marker that is no JSON", marker("{"), "", ACCEPTED)


CASES = [*file_cases(), *flag_cases(), *spec_cases(), *output_cases()]
