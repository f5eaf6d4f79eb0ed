"""The benchmarks run and print their measurements."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.train_command import run_benchmark

NUMBER = r"(\d+\.?\d*)"
IMAGE_SIDES = (
    "bare decode and resize",
    "bare, two threads",
    "reader",
    "two reader threads",
    "Ray Data read tasks",
    "cache: disk",
)
TRANSFORM_SIDES = ("without keys", "drawing by keys")
ROW_SIDES = ("stock iter_torch_batches", "cache: none", "cache: memory", "cache: disk")


def test_the_input_benchmark_measures_every_pipeline() -> None:
    output = run_benchmark("benchmarks/input.py", "--tiny")
    sides = re.findall(rf"^(\S.*?) +{NUMBER} \(\S+\) ", output, re.MULTILINE)
    assert [side for side, _ in sides if not side.endswith("again")] == [*IMAGE_SIDES, *TRANSFORM_SIDES, *ROW_SIDES]
    assert all(float(wall_ms) > 0 for _, wall_ms in sides)
    waits = re.findall(rf"^Waiting for (.*): {NUMBER}% of (\d+) steps of {NUMBER} ms", output, re.MULTILINE)
    assert [name for name, *_ in waits] == ["small rows", "images"]
    assert all(0 <= float(percent) < 100 and int(steps) >= 6 and float(ms) > 0 for _, percent, steps, ms in waits)


def test_the_keras_benchmark_measures_both_ways_to_train_a_keras_model() -> None:
    output = run_benchmark("benchmarks/keras_fit.py", "--tiny", "--rounds", "1")
    sides = re.findall(rf"^(\S.*?) {{2,}}-?{NUMBER} \(\S+\) ", output, re.MULTILINE)
    assert [side for side, _ in sides if "TensorFlow" not in side] == [
        "Model.fit, torch",
        "ray_app.keras.fit",
        "KerasTask",
        "Model.fit, torch again",
    ]


def test_the_object_store_benchmark_spills_nothing() -> None:
    output = run_benchmark("benchmarks/object_store.py", "--rows", "300")
    [sizes] = re.findall(
        rf"store of {NUMBER} MB, {NUMBER} MB through it:\s+at most {NUMBER} MB used, {NUMBER} MB spilled", output
    )
    store, through, used, spilled = map(float, sizes)
    assert (round(through), spilled) == (45, 0)
    assert 0 < used <= store


def test_the_footer_benchmark_measures_every_way_to_open() -> None:
    output = run_benchmark("benchmarks/footers.py", "--files", "20")
    ways = re.findall(
        rf"^(\S.*?) +{NUMBER} s \({NUMBER}-{NUMBER}\), -?{NUMBER} MB; of 100,000 {NUMBER} s, ", output, re.MULTILINE
    )
    assert [way for way, *_ in ways] == [
        "footers, not in the page cache",
        "footers, in the page cache",
        "kept",
        "kept again",
    ]
    assert all(float(seconds) > 0 for _, seconds, *_ in ways)


def test_the_scale_benchmark_simulates_and_plots_many_workers(tmp_path: Path) -> None:
    output = run_benchmark(
        "benchmarks/scale.py", "--workers", "10", "100", "--steps", "1000", "--picture", str(tmp_path / "a.svg")
    )
    for name in (
        "rendezvous, % of a core",
        "forming, s of CPU",
        "objects written per s",
        "driver after 10^6 steps, MB",
    ):
        assert re.search(rf"^{re.escape(name)} +{NUMBER}\S* +{NUMBER}", output, re.MULTILINE)
    assert re.findall(r"^table, messages one after the other +(\d+) +(\d+)", output, re.MULTILINE) == [("18", "8")]
    assert re.findall(r"^messages per s +(\d+) +(\d+)", output, re.MULTILINE) == [("80", "800")], (
        "each worker sends four heartbeats a second and receives as many replies"
    )
    assert (tmp_path / "a.svg").read_text().count("<polyline") == 5


def test_the_study_benchmark_compares_with_ray_tune() -> None:
    output = run_benchmark("benchmarks/tune.py", "--quick", "--rounds", "1")
    sides = re.findall(rf"^(\S.*?) {{2,}}{NUMBER} \(\S+\) ", output, re.MULTILINE)
    assert [side for side, _ in sides] == ["Ray Tune", "ray_app", "ray_app, ASHA", "Ray Tune again"]
    studies = re.findall(rf"{NUMBER} of {NUMBER} worker-seconds in steps .* after {NUMBER} s", output)
    assert len(studies) == 2
    assert all(0 < float(share) < 1 for share, *_ in studies)
    assert re.search(rf"^simulated trials: \d+ decisions, {NUMBER} ms per decision", output, re.MULTILINE)
