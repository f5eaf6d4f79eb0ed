"""Tests with processes and files of several users."""

import os

import pytest

ROOT_ONLY = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user, or give files to one")
