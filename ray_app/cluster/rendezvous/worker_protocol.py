"""A worker's part of the protocol with the rendezvous, without threads and connections."""

from __future__ import annotations

from dataclasses import replace

from ray_app.runlog.journal import StepRecord
from ray_app.train.membership import Flags, GenerationInfo, Heartbeat, HeartbeatReply, Phase


class WorkerProtocol:
    """What a worker reports to the rendezvous, and what follows from the newest reply; see `Membership`.

    Args:
        identity: A heartbeat with the fields that stay the same.

    Attributes:
        reply: The newest reply.
        formed: The newest generation that has formed with this worker.
        generation_number, rank, step, phase, record, wait_number, was_broken: Fields of the next heartbeat, see
            `Heartbeat`; the first one is its `generation`.
    """

    def __init__(self, identity: Heartbeat) -> None:
        self.identity = identity
        self.reply = HeartbeatReply()
        self.formed = GenerationInfo(0, 0, 0, "", 0)
        self.generation_number = self.rank = self.wait_number = 0
        self.step = -1
        self.phase: Phase = "starting"
        self.record: StepRecord | None = None
        self.was_broken = False
        self._stored_step = self._progress_reports = self._wait_count = 0

    def heartbeat(self) -> Heartbeat:
        """Returns the heartbeat to send now."""
        return replace(
            self.identity,
            generation=self.generation_number,
            rank=self.rank,
            step=self.step,
            phase=self.phase,
            record=self.record,
            stored_step=self._stored_step,
            progress_reports=self._progress_reports,
            wait_number=self.wait_number,
            was_broken=self.was_broken,
        )

    def begin_wait(self, was_broken: bool) -> None:
        """Begins a wait for a generation; `was_broken` says whether the last one broke."""
        self._wait_count += 1
        self.wait_number, self.was_broken = self._wait_count, was_broken

    def apply(self, reply: HeartbeatReply) -> None:
        """Stores a reply, and ends the wait if the reply has a new generation."""
        self.reply = reply
        # An answer to an earlier wait may arrive late; its generation is not a new one.
        if reply.formed is not None and self.wait_number and reply.formed.number > self.generation_number:
            self.formed, self.wait_number = reply.formed, 0
            self.generation_number, self.rank = reply.formed.number, reply.formed.rank
            self.phase, self.was_broken = "forming", False

    @property
    def is_drained(self) -> bool:
        """Whether this worker, which waits, exits without another generation."""
        return self.reply.drain and self.reply.is_for_waiting

    @property
    def has_to_abort(self) -> bool:
        """Whether this worker must leave its present generation at once."""
        return self.reply.abort and self.reply.generation == self.generation_number

    def flags(self) -> Flags:
        """Returns the flags that this rank brings into its next step, see `Membership.flags`."""
        # A reply to a heartbeat from another generation does not ask to leave the present one.
        if self.reply.generation != self.generation_number:
            return self.reply.flags & ~Flags.REFORM
        return self.reply.flags | Flags.REFORM if self.reply.abort else self.reply.flags

    def is_draining(self) -> bool:
        """Returns whether this worker has to exit when its generation ends, see `Membership.is_draining`."""
        return self.reply.drain

    def enter(self, phase: Phase) -> None:
        """Puts a phase into the next heartbeat, see `Membership.enter`."""
        self.phase = phase

    def report_progress(self) -> None:
        """Counts a progress other than a step in the next heartbeat, see `Membership.report_progress`."""
        self._progress_reports += 1

    def report(self, step: int, record: StepRecord | None, stored_step: int) -> None:
        """Puts the finished steps and the newest record into the next heartbeat, see `Membership.report`."""
        self.step, self.record = step, record
        self._stored_step = stored_step

    def stored_step(self) -> int:
        """Returns the last step with its record on storage, see `Membership.stored_step`."""
        return self.reply.stored_step
