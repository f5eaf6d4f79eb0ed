"""The training state (model, optimizer, schedule, averages): building it, loading it, sending it to other ranks."""
