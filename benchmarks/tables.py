"""Accuracy on tables: `TabularClassification` and `TabularRegression` by default against scikit-learn's estimators.

Of each table a quarter of the rows is the test set (the same rows for all). No model is trained on it and no checkpoint
is chosen by it, but the defaults of the network were chosen on a selection of tables with three of these, so its score
on them may be a little optimistic. All rows go through CSV files and `ray-app ingest`. The configuration of the
networks is that of docs/start/tables.md without `eval_path`: just the name of the task and a folder. Both networks and
the trees (`HistGradientBoosting`, by its defaults) train on all other rows. They see gaps and words: the trees natively
after an ordinal encoding, `MLP` after scikit-learn's usual pipeline (mean and indicator, one-hot, standardized
numbers). The score is the accuracy, or R2. The tables that scikit-learn does not ship are made here; no row of them is
real.

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


def make_prices() -> tuple[pd.DataFrame, pd.Series]:
    """Makes houses with prices of 50,000 to 800,000."""
    generator = np.random.default_rng(3)
    rows = 2000
    area, storeys = generator.uniform(30, 250, rows).round(1), generator.integers(1, 7, rows)
    age, distance = generator.uniform(0, 80, rows).round(), generator.uniform(0, 30, rows).round(1)
    price = 2500 * area + 12_000 * storeys - 900 * age - 4000 * distance + 60_000
    table = {"area": area, "storeys": storeys, "age": age, "distance [km]": distance}
    return pd.DataFrame(table), pd.Series((price + 15_000 * generator.normal(size=rows)).round())


def make_thousands() -> tuple[pd.DataFrame, pd.Series]:
    """Makes columns of 0 to 1000, two of which decide."""
    values = np.random.default_rng(4).uniform(0, 1000, (600, 4)).round(1)
    return pd.DataFrame(values, columns=list("abcd")), pd.Series(
        np.where(values[:, 0] + 0.5 * values[:, 1] > 750, "good", "bad")
    )


def make_tails() -> tuple[pd.DataFrame, pd.Series]:
    """Makes columns with heavy tails: five lognormal ones with deviation 2.5, and one of Cauchy's distribution."""
    generator = np.random.default_rng(5)
    values, cauchy = np.exp(generator.normal(0, 2.5, (3000, 5))), generator.standard_cauchy(3000)
    target = np.log(values[:, 0]) + 2 * np.tanh(np.log(values[:, 1])) + np.clip(cauchy, -2, 2)
    table = pd.DataFrame(values, columns=list("abcde")).assign(cauchy=cauchy)
    return table, pd.Series(100 * (target + generator.normal(0, 0.5, 3000)))


def make_words() -> tuple[pd.DataFrame, pd.Series]:
    """Makes sales of 600 products, a few of which are sold most."""
    generator = np.random.default_rng(6)
    product = (600 * generator.random(4000) ** 2).astype(int)
    vendor, weight = generator.integers(0, 12, 4000), generator.normal(size=4000)
    target = generator.normal(0, 1, 600)[product] + 0.5 * (vendor % 3) + 0.7 * weight
    table = {"product": [f"p{i:04}" for i in product], "vendor": [f"vendor {i}" for i in vendor], "weight": weight}
    return pd.DataFrame(table), pd.Series(target + generator.normal(0, 0.5, 4000))


def make_noise() -> tuple[pd.DataFrame, pd.Series]:
    """Makes 100 columns of different scales, 80 of which are noise."""
    generator = np.random.default_rng(7)
    values = generator.normal(size=(3000, 100))
    score = values[:, 0] + values[:, 1] * values[:, 2] + 1.5 * np.abs(values[:, 3]) - 1.2
    score += (values[:, 4:20] * np.linspace(0.6, 0.1, 16)).sum(1)
    table = pd.DataFrame(values * np.exp(generator.normal(0, 2, 100)), columns=[f"x{i}" for i in range(100)])
    return table, pd.Series((score + generator.logistic(0, 0.4, 3000) > 0).astype(int))


def make_many_rows() -> tuple[pd.DataFrame, pd.Series]:
    """Makes 20,000 rows of three classes, with interactions and a column of 40 words."""
    generator = np.random.default_rng(8)
    values, region = generator.normal(size=(20_000, 10)), generator.integers(0, 40, 20_000)
    score = np.sin(2 * values[:, 0]) + values[:, 1] * (values[:, 2] > 0) + 0.5 * values[:, 4] ** 2
    score += generator.normal(0, 1, 40)[region] * (values[:, 3] > -0.5) + np.where(values[:, 5] > 1, 1.0, 0.0)
    classes = np.searchsorted(np.quantile(score, [0.33, 0.66]), score + generator.normal(0, 0.3, 20_000))
    table = pd.DataFrame(values, columns=[f"n{i}" for i in range(10)]).assign(region=[f"r{i}" for i in region])
    return table, pd.Series(np.array(["low", "middle", "high"])[classes])


TABLES: dict[str, Callable[[], tuple[pd.DataFrame, pd.Series]]] = {
    **{name: partial(load_bundled, name) for name in ("iris", "wine", "breast_cancer", "digits", "diabetes")},
    "titanic": make_titanic,
    "adult": make_adult,
    "penguins": make_penguins,
    "prices": make_prices,
    "thousands": make_thousands,
    "tails": make_tails,
    "words": make_words,
    "noise": make_noise,
    "many_rows": make_many_rows,
}
REGRESSIONS = ("diabetes", "prices", "tails", "words")


def score_network(train: pd.DataFrame, test: pd.DataFrame, is_regression: bool, folder: Path) -> float:
    """Ingests the tables from CSV, trains by default, and returns the score of the last checkpoint on the test set."""
    label = "target" if is_regression else "label"
    classes = None if is_regression else sorted(train[label].astype(str).unique())
    options: dict[str, Any] = {"label": None if is_regression else label, "classes": classes}
    for name, table in (("train", train), ("test", test)):
        table.to_csv(folder / f"{name}.csv", index=False)
        ingest(IngestOptions("csv", str(folder / name), str(folder / f"{name}.csv"), **options))
    config = load_config(
        None,
        task__class_path=f"ray_app.task.tabular.Tabular{'Regression' if is_regression else 'Classification'}",
        data__path=str(folder / "train"),
        # What follows changes where the run works and what it records, and no parameter.
        train__strategy="single",
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
    print(f"{'table':14}{'rows':>6}{'ray_app':>9}{'trees':>8}{'MLP':>8}  ray_app - trees", flush=True)
    for name in names:
        rows, target = TABLES[name]()
        is_regression = name in REGRESSIONS
        table = rows.assign(**{"target" if is_regression else "label": target})
        train, test = train_test_split(table, random_state=0, stratify=None if is_regression else target)
        with tempfile.TemporaryDirectory() as folder:
            ours = score_network(train, test, is_regression, Path(folder))
        trees, mlp = (score(train, test, is_regression) for score in (score_trees, score_mlp))
        print(f"{name:14}{len(table):>6}{ours:>9.3f}{trees:>8.3f}{mlp:>8.3f}{ours - trees:>+8.3f}", flush=True)


if __name__ == "__main__":
    main()
