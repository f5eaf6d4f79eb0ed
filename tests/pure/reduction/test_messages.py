"""Messages of peers are read only with a valid proof, and only one module unpickles what a peer sends."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_app.errors import ForgedMessageError
from ray_app.reduction.messages import Session, to_padded_tensor
from ray_app.train.membership import KEY_BYTES, GenerationInfo, HeartbeatReply
from tests.support.mutations import Malicious
from tests.support.paths import ROOT

KEY, OTHER_KEY = "ab" * KEY_BYTES, "cd" * KEY_BYTES


def read(session: Session, sender: int, purpose: str, head: torch.Tensor, body: bytes) -> Any:
    """Reads a message as a receiver does."""
    signature = session.sign(purpose)
    length, digest = signature.read_head(sender, head)
    assert length == len(body)
    return signature.load(sender, to_padded_tensor(body), digest)


def test_the_next_message_of_a_rank_is_read() -> None:
    sender, receiver = Session(2, 1, KEY), Session(2, 0, KEY)
    for value in ({"a": 1}, [2.5]):
        body = pickle.dumps(value)
        assert read(receiver, 1, "gather", sender.sign("gather").head(1, body), body) == value


@pytest.mark.parametrize(
    ("generation", "sender", "purpose", "earlier", "key"),
    [
        (1, 1, "gather", 0, KEY),
        (2, 2, "gather", 0, KEY),
        (2, 1, "broadcast", 0, KEY),
        (2, 1, "gather", 1, KEY),
        (2, 1, "gather", 0, OTHER_KEY),
    ],
    ids=["an earlier generation", "another rank", "another purpose", "another step", "another key"],
)
def test_a_message_at_another_place_than_its_own_is_refused(
    generation: int, sender: int, purpose: str, earlier: int, key: str, tmp_path: Path
) -> None:
    """Each is a valid message elsewhere: a stranger records it and sends it again."""
    session, body = Session(generation, sender, key), pickle.dumps(Malicious(tmp_path / "executed"))
    for _ in range(earlier):
        session.sign(purpose)
    head = session.sign(purpose).head(sender, body)
    with pytest.raises(ForgedMessageError, match=r"rank 1 \(generation 2, gather 1\) has no proof") as caught:
        read(Session(2, 0, KEY), 1, "gather", head, body)
    assert not (tmp_path / "executed").exists()
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("index", [0, 8, 40, 71, 72, -1], ids=lambda index: f"byte {index}")
def test_a_changed_message_is_refused(index: int, tmp_path: Path) -> None:
    sender, receiver = Session(2, 1, KEY), Session(2, 0, KEY)
    body = pickle.dumps(Malicious(tmp_path / "executed"))
    message = torch.cat([sender.sign("gather").head(1, body), to_padded_tensor(body)])
    message[index] ^= 1
    with pytest.raises(ForgedMessageError):
        read(receiver, 1, "gather", message[:72], message[72:].numpy().tobytes())
    assert not (tmp_path / "executed").exists()


def test_the_key_is_in_no_text() -> None:
    info = GenerationInfo(1, 0, 2, "host", 1, ("host", "host"), KEY)
    texts = [repr(info), repr(HeartbeatReply(formed=info)), str(Session(1, 0, KEY)), repr(Session(1, 0, KEY))]
    assert not [text for text in [*texts, repr(Session(1, 0, KEY).sign("gather"))] if KEY in text or "\\xab" in text]


_READS = re.compile(
    r"(?:[pP]ickle|dill|joblib|marshal)\.loads?$|\bUnpickler$|(?:gather|send|recv)_object$|_object_list$|^torch\.load$|"
    r"\bread_pickle$"
)
ALLOWED = {
    "ray_app/reduction/messages.py": "it checks the sender",
    "ray_app/data/ray_tasks.py": "the argument of a task, which Ray itself unpickles",
    "ray_app/drill/faults.py": "a file of the drill in a folder of the user",
    "ray_app/preflight/model_checks.py": "what the same process has pickled",
    "ray_app/preflight/sandbox.py": "files of a process and its child, in a folder of mode 0700",
    "ray_app/task/keras/copies.py": "a file with the SHA-256 that the configuration names",
    "ray_app/task/metric_classes.py": "a state of a metric, which comes through `gather` or Ray",
}


def find_unpickling(code: str) -> list[str]:
    """Returns the calls that unpickle, or gather by pickles, without `torch.load(weights_only=True)`."""
    calls = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call | ast.Attribute | ast.alias))
    unsafe_names = []
    safe = set()
    for node in calls:
        if isinstance(node, ast.Call) and any(
            word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords
        ):
            safe.add(id(node.func))
        elif isinstance(node, ast.Attribute) and id(node) not in safe and _READS.search(ast.unparse(node)):
            unsafe_names.append(ast.unparse(node))
        # `from pickle import loads` would hide the module.
        elif isinstance(node, ast.alias) and re.fullmatch(
            r"loads|Unpickler|\w*gather_object|\w+_object_list", node.name
        ):
            unsafe_names.append(node.name)
    return unsafe_names


@pytest.mark.parametrize(
    ("code", "calls"),
    [
        ("pickle.loads(data)", ["pickle.loads"]),
        ("cloudpickle.load(file)", ["cloudpickle.load"]),
        ("f = pickle.loads", ["pickle.loads"]),
        ("from pickle import loads", ["loads"]),
        ("dist.all_gather_object(a, b)", ["dist.all_gather_object"]),
        ("dist.broadcast_object_list(a)", ["dist.broadcast_object_list"]),
        ("torch.load(file)", ["torch.load"]),
        ("torch.load(file, weights_only=False)", ["torch.load"]),
        ("torch.load(file, weights_only=True)", []),
        ("json.loads(data); safetensors.torch.load(data); pickle.dumps(value)", []),
    ],
)
def test_the_search_finds_each_way_to_unpickle(code: str, calls: list[str]) -> None:
    assert find_unpickling(code) == calls


def test_only_one_module_unpickles_what_a_peer_sends() -> None:
    files = {
        file.relative_to(ROOT).as_posix(): calls
        for file in (ROOT / "ray_app").rglob("*.py")
        if (calls := find_unpickling(file.read_text()))
    }
    assert files.keys() == ALLOWED.keys(), files
