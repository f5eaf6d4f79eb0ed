"""A new run that continues from a checkpoint of another run (`run.branch_from`), with other settings if it likes.

The checkpoint is copied before the new run exists, so that the retention of the other run does not matter. Everything
stays as it is but options of the optimizers and schedules: two pairs of them, built from both configurations and moved
to the step of the checkpoint, show which ones the new configuration sets to other values. These are replaced.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import IO, Any, NamedTuple

from ray_app.checkpoint.format import TRAINING, Snapshot, map_tensors, read_rest, write_rest
from ray_app.checkpoint.store import COMMIT, CheckpointStore, Commit
from ray_app.config.config import Config, flatten, result_fields
from ray_app.devices import HOST
from ray_app.errors import CheckpointError, ConfigError, DamagedError
from ray_app.preflight.changes import check_same_classes
from ray_app.preflight.context import Branch, PreflightContext
from ray_app.preflight.inputs import make_task
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.stored_config import read_config, read_manifest
from ray_app.storage.data_files import open_data_file
from ray_app.storage.files import Content, read_json, remove_tree, render_content, to_location
from ray_app.task.base import Task
from ray_app.task.schema import prepare_task
from ray_app.task.user_code import user_code
from ray_app.train.state.state import TrainingState
from ray_app.train.state.transfer import copy_to_host

_SOURCE = re.compile(r"(.+?)(?:@(newest|best|step-\d+(?:-\d+)?|epoch-\d+))?(\?[^@]*)?", re.DOTALL)
"""A run, the name of a checkpoint, and the options of an object store, which may also stand before the checkpoint."""
_ROWS = "it decides which rows a step has, so earlier rows would be missing or come again"
_FORM = "the state of the checkpoint has the form that belongs to it"
_FIXED = {
    "manifest": "the data is another, whose rows have other steps",
    "seed": _ROWS,
    "scaling.logical_workers": _ROWS,
    "data.": _ROWS,
    "train.strategy": _FORM,
    "train.local_steps": _FORM,
    "train.outer_": _FORM,
    "train.freeze": "the optimizer has a state for the parameters that were trained",
}
"""What a branch has in common with the other run, by the beginnings of the names of fields, and why."""
_BLOCK_BYTES = 16 << 20


def open_branch(context: PreflightContext) -> None:
    """Chooses the checkpoint of `run.branch_from`, unless the run has its copy, and sets `run.branch_point`.

    Raises:
        ConfigError: There is no such run or checkpoint, or a setting differs that a branch has in common with its run.
    """
    config, before = context.config, context.before
    source = str(config.run.branch_from)
    if before is not None and before.run.branch_from == source:
        point = config.run.branch_point or before.run.branch_point
        context.config = config.replace(run__branch_point=point)
        return
    match = _SOURCE.fullmatch(source)
    assert match is not None
    paths = RunPaths(to_location(match[1] + (match[3] or "")))
    if "@" in paths.name:
        raise ConfigError(
            f"run.branch_from is {source!r}; after the directory of a run come @newest, @best, @step-N or @epoch-N."
        )
    if str(paths.root) == str(context.paths.root):
        raise ConfigError(
            f"run.branch_from is {source!r}, the run itself; give another run.name, or leave it out to continue it."
        )
    try:
        parent = read_config(paths)
        _refuse_other_rows(source, result_fields(parent, read_manifest(paths).digest), context)
        check_same_classes(paths, context.plan)
        commit = _choose_checkpoint(paths, match[2] or "newest", parent, context.plan.steps_per_epoch)
    except OSError as error:
        raise ConfigError(
            f"run.branch_from {source!r} cannot be read: {error}. Name the directory of a run."
        ) from error
    point = f"{commit.step}-{commit.params_digest}"
    if config.run.branch_point not in (None, point):
        raise ConfigError(f"run.branch_from {source!r} is {point}, and run.branch_point is {config.run.branch_point}.")
    context.config = config.replace(run__branch_point=point)
    if (steps := config.train.total_steps(context.plan.steps_per_epoch)) <= commit.step:
        raise ConfigError(
            f"run.branch_from {source!r} is step {commit.step}, and the run ends at step {steps}: nothing is left to"
            " train. Raise train.epochs or train.max_steps, which count from the first step of the other run."
        )
    context.branch = Branch(paths, parent, commit) if before is None else None


def _refuse_other_rows(source: str, then: Mapping[str, Any], context: PreflightContext) -> None:
    """Refuses settings by which the steps before have had other rows, or the state another form.

    Args:
        source: Value of `run.branch_from`.
        then: The `result_fields` of the other run.
        context: The new run.
    """
    now = result_fields(context.config, context.plan.manifest.digest)
    defaults = flatten(Config().to_dict())
    problems = [
        f"{name} was {then.get(name, defaults.get(name))!r} and is {now.get(name, defaults.get(name))!r}: {reason}."
        for beginning, reason in _FIXED.items()
        for name in sorted({*then, *now})
        if name.startswith(beginning) and then.get(name) != now.get(name)
    ]
    if problems:
        listed = "\n- ".join(problems)
        raise ConfigError(
            f"run.branch_from is {source!r}, from which a run with other settings cannot continue:\n- {listed}\nSet"
            " them as there, or begin a run with its parameters alone (train.init_from)."
        )


def _choose_checkpoint(paths: RunPaths, name: str, parent: Config, pass_steps: int) -> Commit:
    """Returns the checkpoint of a run that a name stands for; `pass_steps` are the steps of a pass over the data."""
    commits = CheckpointStore(paths).commits()
    kind, _, numbers = name.partition("-")
    step, _, fence = numbers.partition("-")
    steps = {"newest": commits[-1].step if commits else None, "step": int(step or 0)}
    steps["epoch"] = int(step or 0) * (parent.train.steps_per_epoch or pass_steps)
    steps["best"] = ((read_json(paths.summary) or {}).get("best") or {}).get("step")
    if matching := [c for c in commits if c.step == steps[kind] and fence in ("", f"{c.fence:04d}", str(c.fence))]:
        return matching[-1]
    valid = ", ".join(f"step-{commit.step}" for commit in commits) or "none"
    hint = " The best one is known when the run has ended." if name == "best" else ""
    raise ConfigError(f"run.branch_from names {name} of {paths.root}, which has the checkpoints {valid}.{hint}")


class _Optimizers(NamedTuple):
    """The optimizers of a configuration: their classes, names and options of each group, the state of schedules."""

    classes: list[str]
    members: list[list[str]]
    options: list[dict[str, Any]]
    schedule: dict[str, Any] | None


def _optimizers_at(step: int, config: Config, task: Task, pass_steps: int) -> _Optimizers:
    """Builds the optimizers of a configuration, and moves their schedules to a step."""
    state = TrainingState(config, task, HOST, config.train.total_steps(pass_steps))
    state.initialize(None)
    with warnings.catch_warnings(), user_code(lambda: "moving the schedule"):
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        while state.schedule is not None and state.step < step:
            state.advance_schedule()
    task.finish(state.model)
    names = {id(p): name for name, p in state.master.named_parameters()}
    groups = state.optimizer.param_groups
    return _Optimizers(
        [str(type(one)) for one in (state.turns.optimizers.values() if state.turns is not None else [state.optimizer])],
        [[names.get(id(p), "") for p in group["params"]] for group in groups],
        [copy_to_host({name: value for name, value in group.items() if name != "params"}) for group in groups],
        copy_to_host(state.schedule.state_dict()) if state.schedule is not None else None,
    )


def continue_state(context: PreflightContext) -> None:
    """Refuses a checkpoint that is not one of this model and optimizer, and gives it the options that have changed.

    Raises:
        ConfigError: The checkpoint belongs to another model or optimizer, or is damaged.
    """
    branch, config = context.branch, context.config
    assert branch is not None
    source, pass_steps = f"run.branch_from {config.run.branch_from!r}", context.plan.steps_per_epoch
    store, commit = CheckpointStore(branch.paths), branch.commit
    try:
        model = store.open(commit).model
        rest = read_rest(store.load(commit, lambda name: name == TRAINING)[TRAINING])
    except (CheckpointError, OSError) as error:
        raise ConfigError(f"{source} cannot be read: {error}. Name another checkpoint.") from error
    _refuse_other_parts(source, model, rest["more"], context.row_probe.state.live())
    task = context.task
    if branch.config.task != config.task:
        task = prepare_task(make_task(branch.config), context.dataset.facts, read_json(branch.paths.schema))
    then = _optimizers_at(commit.step, branch.config, task, pass_steps)
    now = _optimizers_at(commit.step, config, context.task, pass_steps)
    if then.classes != now.classes or then.members != now.members or _turns(branch.config) != _turns(config):
        raise ConfigError(
            f"{source} is of a run with other optimizers: another class, other groups of parameters, or other turns."
            " Set these as there; init_args, the options of groups and the schedule may differ."
        )
    for group, old, new in zip(rest["optimizer"]["param_groups"], then.options, now.options, strict=True):
        for name, value in new.items():
            if (name == "momentum" or isinstance(value, bool)) and bool(value) != bool(old.get(name)):
                raise ConfigError(
                    f"{source} is of a run with {name} {old.get(name)!r}, here it is {value!r}, and the optimizer keeps"
                    " another state. Set it as there."
                )
        for name in old.keys() - new.keys():
            group.pop(name, None)
        group |= {name: new[name] for name in new if name not in old or _to_text(new[name]) != _to_text(old[name])}
    if _to_text(then.schedule) != _to_text(now.schedule):
        rest["schedule"] = now.schedule
    context.branch = replace(branch, training=render_content(partial(write_rest, rest)))


def _turns(config: Config) -> list[tuple[str, list[str], int]]:
    return [(name, spec.parameters, spec.steps) for name, spec in (config.optimizers or {}).items()]


def _to_text(value: Any) -> str:
    """Returns an option or the state of a schedule with all digits."""
    return repr(map_tensors(value, lambda _, tensor: (tensor.dtype, tensor.tolist())))


def _refuse_other_parts(source: str, model: Mapping[str, Any], more: Mapping[str, Any], live: Snapshot) -> None:
    """Refuses a checkpoint of another model, or with other parts besides model, optimizer and schedule.

    Args:
        source: The field and its value, for the error.
        model: Parameters and persistent buffers of the checkpoint.
        more: Its other parts, see `Snapshot.extra_state`.
        live: The state of this run.
    """
    before, after = ({name: tuple(value.shape) for name, value in one.items()} for one in (model, live.model))
    if other := sorted(name for name in {*before, *after} if before.get(name) != after.get(name)):
        name = other[0]
        raise ConfigError(
            f"{source} is a checkpoint of another model: {len(other)} tensors differ, such as {name} with the shape"
            f" {before.get(name)} there and {after.get(name)} here (None: there is none). Set task as there."
        )
    if different := (more.keys() ^ live.extra_state.keys()) - {"metrics"}:
        fields = {"parameters": "train.ema_decay", "scale": "train.precision"}
        names = ", ".join(fields.get(name, name) for name in sorted(different))
        raise ConfigError(
            f"{source} belongs to a run with another {names}, whose state is missing or left over: null cannot become a"
            " value, nor fp16 another precision, and the reverse. Set it as there."
        )


def copy_checkpoint(branch: Branch, paths: RunPaths, fence: int, config_digest: str) -> None:
    """Copies the checkpoint into a new run, with the options of the new run.

    Raises:
        ConfigError: The checkpoint is damaged, or the other run has removed it meanwhile.
        OSError: A storage does not answer.
    """
    store, commit = CheckpointStore(paths), branch.commit
    files: dict[str, Content] = {name: partial(_copy_file, branch, name) for name in commit.files}
    files[TRAINING] = branch.training
    new = replace(commit, fence=fence, config_digest=config_digest, prefix="", why="branch")
    try:
        store.write(files, new)
    except (DamagedError, FileNotFoundError) as error:
        raise ConfigError(
            f"run.branch_from: step {commit.step} of {branch.paths.root} cannot be copied: {error}. Name another"
            " checkpoint."
        ) from error


def _copy_file(branch: Branch, name: str, file: IO[bytes]) -> None:
    """Copies a file of the checkpoint in blocks, and verifies it."""
    commit, sha = branch.commit, hashlib.sha256()
    folder = branch.paths.checkpoint(commit.step, commit.fence)
    with open_data_file(folder / f"{commit.prefix}{name}") as source:
        while block := source.read(_BLOCK_BYTES):
            sha.update(block)
            file.write(block)
    if sha.hexdigest() != commit.files[name]["sha256"]:
        raise DamagedError(f"{folder.name}/{name} differs from what was committed (SHA-256)")


def remove_leftovers(paths: RunPaths) -> None:
    """Removes the checkpoints that a start has copied which was killed before the run existed."""
    for commit in CheckpointStore(paths).commits():
        if commit.why == "branch":
            folder = paths.checkpoint(commit.step, commit.fence)
            (folder / COMMIT).unlink(missing_ok=True)
            remove_tree(folder)
