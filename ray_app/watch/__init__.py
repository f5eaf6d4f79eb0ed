"""What a person sees while a run goes on: the console, the line in a notebook, and how busy the nodes are."""
