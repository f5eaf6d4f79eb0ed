"""What becomes of a run: its closing, summary and result, its checkpoints as exports and versions, its report, comparisons."""
