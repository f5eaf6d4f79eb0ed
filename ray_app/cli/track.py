"""The command `ray-app track`: sends the record of a run that has ended to MLflow, as far as it is missing there."""

from __future__ import annotations

import argparse

from ray_app.cli.main import exit_code
from ray_app.driver.parsing import add_current_folder_to_path
from ray_app.driver.trained_run import send_to_mlflow
from ray_app.errors import escape_controls


def main(arguments: list[str] | None = None, prog: str = "ray-app track") -> int:
    """Runs the command `ray-app track`.

    Returns:
        Exit code: see `exit_code`. Records that MLflow has are not sent again.
    """
    parser = argparse.ArgumentParser(
        prog=prog, description="Sends the missing record of an ended run to MLflow.", allow_abbrev=False
    )
    parser.add_argument("--replay", metavar="RUN", required=True, help="Directory of the run, or its URI in a bucket.")
    parser.add_argument("--uri", help="MLflow tracking URI; default: the run's own. Another one gets the whole record.")
    experiment_help = "Experiment for a run that MLflow does not know yet; default: the run's own."
    parser.add_argument("--experiment", help=experiment_help)
    options = parser.parse_args(arguments)
    add_current_folder_to_path()

    def work() -> None:
        sent = send_to_mlflow(options.replay, options.uri, options.experiment)
        text = f"Sent {sent.points} points, {sent.evaluations} of them evaluations, to MLflow run {sent.run_id}"
        print(escape_controls(f"{text} ({sent.status}) at {sent.uri}"))

    return exit_code(work, "The record could not be sent")
