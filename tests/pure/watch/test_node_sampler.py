"""The node sampler: names of nodes, and the interval of its samples."""

from __future__ import annotations

import pytest

from ray_app.config.checks import check_config
from ray_app.config.config import Config
from ray_app.errors import ConfigError
from ray_app.watch.node_sampler import _free_name


def test_nodes_that_share_an_address_have_different_names() -> None:
    assert _free_name("10.0.0.1", set()) == "10.0.0.1"
    assert _free_name("10.0.0.1", {"10.0.0.1", "10.0.0.1-3"}) == "10.0.0.1-2"


def test_a_sampling_interval_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="system_metrics_s is 0; it must be greater than 0"):
        check_config(Config().replace(tracking__system_metrics_s=0))
