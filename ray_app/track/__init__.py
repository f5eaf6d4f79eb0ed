"""From the run's record to MLflow and TensorBoard."""
