"""Which row belongs to which step, as pure functions of integers: no Ray, no torch, no files."""
