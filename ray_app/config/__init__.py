"""The configuration: its sections with their fields, and their checks. No framework."""
