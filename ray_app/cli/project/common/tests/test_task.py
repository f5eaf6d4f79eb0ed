"""Two steps and an evaluation in this process: data, task, model, loss and metrics fit together."""

from pathlib import Path

from make_data import write_data

from ray_app import load_config, run_training

CONFIG = Path(__file__).parents[1] / "train.yaml"


def test_two_steps(tmp_path: Path) -> None:
    """Trains and evaluates on a few rows, without a cluster."""
    write_data(tmp_path, train_rows=128, eval_rows=64)
    config = load_config(
        CONFIG,
        data__path=str(tmp_path / "train"),
        data__eval_path=str(tmp_path / "eval"),
        run__storage_path=str(tmp_path / "runs"),
        train__strategy="single",
        train__max_steps=2,
        evaluate__where="workers",
        tracking__enabled=False,
    )
    result = run_training(config)
    assert (result.status, result.summary["steps"]) == ("finished", 2)
    assert result.summary["metrics"]["error"] < 1
