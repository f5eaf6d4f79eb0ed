"""The training state: model, optimizer, schedule, averages; how it is made, restored and transferred."""
