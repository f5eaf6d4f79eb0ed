"""The version of the application; the wheel has it from here."""

from __future__ import annotations

__version__ = "0.3.0"
