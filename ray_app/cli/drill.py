"""The command `ray-app drill`: runs a configuration undisturbed and under named failures, and writes a certificate."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import ray

from ray_app.cli.main import exit_code
from ray_app.cluster.resources import cluster, reconnect, resolve_scaling
from ray_app.config.config import Config
from ray_app.config.rules import PositiveFloat, PositiveInt, check_fields, refuse
from ray_app.drill.cluster import DrillCluster, open_drill_cluster
from ray_app.drill.session import SCENARIOS, Drill
from ray_app.driver.parsing import parse_with_sections
from ray_app.errors import ConfigError
from ray_app.preflight.prepare import prepare
from ray_app.runlog.output import TextConsole
from ray_app.storage.files import Location, to_location

_DESCRIPTION = (
    "Trains a configuration undisturbed, then under failures and resizes, and certifies whether the result is the same."
    f" The scenarios are {', '.join(SCENARIOS)}."
)
_FEWEST_STEPS = 20
_CHECKPOINTS = 8
_HEARTBEAT_S = 3.0
_RESIZE_S = 2.0
_MAX_LOCAL_WORKERS = 4


@dataclass(frozen=True)
class DrillSection:
    """The scenarios of a drill and their limits.

    Args:
        scenarios: Names of scenarios, separated by commas. Default: all of them.
        max_steps: Largest number of optimizer steps of every drilled run.
        seed: Seed for the choice of the steps and the workers that are disturbed.
        out: New folder for the runs and the certificate, which every node sees under the same path. Default: a folder
            named by the time, in `drills` next to `run.storage_path`.
        limit_s: Seconds after which a scenario counts as hanging. It has then failed, its processes are ended, and the
            next one starts.
    """

    scenarios: str | None = None
    max_steps: PositiveInt = 200
    seed: int = 0
    out: str | None = None
    limit_s: PositiveFloat = 900.0


def choose_scenarios(section: DrillSection) -> list[str]:
    """Returns the names of the chosen scenarios; raises `ConfigError` if a name is unknown or a limit out of range."""
    refuse(check_fields(section, "drill."), "drill")
    if section.scenarios is None:
        return list(SCENARIOS)
    names = [name.strip() for name in section.scenarios.split(",") if name.strip()]
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown or not names:
        raise ConfigError(
            f"drill.scenarios is {section.scenarios!r}; {', '.join(map(repr, unknown)) or 'nothing'} is not a scenario."
            f" The scenarios are {', '.join(SCENARIOS)}. Name some, separated by commas, or leave it out for all."
        )
    return list(dict.fromkeys(names))


def make_drill_config(config: Config, section: DrillSection, starts_cluster: bool) -> Config:
    """Returns the configuration of every drilled run; raises `ConfigError` if it cannot be drilled.

    Of the fields that decide the result only the number of steps changes, and early stopping is off, so that the
    scenarios have enough steps.
    """
    train, free = config.train, "does not give bit-identical parameters, which a drill compares"
    if train.reduction != "exact":
        raise ConfigError(f"train.reduction is {train.reduction!r}, which {free}. Set --train.reduction exact.")
    if train.staleness:
        raise ConfigError(f"train.staleness is {train.staleness}, which {free}. Set --train.staleness 0.")
    if config.scaling.max_workers == "all":
        raise ConfigError("scaling.max_workers is all; a drill needs a number. Set --scaling.max_workers 3.")
    if not train.strategy_traits.has_workers:
        raise ConfigError(
            f"train.strategy is {train.strategy}: its only worker is the driver, which a drill cannot restart."
        )
    changed: dict[str, Any] = {
        "run__name": "undisturbed",
        "run__storage_path": str(_output_folder(config, section)),
        "scaling__logical_workers": config.logical_workers,
        "scaling__resize_interval_s": min(config.scaling.resize_interval_s, _RESIZE_S),
        "train__max_steps": min(section.max_steps, config.train.max_steps or section.max_steps),
        "failure__max_failures": -1,
        "failure__step_timeout_s": None,
        "failure__heartbeat_timeout_s": min(config.failure.heartbeat_timeout_s, _HEARTBEAT_S),
        "evaluate__patience": None,
        "tracking__enabled": False,
    }
    if starts_cluster:
        max_workers = min(config.scaling.worker_limit, _MAX_LOCAL_WORKERS)
        changed |= {"scaling__max_workers": max_workers}
        changed |= {"scaling__min_workers": min(config.scaling.min_workers, max_workers)}
        # The nodes of a local cluster have no labels.
        changed["scaling__label_selector"] = None
    if starts_cluster and not config.scaling.worker_gpus:
        changed |= {"scaling__cpus_per_worker": 1, "evaluate__num_cpus": 1}
    drill_config = config.replace(**changed)
    steps = prepare(drill_config).job.total_steps
    if steps < _FEWEST_STEPS:
        raise ConfigError(
            f"The drilled run would have {steps} steps; a drill needs {_FEWEST_STEPS}. Raise drill.max_steps"
            f" ({section.max_steps}), train.max_steps ({config.train.max_steps}) or train.epochs"
            f" ({config.train.epochs})."
        )
    every, keep = max(1, steps // _CHECKPOINTS), max(config.checkpoint.keep_last, 3)
    return drill_config.replace(
        checkpoint__every_steps=every, checkpoint__every_epochs=None, checkpoint__keep_last=keep
    )


def _output_folder(config: Config, section: DrillSection) -> Location:
    """Returns the folder of the runs and the certificate; raises `ConfigError` if it has that of another drill."""
    name = time.strftime("%Y%m%d-%H%M%S")
    storage = to_location(config.run.storage_path)
    beside = (storage.parent if isinstance(storage, Path) else storage) / "drills"
    out = to_location(section.out) if section.out else beside / name
    if (out / "certificate.json").exists():
        raise ConfigError(
            f"drill.out is {section.out}, which has the certificate of another drill. Name another folder."
        )
    return out


@contextmanager
def _connected(config: Config, starts_cluster: bool) -> Iterator[DrillCluster | None]:
    """Connects to the cluster of the drill in the block, and yields its nodes if the drill may end them."""
    if starts_cluster and not config.scaling.worker_gpus:
        with open_drill_cluster(config.scaling.worker_limit, config.data.evaluation_path is not None) as nodes:
            yield nodes
    else:
        with cluster(config):
            yield None


def main(arguments: list[str] | None = None, prog: str = "ray-app drill") -> int:
    """Runs `ray-app drill`; returns 0 if every scenario happened and ended with equal parameters.

    It returns 1 if one did not or the drill was not completed, 2 if it was refused before anything started.
    """
    console = TextConsole(file=sys.stdout, width=None if sys.stdout.isatty() else 150)
    started = threading.Event()

    def work() -> int:
        config, sections = parse_with_sections(arguments, {"drill": DrillSection}, prog, description=_DESCRIPTION)
        section: DrillSection = sections["drill"]
        names = choose_scenarios(section)
        starts_cluster = not (ray.is_initialized() or config.run.ray_address or os.environ.get("RAY_ADDRESS"))
        if config.scaling.max_workers != "all":
            config = resolve_scaling(config)
        drill_config = make_drill_config(config, section, starts_cluster)
        with redirect_stdout(StringIO()), _connected(drill_config, starts_cluster) as nodes:
            renew = nodes.restart if nodes is not None else partial(reconnect, drill_config)
            session = Drill(drill_config, config, names, section.seed, section.limit_s, nodes, console, renew)
            started.set()
            return session.run()

    interrupted = "Interrupted; the certificate lists the finished scenarios.", 1
    return exit_code(work, "The drill ended early", interrupted, started.is_set)
