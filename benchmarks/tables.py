"""Accuracy on tables: `TabularClassification` and `TabularRegression` against two estimators of scikit-learn.

Of each table a quarter of the rows is the test set (the same rows for all). It goes through CSV files and
`ray-app ingest`. Both networks and the trees see gaps and words: `HistGradientBoosting` takes them natively after an
ordinal encoding, `MLP` after scikit-learn's usual pipeline (mean and indicator, one-hot, standardized numbers). The
score is the accuracy, or R2. titanic, adult and penguins are made here, with the columns and gaps of the data sets of
these names; no row of them is real.

python benchmarks/tables.py                     # all tables
python benchmarks/tables.py iris titanic        # some tables
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pandas as pd
from sklearn import datasets
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.impute import SimpleImputer
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

from ray_app import load_config, run_training
from ray_app.ingest.ingest import IngestOptions, ingest

STEPS, BATCH = 2000, 32
WORDS = make_column_selector(dtype_include=["object", "string"])
NUMBERS = make_column_selector(dtype_include="number")


def load_bundled(name: str) -> tuple[pd.DataFrame, pd.Series]:
    """Returns the rows and the target of a data set that scikit-learn ships."""
    bunch = getattr(datasets, f"load_{name}")(as_frame=True)
    return bunch.data, bunch.target


def with_gaps(values: Any, share: float, generator: np.random.Generator) -> pd.Series:
    """Returns values of which a share is missing."""
    return pd.Series(values).mask(generator.random(len(values)) < share)


def make_titanic() -> tuple[pd.DataFrame, pd.Series]:
    """Makes passengers: the chance to survive depends on sex, class, age and fare."""
    generator = np.random.default_rng(0)
    rows = 891
    sex = generator.choice(["male", "female"], rows, p=[0.65, 0.35])
    pclass = generator.choice([1, 2, 3], rows, p=[0.24, 0.21, 0.55])
    age = generator.gamma(6, 5, rows).round()
    fare = np.exp(4.6 - 0.8 * pclass + generator.normal(0, 0.5, rows)).round(2)
    deck = np.where(pclass == 1, generator.choice(list("ABCDE"), rows), generator.choice(list("EFG"), rows))
    score = 2.6 * (sex == "female") - 1.1 * (pclass - 2) - 0.03 * (age - 30) + 0.2 * np.log(fare) - 1.4
    table = {
        "pclass": pclass,
        "sex": sex,
        "age": with_gaps(age, 0.2, generator),
        "fare": fare,
        "deck": with_gaps(deck, 0.6, generator),
        "embarked": with_gaps(generator.choice(["S", "C", "Q"], rows, p=[0.72, 0.19, 0.09]), 0.01, generator),
        "siblings": generator.poisson(0.5, rows),
    }
    return pd.DataFrame(table), pd.Series((score + generator.logistic(0, 0.6, rows) > 0).astype(int))


def make_adult() -> tuple[pd.DataFrame, pd.Series]:
    """Makes incomes: a high one depends on education, age, hours, marriage and gains."""
    generator = np.random.default_rng(1)
    rows = 8000
    education = generator.choice(["HS-grad", "Some-college", "Bachelors", "Masters", "11th"], rows)
    years = pd.Series(education).map({"11th": 7, "HS-grad": 9, "Some-college": 10, "Bachelors": 13, "Masters": 14})
    age = generator.integers(17, 90, rows)
    hours = generator.normal(40, 12, rows).clip(1, 99).round()
    married = generator.random(rows) < 0.46
    gain = np.where(generator.random(rows) < 0.08, np.exp(generator.normal(8.5, 0.8, rows)).round(), 0)
    work = generator.choice(["Private", "Self-emp", "Local-gov", "Federal-gov"], rows, p=[0.7, 0.12, 0.1, 0.08])
    score = (
        0.45 * (years - 10) + 1.9 * married - 0.002 * (age - 48) ** 2 + 0.04 * (hours - 40) + 3 * (gain > 5000) - 1.2
    )
    table = {
        "age": age,
        "workclass": with_gaps(work, 0.06, generator),
        "education": education,
        "marital": np.where(married, "Married", generator.choice(["Never-married", "Divorced"], rows)),
        "gain": gain,
        "hours": hours,
        "occupation": with_gaps(generator.choice([f"job {i}" for i in range(14)], rows), 0.06, generator),
    }
    return pd.DataFrame(table), pd.Series(np.where(score + generator.logistic(0, 0.7, rows) > 0, ">50K", "<=50K"))


def make_penguins() -> tuple[pd.DataFrame, pd.Series]:
    """Makes penguins of three species, by the means and deviations of their measures."""
    generator = np.random.default_rng(2)
    rows = 344
    species = generator.choice(["Adelie", "Chinstrap", "Gentoo"], rows, p=[0.44, 0.2, 0.36])
    kind = pd.Series(species)
    measures: dict[str, dict[str, tuple[float, float]]] = {
        "bill_length": {"Adelie": (38.8, 2.7), "Chinstrap": (48.8, 3.3), "Gentoo": (47.5, 3.1)},
        "bill_depth": {"Adelie": (18.3, 1.2), "Chinstrap": (18.4, 1.1), "Gentoo": (15.0, 1.0)},
        "flipper": {"Adelie": (190, 6.5), "Chinstrap": (196, 7.1), "Gentoo": (217, 6.5)},
        "mass": {"Adelie": (3700, 460), "Chinstrap": (3730, 385), "Gentoo": (5080, 500)},
    }
    table: dict[str, Any] = {}
    for name, values in measures.items():
        mean, std = (kind.map({key: pair[i] for key, pair in values.items()}) for i in range(2))
        table[name] = with_gaps(generator.normal(mean, std).round(1), 0.02, generator)
    biscoe = generator.random(rows) < 0.3
    table["island"] = np.where((species == "Gentoo") | ((species == "Adelie") & biscoe), "Biscoe", "Dream")
    table["sex"] = with_gaps(generator.choice(["male", "female"], rows), 0.03, generator)
    return pd.DataFrame(table), kind


TABLES: dict[str, Callable[[], tuple[pd.DataFrame, pd.Series]]] = {
    **{name: partial(load_bundled, name) for name in ("iris", "wine", "breast_cancer", "digits", "diabetes")},
    "titanic": make_titanic,
    "adult": make_adult,
    "penguins": make_penguins,
}


def score_network(train: pd.DataFrame, test: pd.DataFrame, is_regression: bool, folder: Path) -> float:
    """Ingests both tables from CSV, trains for about `STEPS` steps, and returns the score of the last checkpoint."""
    label = "target" if is_regression else "label"
    for name, table in (("train", train), ("test", test)):
        table.to_csv(folder / f"{name}.csv", index=False)
    classes = None if is_regression else sorted(train[label].astype(str).unique())
    for name in ("train", "test"):
        named = None if is_regression else label
        ingest(IngestOptions("csv", str(folder / name), str(folder / f"{name}.csv"), label=named, classes=classes))
    kind = "TabularRegression" if is_regression else "TabularClassification"
    config = load_config(
        None,
        task__class_path=f"ray_app.task.tabular.{kind}",
        task__init_args={"hidden": [64, 64], "missing": {"default": "indicator"}, "standardize": True, "dropout": 0.2},
        optimizer__class_path="torch.optim.AdamW",
        optimizer__init_args={"lr": 0.002, "weight_decay": 0.05},
        data__path=str(folder / "train"),
        data__eval_path=str(folder / "test"),
        data__global_batch_size=BATCH,
        train__epochs=max(1, STEPS * BATCH // len(train)),
        train__strategy="single",
        evaluate__where="workers",
        checkpoint__every_epochs=None,
        tracking__enabled=False,
        run__storage_path=str(folder / "runs"),
        run__name="table",
    )
    return run_training(config).evaluate(str(folder / "test"), "newest")["r2" if is_regression else "accuracy"]


def score_trees(train: pd.DataFrame, test: pd.DataFrame, is_regression: bool) -> float:
    """Returns the score of `HistGradientBoosting` with its defaults."""
    kind = HistGradientBoostingRegressor if is_regression else HistGradientBoostingClassifier
    ordinal = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=np.nan)
    columns = make_column_transformer((ordinal, WORDS), remainder="passthrough")
    return make_pipeline(columns, kind(random_state=0)).fit(*_split(train)).score(*_split(test))


def score_mlp(train: pd.DataFrame, test: pd.DataFrame, is_regression: bool) -> float:
    """Returns the score of `MLP` behind scikit-learn's usual pipeline."""
    kind = MLPRegressor if is_regression else MLPClassifier
    words = make_pipeline(SimpleImputer(strategy="constant", fill_value="?"), OneHotEncoder(handle_unknown="ignore"))
    numbers = make_pipeline(SimpleImputer(add_indicator=True), StandardScaler())
    columns = make_column_transformer((words, WORDS), (numbers, NUMBERS))
    return make_pipeline(columns, kind(random_state=0, max_iter=500)).fit(*_split(train)).score(*_split(test))


def _split(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.Series]:
    return table.iloc[:, :-1], table.iloc[:, -1]


def main() -> None:
    """Prints a line for each table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], help="Default: all.")
    names = parser.parse_args().tables or list(TABLES)
    warnings.simplefilter("ignore")
    print(f"{'table':14}{'rows':>6}{'ray_app':>9}{'trees':>8}{'MLP':>8}  ray_app - MLP", flush=True)
    for name in names:
        rows, target = TABLES[name]()
        is_regression = name == "diabetes"
        table = rows.assign(**{"target" if is_regression else "label": target})
        train, test = train_test_split(table, random_state=0, stratify=None if is_regression else target)
        with tempfile.TemporaryDirectory() as folder:
            ours = score_network(train, test, is_regression, Path(folder))
        trees, mlp = (score(train, test, is_regression) for score in (score_trees, score_mlp))
        print(f"{name:14}{len(table):>6}{ours:>9.3f}{trees:>8.3f}{mlp:>8.3f}{ours - mlp:>+8.3f}", flush=True)


if __name__ == "__main__":
    main()
