"""The command `ray-app export`: writes the model of a run to a folder."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser

from ray_app.cli.main import exit_code
from ray_app.driver.model_export import ExportOptions, export_run
from ray_app.driver.parsing import add_current_folder_to_path
from ray_app.runlog.redaction import redact


def main(arguments: list[str] | None = None, prog: str = "ray-app export") -> int:
    """Runs the command `ray-app export`.

    Returns:
        Exit code: see `exit_code`.
    """
    add_current_folder_to_path()
    parser = ArgumentParser(
        prog=prog, description="Writes the model of a run to a folder, for machines without Ray and MLflow."
    )
    parser.add_class_arguments(ExportOptions, None)
    options = ExportOptions(**parser.parse_args(arguments).as_dict())

    def work() -> None:
        summary = export_run(options)
        as_program = (
            ""
            if summary["format"] == "torch.export"
            else f"; not as a torch.export program ({'; '.join(summary['refused'])})"
        )
        print(
            redact(
                f"step {summary['step']} of {summary['run']} as {summary['format']}, parameters sha256"
                f" {summary['params_digest']}{as_program}"
            )
        )
        print(Path(options.out).expanduser().resolve())

    return exit_code(work, "The model was not exported")
