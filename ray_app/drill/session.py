"""One drill: the undisturbed run, then every scenario, and a certificate that is written again after each of them.

Every run has a time limit (`time_limit`), which also ends waits inside of libraries.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from io import StringIO
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner

from ray_app.checkpoint.store import CheckpointStore
from ray_app.cluster.resources import cluster_capacity, workers_that_fit
from ray_app.config.config import Config, digest, flatten
from ray_app.drill import process_scenarios as scenarios
from ray_app.drill.certificate import (
    RunStart,
    Trace,
    assess_scenario,
    collect_fault_evidence,
    collect_measurements,
    compare_restart,
    describe_environment,
    find_start_after,
    make_results_table,
    read_trace,
    summarize_results,
)
from ray_app.drill.cluster import DrillCluster
from ray_app.drill.faults import Evidence, HookChain
from ray_app.drill.memory_faults import flip, memory
from ray_app.drill.network import half_open, partition
from ray_app.drill.node_scenarios import grow, head, node, node_rank0, shrink
from ray_app.drill.scenario import Scenario, ScenarioContext, ScenarioResult, kill_stopped_processes
from ray_app.drill.stranger import stranger
from ray_app.drill.tracking import mlflow
from ray_app.driver.result import Result
from ray_app.driver.run import Faults, Observe, run_training
from ray_app.errors import ConfigError, unwrap_app_error
from ray_app.preflight.prepare import prepare
from ray_app.process import STOP_SIGNALS
from ray_app.retry import Retry
from ray_app.runlog.output import TextConsole
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import Location, put_atomic, put_json, to_location
from ray_app.train.job import Job

_SCENARIO_FUNCTIONS = (
    *(scenarios.kill, scenarios.kill_twice, scenarios.kill_two, scenarios.kill_all, scenarios.kill_reduction),
    *(scenarios.kill_saving, scenarios.kill_forming, scenarios.kill_joining, scenarios.kill_phases),
    *(scenarios.rendezvous, scenarios.evaluator, scenarios.freeze, scenarios.slow, scenarios.slow_storage),
    *(scenarios.storage_away, scenarios.full_disk, flip, partition, half_open, memory, scenarios.clock_jump),
    *(node, node_rank0, grow, shrink, head, mlflow, scenarios.damage, scenarios.torn_write),
    *(stranger, scenarios.driver, scenarios.evaluator_and_driver, scenarios.study),
)
SCENARIOS: dict[str, Callable[[ScenarioContext], Scenario | str]] = {
    scenario.__name__: scenario for scenario in _SCENARIO_FUNCTIONS
}
"""Every scenario by its name: a function that returns the plan, or the reason for which this drill cannot run it.

The certificate and the terminal show the docstring of the function.
"""
_CLEANUP_TIMEOUT_S = 180.0
_CLEANUP_RETRY = Retry(0.0, attempts=3)
"""Several attempts, because Ray's own limit for the start of a node is short on a busy machine."""


