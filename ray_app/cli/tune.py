"""The command `ray-app tune`: runs or continues a study."""

from __future__ import annotations

from ray_app.cli.main import exit_code
from ray_app.driver.parsing import parse_with_sections
from ray_app.retrain.options import RetrainSection
from ray_app.runlog.output import TextConsole
from ray_app.runlog.redaction import register_secrets
from ray_app.tune.options import TuneSection
from ray_app.tune.study import StudyDriver

_DESCRIPTION = (
    "Trains a configuration with many settings, of which the best continue; the winner does not depend on the cluster."
)


def main(arguments: list[str] | None = None, prog: str = "ray-app tune") -> int:
    """Runs `ray-app tune`; see `exit_code`. An interrupted study continues when it is started again."""
    is_started = False

    def work() -> None:
        nonlocal is_started
        kinds = {"tune": TuneSection, "retrain": RetrainSection}
        config, sections = parse_with_sections(arguments, kinds, prog, description=_DESCRIPTION)
        register_secrets(config.to_dict())
        driver = StudyDriver(config, sections["tune"], sections["retrain"], TextConsole())
        is_started = True
        driver.run()

    interrupted = "Interrupted; starting it again continues the study.", 75
    return exit_code(work, "The study failed", interrupted, lambda: is_started)
