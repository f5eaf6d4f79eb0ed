"""`ray-app train` refuses invalid input before it writes anything."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ray_app import load_config
from ray_app.cluster.resources import ClusterCapacity, workers_that_fit
from ray_app.driver.parsing import parse
from ray_app.errors import ConfigError
from ray_app.preflight.prepare import claim, prepare
from ray_app.runlog.lease import acquire_lease
from tests.support.paths import ROOT
from tests.support.train_command import CommandResult, image_arguments, write_images


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--train.epoch=3"], r"error: --train.epoch is not a field. Did you mean train.epochs\? train has backend, "),
        (["--retrain.max_age_days=3"], "retrain.max_age_days is a field of ray-app retrain, which this command"),
        (["--train.epochs=many"], "train.epochs is many; it must be an integer"),
        (["--data.last_batch=some"], "data.last_batch is some; it must be one of keep, drop"),
        (["--data.global_batch_size=66"], "66, which is not divisible by the 4 logical workers; the nearest valid"),
        (["--scaling.max_workers=5"], "max_workers is 5, above scaling.logical_workers = 4: .* Set max_workers to"),
        (["--scaling.min_workers=3", "--train.epochs=0"], r"(?s)epochs is 0; it must be at least 1.*min_workers is 3"),
        (["--run.storage_path=/proc/nothing"], "No run can be stored in run.storage_path '/proc/nothing': No such"),
        ([f"--run.storage_path={__file__}/runs"], "No run can be stored in .*test_train.py is a file. Set"),
        (["--run.name=../there"], "run.name is '../there'; use"),
        (["--data.path=nowhere"], "nowhere' does not exist .* ingest"),
        (["--task.init_args.image=label"], "Column 'label' .* holds integer int64; the image needs array or bytes"),
        (["--task.init_args.label=image"], "Column 'image' .* the label needs integer"),
        (["--task.init_args.num_classes=5"], "labels from 0 to 9; 5 classes allow 0 to 4"),
        (["--task.init_args.model=resnet999"], "resnet999'?; it must be one of .*resnet18"),
        (["--task.class_path=nowhere.Missing"], "'nowhere.Missing', but there is no module 'nowhere'"),
        (["--task.class_path=ray_app.task.imag.Image"], "ray_app.task has no 'imag'. Did you mean"),
        (["--task.class_path=Image"], "task.class_path is 'Image', which is not an import path of a class. Give"),
        (["--task.class_path=ray_app.Tabular"], "The names there are"),
        (["--task.class_path=ray_app.TabularRegression"], "Did you mean ray_app.task.tabular.TabularRegression"),
        (["--schedule.class_path=torch.optim.StepLR"], "Did you mean torch.optim.lr_scheduler.StepLR"),
        (["--optimizer.class_path=torch.optim.Adamm"], "optimizer.class_path .* has no 'Adamm'. Did you mean"),
        (["--optimizer.init_args.lrr=1"], "torch.optim.AdamW has no argument 'lrr'. Did you mean lr\\? Its"),
        (["--optimizer.init_args.lr=big"], "torch.optim.AdamW got lr = big; it must be a number"),
        (["--task.class_path=torch.nn.Linear"], "torch.nn.Linear', which is not a subclass of ray_app.task.base.Task"),
        (["--evaluate.metric=recall"], "evaluate.metric is 'recall'; the task's single-valued metrics are accuracy, "),
    ],
)
def test_invalid_input_is_refused_before_anything_is_written(
    make_arguments: Callable[..., list[str]],
    run_command: Callable[[Sequence[str]], CommandResult],
    tmp_path: Path,
    arguments: list[str],
    expected: str,
) -> None:
    assert_refused(run_command(make_arguments(*arguments)), expected, tmp_path)


def assert_refused(ended: CommandResult, expected: str, tmp_path: Path) -> None:
    assert ended.code == 2
    assert not ended.out
    assert re.search(expected, ended.err), ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "runs").exists()


def test_an_unknown_field_in_a_file_is_refused(
    make_arguments: Callable[..., list[str]], run_command: Callable[[Sequence[str]], CommandResult], tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text("train:\n  epoch: 3\n")
    assert_refused(
        run_command(make_arguments(f"--config={tmp_path / 'mine.yaml'}")),
        r"error: train.epoch is not a field. Did you mean train.epochs\?",
        tmp_path,
    )


def test_an_empty_folder_is_refused(
    make_arguments: Callable[..., list[str]], run_command: Callable[[Sequence[str]], CommandResult], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    assert_refused(
        run_command(make_arguments(f"--data.path={tmp_path / 'empty'}")),
        "empty' holds no .*parquet file; ingest",
        tmp_path,
    )


def test_data_without_an_image_in_its_first_row_is_refused(
    make_arguments: Callable[..., list[str]], run_command: Callable[[Sequence[str]], CommandResult], tmp_path: Path
) -> None:
    folder = write_images(tmp_path / "images", 32, 16, bad=0)
    assert_refused(
        run_command(make_arguments(*image_arguments(folder))),
        r"BadRowError: images\.parquet, row group 0, row 0: ",
        tmp_path,
    )


def test_a_run_name_of_another_configuration_is_refused(
    make_arguments: Callable[..., list[str]], run_command: Callable[[Sequence[str]], CommandResult], tmp_path: Path
) -> None:
    prepared = prepare(parse(make_arguments()))
    with acquire_lease(prepared.job.paths) as lease:
        # The run has written no more than its configuration.
        claim(prepared, lease.fence)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    ended = run_command(make_arguments("--seed=7"))
    assert ended.code == 2
    assert "The run 'run' exists with another configuration" in ended.err
    assert "+ seed: 7" in ended.err
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before


@pytest.mark.parametrize(
    ("fields", "resources", "expected"),
    [
        ({"scaling__max_workers": 4}, {"CPU": 6.0}, 4),
        ({"scaling__max_workers": 4}, {"CPU": 5.0}, 3),
        ({"scaling__max_workers": 4, "data__eval_path": None}, {"CPU": 5.0}, 4),
        ({"scaling__max_workers": 4, "evaluate__num_cpus": 0}, {"CPU": 5.0}, 4),
        ({"scaling__max_workers": 4, "scaling__cpus_per_worker": 2}, {"CPU": 7.0}, 2),
        ({"scaling__max_workers": 4, "scaling__gpus_per_worker": 1}, {"CPU": 9.0, "GPU": 2.0}, 2),
        (
            {"scaling__max_workers": 4, "scaling__gpus_per_worker": 1, "evaluate__num_gpus": 1},
            {"CPU": 9.0, "GPU": 2.0},
            1,
        ),
    ],
)
def test_as_many_workers_start_as_fit_the_cluster(
    fields: dict[str, Any], resources: dict[str, float], expected: int
) -> None:
    assert (
        workers_that_fit(load_config(ROOT / "conf" / "digits.yaml").replace(**fields), ClusterCapacity(resources))
        == expected
    )


@pytest.mark.parametrize("resources", [{"CPU": 3.0}, {}])
def test_a_cluster_that_is_too_small_is_refused_with_its_resources(resources: dict[str, float]) -> None:
    config = load_config(ROOT / "conf" / "digits.yaml", scaling__min_workers=2)
    with pytest.raises(
        ConfigError,
        match=rf"need 4 CPU and 0 GPU; the cluster has {resources.get('CPU', 0):g} CPU and 0 GPU\. Add nodes",
    ):
        workers_that_fit(config, ClusterCapacity(resources))


def test_null_disables_a_default(make_arguments: Callable[..., list[str]]) -> None:
    assert parse(make_arguments()).checkpoint.every_epochs == 5
    config = parse(make_arguments("--checkpoint.every_epochs=null", "--schedule=null", "--data.eval_path=null"))
    assert (config.checkpoint.every_epochs, config.schedule, config.data.eval_path) == (None, None, None)
