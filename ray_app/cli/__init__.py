"""The commands, one module each, and what their exit codes mean."""
