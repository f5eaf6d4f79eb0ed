"""Models that leave a run: packages, exports, versions in the registry, and loading them. MLflow is imported here and in `track` only."""
