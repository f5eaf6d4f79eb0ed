"""A thousand workers are killed, in every phase and at any moment, and each run stays bit-identical. See
`tests/support/campaign.py`.
"""

from collections import Counter
from pathlib import Path

import pytest

from ray_app.testing import cache_windows, read_trained_run, stream_windows
from ray_app.train.job import Job
from tests.support.campaign import DILOCO, PHASES, Campaign, rows_of
from tests.support.local_world import TinyImages, make_job, write_images
from tests.support.served_campaign import MOMENTS, run_served_campaign

AVERAGED = {
    "train__ema_decay": 0.9,
    "train__grad_clip_norm": 0.5,
    "schedule": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 5, "gamma": 0.9}},
}
# Each case has the number of deaths, the strategy, the number of workers, the windows and the settings.
CASES = {
    "ddp": (300, "ddp", 3, cache_windows, {}),
    "ddp, stream_windows, averaged": (200, "ddp", 3, stream_windows, AVERAGED),
    "central_storage": (200, "central_storage", 3, cache_windows, {}),
    "local_sgd": (150, "local_sgd", 3, cache_windows, DILOCO),
    "fsdp": (100, "fsdp", 3, cache_windows, {}),
    "single": (100, "single", 1, cache_windows, {}),
}


def inject_deaths(case: str, folder: Path, deaths: int) -> Counter[str]:
    """Kills workers in one run after the other until `deaths` are reached; returns the number per phase."""
    _, strategy, workers, windows, settings = CASES[case]
    data = write_images(folder / "data", [[50, 1], [46]])

    def run(name: str, seed: int, faults: int) -> tuple[Job, Counter[str]]:
        fields = {
            "train__epochs": 12,
            "checkpoint__every_epochs": None,
            "checkpoint__every_steps": 3,
            "train__strategy": strategy,
        }
        job = make_job(folder / name, data, task=TinyImages(), **fields, **settings)
        campaign = Campaign(folder / f"{name}-groups", seed, job, workers, windows)
        campaign.run(faults)
        return job, campaign.deaths

    undisturbed, none = run("undisturbed", 0, 0)
    assert not none
    fired, runs = Counter[str](), 0
    while fired.total() < deaths:
        runs += 1
        job, run_fired = run(f"run-{runs}", runs, deaths - fired.total())
        assert run_fired, "no worker was killed in this run"
        fired += run_fired
        assert rows_of(job) == rows_of(undisturbed)
        assert read_trained_run(job).digests == read_trained_run(undisturbed).digests, f"seed {runs}"
        assert read_trained_run(job).steps == read_trained_run(undisturbed).steps, f"seed {runs}"
    return fired


@pytest.mark.search
@pytest.mark.parametrize("case", CASES)
def test_kills_in_any_phase_leave_the_result_bit_identical(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    deaths = CASES[case][0]
    fired = inject_deaths(case, tmp_path, deaths)
    assert set(fired) == set(PHASES), "there is a phase without a kill"
    with capsys.disabled():
        print(f" {fired.total()} workers killed: {dict(fired)}")


@pytest.mark.search
def test_losses_with_parameter_servers_leave_the_result_bit_identical(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fired, losses = Counter[tuple[str, str]](), 300
    data = write_images(tmp_path / "data", [[50, 1], [46]])

    def run(name: str, seed: int, max_losses: int) -> Job:
        fields = {"train__epochs": 12, "checkpoint__every_epochs": None, "checkpoint__every_steps": 3}
        servers = {"train__strategy": "parameter_server", "train__servers": 2}
        job = make_job(tmp_path / name, data, task=TinyImages(), **fields, **servers)
        fired.update(run_served_campaign(job, seed, 3, max_losses))
        return job

    undisturbed, runs = run("undisturbed", 0, 0), 0
    while fired.total() < losses:
        runs += 1
        job = run(f"run-{runs}", runs, min(40, losses - fired.total()))
        assert rows_of(job) == rows_of(undisturbed), f"seed {runs}"
        assert read_trained_run(job).digests == read_trained_run(undisturbed).digests, f"seed {runs}"
        assert read_trained_run(job).steps == read_trained_run(undisturbed).steps, f"seed {runs}"
    assert set(fired) == {(role, moment) for role, moments in MOMENTS.items() for moment in moments}, (
        "there is a moment without a loss"
    )
    with capsys.disabled():
        print(f" {fired.total()} lost: {dict(Counter(role for role, _ in fired.elements()))}")


def test_the_cases_kill_a_thousand_workers() -> None:
    assert sum(deaths for deaths, *_ in CASES.values()) >= 1000
