"""Scheduled retraining as an Airflow DAG: one task, which runs `ray-app retrain` on a machine of the Ray cluster.

For Airflow 3, or 2.10 and newer with apache-airflow-providers-standard. Copy this file into the DAG folder and change
the constants.
"""

from __future__ import annotations

from datetime import timedelta

import pendulum
from airflow import DAG
from airflow.exceptions import AirflowException, AirflowFailException
from airflow.providers.standard.operators.bash import BashOperator

FOLDER = "/opt/ray_app"
COMMAND = "exec .venv/bin/python -m ray_app retrain --config conf/retrain_digits.yaml"

AGAIN = 75  # interrupted, or another scheduler is at it


class Retrain(BashOperator):
    """Runs the command; only what ended with `AGAIN` is worth another try.

    A stopped task gets SIGTERM, which the retraining answers with a last checkpoint and exit code 75.
    """

    def execute(self, context):
        """Runs the command in `cwd`.

        Raises:
            AirflowException: It ended with 75; Airflow tries again.
            AirflowFailException: It ended with another code, 2 where the data or the configuration is refused; no
                further try.
        """
        result = self.subprocess_hook.run_command(
            command=["bash", "-c", self.bash_command], env=self.get_env(context), cwd=self.cwd
        )
        if result.exit_code == AGAIN:
            raise AirflowException("Interrupted, or another scheduler is at it; the next try goes on from there.")
        if result.exit_code != 0:
            raise AirflowFailException(f"Exit code {result.exit_code}; the last lines of the log say why.")


with DAG(
    dag_id="retrain_digits",
    schedule="17 3 * * *",
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    max_active_runs=1,
):
    Retrain(
        task_id="retrain",
        bash_command=COMMAND,
        cwd=FOLDER,
        retries=5,
        retry_delay=timedelta(minutes=5),
        retry_exponential_backoff=True,
    )
