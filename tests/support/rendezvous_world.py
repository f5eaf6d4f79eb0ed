"""A simulation of workers around the real `Rendezvous`, with its own clock and network, and random faults.

The workers have the client's `WorkerProtocol` and act as `train/loop.py` does, the controller as
`cluster/controller/controller.py`; time advances in ticks. Invariants: each generation number is used once; no
generation begins at an earlier step than a reachable worker has, unless it has been superseded without notice; no
worker leaves with a step that no other worker has and that is not saved; no generation steps after a later one has
stepped; every run ends. The seed determines the schedule: the same seed gives the same history.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from ray_app.cluster.rendezvous.rendezvous import Rendezvous
from ray_app.cluster.rendezvous.worker_protocol import WorkerProtocol
from ray_app.train.loop import has_to_save_on_exit
from ray_app.train.membership import Flags, Heartbeat, HeartbeatReply, Phase

TICK_S = 0.25
SILENCE_S = 2.0
FORM_S = 5.0
CONTROL_TICKS = 2
KINDS = ("join", "kill", "kill_all_but_one", "freeze", "cut_off", "drain", "drain_all", "restart", "slow_storage")
KINDS_WITH_PARTITION = (*KINDS, "partition")
"""The kinds with a partition. The history of a seed depends on the kinds, so tests that name seeds keep `KINDS`."""


class InvariantViolationError(AssertionError):
    """An invariant was violated; the message is the history."""


@dataclass
class Generation:
    """The process group of a generation."""

    number: int
    size: int
    until_s: float
    members: dict[int, Worker] = field(default_factory=dict)
    shared: bool = False
    broken: bool = False
    # Since this time, its members have not reached each other.
    hangs_s: float | None = None


class Worker(WorkerProtocol):
    """The state of a worker process that the simulation uses."""

    def __init__(self, identity: Heartbeat) -> None:
        super().__init__(identity)
        # The next heartbeat is due at this time, and the last one was sent at that time.
        self.due_s = self.sent_s = 0.0
        self.group: Generation | None = None
        self.state = "starting"
        # The worker is frozen until this time.
        self.until_s = 0.0
        # It cannot reach the rendezvous, and the other workers, until these times.
        self.cut_until_s = self.partitioned_until_s = 0.0
        self.saving: int | None = None
        self.saved_at_s = 0.0
        self.over = False

    @property
    def name(self) -> str:
        return self.identity.worker

    def heartbeat(self) -> Heartbeat:
        phases: dict[str, Phase] = {"saving": "saving", "exiting": "done"}
        self.phase = phases.get(self.state, "compute" if self.group else "waiting")
        return super().heartbeat()


class RendezvousWorld:
    """A simulated run, as the module's docstring describes it.

    Args:
        seed: Seed of the faults.
        workers: Number of workers at the start.
        steps: Number of steps of the run.
        events: Number of faults.
        kinds: Kinds of faults.
    """

    def __init__(self, seed: int, workers: int, steps: int, events: int, kinds: tuple[str, ...] = KINDS) -> None:
        self.random = random.Random(seed)
        self.steps = steps
        self.now = 100.0
        self.min_workers = min(workers, random.Random(seed).choice((1, 1, 1, 2, 3)))
        self.log = [f"seed {seed}: {workers} workers, at least {self.min_workers}, {steps} steps"]
        self.actors, self.died_s = -1, 0.0
        self.heartbeats_per_s, self.calls = workers * self.random.choice((4.0, 1.0, 0.4)), self.random.random() < 0.8
        self.live: list[Worker] = []
        self.actor: Rendezvous | None = self._new_actor()
        self.back_s = self.storage_s = 0.0
        self.controlled: list[Worker] = []
        self.draining: set[str] = set()
        self.groups: dict[int, Generation] = {}
        # The newest generation that has finished a step, and the newest that was reported to a worker.
        self.stepped = self.formed = 0
        self.saved = 0
        self.finished_steps = -1
        self.names = 0
        for _ in range(workers):
            self._add()
        self.schedule = sorted((self.random.randrange(2, 4 * steps), self.random.choice(kinds)) for _ in range(events))

    def _new_actor(self) -> Rendezvous:
        self.actors += 1
        actor = Rendezvous(
            SILENCE_S, 1e6, lambda: self.now, 1 + 1000 * self.actors, self.heartbeats_per_s, self.min_workers
        )
        actor.on_change = lambda: self._call(actor)
        return actor

    def _call(self, actor: Rendezvous) -> None:
        """Sends the new replies to all reachable workers; the others get theirs with the next heartbeat."""
        for w in self.live:
            if self.now >= max(w.until_s, w.cut_until_s) and w.state != "dead" and self.calls:
                self._apply_reply(w, actor.reply_for(w.name))

    def _log(self, text: str) -> None:
        self.log.append(f"{self.now - 100:7.2f} s  {text}")

    def _fail(self, text: str) -> None:
        raise InvariantViolationError("\n".join([*self.log, text]))

    def _add(self) -> None:
        self.names += 1
        worker = Worker(Heartbeat(f"w{self.names}", f"n{self.names}", "host", 1, 1))
        self.live.append(worker)
        self.controlled.append(worker)

    # Faults.

    def _inject(self, kind: str) -> None:
        chosen = self.random.choice(self.live) if self.live else None
        self._log(
            kind + (f" {chosen.name}" if chosen and kind in ("kill", "freeze", "cut_off", "drain", "partition") else "")
        )
        if kind == "join":
            self._add()
        elif kind == "restart":
            self.actor, self.back_s = None, self.now + self.random.choice((0.5, 1.0, 3.0))
        elif kind == "slow_storage":
            self.storage_s = self.now + self.random.choice((1.0, 5.0))
        elif kind == "kill_all_but_one":
            for worker in self.random.sample(self.live, max(0, len(self.live) - 1)):
                self._die(worker)
        elif kind == "drain_all":
            self.draining |= {w.identity.node for w in self.live}
            for _ in range(self.random.randrange(3)):
                self._add()
        elif chosen is None:
            return
        elif kind == "kill":
            self._die(chosen)
        elif kind == "freeze":
            chosen.until_s = self.now + self.random.choice((1.0, 6.0))
        elif kind == "cut_off":
            chosen.cut_until_s = self.now + self.random.choice((1.0, 6.0))
        elif kind == "drain":
            self.draining.add(self.random.choice((chosen.identity.node, chosen.name)))

    def _die(self, worker: Worker) -> None:
        if worker not in self.live:
            return
        self.live.remove(worker)
        worker.state, self.died_s = "dead", self.now
        if worker.group:
            worker.group.broken = True
        # Mostly, the end of its connection reports the loss at once.
        if self.actor and self.random.random() < 0.9:
            self.actor.on_disconnect(worker.name)

    # Workers.

    def _act(self, w: Worker) -> None:
        if self.now < w.until_s or w.state == "dead":
            return None
        if self.actor and self.now >= max(w.cut_until_s, w.due_s):
            w.sent_s = self.now
            self._apply_reply(w, self.actor.handle_heartbeat(w.heartbeat()))
            if w.reply.exit:
                self._log(f"{w.name} is ordered to exit")
                return self._die(w)
        if w.group and w.has_to_abort:
            w.group.broken = True
        if w.state == "saving":
            if self.now >= max(w.saved_at_s, self.storage_s):
                self.saved, w.state = max(self.saved, w.saving or 0), "exiting"
                self._log(f"{w.name} has saved step {w.saving}")
            return None
        if w.state == "exiting":
            return self._exit(w)
        if w.group is not None:
            return self._lose_peer(w) if w.group.broken else None
        if not w.wait_number:
            w.begin_wait(w.was_broken)
            w.due_s = 0.0
        elif w.is_drained:
            self._begin_exit(w, has_to_save_on_exit(Flags(0), w.flags(), w.rank))
        return None

    def _apply_reply(self, w: Worker, reply: HeartbeatReply) -> None:
        before = w.generation_number
        w.apply(reply)
        w.due_s = w.sent_s + reply.period_s
        formed = w.formed
        if w.generation_number == before:
            return
        self.formed = max(self.formed, formed.number)
        group = self.groups.setdefault(formed.number, Generation(formed.number, formed.size, self.now + FORM_S))
        if formed.size < self.min_workers and self.finished_steps < self.steps:
            self._fail(f"generation {formed.number} has {formed.size} workers, fewer than {self.min_workers}")
        if formed.rank in group.members or formed.size != group.size:
            self._fail(f"generation {formed.number} was formed twice: rank {formed.rank} is {w.name}, too")
        group.members[formed.rank] = w
        w.group = group
        if any(m.state == "dead" for m in group.members.values()):
            group.broken = True

    def _lose_peer(self, w: Worker) -> None:
        self._log(f"{w.name} lost a peer of generation {w.generation_number} at step {w.step}")
        w.group = None
        w.was_broken = True
        w.wait_number = 0

    def _begin_exit(self, w: Worker, saves: bool) -> None:
        w.group, w.wait_number = None, 0
        self._log(f"{w.name} exits at step {w.step}{', saving' if saves and w.step >= 0 else ''}")
        w.state = "exiting"
        if saves and w.step >= 0:
            w.state = "saving"
            w.saving = w.step
            w.saved_at_s = self.now + 0.5
            return
        others = any(o.step >= w.step and o is not w and o.state != "exiting" for o in self.live)
        if w.step > self.saved and not others and self.now > self.died_s + SILENCE_S + 1:
            self._fail(f"{w.name} exits with step {w.step}; {self.saved} is saved, and no other worker has it")

    def _exit(self, w: Worker) -> None:
        if self.actor is None or self.now < w.cut_until_s:
            return
        self.actor.report_exit(w.heartbeat(), w.over)
        self.live.remove(w)
        w.state = "dead"

    # Generations.

    def _step(self, group: Generation) -> None:
        members = [group.members[rank] for rank in sorted(group.members)]
        if len(members) < group.size and self.now > group.until_s:
            group.broken = True
        missing = (
            group.broken
            or len(members) < group.size
            or any(self.now < m.until_s or m.group is not group for m in members)
        )
        if missing or self._hangs(group, members):
            return None
        if not group.shared:
            return self._begin_generation(group, members)
        if not any(self.now < m.cut_until_s for m in members):
            if group.number < self.stepped:
                self._fail(f"generation {group.number} steps after {self.stepped} has")
            self.stepped = group.number
        flags = Flags(0)
        for m in members:
            flags |= m.flags()
        partly = self.random.random() < 0.02 and len(members) > 1
        # A worker dies in the reduction: some workers have finished it, some have not.
        if partly:
            victim = self.random.choice(members)
            for m in members:
                m.step += self.random.random() < 0.5
            self._die(victim)
            self._log(f"{victim.name} dies in a reduction")
            return None
        for m in members:
            m.step += 1
        self.finished_steps = max(self.finished_steps, members[0].step)
        over = members[0].step >= self.steps
        if over or flags & Flags.SAVE:
            self.saved = max(self.saved, members[0].step)
        if over or flags & Flags.REFORM:
            for m in members:
                self._end_generation(m, over, flags)
        return None

    def _hangs(self, group: Generation, members: list[Worker]) -> bool:
        """Returns whether members do not reach each other; they wait until the reduction times out."""
        if len(members) == 1 or not any(self.now < m.partitioned_until_s for m in members):
            group.hangs_s = None
            return False
        group.hangs_s = self.now if group.hangs_s is None else group.hangs_s
        group.broken = self.now - group.hangs_s > FORM_S
        return True

    def _end_generation(self, m: Worker, over: bool, flags: Flags) -> None:
        m.group = None
        if m.reply.drain:
            self._begin_exit(m, not over and has_to_save_on_exit(flags, m.flags(), m.rank))
        elif over:
            m.over, m.state = True, "exiting"
        m.over = over and not m.reply.drain

    def _begin_generation(self, group: Generation, members: list[Worker]) -> None:
        newest = max(m.step for m in members)
        if newest < 0:
            if self.now < self.storage_s:
                return
            newest = self.saved
        # A superseded generation may begin at an earlier step if a member has not received the new one: its steps
        # are bit-identical and replace nothing.
        is_unaware = group.number < self.formed and any(self.now < m.cut_until_s for m in members)
        for other in self.live if not is_unaware else ():
            is_aware = self.now >= max(other.until_s, other.cut_until_s) + 3 * SILENCE_S or not max(
                other.until_s, other.cut_until_s
            )
            reachable = is_aware and not other.reply.exit and other in self.controlled
            if other.step > newest and other.group is not group and reachable:
                self._fail(
                    f"generation {group.number} begins with step {newest}, {other.name} has {other.step}"
                    f" ({other.state})"
                )
        for m in members:
            m.step = newest
        group.shared = True
        self._log(f"generation {group.number} of {', '.join(m.name for m in members)} begins at step {newest}")

    # The controller.

    def _control(self) -> None:
        if self.actor is None:
            return
        dead = [w for w in self.controlled if w not in self.live]
        silent = {name for name, lost_s in self.actor.status().lost_for_s.items() if lost_s > 1.0}
        late = [
            w
            for w in self.controlled
            if w in self.live and w.name in silent and self.now < max(w.until_s, w.cut_until_s)
        ]
        for w in dead + late:
            self.controlled.remove(w)
            self.actor.remove({w.name})
            if w in late:
                self._die(w)
        if len(self.controlled) < self.min_workers and self.finished_steps < self.steps:
            for _ in range(self.random.randint(1, 2) if not self.controlled else 1):
                self._add()
        self.actor.drain(self.draining)
        self.actor.set_expected(len(self.controlled))

    def run(self) -> None:
        """Simulates until the run is over.

        Raises:
            InvariantViolationError: An invariant was violated.
        """
        todo, ticks = list(self.schedule), 0
        while not (self.finished_steps >= self.steps and not self.live):
            ticks += 1
            self.now += TICK_S
            while todo and todo[0][0] <= ticks and self.finished_steps < self.steps:
                self._inject(todo.pop(0)[1])
            if self.actor is None and self.now >= self.back_s:
                self.actor = self._new_actor()
                for w in self.live:
                    # The end of its connection wakes the worker.
                    w.due_s = 0.0
            for worker in list(self.live):
                self._act(worker)
            for number in sorted(self.groups):
                self._step(self.groups[number])
            self.groups = {
                n: g for n, g in self.groups.items() if not g.broken or any(m.group is g for m in g.members.values())
            }
            if self.actor:
                self.actor.check_liveness(self.now)
            if ticks % CONTROL_TICKS == 0:
                self._control()
            if ticks > 40 * self.steps + 400:
                self._fail("the run does not end")
            if self.finished_steps >= self.steps:
                self.live = [w for w in self.live if w.state != "starting" or w.group or w.step >= 0]
                if all(w.step < self.steps for w in self.live):
                    return
