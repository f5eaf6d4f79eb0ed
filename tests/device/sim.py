"""The simulated devices with their process group: a process that imports this module has them as torch's accelerator.

`SimulatedGroup` is to the simulated devices what NCCL is to GPUs. Collectives run on a stream of the group, which waits
for the stream that launches them; `wait()` lets the current stream wait for that stream, and the host for nothing that
it could see. Tensors of the host go through gloo.
"""

from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ErrorType
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.utils import swap_tensors

from ray_app.devices import KINDS, DeviceKind
from tests.device.simulated import GROUP, NAME, load
from tests.support.device_group import GARBAGE, DeviceGroup2, tensors_in

SIM = load()
DEVICE = torch.device(NAME, 0)


class SimulatedKind(DeviceKind):
    """The kind of the simulated devices: their driver can page-lock memory of the host."""

    def lock_pages(self, address: int, size: int) -> str | None:
        SIM.lock_pages(address, size)
        return None

    def unlock_pages(self, address: int) -> None:
        SIM.unlock_pages(address)


KINDS[NAME] = SimulatedKind(NAME)


class SimulatedGroup(DeviceGroup2):
    """A group as the module's docstring describes it, with the error messages of NCCL, see `DeviceGroup2`."""

    name = GROUP
    supports_splitting = False
    _group_name, _num_synchronizations = "", 0

    # torch asks for the name when it makes a device mesh; the base class has none without a backend in C++.
    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def _is_of_device(self, name: str, outputs: list[Tensor]) -> bool:
        del name
        return any(tensor.device.type == NAME for tensor in outputs)

    def _launch(self, name: str, *args: Any, **options: Any) -> Any:
        outputs = {id(tensor) for tensor in tensors_in(args[0])}
        tensors = list(tensors_in(args))
        device = next(tensor.device for tensor in tensors)
        assert {tensor.device for tensor in tensors} == {device}, "NCCL takes tensors of one device"
        stream = _group_stream(device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            for tensor in tensors:
                SIM.access(tensor, id(tensor) in outputs or name in _IN_PLACE, f"the collective {name}")
        SIM.count("collectives")
        was_counted = SIM.set_counted(False)
        try:
            work = self.start(name, *_on_host(args), **options)
        finally:
            SIM.set_counted(was_counted)
        return _StreamWork(work, stream.record_event(), tensors)

    def get_error(self) -> ErrorType:
        """Returns the error of a failed collective once this process has waited for a device since."""
        if self.failed is not None and SIM.num_synchronizations() > self._num_synchronizations:
            self.error = ErrorType.COMM_ERROR
        return self.error

    def fill_with_garbage(self, output: Tensor) -> None:
        self._num_synchronizations = SIM.num_synchronizations()
        SIM.host_view(output.detach()).fill_(GARBAGE if output.is_floating_point() else 1)

    def synchronize(self) -> None:
        """See `DeviceGroup.synchronize`."""
        super().synchronize()
        torch.accelerator.current_stream().synchronize()


class _StreamWork:
    """A collective on the stream of the group; it keeps the tensors alive until a stream waits for it."""

    def __init__(self, work: Any, done: torch.Event, tensors: list[Tensor]) -> None:
        self._work, self._done = work, done
        self._tensors = tensors

    def has_arrived(self) -> bool:
        return self._work.has_arrived()

    def wait(self) -> None:
        try:
            self._work.wait()
        finally:
            torch.accelerator.current_stream(self._tensors[0].device).wait_event(self._done)


_IN_PLACE = ("allreduce", "broadcast", "send", "recv")
_streams: dict[torch.device, torch.Stream] = {}


def _group_stream(device: torch.device) -> torch.Stream:
    return _streams.setdefault(device, torch.Stream(device))


def _on_host(value: Any) -> Any:
    """Returns arguments of a collective with each tensor of a device as a tensor of the host with the same memory."""
    if isinstance(value, Tensor):
        return SIM.host_view(value)
    if isinstance(value, list | tuple):
        return type(value)(_on_host(part) for part in value)
    return value


def _move_states_to_device(parameters: list[Any], buffers: list[Tensor], device: torch.device) -> None:
    """Does what FSDP's function of this name does; torch cannot assign a tensor of this backend to `data` of another's.

    A parameter or buffer keeps its identity, and gets the memory of its copy on the device.
    """
    for tensor in (*parameters, *buffers):
        if tensor.device not in (device, torch.device("meta")):
            moved = tensor.detach().to(device)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            swap_tensors(tensor, torch.nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved)


_fsdp_init._move_states_to_device = _move_states_to_device