class Drill:
    """One drill on the connected cluster.

    Args:
        config: The configuration of the drill's runs.
        user_config: The user's configuration, from which `config` was derived.
        names: The scenarios to run.
        seed: Seed of the steps and workers at which the faults happen.
        limit_s: Seconds after which a scenario counts as hanging.
        nodes: The cluster that the drill has started; None on a cluster of the user.
        renew: Ends everything that a scenario has left on the cluster, and reconnects to it or to a new one.

    Raises:
        ConfigError: No scenario is possible.
    """

    def __init__(
        self,
        config: Config,
        user_config: Config,
        names: list[str],
        seed: int,
        limit_s: float,
        nodes: DrillCluster | None,
        console: Console,
        renew: Callable[[], None],
    ) -> None:
        self._config = config
        self._seed = seed
        self._limit_s = limit_s
        self._nodes = nodes
        self._console = console
        self._renew = renew
        self._out = to_location(config.run.storage_path)
        self._workers = workers_that_fit(config, cluster_capacity())
        self._log = StringIO()
        job = prepare(config).job
        self._steps, self._per_epoch = job.total_steps, job.plan.steps_per_epoch
        user_fields, drilled_fields = flatten(user_config.to_dict()), flatten(config.to_dict())
        self._certificate: dict[str, Any] = {
            **describe_environment(),
            "complete": False,
            "verdict": None,
            "config_digest": digest(user_config, job.plan.manifest.digest),
            "drilled_config_digest": job.config_digest,
            "manifest_digest": job.plan.manifest.digest,
            "changed_for_the_drill": {
                k: {"yours": user_fields.get(k), "drilled": v}
                for k, v in drilled_fields.items()
                if user_fields.get(k) != v
            },
            "seed": seed,
            "undisturbed": None,
            "scenarios": [],
        }
        self._contexts = {name: self._make_context(name) for name in names}
        self._plans = plans = {name: SCENARIOS[name](context) for name, context in self._contexts.items()}
        if all(isinstance(plan, str) for plan in plans.values()):
            reasons = "\n".join(f"  - {name}: {plan}" for name, plan in plans.items())
            raise ConfigError(f"No scenario is possible:\n{reasons}")

    @property
    def certificate(self) -> Location:
        """The file of the certificate."""
        return self._out / "certificate.json"

    def run(self) -> int:
        """Runs all scenarios and returns the exit code: 0 if each of them ended equal or was left out."""
        plans = self._plans
        self._say(
            f"{self._steps} steps of every run, on up to {self._workers} workers of"
            f" {'a cluster of the drill' if self._nodes else 'the cluster'}; runs and certificate in {self._out}"
        )
        undisturbed, first = self._run_undisturbed()
        results = self._certificate["scenarios"]
        for number, (name, plan) in enumerate(plans.items(), 1):
            began_s = time.monotonic()
            result: dict[str, Any] = {"scenario": name, "what": SCENARIOS[name].__doc__}
            with self._show_activity(f"{number}/{len(plans)} {name}: {result['what']}"):
                if isinstance(plan, str):
                    result |= {"outcome": "left out", "reason": plan}
                else:
                    result |= self._run_scenario(name, plan, self._contexts[name], undisturbed, first)
            is_broken = result.pop("is_broken", False)
            result["seconds"] = round(time.monotonic() - began_s, 1)
            results.append(result)
            self._save(len(results) == len(plans), summarize_results(results, undisturbed.digest, len(plans)))
            outcome = result["outcome"] if result["outcome"] in ("equal", "left out") else result["outcome"].upper()
            more = f": {result['reason']}" if result["reason"] else ""
            self._say(f"{number:2}/{len(plans)} {name:<14} {outcome}{more} ({result['seconds']:.0f} s)")
            if is_broken and number < len(plans):
                self._clean_up()
        self._console.print(make_results_table(results))
        self._say(f"{self._certificate['verdict']}\ncertificate: {self.certificate}")
        return 0 if all(r["outcome"] in ("equal", "left out") for r in results) else 1

    def _run_undisturbed(self) -> tuple[Trace, RunStart]:
        """Runs the configuration without faults; returns its trace and its start, to compare the scenarios with."""
        began_s = time.time()
        with self._show_activity("the undisturbed run"), time_limit(self._limit_s, "The undisturbed run"):
            result = self._train(self._config, Faults())
        paths = RunPaths(result.path)
        trace, first = read_trace(paths, result.summary), find_start_after(paths, began_s)
        commit = CheckpointStore(paths).commits()[-1]
        fields = ("params_digest", "rows", "steps", "world_sizes", "timing")
        self._certificate["undisturbed"] = {name: result.summary[name] for name in fields} | {
            "environment": commit.environment
        }
        self._save(False, "no scenario was reached")
        self._store_log("undisturbed")
        self._say(f"undisturbed: {trace.rows:,} rows, sha256 {trace.digest} ({time.time() - began_s:.0f} s)")
        return trace, first

    def _run_scenario(
        self, name: str, plan: Scenario, context: ScenarioContext, undisturbed: Trace, first: RunStart
    ) -> dict[str, Any]:
        """Runs one scenario and returns its entry of the certificate.

        The entry has `is_broken` if the run raised or exceeded the limit, and may have left processes behind.
        """
        result: dict[str, Any] = {"steps": plan.steps, "changes": plan.changes}
        try:
            with time_limit(self._limit_s, f"The scenario {name!r}"):
                result |= self._run_disturbed(plan, context, undisturbed, first)
        except Exception as error:
            error = unwrap_app_error(error)  # type: ignore[assignment]
            reason = str(error) if isinstance(error, LimitExceededError) else f"{type(error).__name__}: {error}"
            result |= {"outcome": "failed", "reason": reason, "is_broken": True}
        finally:
            kill_stopped_processes(context.evidence)
            self._store_log(name)
        return result | {"evidence": collect_fault_evidence(context.evidence.all()), "run": str(context.paths.root)}

    def _run_disturbed(
        self, plan: Scenario, context: ScenarioContext, undisturbed: Trace, first: RunStart
    ) -> dict[str, Any]:
        """Trains with the faults of a plan; returns the comparison with the undisturbed run and the measurements."""
        if self._nodes is not None:
            self._nodes.resize(plan.initial_workers or self._workers)
        with plan.setup() as setup_fields:
            config = context.config.replace(**plan.changes, **setup_fields)
            if plan.first_start is not None:
                plan.first_start(config)
            result = self._train(config, plan.faults, plan.observe)
            kill_stopped_processes(context.evidence)
            run = ScenarioResult(RunPaths(result.path), result.summary, context.evidence.all())
            outcome, reason = assess_scenario(plan, run, undisturbed)
            measurements = collect_measurements(plan, run) | compare_restart(run, first)
            return {"outcome": outcome, "reason": reason, **measurements}

    def _clean_up(self) -> None:
        """Ends the processes that a broken scenario has left, and restarts the drill's own cluster.

        The next scenario then starts from the state that the first one had.

        Raises:
            RuntimeError: No attempt gave a cluster for the next scenario.
        """

        def renew() -> None:
            with time_limit(_CLEANUP_TIMEOUT_S, "Cleaning up after a scenario"):
                self._renew()

        def report(error: Exception) -> None:
            self._say(f"Cleaning up after the scenario failed: {type(error).__name__}: {error}")

        try:
            _CLEANUP_RETRY.call(renew, Exception, "Cleaning up after a scenario", report)
        except Exception as error:
            raise RuntimeError(f"no cluster for the next scenario: {type(error).__name__}: {error}") from error

    def _make_context(self, name: str) -> ScenarioContext:
        """Returns the input of a scenario, with a random generator that depends on the seed and the name only."""
        return ScenarioContext(
            config=self._config.replace(run__name=name),
            workers=self._workers,
            total_steps=self._steps,
            steps_per_epoch=self._per_epoch,
            checkpoint_every=int(self._config.checkpoint.every_steps or 1),
            evidence=Evidence(str(self._out / "evidence" / name)),
            random=random.Random(f"{self._seed} {name}"),
            nodes=self._nodes,
            train=self._train,
        )

    def _train(self, config: Config, faults: Faults, observe: Observe | None = None) -> Result:
        """Calls `run_training` with its output in the log; a signal meanwhile ends the drill, whatever the run did."""
        interrupted = _InterruptFlag()

        def listen(_: Job) -> None:
            interrupted.listen()

        observe = HookChain((listen, observe)) if observe is not None else listen
        result = run_training(config, TextConsole(file=self._log, width=160), faults, observe)
        if interrupted.is_set or result.status == "interrupted":
            raise KeyboardInterrupt
        return result

    def _save(self, complete: bool, verdict: str) -> None:
        self._certificate |= {"complete": complete, "verdict": verdict}
        put_json(self.certificate, self._certificate)

    def _store_log(self, name: str) -> None:
        """Writes the collected output to a file and empties the log for the next run."""
        put_atomic(self._out / "logs" / f"{name}.txt", self._log.getvalue().encode())
        self._log.seek(0)
        self._log.truncate()

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def _show_activity(self, text: str) -> Iterator[None]:
        """Shows a spinner with a text if the console is a terminal; standard output goes to the log meanwhile."""
        spinner = Spinner("dots", escape(text))
        live = Live(spinner, console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False)
        with ExitStack() as stack:
            stack.enter_context(redirect_stdout(self._log))
            if self._console.is_terminal:
                stack.enter_context(live)
            yield


