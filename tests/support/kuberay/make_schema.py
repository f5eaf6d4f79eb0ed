"""Writes schema.json, against which the manifests in deploy/ are validated, from KubeRay's resource definitions.

The definitions have 770 KB each, mostly descriptions and parts of a pod that deploy/ does not use. Every object in the
result refuses fields that it does not declare, as `kubectl apply --validate=strict` does.

python tests/support/kuberay/make_schema.py VERSION FOLDER     # FOLDER: ray-operator/config/crd/bases of that release
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
UNUSED = {
    "RayJobSpec": {"deletionStrategy"},
    "RayClusterSpec": {"gcsFaultToleranceOptions", "historyServerOptions", "networkPolicy", "tlsOptions", "managedBy"},
    "headGroupSpec": {"headService", "ingressOptions"},
}
POD_FIELDS = {
    "containers": {
        "args",
        "command",
        "env",
        "envFrom",
        "image",
        "imagePullPolicy",
        "name",
        "ports",
        "resources",
        "securityContext",
        "volumeMounts",
    },
    "volumes": {"configMap", "emptyDir", "name", "persistentVolumeClaim", "secret"},
}
POD_PLAIN = {
    "automountServiceAccountToken",
    "imagePullSecrets",
    "nodeSelector",
    "restartPolicy",
    "securityContext",
    "serviceAccountName",
    "terminationGracePeriodSeconds",
    "tolerations",
}


def main(version: str, folder: Path) -> None:
    """Writes schema.json next to this file."""
    job, cron = (_spec(folder / f"ray.io_{kind}.yaml") for kind in ("rayjobs", "raycronjobs"))
    assert cron["properties"]["jobTemplate"] == job
    cluster = job["properties"]["rayClusterSpec"]["properties"]
    pod = job["properties"]["submitterPodTemplate"]
    head, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"]["items"]
    assert pod == head["properties"]["template"] == workers["properties"]["template"]
    _trim_pod(pod["properties"]["spec"]["properties"])
    for owner in (job, head, workers):
        owner["properties"]["submitterPodTemplate" if owner is job else "template"] = {"$ref": "#/$defs/Pod"}
    for fields, unused in (
        (job["properties"], "RayJobSpec"),
        (cluster, "RayClusterSpec"),
        (head["properties"], "headGroupSpec"),
    ):
        for name in UNUSED[unused]:
            del fields[name]
    cron["properties"]["jobTemplate"] = {"$ref": "#/$defs/RayJob"}
    schema = {
        "$comment": f"KubeRay {version}, ray-operator/config/crd/bases, Apache License 2.0; trimmed by make_schema.py",
        "$defs": {"RayJob": _strict(job), "RayCronJob": _strict(cron), "Pod": _strict(pod)},
    }
    (HERE / "schema.json").write_text(json.dumps(schema, indent=1, sort_keys=True) + "\n")


def _spec(file: Path) -> dict[str, Any]:
    versions = yaml.load(file.read_text(), yaml.CSafeLoader)["spec"]["versions"]
    served = next(version for version in versions if version["name"] == "v1")
    return _without_descriptions(served["schema"]["openAPIV3Schema"]["properties"]["spec"])


def _without_descriptions(part: Any) -> Any:
    if isinstance(part, dict):
        return {k: _without_descriptions(v) for k, v in part.items() if not (k == "description" and isinstance(v, str))}
    return [_without_descriptions(item) for item in part] if isinstance(part, list) else part


def _trim_pod(fields: dict[str, Any]) -> None:
    for name in set(fields) - POD_PLAIN - set(POD_FIELDS):
        del fields[name]
    for name, kept in POD_FIELDS.items():
        inner = fields[name]["items"]["properties"]
        for unused in set(inner) - kept:
            del inner[unused]


def _strict(part: Any) -> Any:
    if isinstance(part, list):
        return [_strict(item) for item in part]
    if not isinstance(part, dict):
        return part
    strict = {k: _strict(v) for k, v in part.items()}
    if isinstance(part.get("properties"), dict) and part.get("type") == "object":
        strict["additionalProperties"] = False
    return strict


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
