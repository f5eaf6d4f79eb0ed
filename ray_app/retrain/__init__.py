"""Scheduled retraining: triggers, data validation, training, the gate between challenger and champion, audit record."""