class _InterruptFlag:
    """Records `STOP_SIGNALS`: a run may finish although the user wanted to end it, and the drill must then end."""

    def __init__(self) -> None:
        self.is_set = self._is_installed = False

    def listen(self) -> None:
        """Installs handlers that set the flag and call those of the run, which exist only while the run goes on."""
        if self._is_installed or threading.current_thread() is not threading.main_thread():
            return
        self._is_installed = True
        for number in STOP_SIGNALS:
            if callable(handler := signal.getsignal(number)):
                signal.signal(number, self._make_handler(handler))

    def _make_handler(self, previous_handler: Any) -> Callable[[int, Any], None]:
        def handler(number: int, frame: Any) -> None:
            self.is_set = True
            previous_handler(number, frame)

        return handler


_REPEAT_S = 60.0
"""Seconds after the limit until the alarm is raised again, and from then on between two alarms.

The alarm is repeated because the code that reacts to the first one may hang, too.
"""


class LimitExceededError(Exception):
    """The work inside of `time_limit` took longer than its limit."""


class _LimitReached(BaseException):
    """Raised in the main thread at the limit; not an `Exception`, because code may retry after every `Exception`."""


@contextmanager
def time_limit(seconds: float, subject: str) -> Iterator[None]:
    """Limits the time that the main thread spends in this context, by a `LimitExceededError` that names the subject."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise _LimitReached

    previous_handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, _REPEAT_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    except _LimitReached as error:
        raise LimitExceededError(
            f"{subject} did not end within {seconds:g} s (drill.limit_s bounds scenarios)."
        ) from error
    finally:
        signal.signal(signal.SIGALRM, previous_handler)
