"""The command `ray-app register`: registers a run's best checkpoint in MLflow's model registry."""

from __future__ import annotations

from ray_app.cli.main import exit_code
from ray_app.driver.model_export import RegisterOptions, register_run
from ray_app.driver.parsing import parse_options
from ray_app.runlog.output import TextConsole
from ray_app.watch.terminal import describe_model


def main(arguments: list[str] | None = None, prog: str = "ray-app register") -> int:
    """Runs `ray-app register`; see `exit_code`. Registering a checkpoint again is safe."""
    description = "Registers the best checkpoint of a run as a version of a model in MLflow's registry."
    options = parse_options(RegisterOptions, arguments, prog, description)

    def work() -> None:
        registered = register_run(options)
        model = {"name": registered.name, "version": registered.version, "aliases": registered.aliases}
        TextConsole().print(describe_model(model), markup=False, highlight=False, soft_wrap=True)

    return exit_code(work, "The model could not be registered")
