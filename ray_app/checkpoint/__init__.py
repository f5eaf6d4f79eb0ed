"""The checkpoint store: files of a checkpoint, atomic commit, verification, fallback and retention."""
