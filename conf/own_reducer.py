"""A gradient reducer in plain PyTorch, for `train.reducer: own_reducer.OneDevice`; see docs/strategies.md."""

import torch

from ray_app.reduction.messages import gather
from ray_app.reduction.reducer import GradientReducer


class OneDevice(GradientReducer):
    """Gathers the gradients of all logical workers on every worker, and adds them in their order."""

    def __init__(self, model, world):
        self.world, self.sums = world, {}
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def backward(self, losses, weights, logical_worker):
        """Collects the gradient of a weighted sum."""
        self.collect_from(lambda: losses.backward(weights), logical_worker)

    def skip(self, logical_worker):
        """Collects zeros."""
        self.collect_from(lambda: None, logical_worker)

    def collect_from(self, compute, logical_worker):
        """Calls a function, and collects the gradient that it leaves."""
        self.close()
        result = compute()
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters]
        self.sums[logical_worker] = torch.cat([g.flatten() for g in gradients])
        return result

    def launch(self):
        """Nothing travels before `finish`."""

    def finish(self):
        """Adds the gradients of all logical workers in their order."""
        sums = {v: gradient for sums_of_rank in gather(self.sums, self.world) for v, gradient in sums_of_rank.items()}
        total = sum(sums[v] for v in range(self.world.logical_workers))
        for p, gradient in zip(self.parameters, total.split([p.numel() for p in self.parameters]), strict=True):
            p.grad = gradient.view_as(p)
        self.sums = {}

    def gradients(self):
        """Returns the sums."""
        return [p.grad for p in self.parameters]

    def norms(self):
        """Returns the norm of each sum."""
        return [gradient.norm() for gradient in self.gradients()]

    def close(self):
        """Removes all gradients."""
        for p in self.parameters:
            p.grad = None
