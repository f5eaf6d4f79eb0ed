"""What is trained here."""
