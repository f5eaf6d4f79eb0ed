"""Everything that knows Ray Train and Ray's internals: starting workers, scaling, membership."""
