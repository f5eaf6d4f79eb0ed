"""From the record to MLflow and TensorBoard, and nothing else; models are in `models`."""
