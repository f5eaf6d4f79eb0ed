"""The drill: a configuration under faults on the user's own cluster, compared with the undisturbed run."""
