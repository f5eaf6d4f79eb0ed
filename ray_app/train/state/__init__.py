"""The training state: made, kept, shared and restored; averages and frozen parameters."""
