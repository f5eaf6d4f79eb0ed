"""What the members are told apart by when a generation forms: who is back, who has the state, and in which order they rank."""

from __future__ import annotations

from ray_app.cluster.rendezvous.members import Kind, Member, Members


def steps_now(kind: Kind) -> bool:
    """Whether such a member is in the newest generation and has not come back from it."""
    return kind.current and not kind.waits


def state_stays(members: Members) -> bool:
    """Whether somebody who has the training state stays."""
    return members.any(lambda k: k.has_state and not k.leaving)


def brought(members: Members) -> list[Member]:
    """Those who have to leave and come back from a broken generation with a step that nobody has finished who stays."""
    if not members.any(lambda k: k.leaving and k.waits and k.has_state) or not state_stays(members):
        return []
    newest = max(m.beat.step for m in members if not members.leaves(m))
    return [m for m in members.waiting.values() if members.leaves(m) and m.beat.step > newest]


def is_complete(members: Members, broken: bool) -> bool:
    """Whether all of the last generation are back.

    Args:
        members: All that are known.
        broken: Whether it broke: then those who have to leave, too, since their step may be the newest.
    """
    return not members.any(lambda k: k.current and not k.waits and (not k.leaving or (broken and k.phase not in ("saving", "done"))))


def ranked(ready: list[Member]) -> list[Member]:
    """By rank: who has the state before who has none, incumbents as they were, those of one host together."""
    ordered = sorted(ready, key=lambda m: (m.beat.step < 0, m.beat.rank if m.beat.generation else 0, m.joined_s))
    places = {host: place for place, host in enumerate(dict.fromkeys(m.beat.host for m in ordered))}
    return sorted(ordered, key=lambda m: places[m.beat.host])  # the first stays the first
