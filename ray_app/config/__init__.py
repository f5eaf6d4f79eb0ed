"""What can be configured: the sections with their fields, and what is refused before anything starts. No framework."""
