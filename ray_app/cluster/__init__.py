"""Everything that knows Ray Train and Ray's internals: starting workers, scaling, membership."""

import logging
import os
import sys

from ray_app.errors import ConfigError

_V2 = "RAY_TRAIN_V2_ENABLED"

# Ray Train reads the variable once, when it is imported.
if os.environ.get(_V2, "1").lower() not in ("1", "true"):
    if "ray.train" in sys.modules:
        raise ConfigError(
            f"{_V2} was {os.environ[_V2]} when this process imported ray.train, whose first version cannot replace a"
            " worker. Unset the variable, and restart the program or the notebook's kernel."
        )
    logging.getLogger(__name__).warning(
        "%s is %s, but 1 is used: the first version of Ray Train cannot replace a worker.", _V2, os.environ[_V2]
    )
    os.environ[_V2] = "1"
