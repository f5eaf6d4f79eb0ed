"""What the user gave: files of YAML, fields on the command line, and what is refused before anything is read."""
