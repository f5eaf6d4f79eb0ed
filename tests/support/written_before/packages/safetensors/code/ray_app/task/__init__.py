"""What is trained: the model, how rows become tensors, the loss and the metrics. The user's point of extension."""
