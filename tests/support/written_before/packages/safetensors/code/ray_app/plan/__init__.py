"""The order of the data as pure functions of integers: no Ray, no torch, no MLflow, no files."""
