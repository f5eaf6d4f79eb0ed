"""The command `ray-app export`: writes the model of a run to a folder."""

from __future__ import annotations

from pathlib import Path

from ray_app.cli.main import exit_code
from ray_app.driver.model_export import ExportOptions, export_run
from ray_app.driver.parsing import parse_options
from ray_app.runlog.redaction import redact


def main(arguments: list[str] | None = None, prog: str = "ray-app export") -> int:
    """Runs `ray-app export`; see `exit_code`."""
    description = "Writes the model of a run to a folder, for machines without Ray and MLflow."
    options = parse_options(ExportOptions, arguments, prog, description)

    def work() -> None:
        summary = export_run(options)
        as_program = ""
        if summary["format"] != "torch.export":
            as_program = f"; no torch.export program ({'; '.join(summary['refused'])})"
        text = f"step {summary['step']} of {summary['run']} as {summary['format']}, parameters sha256"
        print(redact(f"{text} {summary['params_digest']}{as_program}"))
        print(Path(options.out).expanduser().resolve())

    return exit_code(work, "The model could not be exported")
