"""Tests that invalid settings in files and on the command line are rejected immediately and explicitly."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipelines import distill, quantize, report
from pipelines.runs import cli
from pipelines.settings.command_line import override_flags
from pipelines.settings.commands.distill import SHORT_OPTIONS, DistillConfig
from support.commands import ROOT, rejected_as_written
from support.tiny_models import build_model, saved

NEEDED = ("--teacher", "T", "--data", "D", "--output", "O")
Reject = Callable[..., str]


@pytest.fixture
def reject(monkeypatch, capsys) -> Reject:
    """A function that returns the error message of a rejected `pipelines.distill` command."""
    return lambda *arguments: rejected_as_written(distill, arguments, monkeypatch, capsys)


@pytest.fixture
def reject_file(tmp_path: Path, reject: Reject) -> Reject:
    """A function that returns the error message of a command that is given a config file with this content."""

    def reject_content(content: str | bytes, *arguments: str) -> str:
        file = tmp_path / "a.yaml"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return reject("--config", str(file), *NEEDED, *arguments)

    return reject_content


def parse(*arguments: str) -> DistillConfig:
    return cli.parse(DistillConfig, arguments, prog="pipelines.distill", about="", examples="", short=SHORT_OPTIONS)


def parse_file(tmp_path: Path, *contents: str) -> DistillConfig:
    arguments = list(NEEDED)
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.yaml").write_text(content)
        arguments += ["--config", str(tmp_path / f"{number}.yaml")]
    return parse(*arguments)


def billion_laughs() -> str:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("seed: 1\nepochs: 2\nseed: 2\n", "key 'seed' is given twice, in line 1 and line 3"),
        ("train:\n  epochs: 1\n  epochs: 2\n", "key 'train.epochs' is given twice, in line 2 and line 3"),
        ("train.epochs: 1\ntrain:\n  epochs: 2\n", "train.epochs is given twice, in line 1 and line 2"),
        ("epochs: 1\ntrain: {epochs: 1}\n", "train.epochs is given twice, in line 1 and line 2"),
        ("epochs: 1\ntrain.epochs: 1\n", "train.epochs is given twice, in line 1 and line 2"),
        ("general: {loss: {kl: 1}}\ngeneral.loss: {kl: 2}\n", "general.loss.kl is given twice"),
        ("train: {epochs: 1}\ntrain: {patience: 1}\n", "key 'train' is given twice"),
        ("loss:\n  ramps: {kl: [1, 0], kl: [0, 1]}\n", "loss.ramps: key 'kl' is given twice"),
        ("train:\n  epochs:\n", "line 2: train.epochs has no value"),
        ("epochs: ~\n", "line 1: train.epochs has no value"),
        ("student:\n", "line 1: student.spec has no value"),
        ("train:\n", "line 1: expected settings below 'train', found nothing"),
        ("train: 3\n", "line 1: expected settings below 'train', found '3'"),
        ("loss: [kl]\n", "line 1: expected settings below 'loss', found a list"),
        ("seed: {a: 1}\n", "seed"),
        ("? [1, 2]\n: 3\n", "expected a name before the colon, found sequence"),
        ("trian: {epochs: 1}\n", "unknown key 'trian'"),
        ("batch-size: 8\n", "unknown key 'batch-size'; the nearest is 'batch_size'"),
        ("train: &a {epochs: *a}\n", "alias *a occurs inside its own anchor"),
        ("train: &a\n  train: *a\n", "alias *a occurs inside its own anchor"),
        ("seed: " + "[" * 5000 + "]" * 5000, "at most 32 levels deep"),
        ("{a: " * 3000 + "1" + "}" * 3000, "at most 32 levels deep"),
        (billion_laughs(), "more than 20,000 values once aliases unfold"),
        ("seed: " + "1" * 200_000, "found more than 131,072 bytes"),
        ("epochs: 010\n", "expected a decimal number, found '010', which YAML reads as another number"),
        ("epochs: 1:30\n", "expected a decimal number, found '1:30', which YAML reads as another number"),
        ("learning_rate: .nan\n", "train.learning_rate: expected a number, found nan"),
        ("machine: {timeout: .inf}\n", "machine.timeout: expected a number, found inf"),
        ("seed: !!python/object/apply:os.system ['true']\n", "not well-formed YAML"),
        ("seed: 1\n---\nseed: 2\n", "expected a single document"),
        ("", "expected settings as `name: value`, found nothing"),
        ("# nothing yet\n", "expected settings as `name: value`, found nothing"),
        ("- 1\n- 2\n", "expected settings as `name: value`, found a list"),
        (b"\x7fELF\x00\x01\x02", "not well-formed YAML"),
        (b"\xff\xfe\x00", "expected UTF-8, found other bytes"),
    ],
)
def test_an_ambiguous_or_invalid_config_file_is_rejected(content, message, reject_file):
    expected = reject_file(content)
    assert message in expected
    assert "a.yaml" in expected or content in ("learning_rate: .nan\n", "machine: {timeout: .inf}\n", "seed: {a: 1}\n")


def test_a_config_path_that_is_not_a_file_is_rejected_by_name(tmp_path: Path, reject: Reject):
    assert "expected a YAML file, found a folder" in reject("--config", str(tmp_path), *NEEDED)
    assert "expected a YAML file, found no name" in reject("--config=", *NEEDED)
    assert "none.yaml': can't be read: No such file" in reject("--config", str(tmp_path / "none.yaml"), *NEEDED)


def test_several_config_files_merge_in_order_and_flags_win_over_all(tmp_path: Path):
    first = "train: {epochs: 5, patience: 2}\nseed: 3\nloss: {ramps: {kl: [1, 2], ce: [1, 1]}}\n"
    config = parse_file(tmp_path, first, "epochs: 7\nloss.ramps: {kl: [2, 1]}\n")
    assert (config.train.epochs, config.train.patience, config.seed) == (7, 2, 3)
    assert config.loss.ramps == {"kl": (2, 1)}
    files = [word for name in ("0", "1") for word in ("--config", str(tmp_path / f"{name}.yaml"))]
    assert parse(*NEEDED, *files, "--epochs", "9").train.epochs == 9
    assert parse(*NEEDED, *files[2:], *files[:2]).train.epochs == 5


def test_the_error_for_an_unknown_key_names_the_file_that_contains_it(tmp_path: Path, reject: Reject):
    (tmp_path / "one.yaml").write_text("seed: 1\n")
    (tmp_path / "two.yaml").write_text("sede: 1\n")
    expected = reject("--config", str(tmp_path / "one.yaml"), "--config", str(tmp_path / "two.yaml"), *NEEDED)
    assert "two.yaml', line 1: unknown key 'sede'; the nearest is 'seed'" in expected


def test_values_of_text_settings_keep_their_yaml_spelling(tmp_path: Path):
    config = parse_file(
        tmp_path,
        "wandb: off\nprecision: 32\nspeedup: 4\nloss: {hidden: 1, layer_map: 1:2}\n"
        "data: {text: no, label: 007}\nsparsity: {pattern: 2:4}\nteacher: {additional: [1, on]}\nlatency_ms: 0\n",
    )
    assert (config.machine.wandb, config.machine.precision, config.budget.speedup) == ("off", "32", "4")
    assert (config.loss.layer_map, config.data.text, config.data.label) == ("1:2", "no", "007")
    assert (config.sparsity.pattern, config.teacher.additional) == ("2:4", ("1", "on"))


def test_keys_of_a_group_override_merged_ones(tmp_path: Path):
    config = parse_file(tmp_path, "train: &usual {epochs: 5, patience: 2}\nteacher_train: {<<: *usual, patience: 1}\n")
    assert (config.teacher_train.epochs, config.teacher_train.patience) == (5, 1)


def test_optional_settings_may_be_null(tmp_path: Path):
    assert parse_file(tmp_path, "data: {text: null}\nloss: {temperature: ~}\n").data.text is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--epochs", "1", "--epochs", "2"), "--train.epochs is given twice, as '1' and '2'"),
        (("--epochs", "1", "--train.epochs=2"), "--train.epochs is given twice, as '1' and '2'"),
        (("--batch-size", "1", "--batch_size", "2"), "--train.batch_size is given twice"),
        (("--output", "P"), "--output is given twice, as 'O' and 'P'"),
        (("--dry-run", "--dry_run", "false"), "--dry_run is given twice, as 'true' and 'false'"),
        (("--train.epoch", "3"), "unknown flag --train.epoch; the nearest is --train.epochs"),
        (("--see", "3"), "unknown flag --see; the nearest is --seed"),
        (("--train", '{"epochs": 4}'), "unknown flag --train"),
        (("--epochs",), "--train.epochs: expected a value after it, found none"),
        (("--data.text", "--seed", "1"), "--data.text: expected a value after it, found --seed"),
        (("more",), "expected a flag such as --output, found 'more'"),
        (("--epochs", "010"), "--train.epochs: expected a decimal number, found '010'"),
        (("--learning-rate", "1e400"), "train.learning_rate: expected a number, found inf"),
        (("--loss.ramps", '{"kl": [1, 2], "kl": [2, 1]}'), "--loss.ramps: key 'kl' is given twice"),
        (("--loss.ramps", "[" * 3000), "--loss.ramps, line 1: expected settings, at most 32 levels deep"),
        (("--teacher.additional", "&a [*a]"), "alias *a occurs inside its own anchor"),
        (("--threads", "100000"), "machine.threads: expected at most"),
        (("--measure.threads", "100000"), "measure.threads: expected at most"),
        (("--budget.threads", "100000"), "budget.threads: expected at most"),
        (("--devices", "100000"), "machine.devices: expected at most"),
        (("--machine.timeout", "1e300"), "machine.timeout: expected more than 0 seconds, at most 31536000"),
        (("--accelerator", "quantum"), "machine.accelerator"),
        (("--precision", "64"), "machine.precision"),
        (("--loss.kl", "-1"), "error: loss.kl: expected a weight of at least 0, found -1"),
        (("--general.loss.kl", "-1"), "error: general.loss.kl: expected a weight of at least 0, found -1"),
        (("--general.loss.hidden", "0"), "error: general.loss: expected weights with a sum > 0"),
        (("--general.loss.beta", "2"), "error: general.loss.beta: expected a share between 0 and 1"),
        (("--general.loss.kl", "1", "--general.loss.similarity", "1"), "error: general.loss.embedding, general.loss.s"),
        (("--general.masking.rate", "2"), "error: general.masking.rate: expected a share between 0 and 1"),
        (
            ("--general.masking.replaced", "0.9", "--general.masking.random", "0.9"),
            "error: general.masking.replaced + general.masking.random: expected at most 1",
        ),
        (("--general.train.warmup", "2"), "error: general.train.warmup: expected a share"),
        (("--teacher_train.patience", "-1"), "error: teacher_train.patience: expected at least 0"),
        (("--student", "layers=1,layers=2"), "student 'layers=1,layers=2': layers is given twice"),
        (("--student", "half,hidden=8,hidden=8"), "hidden is given twice"),
        (("--student", "fresh,fresh"), "found fresh,fresh"),
        (("--student", "layers=" + "9" * 5000), "expected numbers after layers="),
        (("--student", "distillbert"), "did you mean 'distilbert'?"),
        (("--student", "fresh,distillbert"), "did you mean 'distilbert'?"),
        (("--student", "distillbert,hidden=8"), "did you mean 'distilbert'?"),
        (("--student", "tinybert-4"), "did you mean 'tinybert4'?"),
    ],
)
def test_an_ambiguous_or_invalid_command_line_is_rejected(arguments, message, reject):
    assert message in reject(*NEEDED, *arguments)


def test_the_error_for_an_invalid_loss_weight_names_only_that_term(reject: Reject):
    assert "ce" not in reject(*NEEDED, "--general.loss.kl", "-1").partition(":")[2].split("found")[0].split()


def test_a_quantize_command_with_an_untrained_model_is_rejected(monkeypatch, capsys):
    arguments = ("--model", "m", "--data", "D", "--output", "O", "--student.trained", "false")
    expected = rejected_as_written(quantize, arguments, monkeypatch, capsys)
    assert "--student.trained: pipelines.quantize sets it itself" in expected


def test_replaced_flags_override_their_earlier_values_and_keep_the_others():
    arguments = ["--teacher", "T", "--epochs", "3", "--dry-run", "--config", "a"]
    changed = override_flags(arguments, ["--train.epochs=4", "--config", "b"], SHORT_OPTIONS)
    assert changed == ["--teacher", "T", "--dry-run", "--config", "a", "--train.epochs=4", "--config", "b"]


@pytest.mark.parametrize(
    ("flag", "setting"),
    [
        ("--output", "output"),
        ("--teacher", "teacher.model"),
        ("--student", "student.spec"),
        ("--data", "data.path"),
        ("--data.unlabelled", "data.unlabelled"),
        ("--general.data", "general.data"),
        ("--chat.template", "chat.template"),
        ("--strategy", "machine.strategy"),
    ],
)
def test_a_tilde_is_expanded_in_every_path_setting(flag, setting, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    arguments = override_flags(NEEDED, [f"{flag}=~/x"], SHORT_OPTIONS)
    for config in (
        parse(*arguments),
        parse_file(tmp_path, f"{setting}: ~/x\n") if flag not in NEEDED else parse(*arguments),
    ):
        value = config
        for name in setting.split("."):
            value = getattr(value, name)
        assert value == f"{tmp_path}/x"


def test_a_config_in_the_home_folder_is_found_and_tildes_in_it_are_expanded(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.yaml").write_text('teacher: {additional: ["~/a", b]}\noutput: ~/out\n')
    config = parse("--config=~/c.yaml", "--teacher", "T", "--data", "D")
    assert (config.output, config.teacher.additional) == (f"{tmp_path}/out", (f"{tmp_path}/a", "b"))


def test_an_unknown_home_folder_and_a_null_character_are_rejected(reject: Reject):
    arguments = override_flags(NEEDED, ["--output=~nobody-here/x"], SHORT_OPTIONS)
    assert "output '~nobody-here/x': there is no home folder of that name" in reject(*arguments)
    assert "output 'a\\x00b': expected a path" in reject(*override_flags(NEEDED, ["--output=a\0b"], SHORT_OPTIONS))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    """A folder with three tiny teachers, tiny data and two JSON files."""
    root = tmp_path_factory.mktemp("inputs")
    saved(build_model("bert", "Model"), tokenizer, root / "body")
    saved(build_model("bert"), tokenizer, root / "classifier")
    saved(build_model("bert", "ForTokenClassification"), tokenizer, root / "tagger")
    (root / "data").mkdir()
    (root / "data" / "train.csv").write_text("text,label\na,x\nb,y\n")
    (root / "broken.json").write_text("{")
    (root / "plain.json").write_text("{}")
    return root


REJECTIONS = [
    (("--student", "distillbert"), "did you mean 'distilbert'?"),
    (("--teacher", "{root}/none"), "none': no such folder here"),
    (("--student", "./none"), "student './none': no such folder here"),
    (("--data", "{root}/none"), "none': no such file or folder"),
    (("--data", "none.csv"), "data 'none.csv': no such file or folder"),
    (("--general.data", "none.txt"), "general.data 'none.txt': expected a file or a folder with text"),
    (("--student", "layers=9"), "student layers=9: the teacher has 4 layers"),
    (("--student", "layers=2,hidden=99999"), "student hidden=99999: expected 1 to"),
    (("--student", "layers=2,heads=3"), "heads that divide hidden"),
    (
        ("--loss.hidden", "1", "--loss.layer_map", "0:9", "--task", "text-classification"),
        "loss.layer_map: expected pairs of student layers 0 to 2",
    ),
    (("--teacher", "{root}/tagger", "--task", "text-classification"), "was trained for token-classification"),
    (("--teacher", "{root}/classifier", "--task", "causal-lm"), "was trained for text-classification"),
    (("--task", "masked-lm"), "expected a head for masked-lm"),
    (("--task", "text-classification", "--keep.draws", "9"), "keep.draws: expected none for text-classification"),
    (("--task", "regression", "--on_policy.share", "0.5"), "on_policy.share 0.5: expected causal-lm or chat"),
    (("--teacher", "{root}/classifier", "--sequences.share", "1"), "sequences.share 1: expected chat"),
    (
        ("--task", "text-classification", "--loss.embedding", "1", "--loss.kl", "0"),
        "loss: expected kl or ce for text-classification, found embedding=1: there is nothing to",
    ),
    (("--student.layout", "zero9"), "student.layout 'zero9': expected replicated"),
    (("--student.layout", "fsdp=2"), "student.layout 'fsdp=2': expected 2 processes, found 1"),
    (("--devices", "3", "--student.layout", "tp=3"), "attention heads: they can't be divided evenly"),
    (("--devices", "6", "--student.layout", "pp=6"), "expected at most 2 stages, the model's number of layers"),
    (
        ("--devices", "2", "--student.layout", "cp=2", "--task", "text-classification"),
        "student.layout cp=2: expected mas",
    ),
    (
        ("--teacher.online", "true", "--teacher.processes", "3"),
        "teacher.processes 3: expected fewer than the 1 processes",
    ),
    (("--student.offload",), "student.offload: expected student.layout fsdp=N or zero2"),
    (
        ("--devices", "2", "--student.layout", "fsdp=2", "--machine.gradient_compression", "fp16"),
        "machine.gradient_compression fp16",
    ),
    (
        ("--devices", "2", "--student.layout", "fsdp=2", "--teacher.layout", "replicated", "--loss.balance_every", "2"),
        "loss.b",
    ),
    (
        ("--devices", "2", "--student.layout", "zero1", "--teacher.layout", "replicated", "--quantize", "int8"),
        "quantiz",
    ),
    (("--strategy", "deepspeed_stage_9"), "expected deepspeed_stage_1, 2 or 3"),
    (("--strategy", "{root}/none.json"), "found no such file"),
    (("--strategy", "{root}/broken.json"), "expected JSON in the file, found other text"),
    (("--strategy", "{root}"), "the file can't be read: Is a directory"),
    (("--strategy", "{root}/plain.json"), "expected an object with zero_optimization in it"),
    (("--export", "torchao"), "export torchao: expected a quantized model"),
    (("--quantize", "int7"), "quantize.scheme: expected one of"),
    (("--threads", "100000"), "machine.threads: expected at most"),
    (("--speedup", "4", "--prune.schedule", "gradual", "--epochs", "1"), "train.epochs 1: expected at least 2"),
]
WITHOUT_GPU = [
    (("--accelerator", "gpu"), "machine.accelerator gpu: expected a GPU, found none on this machine"),
    (("--precision", "fp8"), "machine.precision fp8: expected a GPU, found none on this machine"),
]
REJECTIONS_BY_COMMAND = {
    "distill": [
        ((), "--output: missing"),
        ((*NEEDED, "--epochs", "1", "--train.epochs", "2"), "--train.epochs is given twice"),
        ((*NEEDED, "--config", "{root}/none.yaml"), "none.yaml': can't be read"),
        ((*NEEDED, "--student", "distillbert"), "did you mean 'distilbert'?"),
    ],
    "cache": [
        (("write", "--teacher", "{root}/none", "--data", "D", "--cache", "C"), "none': no such folder here"),
        (("write", "--teacher", "{root}/body", "--data", "none.csv", "--cache", "C"), "data 'none.csv': no such file"),
        (
            ("write", "--teacher", "{root}/body", "--data", "{root}/data", "--cache", "C", "--layout", "tp=2"),
            "layout 'tp=2': expected 2 processes, found 1",
        ),
        (("write", "--teacher", "T", "--data", "D", "--cache", "C", "--cache", "E"), "--cache is given twice"),
        (("verify", "--threads", "1"), "unknown flag --threads"),
    ],
    "prune": [
        (("--model", "{root}/none", "--data", "{root}/data", "--speedup", "4", "--output", "O"), "no such folder here"),
        (("--model", "M", "--data", "D", "--output", "O"), "budget: expected a --speedup such as 10"),
    ],
    "quantize": [(("--model", "{root}/none", "--data", "{root}/data", "--output", "O"), "no such folder here")],
    "export": [
        (("--model", "{root}/none", "--data", "D", "--output", "O"), "model '{root}/none': no such folder here"),
        (("--model", "{root}/body", "--data", "./none", "--output", "O"), "data './none': no such file or folder"),
        (("--model", "M", "--data", "D", "--output", "O", "--export", "onnxx"), "export: expected one or several"),
    ],
    "evaluate": [
        (("--model", "{root}/none", "--data", "D", "--output", "O"), "model '{root}/none': no such folder here"),
        (("--model", "M", "--data", "D", "--output", "O", "--measure.threads", "9999"), "measure.threads: expected"),
    ],
    "report": [
        (("--model", "{root}/none", "--data", "D", "--output", "O"), "model '{root}/none': no such folder here"),
        (("--run", "{root}/none"), "no finished report there"),
        (("--run", "{root}/none", "--model", "M"), "--run: expected no --model with it"),
        (("--run", "{root}/none", "--seed", "3"), "--run: expected no --seed with it"),
        (("--run", "{root}/none", "--measure.rounds", "2"), "--run: expected no --measure with it"),
        (("--charts", "true", "--model", "M"), "--charts: expected --run with it"),
    ],
}
CODE = """
import json, runpy, sys
for module, words in json.load(sys.stdin):
    sys.argv = [module, *words]
    try:
        runpy.run_module(f"pipelines.{module}", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code
    print(f"ended with {code}", file=sys.stderr, flush=True)
heavy = [name for name in ("torch", "lightning", "datasets") if name in sys.modules]
print(*heavy)
"""


def run_all(commands: list[tuple[str, list[str]]]) -> tuple[list[str], list[str]]:
    """Runs commands in one process and returns (what each printed, heavy libraries that were imported)."""
    done = subprocess.run(
        [sys.executable, "-c", CODE], input=json.dumps(commands), capture_output=True, text=True, cwd=ROOT, timeout=120,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr.split("ended with 2\n")[:-1], done.stdout.split()


def test_rejected_commands_print_one_error_and_import_no_torch(inputs: Path):
    usual = ["--teacher", "{root}/body", "--data", "{root}/data", "--output", "{root}/run"]
    listed = [*REJECTIONS, *([] if has_gpu() else WITHOUT_GPU)]
    cases = [("distill", override_flags(usual, arguments, SHORT_OPTIONS), message) for arguments, message in listed]
    cases += [
        (module, [*arguments], message)
        for module, rejections in REJECTIONS_BY_COMMAND.items()
        for arguments, message in rejections
    ]
    filled = [(module, [word.replace("{root}", str(inputs)) for word in arguments]) for module, arguments, _ in cases]
    printed, heavy_imports = run_all(filled)
    assert len(printed) == len(cases), printed
    for (_, arguments, message), each in zip(cases, printed, strict=True):
        assert each.startswith("error: "), (arguments, each)
        assert message.replace("{root}", str(inputs)) in each, (arguments, each)
        assert "Traceback" not in each
    assert heavy_imports == []
    assert not (inputs / "run").exists()


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder, with the test run as an unprivileged user, since root may read everything."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            os.seteuid(user)


def test_the_error_for_an_unreadable_input_mentions_reading_and_not_writing(unprivileged, monkeypatch, capsys):
    folder = unprivileged / "report" / "0123456789ab"
    folder.mkdir(parents=True)
    file = folder / "report.json"
    file.write_text("{}")
    (unprivileged / "report.json").write_text("{}")
    file.chmod(0)
    expected = rejected_as_written(report, ("--run", str(unprivileged)), monkeypatch, capsys)
    assert f"{file}: no permission to read it; finished stages are kept" in expected
    file.chmod(0o600)
    folder.chmod(0)
    expected = rejected_as_written(report, ("--run", str(unprivileged)), monkeypatch, capsys)
    assert "write" not in expected
    folder.chmod(0o700)


def has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia*")) or Path("/dev/kfd").exists()


def test_the_model_of_the_command_line_replaces_that_of_a_file(tmp_path):
    (tmp_path / "a.yaml").write_text("model: stored\ndata: D\noutput: O\n")
    arguments = quantize.with_defaults(["--config", str(tmp_path / "a.yaml"), "--model", "given"])
    settings = cli.parse(
        DistillConfig, arguments, prog="pipelines.quantize", about="", examples="", short=quantize.QUANTIZE_SHORT
    )
    assert (settings.teacher.model, settings.student.spec) == ("given", "teacher")
