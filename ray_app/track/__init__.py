"""From the record to MLflow: the only importer of `mlflow`, and only when a run is tracked."""
