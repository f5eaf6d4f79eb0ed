"""`report.html`: one self-contained page about a run, made from its directory alone."""
