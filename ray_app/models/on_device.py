"""Exported programs on another device than the one that they were exported on."""

from __future__ import annotations

import torch
from torch import nn


def module_on(exported: torch.export.ExportedProgram, device: torch.device) -> nn.Module:
    """Returns the module of an exported program on a device.

    `Module.to` would move the parameters alone: the operations of the graph that make a tensor, such as `arange`, keep the device that
    they were exported on, and the module checks that its inputs are there.
    """
    from torch.export.passes import move_to_device_pass

    return (move_to_device_pass(exported, device) if device.type != "cpu" else exported).module()
