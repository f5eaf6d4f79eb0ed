"""Who steps together, as a worker sees it: the membership protocol, its messages, and the process group. Knows no Ray."""
