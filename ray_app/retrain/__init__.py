"""Scheduled retraining: is there a reason to train, is the data sound, is the challenger better; with an audit
record.
"""
