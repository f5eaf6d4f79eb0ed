"""Ray's private parts (Ray 2.60) that say which job a driver is.

- `ray._private.worker._global_node.webui_url`: where the dashboard is; `ray.init` returns it, but not of a connection that is there.
- `RAY_JOB_CONFIG_JSON_ENV_VAR`: how the job server tells a driver under which name it was submitted.
"""

from __future__ import annotations

import json
import os
from typing import Any

import ray
from ray._private import worker
from ray._private.ray_constants import RAY_OVERRIDE_DASHBOARD_URL
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR


def ray_job() -> dict[str, Any] | None:
    """The job that this driver is on a cluster; None on no cluster.

    Returns:
        `job_id`; `submission_id`: its name, None if it was not submitted; `dashboard`: address of the cluster's dashboard, None if it has
        none; `page`: the job's page there.
    """
    if not ray.is_initialized():
        return None
    job_id = ray.get_runtime_context().get_job_id()
    told = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR, "{}"))
    node = worker._global_node  # None of a connection through `ray://`
    address = os.environ.get(RAY_OVERRIDE_DASHBOARD_URL) or (node.webui_url if node is not None else None)
    dashboard = (address if "://" in address else f"http://{address}").rstrip("/") if address else None
    page = f"{dashboard}/#/jobs/{job_id}" if dashboard else None
    return {"job_id": job_id, "submission_id": told.get("metadata", {}).get("job_submission_id"), "dashboard": dashboard, "page": page}
