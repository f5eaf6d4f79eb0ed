"""The user-facing task interface and the ready-made tasks: model, decoding of rows, loss, metrics."""
