"""Scheduled retraining: is there a reason to train, is the data sound, is the new model better; and a record of every such decision."""
