"""The version of the application; the wheel has it from here."""

__version__ = "0.3.0"
