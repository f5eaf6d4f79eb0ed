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
from typing import Literal

import ray
import torch

from ray_app.channel import FrameReader, connect, pack_frame
from ray_app.cluster.rendezvous.actor import RendezvousHandle
from ray_app.cluster.rendezvous.server import decode_reply, encode
from ray_app.cluster.rendezvous.worker_protocol import WorkerProtocol
from ray_app.devices import HOST_GROUP
from ray_app.errors import ConfigError, PeerLostError, SilentActorError
from ray_app.reduction.peer_errors import collective
from ray_app.reduction.world import World
from ray_app.runlog.journal import put_event
from ray_app.runlog.paths import RunPaths
from ray_app.task.environment import device_uuid
from ray_app.train.membership import HEARTBEAT_S, DrainedError, GenerationInfo, Heartbeat, HeartbeatReply
from ray_app.train.process_group import ProcessGroup, describe_failed_forms, open_store

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
"""Seconds for which a worker waits for the rendezvous when it connects, sends, or reports its exit."""
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


class RendezvousClient(WorkerProtocol):
    """The `Membership` of a Ray Train worker. A thread sends heartbeats and acts on the replies.

    Args:
        rendezvous: The rendezvous.
        logical_workers: L.
        device: The device on which the worker computes.
        backend: See `ProcessGroup.open`.
        paths: The paths of the run; the stacks of a stalled worker are recorded as one of its events.
        fence: Number of the driver's start.
        fixed_workers: Number of workers that start and end together; None if workers come and go one by one,
            and `ElasticController` tells the rendezvous how many to expect.
    """

    def __init__(
        self,
        rendezvous: RendezvousHandle,
        logical_workers: int,
        device: torch.device,
        backend: Literal["auto", "gloo"],
        paths: RunPaths,
        fence: int,
        fixed_workers: int | None = None,
    ) -> None:
        context, host = ray.get_runtime_context(), ray.util.get_node_ip_address()
        # A process group forms at the store of its rank 0, which any worker may become.
        self._store = open_store(host)
        super().__init__(
            Heartbeat(
                str(context.get_actor_id()),
                context.get_node_id(),
                host,
                self._store.port,
                os.getpid(),
                device=device_uuid(device),
                uses_gloo=backend == HOST_GROUP,
            )
        )
        self.recovers, self._fixed_workers = fixed_workers is None, fixed_workers
        self._rendezvous = rendezvous
        self._logical_workers = logical_workers
        self._device = device
        self._backend = backend
        self._paths = paths
        self._fence = fence
        # The group that a reply may ask this worker to abort.
        self._group: ProcessGroup | None = None
        # Why NCCL did not connect the last time, if this worker was the one that failed.
        self._form_error = ""
        self._connection: socket.socket | None = None
        self._frames = FrameReader()
        # Guards what a reply changes, and is notified of every reply.
        self._reply_condition = threading.Condition()
        self._closed = threading.Event()
        # A byte sent through this pair wakes the heartbeat thread, which polls the pair together with the connection.
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._random = random.Random()
        self._heartbeat_thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._heartbeat_thread.start()

    @contextmanager
    def generation(self, step: int, was_broken: bool) -> Iterator[tuple[World, GenerationInfo]]:
        """Waits for the next generation, opens its process group and yields both, see `Membership.generation`.

        Raises:
            DrainedError: This worker is draining.
            PeerLostError: Another worker was lost while the process group formed.
            ConfigError: NCCL cannot connect the workers.
        """
        self.step, self.phase = step, "waiting"
        info = self._join(was_broken)
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
            self.was_broken = True
        if isinstance(error, PeerLostError):
            self._wake()
        else:
            self.close()

    def step_without_group(self) -> None:
        """Announces a worker of parameter servers, which needs no process group, as stepping in generation 1.

        It returns when the rendezvous knows the worker. The step watchdog covers the worker from then on.
        """
        self.generation_number = 1
        with self._reply_condition:
            self._wake()
            self._reply_condition.wait_for(lambda: self.reply.generation == 1)

    def _join(self, was_broken: bool) -> GenerationInfo:
        """Waits for the next generation and returns it.

        Raises:
            DrainedError: This worker is draining.
        """
        with self._reply_condition:
            self.begin_wait(was_broken)
            self._wake()
            while self.wait_number:
                self._reply_condition.wait()
                if self.is_drained:
                    self.wait_number = 0
                    raise DrainedError
            return self.formed

    def _wake(self) -> None:
        """Wakes the heartbeat thread, so that it sends the next heartbeat at once."""
        self._wake_sender.send(b"!")

    @property
    def progress(self) -> str:
        """The rank and the finished steps of this worker, for messages."""
        return f"rank {self.rank}, step {max(0, self.step)}"

    @property
    def process_name(self) -> str:
        """The name of this process in file names."""
        return f"worker-{self.identity.host.replace(':', '-')}-{os.getpid()}"

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
        with suppress(ray.exceptions.RayError, SilentActorError):
            self._rendezvous.report_exit(self.heartbeat(), over)

    def _run(self) -> None:
        """Sends heartbeats and applies replies until the membership is closed; the body of the heartbeat thread."""
        while not self._closed.is_set():
            try:
                connection = self._connection or self._connect()
                with self._reply_condition:
                    heartbeat = self.heartbeat()
                connection.sendall(pack_frame(encode(heartbeat)))
                self._receive(connection)
            # Any error is retried: without heartbeats this worker would be declared lost.
            except Exception as error:
                logger.warning("The heartbeat was not sent, trying again: %s: %s", type(error).__name__, error)
                self._disconnect()
                self._closed.wait(HEARTBEAT_S)

    def _connect(self) -> socket.socket:
        """Opens a connection to the rendezvous and returns it.

        When this process ends, the connection closes, from which the rendezvous notices the end of the process.
        """
        # A rendezvous that was restarted does not know the number any more.
        if self._fixed_workers is not None:
            self._rendezvous.set_expected(self._fixed_workers)
        address, secret = self._rendezvous.address_and_secret()
        connection = connect(address, secret, ANSWER_S)
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
        while (left_s := sent_s + fraction * self.reply.period_s - time.monotonic()) > 0:
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
            self.apply(reply)
            self._reply_condition.notify_all()
        if reply.dump:
            details = {"rank": self.rank, "step": self.step, "doing": self.phase, "stacks": _stacks()}
            writer = threading.Thread(
                target=put_event, args=(self._paths, "stacks", self._fence), kwargs=details, daemon=True
            )
            writer.start()
            # The storage may be slow, and this thread must go on to its next heartbeat.
            writer.join(_STACKS_S)
        if reply.exit:
            logger.error("Exiting as ordered by the rendezvous (this worker stalls its generation, or was removed)")
            os._exit(1)
        self._abort_if_requested()

    def _abort_if_requested(self) -> None:
        """Aborts the process group if the newest reply asks for it, or ends this process if that has no effect."""
        group = self._group
        if group is not None and self.has_to_abort:
            group.abort()
            if group.is_stuck:
                logger.error("Exiting: this process waits for a peer that was lost before connecting")
                os._exit(1)


def _stacks() -> str:
    """Returns the stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    return "\n".join(parts)
