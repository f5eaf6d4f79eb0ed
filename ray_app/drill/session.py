"""One drill: the undisturbed run, then every scenario, and a certificate that grows with each.

A bound for whatever the main thread does, also where it waits in a library.
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

import ray
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner

from ray_app.checkpoint.store import CheckpointStore
from ray_app.cluster.ray_private import max_resources
from ray_app.cluster.resources import workers_that_fit
from ray_app.config.config import Config, digest, flatten
from ray_app.drill import process_scenarios
from ray_app.drill.certificate import (
    RunStart,
    Trace,
    conclusion,
    facts,
    judge,
    measures,
    proof_of,
    restart,
    start_since,
    table,
    trace_of,
)
from ray_app.drill.cluster import Nodes
from ray_app.drill.faults import Evidence, Several
from ray_app.drill.memory_faults import flip, memory
from ray_app.drill.network import half_open, partition
from ray_app.drill.node_scenarios import grow, head, node, node_rank0, shrink
from ray_app.drill.process_scenarios import clock_jump, damage, driver, evaluator_and_driver, torn_write
from ray_app.drill.scenario import Scenario, ScenarioContext, ScenarioResult, end_frozen
from ray_app.drill.tracking import mlflow
from ray_app.driver.result import Result
from ray_app.driver.run import Faults, Observe, run_training
from ray_app.errors import ConfigError, unwrap_app_error
from ray_app.preflight.prepare import prepare
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import Location, put_atomic, put_json, to_location
from ray_app.train.job import Job

_AGAIN_S = 60.0
"""Seconds after which ending what took too long has taken too long itself."""


class LimitExceededError(Exception):
    """Something took longer than it may."""


class _Late(BaseException):
    """Raised wherever the main thread is. No `Exception`: who tries again after those would do so for ever."""


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Bounds what the main thread does in this context; in another thread there is no bound.

    Args:
        seconds: How long it may take.
        what: What takes so long, as the subject of a sentence.

    Raises:
        LimitExceededError: It took longer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    except _Late as error:
        raise LimitExceededError(
            f"{what} did not end within {seconds:g} s (drill.limit_s bounds scenarios)."
        ) from error
    finally:
        signal.signal(signal.SIGALRM, before)


_MADE = (
    *(
        process_scenarios.kill,
        process_scenarios.kill_twice,
        process_scenarios.kill_two,
        process_scenarios.kill_all,
        process_scenarios.kill_exchange,
        process_scenarios.kill_saving,
    ),
    *(
        process_scenarios.kill_forming,
        process_scenarios.kill_joining,
        process_scenarios.kill_phases,
        process_scenarios.rendezvous,
        process_scenarios.evaluator,
    ),
    *(
        process_scenarios.freeze,
        process_scenarios.slow,
        process_scenarios.slow_storage,
        process_scenarios.storage_away,
        process_scenarios.full_disk,
        flip,
    ),
    *(partition, half_open, memory, clock_jump, node, node_rank0, grow, shrink, head, mlflow),
    *(damage, torn_write, driver, evaluator_and_driver),
)
_CLEAR_S, _CLEAR_TRIES = 180.0, 3
SCENARIOS: dict[str, Callable[[ScenarioContext], Scenario | str]] = {scenario.__name__: scenario for scenario in _MADE}


class _Interrupted:
    """Whether somebody wants to end a run, which may finish all the same."""

    def __init__(self) -> None:
        self.is_set = self._listens = False

    def listen(self) -> None:
        """Listens along with the run, which has its own handlers while it goes on."""
        if self._listens or threading.current_thread() is not threading.main_thread():
            return
        self._listens = True
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._heard(signal.getsignal(number)))

    def _heard(self, before: Any) -> Callable[[int, Any], None]:
        def handler(number: int, frame: Any) -> None:
            self.is_set = True
            before(number, frame)

        return handler


class Drill:
    """One drill on the connected cluster.

    Args:
        config: The configuration of its runs.
        own: The user's configuration.
        names: The scenarios to go through.
        seed: Chooses the steps and the workers that are struck.
        limit_s: Seconds after which a scenario counts as hanging.
        nodes: The drill's own nodes, if the cluster is its own.
        console: Where to say how it gets on.
        renew: Ends what a scenario has left on the cluster, and connects to it, or to another one, anew.

    Raises:
        ConfigError: No scenario is possible.
    """

    def __init__(
        self,
        config: Config,
        own: Config,
        names: list[str],
        seed: int,
        limit_s: float,
        nodes: Nodes | None,
        console: Console,
        renew: Callable[[], None],
    ) -> None:
        self._config, self._seed, self._limit_s = config, seed, limit_s
        self._nodes, self._console, self._renew = nodes, console, renew
        self._out = to_location(config.run.storage_path)
        self._workers = workers_that_fit(config, ray.cluster_resources(), ray.nodes(), max_resources())
        self._log = StringIO()
        job = prepare(config).job
        self._steps, self._per_epoch = job.total_steps, job.plan.steps_per_epoch
        before, now = flatten(own.to_dict()), flatten(config.to_dict())
        self._certificate: dict[str, Any] = {
            **facts(),
            "complete": False,
            "verdict": None,
            "config_digest": digest(own, job.plan.manifest.digest),
            "drilled_config_digest": job.config_digest,
            "manifest_digest": job.plan.manifest.digest,
            "changed_for_the_drill": {
                k: {"yours": before.get(k), "drilled": v} for k, v in now.items() if before.get(k) != v
            },
            "seed": seed,
            "undisturbed": None,
            "scenarios": [],
        }
        self._grounds = {name: self._ground(name) for name in names}
        self._plans = plans = {name: SCENARIOS[name](ground) for name, ground in self._grounds.items()}
        if all(isinstance(plan, str) for plan in plans.values()):
            raise ConfigError(
                "No scenario is possible:\n" + "\n".join(f"  - {name}: {plan}" for name, plan in plans.items())
            )

    @property
    def certificate(self) -> Location:
        """Where the certificate is."""
        return self._out / "certificate.json"

    def go(self) -> int:
        """Goes through all scenarios; returns the exit code."""
        grounds, plans = self._grounds, self._plans
        self._say(
            f"{self._steps} steps of every run, on up to {self._workers} workers of"
            f" {'a cluster of the drill' if self._nodes else 'the cluster'}; runs and certificate in {self._out}"
        )
        undisturbed, first = self._undisturbed()
        results = self._certificate["scenarios"]
        for number, (name, plan) in enumerate(plans.items(), 1):
            began_s = time.monotonic()
            with self._shown(f"{number}/{len(plans)} {name}: {SCENARIOS[name].__doc__}"):
                if isinstance(plan, str):
                    result = self._left_out(name, plan)
                else:
                    result = self._scenario(name, plan, grounds[name], undisturbed, first)
            is_broken = result.pop("is_broken", False)
            result["seconds"] = round(time.monotonic() - began_s, 1)
            results.append(result)
            self._save(len(results) == len(plans), conclusion(results, undisturbed.digest, len(plans)))
            outcome = result["outcome"] if result["outcome"] in ("equal", "left out") else result["outcome"].upper()
            more = f": {result['reason']}" if result["reason"] else ""
            self._say(f"{number:2}/{len(plans)} {name:<14} {outcome}{more} ({result['seconds']:.0f} s)")
            if is_broken and number < len(plans):
                self._clear_away()
        self._console.print(table(results))
        self._say(f"{self._certificate['verdict']}\ncertificate: {self.certificate}")
        return 0 if all(r["outcome"] in ("equal", "left out") for r in results) else 1

    def _undisturbed(self) -> tuple[Trace, RunStart]:
        began_s = time.time()
        with self._shown("the undisturbed run"), time_limit(self._limit_s, "The undisturbed run"):
            result = self._train(self._config, Faults())
        paths = RunPaths(result.path)
        trace, first = trace_of(paths, result.summary), start_since(paths, began_s)
        commit = CheckpointStore(paths).commits()[-1]
        fields = ("params_digest", "rows", "steps", "world_sizes", "timing")
        self._certificate["undisturbed"] = {name: result.summary[name] for name in fields} | {
            "environment": commit.environment
        }
        self._save(False, "no scenario was reached")
        self._keep_log("undisturbed")
        self._say(f"undisturbed: {trace.rows:,} rows, sha256 {trace.digest} ({time.time() - began_s:.0f} s)")
        return trace, first

    def _scenario(
        self, name: str, plan: Scenario, ground: ScenarioContext, undisturbed: Trace, first: RunStart
    ) -> dict[str, Any]:
        """Runs one scenario and says what came of it; `is_broken`: it did not come to its end, and may have left
        something behind.
        """
        result: dict[str, Any] = {
            "scenario": name,
            "what": SCENARIOS[name].__doc__,
            "steps": plan.steps,
            "changes": plan.changes,
        }
        try:
            with time_limit(self._limit_s, f"The scenario {name!r}"):
                result |= self._disturbed(plan, ground, undisturbed, first)
        except Exception as error:
            error = unwrap_app_error(error)  # type: ignore[assignment]
            reason = str(error) if isinstance(error, LimitExceededError) else f"{type(error).__name__}: {error}"
            result |= {"outcome": "failed", "reason": reason, "is_broken": True}
        finally:
            end_frozen(ground.proofs)
            self._keep_log(name)
        return result | {"proof": proof_of(ground.proofs.all()), "run": str(ground.paths.root)}

    def _disturbed(
        self, plan: Scenario, ground: ScenarioContext, undisturbed: Trace, first: RunStart
    ) -> dict[str, Any]:
        """The run under a disturbance, and how it compares."""
        if self._nodes is not None:
            self._nodes.shape(plan.room or self._workers)
        with plan.around() as more:
            config = ground.config.replace(**plan.changes, **more)
            if plan.before is not None:
                plan.before(config)
            ended = self._train(config, plan.faults, plan.observe)
            end_frozen(ground.proofs)
            run = ScenarioResult(RunPaths(ended.path), ended.summary, ground.proofs.all())
            outcome, reason = judge(plan, run, undisturbed)
            return {"outcome": outcome, "reason": reason, **measures(plan, run), **restart(run, first)}

    def _clear_away(self) -> None:
        """Ends what a scenario has left that did not come to its end, with all processes of the drill's own cluster, so
        that the next scenario finds what the first one found.

        Raises:
            RuntimeError: There is no cluster for the next scenario.
        """
        left = _CLEAR_TRIES
        while left:  # on a busy machine Ray's own limit for the start of a node is short
            left -= 1
            try:
                with time_limit(_CLEAR_S, "Clearing away after a scenario"):
                    self._renew()
                left = 0
            except Exception as error:
                self._say(f"What the scenario left could not be cleared away: {type(error).__name__}: {error}")
                if not left:
                    raise RuntimeError(f"no cluster for the next scenario: {type(error).__name__}: {error}") from error

    def _left_out(self, name: str, reason: str) -> dict[str, Any]:
        return {"scenario": name, "what": SCENARIOS[name].__doc__, "outcome": "left out", "reason": reason}

    def _ground(self, name: str) -> ScenarioContext:
        return ScenarioContext(
            config=self._config.replace(run__name=name),
            workers=self._workers,
            total_steps=self._steps,
            steps_per_epoch=self._per_epoch,
            checkpoint_every=int(self._config.checkpoint.every_steps or 1),
            proofs=Evidence(str(self._out / "proofs" / name)),
            random=random.Random(f"{self._seed} {name}"),
            nodes=self._nodes,
            train=self._train,
        )

    def _train(self, config: Config, faults: Faults, observe: Observe | None = None) -> Result:
        """`run_training` without its output.

        Raises:
            KeyboardInterrupt: It was interrupted from outside.
        """
        interrupted = _Interrupted()

        def listen(_: Job) -> None:
            interrupted.listen()

        observe = Several((listen, observe)) if observe is not None else listen
        result = run_training(config, Console(file=self._log, width=160), faults, observe)
        if interrupted.is_set or result.status == "interrupted":
            raise KeyboardInterrupt
        return result

    def _save(self, complete: bool, said: str) -> None:
        self._certificate |= {"complete": complete, "verdict": said}
        put_json(self.certificate, self._certificate)

    def _keep_log(self, name: str) -> None:
        put_atomic(self._out / "logs" / f"{name}.txt", self._log.getvalue().encode())
        self._log.seek(0)
        self._log.truncate()

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def _shown(self, text: str) -> Iterator[None]:
        """Says what goes on, on a terminal; what others print meanwhile goes to the log."""
        spinner = Spinner("dots", escape(text))
        shown = Live(spinner, console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False)
        with ExitStack() as stack:
            stack.enter_context(redirect_stdout(self._log))
            if self._console.is_terminal:
                stack.enter_context(shown)
            yield
