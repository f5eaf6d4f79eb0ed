"""Runs as Ray jobs: checked before submission, followed, and submitted again when their driver is lost."""
