"""Students without attention beside model2vec's: accuracy and texts a second at the same size of table.

    pip install -c constraints.txt -e '.[bench]'
    python -m benchmarks.students.attention_free_students --teacher runs/demo/teacher/KEY/model --data banking77/

Students are specs of `--student`, trained on the teacher's cached logits. The peers get the teacher's body: `model2vec`
is its own distillation with a logistic regression on the labels, `model2vec-trained` its classifier of static vectors,
fitted on the labels with early stopping on the validation split. Every method tries as many values (learning rates, or
strengths of the regression's penalty) with the first seed, and the best on the validation split is used with every
seed. Printed are parameters, the mean and standard deviation of the test accuracy, the share of the teacher's, and
texts a second on one thread with tokenization: after a pass over the training texts, the methods predict each test text
once, in as many parts as there are `--rounds`, in turn; the median of the parts counts. Finished trainings are kept in
the output folder.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
import transformers
from threadpoolctl import threadpool_limits
from transformers import AutoModel, PreTrainedModel

from benchmarks.common.machine import describe_setup
from benchmarks.common.rate_search import train_at_best
from benchmarks.common.results_folder import Results, check_settings
from benchmarks.common.spread import format_percent
from benchmarks.common.timing import median_ratio
from benchmarks.training.logit_experiment import MAX_LENGTH, LogitExperiment, build_parser
from compress.export.arrays.reader import Reader
from compress.export.common.source import Source
from compress.export.common.targets import find_target
from compress.export.write import write_targets
from compress.measure.turns import time_in_turns
from distill.checkpoint.custom_models import load_model_folder, save_model_folder
from distill.data.batches.batches import epoch_order
from distill.student.build import build_student
from distill.student.token_vectors import compute_token_vectors, fill_table, leave_out_special_tokens
from distill.train.config import TrainConfig
from distill.train.optimizer import set_dropout
from pipelines.runs.console import Console

PEER, TRAINED_PEER = "model2vec", "model2vec-trained"
SPECS = ("static", "static,pooling=weighted+max", "static,ngrams=65536", "cnn", "gru")
RATES = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3)  # of students
PEER_RATES = (5e-5, 1e-4, 2e-4, 1e-3, 3e-3, 1e-2)  # model2vec's default is the fourth
PENALTIES = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)  # inverse strength of the regression's
BATCH = 64

Predict = Callable[[Sequence[str]], Any]


class Result(TypedDict):
    """A line of results.jsonl."""

    method: str
    rate: float
    seed: int
    parameters: int
    validation: float
    test: float


def main() -> None:
    """Trains what is missing, times one model of each method, and prints the table."""
    parser = build_parser(__doc__, epochs=20)
    parser.add_argument("--methods", nargs="+", default=[*SPECS, PEER, TRAINED_PEER])
    parser.add_argument("--width", type=int, default=256, help="of all tables")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--output", default="runs/attention-free-students")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = str(options.threads > 1).lower()
    check_settings(Path(options.output), options, free=("methods", "seeds", "rounds", "threads"))
    console, experiment = Console(), Experiment(options)
    chosen = {method: experiment.train_all(method, console) for method in options.methods}
    rates = experiment.measure_rates({method: results[0] for method, results in chosen.items()})
    teacher = experiment.measure_accuracy(experiment.teacher, experiment.test)
    rows = [("teacher", "", "", f"{100 * teacher:.2f}", "100.0", "", "")]
    for method, results in chosen.items():
        scores = [each["test"] for each in results]
        share = f"{100 * float(np.mean(scores)) / teacher:.1f}"
        first = results[0]
        chosen_value = f"{first['parameters']:,}", f"{first['rate']:g}"
        rows.append((method, *chosen_value, format_percent(scores), share, *rates[method]))
    header = ("method", "parameters", "value", "test accuracy", "% of the teacher", "texts/s", "ratio to the first")
    console.table(f"{options.data}, tables of {options.width}, {len(options.seeds)} seeds", header, rows)
    console.say(f"{describe_setup()}, {options.threads} threads")


class Experiment(LogitExperiment):
    """The trainings and the folder of their results."""

    def __init__(self, options: argparse.Namespace):
        super().__init__(options.teacher, options.data)
        self.options, self.folder = options, Path(options.output)
        self.results: Results[Result] = Results(self.folder)

    def train_all(self, method: str, console: Console) -> list[Result]:
        """Returns a method's trainings from every seed, at the value with the best validation accuracy."""
        values = {PEER: PENALTIES, TRAINED_PEER: PEER_RATES}.get(method, RATES)
        train = partial(self.train_once, method, console=console)
        return train_at_best(train, values, self.options.seeds, lambda each: each["validation"])

    def train_once(self, method: str, value: float, seed: int, console: Console) -> Result:
        """Returns the result of a training, which is run if it isn't known."""
        known = self.results.find(method=method, rate=value, seed=seed)
        if known is not None:
            return known
        if method in (PEER, TRAINED_PEER):
            predict, parameters = self.fit_peer(method, value, seed)
            scores = [
                float((predict(part.texts) == np.array(part.labels)).mean())
                for part in (self.splits.validation, self.splits.test)
            ]
        else:
            student = self.fit_student(method, value, seed, console)
            save_model_folder(student, self.name_folder(method, value, seed))
            parameters = student.num_parameters()
            scores = [self.measure_accuracy(student, part) for part in (self.validation, self.test)]
        return self.results.add(
            Result(method=method, rate=value, seed=seed, parameters=parameters, validation=scores[0], test=scores[1])
        )

    def name_folder(self, method: str, value: float, seed: int) -> Path:
        """Returns the folder of a student."""
        return self.folder / f"{method}-{value:g}-{seed}".replace(",", "-").replace("=", "")

    def fit_student(self, spec: str, rate: float, seed: int, console: Console) -> PreTrainedModel:
        """Trains a student with AdamW on the KL divergence from the teacher's cached logits."""
        epochs = self.options.epochs
        train = TrainConfig(epochs=epochs, learning_rate=rate, batch_size=BATCH)
        batches = [rows for epoch in range(epochs) for rows in epoch_order(self.train.lengths, BATCH, seed, epoch)]
        student = build_student(self.teacher, f"fresh,{spec},embeddings={self.options.width}", seed)
        fill_table(student.base_model, self.load_vectors())
        leave_out_special_tokens(student.base_model, self.tokenizer)
        set_dropout(student.train(), self.options.dropout)
        torch.manual_seed(seed)
        return self.fit(student, train, batches, self.folder / "teacher.npy", f"{spec} {rate:g} {seed}", console)

    def load_vectors(self) -> torch.Tensor:
        """Returns the teacher's vector of each token, computed once."""
        file = self.folder / "vectors.npy"
        if not file.exists():
            np.save(file, compute_token_vectors(self.teacher, self.tokenizer).numpy())
        return torch.from_numpy(np.load(file))

    def fit_peer(self, method: str, value: float, seed: int) -> tuple[Predict, int]:
        """Returns the predictions of model2vec's student for texts, and its number of parameters."""
        static = self.load_peer()
        texts, labels = self.splits.train.texts, list(self.splits.train.labels)
        if method == PEER:
            from sklearn.linear_model import LogisticRegression

            head = LogisticRegression(C=value, max_iter=1000, random_state=seed).fit(static.encode(texts), labels)
            return lambda rows: head.predict(static.encode(list(rows))), static.embedding.size + head.coef_.size
        from model2vec.train import StaticModelForClassification

        held_out = self.splits.validation
        student = StaticModelForClassification.from_static_model(model=static)
        student.fit(
            list(texts), labels, learning_rate=value, device="cpu", random_seed=seed,
            X_val=list(held_out.texts), y_val=list(held_out.labels),
        )  # fmt: skip
        return lambda rows: student.predict(list(rows)), sum(each.numel() for each in student.parameters())

    def load_peer(self) -> Any:
        """Returns model2vec's static model of the teacher's body, made once."""
        from model2vec import StaticModel
        from model2vec.distill import distill_from_model

        folder = self.folder / "model2vec"
        if not folder.exists():
            body = AutoModel.from_pretrained(self.source, dtype=torch.float32)
            width = self.options.width
            static = distill_from_model(body, self.tokenizer, device="cpu", pca_dims=width, quantize_to="float32")
            static.save_pretrained(folder)
        return StaticModel.from_pretrained(folder)

    def measure_rates(self, results: dict[str, Result]) -> dict[str, tuple[str, str]]:
        """Returns each method's texts a second with tokenization, and the ratio to the first method's.

        The timed texts are new to a method, but most of their words aren't: ours keeps the ids of words.
        """
        predictors = {method: self.open_predictor(result) for method, result in results.items()}
        parts = np.array_split(np.array(self.splits.test.texts, dtype=object), self.options.rounds)
        with threadpool_limits(self.options.threads):
            for predict in predictors.values():
                predict(list(self.splits.train.texts))
            calls = {method: partial(predict_next, predict, iter(parts)) for method, predict in predictors.items()}
            times = time_in_turns(calls, self.options.rounds, warmup=0)
        first, sizes = times[next(iter(times))], [len(part) for part in parts]
        return {
            method: (f"{np.median(np.array(sizes) / seconds):,.0f}", f"{1 / median_ratio(seconds, first):.2f}")
            for method, seconds in times.items()
        }

    def open_predictor(self, result: Result) -> Predict:
        """Returns a method's predictions as it is deployed: arrays of numpy, or model2vec's own."""
        method, value, seed = result["method"], result["rate"], result["seed"]
        if method in (PEER, TRAINED_PEER):
            return self.fit_peer(method, value, seed)[0]
        folder = self.name_folder(method, value, seed)
        write_targets(Source(load_model_folder(folder), self.tokenizer), [find_target("numpy")], folder / "files")
        return partial(Reader(folder / "files" / "numpy").classify, max_length=MAX_LENGTH)


def predict_next(predict: Predict, parts: Iterator[Sequence[str]]) -> None:
    """Predicts the next of the parts."""
    predict(list(next(parts)))


if __name__ == "__main__":
    main()
