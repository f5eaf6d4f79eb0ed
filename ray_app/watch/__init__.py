"""What a person sees while a run trains: terminal, notebook, web page, Prometheus, webhooks."""
