"""A worker's client of the rendezvous: its heartbeats, and its process group, which is formed anew in each generation.

Ray Train starts and ends the worker processes. The rendezvous decides which of them form a process group and when,
because a process group of Ray Train lasts only as long as all of its workers live.
"""

from __future__ import annotations

import logging
import os
import random
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal

import ray
import torch

from ray_app.channel import FrameReader, connect, pack_frame
from ray_app.cluster.rendezvous.server import decode_reply, encode
from ray_app.devices import HOST_GROUP
from ray_app.errors import ConfigError, PeerLostError
from ray_app.reduction.base import World, collective
from ray_app.runlog.journal import StepRecord, put_event
from ray_app.runlog.paths import RunPaths
from ray_app.task.environment import device_uuid
from ray_app.train.membership import HEARTBEAT_S, Flags, GenerationInfo, Heartbeat, HeartbeatReply, LeavingError, Phase
from ray_app.train.process_group import ProcessGroup, describe_failed_forms, open_store

logger = logging.getLogger(__name__)

_ANSWER_S = 5.0
"""Seconds for which the client waits for the rendezvous when it connects, sends, or reports its end."""
_STACKS_S = 2.0
"""Maximum delay of the next heartbeat, in seconds, while the stacks of this process are written to storage."""
_UNACKNOWLEDGED_MS = 20_000
"""Milliseconds without an acknowledgement after which TCP closes a connection, so that the client connects anew.

After an interruption of the network a new connection works at once, while TCP would resend the lost data of the old one
at ever longer intervals.
"""
_MAX_FAILED_FORMS = 2
"""Number of generations in a row that may fail to form although no worker is lost."""
_MIN_PERIOD_FRACTION = 0.75
"""Jitter: a heartbeat is sent after 75-100 % of the period, so that workers do not stay synchronized."""


