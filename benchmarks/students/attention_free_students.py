"""Students without attention beside model2vec's: test score and texts a second at the same size of table.

    pip install -c constraints.txt -e '.[bench]'
    python -m benchmarks.students.attention_free_students --teacher runs/demo/teacher/KEY/model --data banking77/

Students are specs of `--student`, trained on the teacher's cached logits. The peers get the teacher's body: `model2vec`
is its own distillation with a logistic regression on the labels, `model2vec-trained` its classifier of static vectors,
fitted on the labels with early stopping on the validation split. Every method tries as many values (learning rates, or
strengths of the regression's penalty) with the first seed, and the best on the validation split is used with every
seed. Printed are parameters, the mean and standard deviation of the test score (the accuracy, or the micro F1 where a
text may have several labels), the share of the teacher's, and texts a second on one thread with tokenization: after a
pass over the training texts, the methods predict each test text once, in as many parts as there are `--rounds`, in
turn; the median of the parts counts. Finished trainings are kept in the output folder.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

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
from benchmarks.training.logit_experiment import LogitExperiment, build_data_config, build_parser
from compress.export.arrays.reader import Reader
from compress.export.common.source import Source
from compress.export.common.targets import find_target
from compress.export.write import write_targets
from compress.measure.turns import time_in_turns
from distill.checkpoint.custom_models import load_model_folder, save_model_folder
from distill.data.batches.batches import epoch_order
from distill.data.splits.examples import Examples
from distill.student.build import build_student
from distill.student.token_vectors import compute_token_vectors, fill_table, leave_out_special_tokens
from distill.tasks.text_classification import MultiLabel
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


class Peer(NamedTuple):
    """A trained model of model2vec.

    Args:
        predict: Returns the answers for some texts.
        estimate: Returns the probabilities of the classes, [texts, classes].
        parameters: Their number.
    """

    predict: Predict
    estimate: Predict
    parameters: int


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
    teacher = experiment.measure_score(experiment.teacher, experiment.test)
    rows = [("teacher", "", "", f"{100 * teacher:.2f}", "100.0", "", "")]
    for method, results in chosen.items():
        scores = [each["test"] for each in results]
        share = f"{100 * float(np.mean(scores)) / teacher:.1f}"
        first = results[0]
        chosen_value = f"{first['parameters']:,}", f"{first['rate']:g}"
        rows.append((method, *chosen_value, format_percent(scores), share, *rates[method]))
    score = f"test {experiment.task.metric_name}"
    header = ("method", "parameters", "value", score, "% of the teacher", "texts/s", "ratio to the first")
    console.table(f"{options.data}, tables of {options.width}, {len(options.seeds)} seeds", header, rows)
    console.say(f"{describe_setup()}, {options.threads} threads")


class Experiment(LogitExperiment):
    """The trainings and the folder of their results."""

    def __init__(self, options: argparse.Namespace):
        super().__init__(options.teacher, build_data_config(options))
        self.options, self.folder = options, Path(options.output)
        self.results: Results[Result] = Results(self.folder)

    def train_all(self, method: str, console: Console) -> list[Result]:
        """Returns a method's trainings from every seed, at the value with the best validation score."""
        values = {PEER: PENALTIES, TRAINED_PEER: PEER_RATES}.get(method, RATES)
        train = partial(self.train_once, method, console=console)
        return train_at_best(train, values, self.options.seeds, lambda each: each["validation"])

    def train_once(self, method: str, value: float, seed: int, console: Console) -> Result:
        """Returns the result of a training, which is run if it isn't known."""
        known = self.results.find(method=method, rate=value, seed=seed)
        if known is not None:
            return known
        if method in (PEER, TRAINED_PEER):
            peer = self.fit_peer(method, value, seed)
            parameters = peer.parameters
            parts = ((self.splits.validation, self.validation), (self.splits.test, self.test))
            scores = [self.score_logits(peer.estimate(part.texts) - 0.5, rows) for part, rows in parts]
        else:
            student = self.fit_student(method, value, seed, console)
            save_model_folder(student, self.name_folder(method, value, seed))
            parameters = student.num_parameters()
            scores = [self.measure_score(student, part) for part in (self.validation, self.test)]
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

    def fit_peer(self, method: str, value: float, seed: int) -> Peer:
        """Returns a model of model2vec, trained on the labels."""
        static, (texts, labels) = self.load_peer(), self.list_labelled(self.splits.train)
        if method == PEER:
            head = fit_regression(static.encode(texts), self.splits.train.labels, value, seed)
            size = static.embedding.size + static.embedding.shape[1] * len(self.task.labels)
            return Peer(
                lambda rows: head.predict(static.encode(list(rows))),
                lambda rows: head.predict_proba(static.encode(list(rows))),
                size,
            )
        from model2vec.train import StaticModelForClassification

        held_out_texts, held_out_labels = self.list_labelled(self.splits.validation)
        student = StaticModelForClassification.from_static_model(model=static)
        student.fit(
            texts, labels, learning_rate=value, device="cpu", random_seed=seed,
            X_val=held_out_texts, y_val=held_out_labels,
        )  # fmt: skip
        return Peer(
            lambda rows: student.predict(list(rows)),
            lambda rows: student.predict_proba(list(rows)),
            sum(each.numel() for each in student.parameters()),
        )

    def list_labelled(self, part: Examples) -> tuple[list[str], list[Any]]:
        """Returns the texts of a split, and the class or the list of classes of each."""
        labels = part.labels
        if isinstance(self.task, MultiLabel):
            labels = [np.flatnonzero(each).tolist() for each in labels]
        return list(part.texts), labels

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
            return self.fit_peer(method, value, seed).predict
        folder = self.name_folder(method, value, seed)
        write_targets(Source(load_model_folder(folder), self.tokenizer), [find_target("numpy")], folder / "files")
        return partial(Reader(folder / "files" / "numpy").classify, max_length=self.options.max_length)


def fit_regression(vectors: np.ndarray, labels: Sequence[Any], strength: float, seed: int) -> Any:
    """Returns a logistic regression of the labels, or one for each label where a text may have several.

    Args:
        vectors: [texts, width].
        labels: A class of each text, or a 1 or 0 for each label.
        strength: Inverse strength of the penalty.
        seed: Of its solver.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier

    head = LogisticRegression(C=strength, max_iter=1000, random_state=seed)
    several = np.ndim(labels) > 1
    return (OneVsRestClassifier(head) if several else head).fit(vectors, np.array(labels))


def predict_next(predict: Predict, parts: Iterator[Sequence[str]]) -> None:
    """Predicts the next of the parts."""
    predict(list(next(parts)))


if __name__ == "__main__":
    main()
