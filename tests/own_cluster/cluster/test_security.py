"""The clusters that the application starts refuse clients without the token, on real Ray, and on one machine they open
no port to other machines.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

CLUSTERS = {
    "train": """
from ray_app import load_config
from ray_app.cluster.resources import cluster
with cluster(load_config("conf/digits.yaml")):
    try_all(ray.get_runtime_context().gcs_address)
""",
    "drill": """
from ray_app.drill.cluster import open_drill_cluster
with open_drill_cluster(1, False) as nodes:
    try_all(ray.get_runtime_context().gcs_address)
""",
    "launch": """
from ray_app.cli.launch import is_connected, ray_node, wait
from ray_app.cluster.ray_private import require_shared_token, require_token
require_token()
require_shared_token(2)
address = ray.util.get_node_ip_address()
with ray_node(["--head", f"--node-ip-address={address}", "--port=26380", "--include-dashboard=false"]) as check:
    wait(lambda: "" if is_connected(f"{address}:26380") else "the head node", check)
    try_all(f"{address}:26380")
""",
}
TRY = """
import os, subprocess, sys, tempfile
from pathlib import Path
import psutil, ray

folder = Path(tempfile.gettempdir()) / f"ray_app-{os.getuid()}"
sessions = set(folder.glob("ray/session_2*"))

CLIENT = (
    "import sys, ray; ray.init(address=sys.argv[1], logging_level='ERROR', log_to_driver=False); print('in',"
    " len(ray.nodes()) > 0)"
)

def trying(address, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # Ray replaces 127.0.0.1 by another address of the machine, at which such a cluster does not listen.
    if address.startswith("127."):
        clean["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    command = [sys.executable, "-c", CLIENT, address]
    return subprocess.Popen(command, env=clean | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

def listeners():
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    connections = [connection for process in processes for connection in process.net_connections("tcp")]
    return {c.laddr.ip.removeprefix("::ffff:") for c in connections if c.status == psutil.CONN_LISTEN}

def try_all(address):
    files = set(folder.glob("ray/session_2*")) - sessions
    print("session:", len(files), "below a folder with mode", oct(folder.stat().st_mode & 0o777))
    print("local:", listeners() == {"127.0.0.1"})
    print("file:", oct(os.stat(os.path.expanduser("~/.ray/auth_token")).st_mode & 0o777))
    clients = {
        "right": trying(address, RAY_AUTH_MODE="token"),
        "without": trying(address, RAY_AUTH_MODE="disabled"),
        "wrong": trying(address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="f" * 64),
    }
    for name, client in clients.items():
        said, errors = client.communicate(timeout=500)
        print(f"{name}:", "AuthenticationError" if "AuthenticationError" in errors else said.strip() or errors[-2000:])
"""


@pytest.mark.parametrize("kind", list(CLUSTERS))
def test_a_ray_client_without_the_token_is_refused(kind: str, tmp_path: Path) -> None:
    """The home directory is new, so the tested code creates the token."""
    settings = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | settings
    command = [sys.executable, "-c", TRY + CLUSTERS[kind]]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert [line for line in done.stdout.splitlines() if ": " in line] == [
        "session: 1 below a folder with mode 0o700",
        f"local: {kind != 'launch'}",
        "file: 0o600",
        "right: in True",
        "without: AuthenticationError",
        "wrong: AuthenticationError",
    ]


_READ_ONLY = """
mount --make-rprivate /
mount --bind "$1/tmp" /tmp
mount -o remount,bind,ro /
for folder in $(cut -d ' ' -f 2 /proc/mounts | grep -v -E '^/(proc|sys|dev|tmp)'); do
  mount -o remount,bind,ro "$folder"
done
touch "$2/file" 2>/dev/null && echo "the root can be written to"
exec "$3" -m ray_app train --config conf/digits.yaml --run.storage_path /tmp/runs --tracking.uri sqlite:////tmp/m.db \
  --scaling.max_workers 1 --train.epochs 1
"""


def test_a_run_needs_no_folder_but_tmp_and_its_storage(tmp_path: Path) -> None:
    """The pods of deploy/kuberay have a read-only root: a run in a mount namespace with one ends as any other."""
    (tmp_path / "tmp").mkdir()
    command = ["unshare", "--mount", "bash", "-c", _READ_ONLY, "bash", str(tmp_path), str(ROOT), sys.executable]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "HOME": "/nowhere",
        "RAY_AUTH_TOKEN": "e" * 64,
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "the root can be written to" not in done.stdout
    assert "status                        finished" in done.stdout
    assert [file.name for file in (tmp_path / "tmp" / "runs").glob("*/report.html")] == ["report.html"]
