"""A task's trial before any run: a few rows through all of it in processes of this machine, without Ray and without a trace."""
