"""From a configuration to a job: the plan, what begins, what goes on, what is refused, and a rehearsal on few rows."""
