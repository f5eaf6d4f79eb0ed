"""Trained models as packages, exports and registry versions. Only `models` and `track` import MLflow."""
