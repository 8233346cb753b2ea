"""Invalid settings: flags, YAML files, specs, output paths and machines."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from support.broken_inputs.case import ACCEPTED, Case, Flags, Workspace

MISSING_ACCELERATOR = "mps" if torch.cuda.is_available() else "gpu"  # no machine has both


def flags(**settings: str) -> Callable[[Workspace], Flags]:
    return lambda workspace: {f"--{name.replace('__', '.')}": value for name, value in settings.items()}


def config(*contents: str | bytes, **settings: str) -> Callable[[Workspace], Flags]:
    """Passes YAML files, in order, and flags."""

    def damage(workspace: Workspace) -> Flags:
        named = [str(workspace.written(f"settings{i}.yaml", content)) for i, content in enumerate(contents)]
        return {"--config": named} | flags(**settings)(workspace)

    return damage


def file_cases() -> Iterator[Case]:
    endless = "alias .a occurs inside its own anchor"
    for what, content, message in (
        ("a key twice", "seed: 1\nseed: 2\n", "key 'seed' is given twice"),
        ("a key twice in a group", "train:\n  epochs: 1\n  epochs: 2\n", r"key 'train\.epochs' is given twice"),
        ("a key at two depths", "train.epochs: 1\ntrain:\n  epochs: 2\n", r"train\.epochs is given twice"),
        ("a key in two spellings", "epochs: 1\ntrain: {epochs: 2}\n", r"train\.epochs is given twice"),
        (
            "a key in two spellings, dotted",
            "temperature: 1\nloss.temperature: 2\n",
            r"loss\.temperature is given twice",
        ),
        ("a key with a dash and without", "batch_size: 4\nbatch-size: 8\n", "unknown key 'batch-size'"),
        ("a group twice", "train: {epochs: 1}\ntrain: {patience: 1}\n", "key 'train' is given twice"),
        ("an unknown key", "trian: {epochs: 1}\n", "unknown key 'trian'"),
        ("an unknown key in a group", "train: {epoch: 1}\n", r"unknown key 'train\.epoch'"),
        ("a key without a value", "train:\n  epochs:\n", r"train\.epochs has no value"),
        ("a group without a value", "train:\n", "settings below 'train', found nothing"),
        ("a group that is a number", "train: 3\n", "settings below 'train', found '3'"),
        ("a setting that is a group", "seed: {a: 1}\n", r"seed.*\{'a': 1\}"),
        ("a word for a number", "seed: many\n", "seed.*many"),
        ("a fraction for a count", "train: {epochs: 1.5}\n", r"train\.epochs.*1\.5"),
        ("a yes for a number", "seed: yes\n", "seed.*True"),
        ("a list for a number", "seed: [1]\n", r"seed.*\[1\]"),
        ("a number that isn't finite", "loss: {temperature: .nan}\n", r"loss\.temperature.*found nan"),
        ("an endless number", "loss: {temperature: .inf}\n", r"loss\.temperature.*found inf"),
        ("an object of Python", "seed: !!python/object/apply:os.system ['true']\n", "not well-formed YAML.* tag "),
        ("an anchor that holds itself", "train: &a {epochs: *a}\n", endless),
        ("a group that holds itself", "train: &a\n  train: *a\n", endless),
        ("groups without end", "{a: " * 3000 + "1" + "}" * 3000, "at most 32 levels deep"),
        ("lists without end", "seed: " + "[" * 5000 + "]" * 5000, "at most 32 levels deep"),
        ("a laugh a billion times", exponential_yaml(), "more than 20,000 values once aliases unfold"),
        ("no YAML", "a: [", "not well-formed YAML"),
        ("a tab", "train:\n\tepochs: 1\n", "not well-formed YAML"),
        ("a list", "- 1\n- 2\n", "`name: value`, found a list"),
        ("a word", "hello\n", "`name: value`, found 'hello'"),
        ("nothing", "", "`name: value`, found nothing"),
        ("two documents", "seed: 1\n---\nseed: 2\n", "not well-formed YAML.*document"),
        ("bytes", b"\xff\xfe\x00", "expected UTF-8, found other bytes"),
        ("a number for a key", "1: 2\n", "unknown key '1'"),
        ("a list for a key", "? [1, 2]\n: 3\n", "a name before the colon, found sequence"),
        ("nothing for a key", "~: 3\n", "unknown key '~'"),
    ):
        yield Case(f"config: {what}", config(content), message)
    yield Case("config: two files in order", config("seed: 1\n", "seed: 2\ntrain: {epochs: 1}\n"), "", ACCEPTED)
    yield Case("config: an error in the second file", config("seed: 1\n", "sede: 2\n"), "unknown key 'sede'")
    yield Case(
        "config: a file that isn't there",
        lambda p: {"--config": str(p.root / "none.yaml")},
        r"none\.yaml': can't be read",
    )
    yield Case("config: a folder", lambda p: {"--config": str(p.root)}, "expected a YAML file, found a folder")
    yield Case("config: no name", lambda p: {"--config": ""}, "config '': expected a YAML file, found no name")


def exponential_yaml() -> str:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    return "\n".join(lines) + "\n"


def flag_cases() -> Iterator[Case]:
    for name, value, message in (
        ("trane.epochs", "1", r"unknown flag --trane\.epochs"),
        ("epoch", "1", "unknown flag --epoch;"),
        ("train.epoch", "1", r"unknown flag --train\.epoch;"),
        ("data.max", "32", r"unknown flag --data\.max;"),
        ("see", "3", "unknown flag --see;"),
        ("epochs", "x", r"train\.epochs.* x "),
        ("epochs", "0", r"train\.epochs.*found 0"),
        ("epochs", "-1", r"train\.epochs.*found -1"),
        ("epochs", "1.5", r"train\.epochs.*1\.5"),
        ("epochs", "", r"train\.epochs.*value:  "),
        ("seed", "-1", "seed: expected 0 to .*found -1"),
        ("seed", "99999999999", "seed: expected 0 to .*found 99999999999"),
        ("seed", "1e3", '"seed".*1000'),
        ("threads", "-1", r"machine\.threads.*found -1"),
        ("threads", "100000", r"machine\.threads.*found 100000"),
        ("devices", "0", r"machine\.devices.*found 0"),
        ("devices", "-2", r"machine\.devices.*found -2"),
        ("accelerator", MISSING_ACCELERATOR, rf"machine\.accelerator {MISSING_ACCELERATOR}: expected a .*found "),
        ("accelerator", "quantum", r"machine\.accelerator.*quantum"),
        ("accelerator", "tpu", r"machine\.accelerator.*tpu"),
        ("precision", "64", r"machine\.precision.*value: 64"),
        ("precision", "fp8", r"machine\.precision fp8: expected a GPU, found machine\.accelerator cpu"),
        ("precision", "16-mixed", r"machine\.precision 16-mixed: expected a GPU, found machine\.accelerator cpu"),
        ("learning-rate", "0", r"train\.learning_rate: expected more than 0"),
        ("learning-rate", "-1", r"train\.learning_rate: expected more than 0"),
        ("learning-rate", "nan", r"train\.learning_rate.*nan"),
        ("learning-rate", "inf", r"train\.learning_rate.*inf"),
        ("batch-size", "0", r"train\.batch_size: expected at least 1"),
        ("temperature", "0", r"loss\.temperature: expected more than 0"),
        ("temperature", "nan", r"loss\.temperature.*nan"),
        ("patience", "-1", r"train\.patience: expected at least 0"),
        ("loss.kl", "-1", r"(?<!general\.)loss\.kl: expected a weight of at least 0"),
        ("general.loss.kl", "-1", r"general\.loss\.kl: expected a weight of at least 0"),
        ("general.train.epochs", "0", r"general\.train\.epochs: expected at least 1"),
        ("teacher_train.epochs", "-1", r"teacher_train\.epochs: expected at least 1"),
        ("loss.kl", "nan", r"loss\.kl.*nan"),
        ("loss.divergence", "klx", r"loss\.divergence.*klx"),
        ("loss.ramps", "{", r"--loss\.ramps: expected a list or a mapping"),
        ("loss.ramps", '{"temperature": "x"}', r"loss\.ramps.*value: x"),
        ("until", "end", '"until".*value: end'),
        ("task", "none", '"task".*value: none'),
        ("speedup", "0", r"budget\.speedup: expected more than 1"),
        ("speedup", "-4", r"budget\.speedup: expected numbers .*'-4'"),
        ("speedup", "abc", r"budget\.speedup: expected numbers .*'abc'"),
        ("speedup", "1e9", r"budget\.speedup: expected numbers .*'1e9'"),
        ("latency-ms", "-1", r"budget\.latency_ms: expected more than 0"),
        ("max-bytes", "10XB", r"budget\.max_bytes: expected a size"),
        ("max-bytes", "10MB", r"budget\.max_bytes: expected a speedup"),
        ("min-score-share", "0.9", r"budget\.min_score_share: expected a speedup"),
        ("quantize", "int7", r"quantize\.scheme.*found 'int7'"),
        ("quantize", "int8x", r"quantize\.scheme.*found 'int8x'"),
        ("export", "onnxx", "export: expected .*found 'onnxx'"),
        ("export", "", "export: expected .*found ''"),
        ("wandb", "maybe", r"machine\.wandb.*maybe"),
        ("strategy", "deepspeed_stage_9", r"machine\.strategy 'deepspeed_stage_9': .*no such file"),
        ("strategy", "nowhere.json", r"machine\.strategy 'nowhere\.json': .*no such file"),
        ("machine.restarts", "3", r"machine\.restarts 3: expected machine\.devices of 2 or more"),
        ("machine.timeout", "0", r"machine\.timeout: expected more than 0 seconds"),
        ("machine.timeout", "nan", r"machine\.timeout.*nan"),
        ("student.layout", "zero9", r"student\.layout 'zero9': .*found 'zero9'"),
        ("student.layout", "fsdp=2", r"student\.layout 'fsdp=2': expected 2 processes, found 1"),
        ("student.layout", "tp=0", r"student\.layout 'tp=0': .*found 'tp=0'"),
        ("teacher.layout", "auto=2", r"teacher\.layout 'auto=2': .*found 'auto=2'"),
        ("teacher.online", "maybe", r"teacher\.online.*maybe"),
        ("teacher.finetune", "sometimes", r"teacher\.finetune.*sometimes"),
        ("teacher.processes", "3", r"teacher\.processes 3: expected teacher\.online true"),
        ("dry_run", "maybe", "dry_run.*maybe"),
        ("measure.texts", "0", r"measure\.texts: expected at least 1"),
        ("measure.rounds", "-1", r"measure\.rounds: expected at least 1"),
        ("on_policy.share", "2", r"on_policy\.share: expected a share from 0 to 1"),
        ("sequences.share", "1", r"sequences\.share 1: expected chat"),
        ("sparsity.pattern", "3:2", r"sparsity\.pattern: expected N:M .*found '3:2'"),
        ("sparsity.amount", "2", r"sparsity\.amount 2\.0: expected a pattern"),
        ("keep.signals", "everything", r"keep\.signals: .*found everything"),
        ("prune.embedding_rank", "-1", r"prune\.embedding_rank: expected at least 0"),
    ):
        yield Case(f"--{name}={value}", lambda p, name=name, value=value: {f"--{name}": value}, message)
    yield Case(
        "a layer that isn't there", flags(loss__hidden="1", loss__layer_map="0:9"), r"loss\.layer_map: .*found 0:9"
    )
    yield Case("a speed too few", flags(devices="2", machine__rank_speeds="1"), "rank_speeds.*2 numbers")
    yield Case("a flag twice", lambda p: {"--seed": ["1", "2"]}, "--seed is given twice")
    yield Case(
        "a flag in two spellings",
        lambda p: {"--epochs": "1", "--train.epochs": "2"},
        r"--train\.epochs is given twice",
    )
    yield Case(
        "a flag given twice in another spelling",
        lambda p: {"--learning_rate": "1e-3"},
        r"--train\.learning_rate is given twice",
    )


def spec_cases() -> Iterator[Case]:
    for spec, message in (
        ("distillbert", "did you mean 'distilbert'"),
        ("layers=", "expected numbers after layers=, found ''"),
        ("layers=0", "the teacher has 4 layers; expected 1 to 4"),
        ("layers=9", "the teacher has 4 layers; expected 1 to 4"),
        ("layers=-1", "expected numbers after layers=, found '-1'"),
        ("layers=x", "expected numbers after layers=, found 'x'"),
        ("layers=1,layers=2", "layers is given twice"),
        ("layer=2", "expected layers, .* found 'layer'"),
        ("layers=2,hidden=", "expected numbers after hidden=, found ''"),
        ("layers=2,heads=3", "expected heads that divide hidden"),
        ("layers=0,0", "expected distinct numbers from 0 to 3"),
        ("layers=2,ffn=0", "student ffn=0: expected 1 to 64"),
        ("half,", "expected one preset among .* found half,"),
        ("layers=2 hidden=16", "expected numbers after layers=, found '2 hidden=16'"),
        ("layers=1e9", "expected numbers after layers=, found '1e9'"),
        ("hidden=99999", "student hidden=99999: expected 1 to 32"),
        ("layers=2,hidden=16,hidden=16", "hidden is given twice"),
        ("tinybert-l9000", "student 'tinybert-l9000': no such folder here"),
    ):
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

    occupied_folder = "expected an empty folder or that of an earlier run, found other files"
    missing_target = "found a link to .* which doesn't exist"
    yield Case("output is a file", file, r"notes\.txt': expected a folder, found a file;")
    yield Case("output under a file", under_file, r"notes\.txt/run': expected a folder, found a file at ")
    yield Case("output on a dangling link", dangling, missing_target)
    yield Case("output on a link to itself", itself, rf"loop': .*{missing_target}")
    yield Case("output in a folder of something else", occupied, rf"{occupied_folder} \(thesis\.txt\)")
    yield Case("output with a name too long", lambda p: {"--output": str(p.root / ("x" * 300))}, "the name is too long")
    yield Case("output with a null", lambda p: {"--output": f"{p.root}/a\0b"}, "a path, found a null character")
    yield Case("no output", lambda p: {"--output": ""}, "--output: missing")
    yield Case("output is the data", lambda p: {"--output": str(p.data)}, rf"/data': {occupied_folder}")
    yield Case("output is the teacher", lambda p: {"--output": str(p.teacher)}, rf"/teacher': {occupied_folder}")
    yield Case(
        "output with brackets", lambda p: {"--output": str(p.root / "[bold]run[/]")}, r"\[bold\]run\[/\]", ACCEPTED
    )
    yield Case("output is the root", lambda p: {"--output": str(Path("/"))}, f"output '/': {occupied_folder}")
    yield Case("a marker that is no JSON", marker("{"), "", ACCEPTED)


CASES = [*file_cases(), *flag_cases(), *spec_cases(), *output_cases()]
