"""The commands, one module each, which are imported when they are called."""
