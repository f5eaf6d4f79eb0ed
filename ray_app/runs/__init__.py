"""What starts and carries a run, in the driver: preparation, the rehearsal, the actors around it, and the run itself."""