class RendezvousClient:
    """The `Membership` of a Ray Train worker. A thread sends heartbeats and acts on the replies.

    Args:
        rendezvous: Handle of the rendezvous actor.
        logical_workers: L.
        device: The device on which the worker computes.
        backend: See `ProcessGroup.open`.
        paths: The paths of the run; the stacks of a stalled worker are recorded as one of its events.
        fence: Number of the driver's start.
        group_size: Number of workers that start and end together with this one; None if workers come and go one by one,
            and `ElasticController` tells the rendezvous how many to expect.
    """

    def __init__(
        self,
        rendezvous: Any,
        logical_workers: int,
        device: torch.device,
        backend: Literal["auto", "gloo"],
        paths: RunPaths,
        fence: int,
        group_size: int | None = None,
    ) -> None:
        self.recovers, self._group_size = group_size is None, group_size
        self._rendezvous = rendezvous
        self._logical_workers = logical_workers
        self._device = device
        self._backend = backend
        self._paths = paths
        self._fence = fence
        context, host = ray.get_runtime_context(), ray.util.get_node_ip_address()
        # A process group forms at the store of its rank 0, which any worker may become.
        self._store = open_store(host)
        self._identity = Heartbeat(
            str(context.get_actor_id()),
            context.get_node_id(),
            host,
            self._store.port,
            os.getpid(),
            device=device_uuid(device),
            uses_gloo=backend == HOST_GROUP,
        )
        # These attributes are the fields of the next heartbeat.
        self._generation = self._rank = self._recorded = self._progress_reports = 0
        self._step = -1
        self._record: StepRecord | None = None
        self._phase: Phase = "starting"
        self._wait_number = 0
        self._lost = False
        # The newest reply, and the group that it may ask this worker to abort.
        self._reply = HeartbeatReply()
        self._group: ProcessGroup | None = None
        # The newest generation that has formed with this worker, and the number of waits for a generation so far.
        self._generation_info = GenerationInfo(0, 0, 0, "", 0)
        self._wait_count = 0
        # Why NCCL did not connect the last time, if this worker was the one that failed.
        self._form_error = ""
        self._connection: socket.socket | None = None
        self._frames = FrameReader()
        # Guards the fields that a reply changes, and is notified of every reply.
        self._reply_condition = threading.Condition()
        self._closed = threading.Event()
        # A byte sent through this pair wakes the heartbeat thread, which polls the pair together with the connection.
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._random = random.Random()
        self._heartbeat_thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._heartbeat_thread.start()

    @contextmanager
    def generation(self, step: int, lost: bool) -> Iterator[tuple[World, GenerationInfo]]:
        """Waits for the next generation, opens its process group and yields both, see `Membership.generation`.

        Raises:
            LeavingError: This worker has to leave.
            PeerLostError: Another worker was lost while the process group formed.
            ConfigError: NCCL cannot connect the workers.
        """
        self._step, self._phase = step, "waiting"
        info = self._join(lost)
        world = World(info.rank, info.size, self._logical_workers)
        if info.size == 1:
            yield world, info
            return
        group = self._group = ProcessGroup()
        is_broken = True
        try:
            # A reply may have asked to abort this generation before there was a group to abort.
            self._abort_if_requested()
            self._open(group, info)
            world = replace(
                world, hosts=info.hosts, groups=group.groups, has_device_collectives=group.has_device_collectives
            )
            yield world, info
            is_broken = False
        except BaseException as error:
            self._report_break(error)
            raise
        finally:
            # The heartbeat thread may have to abort the group while it closes, so the attribute is cleared last.
            group.close(is_broken)
            self._group = None

    def _open(self, group: ProcessGroup, info: GenerationInfo) -> None:
        """Forms the process group of a generation, and remembers why that fails if the group was not aborted."""
        if self._form_error and info.failed_forms >= _MAX_FAILED_FORMS:
            raise ConfigError(describe_failed_forms(self._form_error))
        self._form_error = ""
        try:
            with collective():
                group.open(info, self._device, "gloo" if info.uses_gloo else self._backend)
        except PeerLostError as error:
            if group.has_device_collectives and not group.is_aborted:
                self._form_error = str(error)
            raise

    def _report_break(self, error: BaseException) -> None:
        """Reports at once that this worker leaves its generation in the middle, so that the others leave it, too.

        With NCCL they would not notice it. If the worker does not come back, the next generation does not wait until it
        has written what it still has to write.
        """
        with self._reply_condition:
            self._lost = True
        if isinstance(error, PeerLostError):
            self._wake()
        else:
            self.close()

    def need_no_group(self) -> None:
        """Announces a worker of parameter servers, which needs no process group, as stepping in generation 1.

        It returns when the rendezvous knows the worker. The step watchdog covers the worker from then on.
        """
        self._generation = 1
        with self._reply_condition:
            self._wake()
            self._reply_condition.wait_for(lambda: self._reply.generation == 1)

    def _join(self, lost: bool) -> GenerationInfo:
        """Waits for the next generation and returns it.

        Raises:
            LeavingError: This worker has to leave.
        """
        with self._reply_condition:
            self._wait_count += 1
            self._wait_number, self._lost = self._wait_count, lost
            self._wake()
            while self._wait_number:
                self._reply_condition.wait()
                if self._reply.leave and self._reply.is_for_waiting:
                    self._wait_number = 0
                    raise LeavingError
            return self._generation_info

    def _wake(self) -> None:
        """Wakes the heartbeat thread, so that it sends the next heartbeat at once."""
        self._wake_sender.send(b"!")

    def _heartbeat(self) -> Heartbeat:
        """Returns the heartbeat to send now."""
        with self._reply_condition:
            return replace(
                self._identity,
                generation=self._generation,
                rank=self._rank,
                step=self._step,
                phase=self._phase,
                record=self._record,
                recorded=self._recorded,
                progress_reports=self._progress_reports,
                wait_number=self._wait_number,
                lost=self._lost,
            )

    def flags(self) -> Flags:
        """Returns the flags that this rank brings into its next step, see `Membership.flags`."""
        reply = self._reply
        # A reply to a heartbeat from another generation does not ask to leave the present one.
        if reply.generation != self._generation:
            return reply.flags & ~Flags.REFORM
        return reply.flags | (Flags.REFORM if reply.abort else Flags(0))

    def is_leaving(self) -> bool:
        """Returns whether this worker has to end when its generation does, see `Membership.is_leaving`."""
        return self._reply.leave

    def enter(self, phase: Phase) -> None:
        """Puts a phase into the next heartbeat, see `Membership.enter`."""
        self._phase = phase

    def report_progress(self) -> None:
        """Counts a progress other than a step in the next heartbeat, see `Membership.report_progress`."""
        self._progress_reports += 1

    def report(self, step: int, record: StepRecord | None, recorded: int) -> None:
        """Puts the finished steps and the newest record into the next heartbeat, see `Membership.report`."""
        self._step = step
        self._record = record
        self._recorded = recorded

    @property
    def progress(self) -> str:
        """The rank and the finished steps of this worker, for messages."""
        return f"rank {self._rank}, step {max(0, self._step)}"

    @property
    def process_name(self) -> str:
        """The name of this process in file names."""
        return f"worker-{self._identity.host.replace(':', '-')}-{os.getpid()}"

    def recorded(self) -> int:
        """Returns the last step with its record on storage, see `Membership.recorded`."""
        return self._reply.recorded

    def close(self, over: bool = False) -> None:
        """Ends the heartbeats and reports to the rendezvous that this worker ends by itself; only once.

        Args:
            over: Whether the worker ends because the run has ended.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        self._wake()
        self._heartbeat_thread.join()
        with suppress(ray.exceptions.RayError):
            ray.get(self._rendezvous.leave.remote(self._heartbeat(), over), timeout=_ANSWER_S)

    def _run(self) -> None:
        """Sends heartbeats and applies replies until the membership is closed; the body of the heartbeat thread."""
        while not self._closed.is_set():
            try:
                connection = self._connection or self._connect()
                connection.sendall(pack_frame(encode(self._heartbeat())))
                self._receive(connection)
            # Any error is retried: without heartbeats this worker would be declared lost.
            except Exception as error:
                logger.warning("The heartbeat was not sent, will try again: %s: %s", type(error).__name__, error)
                self._disconnect()
                self._closed.wait(HEARTBEAT_S)

    def _connect(self) -> socket.socket:
        """Opens a connection to the rendezvous and returns it.

        When this process ends, the connection closes, from which the rendezvous notices the end of the process.
        """
        # A rendezvous that was restarted does not know the number any more.
        if self._group_size is not None:
            ray.get(self._rendezvous.set_expected.remote(self._group_size), timeout=_ANSWER_S)
        address, secret = ray.get(self._rendezvous.address_and_secret.remote(), timeout=_ANSWER_S)
        connection = connect(address, secret, _ANSWER_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
        self._connection, self._frames = connection, FrameReader()
        return connection

    def _disconnect(self) -> None:
        """Closes the connection, if there is one; the next heartbeat opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _receive(self, connection: socket.socket) -> None:
        """Applies replies until the next heartbeat is due, another thread calls `_wake`, or the connection ends."""
        # `select.select` would refuse file descriptors above 1023.
        poll = select.poll()
        for readable in (connection, self._wake_receiver):
            poll.register(readable, select.POLLIN)
        sent_s = time.monotonic()
        fraction = self._random.uniform(_MIN_PERIOD_FRACTION, 1.0)
        while (left_s := sent_s + fraction * self._reply.period_s - time.monotonic()) > 0:
            ready = [descriptor for descriptor, _ in poll.poll(1e3 * left_s)]
            if connection.fileno() in ready:
                data = connection.recv(1 << 16)
                if not data:
                    self._disconnect()
                    return
                for frame in self._frames.feed(data):
                    self._apply(decode_reply(frame))
            if self._wake_receiver.fileno() in ready:
                self._wake_receiver.recv(64)
                return

    def _apply(self, reply: HeartbeatReply) -> None:
        """Stores a reply and does what it asks for: record the stacks, exit, or abort the process group."""
        with self._reply_condition:
            self._reply = reply
            # An answer to an earlier wait may arrive late; its generation is not a new one.
            if reply.formed is not None and self._wait_number and reply.formed.number > self._generation:
                self._generation_info, self._wait_number = reply.formed, 0
                self._generation, self._rank = reply.formed.number, reply.formed.rank
                self._phase, self._lost = "forming", False
            self._reply_condition.notify_all()
        if reply.dump:
            details = {"rank": self._rank, "step": self._step, "doing": self._phase, "stacks": _stacks()}
            writer = threading.Thread(
                target=put_event, args=(self._paths, "stacks", self._fence), kwargs=details, daemon=True
            )
            writer.start()
            # The storage may be slow, and this thread must go on to its next heartbeat.
            writer.join(_STACKS_S)
        if reply.exit:
            logger.error("Exiting: evicted by the rendezvous (stalled the group, or declared lost)")
            os._exit(1)
        self._abort_if_requested()

    def _abort_if_requested(self) -> None:
        """Aborts the process group if the newest reply asks for it, or ends this process if that has no effect."""
        group, reply = self._group, self._reply
        if reply.abort and group is not None and reply.generation == self._generation:
            group.abort()
            if group.is_stuck:
                logger.error("Exiting: this process waits for a peer that was lost before it had connected")
                os._exit(1)


def _stacks() -> str:
    """Returns the stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    return "\n".join(parts)
