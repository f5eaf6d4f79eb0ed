"""Every name of a library that the code uses exists in the installed version, also in code that runs only on a GPU or
a cluster.

A missing attribute raises only when its line runs, and many lines run only on a GPU: a call of a function that exists
in no version of PyTorch once ended every run on a GPU at its first worker.
"""

from __future__ import annotations

import ast

import pytest

from tests.support.library_names import LIBRARIES, Names, missing, names


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_name_of_a_library_that_the_code_uses_exists(library: str) -> None:
    used = {name: location for name, location in names().items() if name.split(".")[0] == library}
    assert len(used) >= {"torch": 200, "ray": 50, "mlflow": 15, "pyarrow": 30, "torchvision": 5}[library], (
        "fewer names were found than the code uses"
    )
    assert missing(used) == {}


def test_names_are_collected_for_each_form_of_import() -> None:
    text = """
import torch
import pyarrow.parquet as pq
import torch.distributed as dist
from torch import cuda, nn
from torch.nn import functional as F
import os

def f(x):
    from ray.util import scheduling_strategies
    cuda.Stream(x).wait_stream(cuda.current_stream())
    os.path.nothing
    x.torch.nothing
    getattr(torch.backends.cudnn, "conv")
    getattr(torch, "perhaps", None)
    return F.relu(pq.read_table(x)), dist.ReduceOp.SUM, torch._C._cuda_getDriverVersion(), nn.Nothing().parameters
"""
    collected = Names(ast.parse(text)).first_lines
    assert set(collected) == {
        *("torch", "torch.cuda", "torch.nn", "pyarrow.parquet", "torch.distributed", "torch.nn.functional"),
        *(
            "ray.util.scheduling_strategies",
            "torch.cuda.Stream",
            "torch.cuda.current_stream",
            "torch.backends.cudnn.conv",
        ),
        *(
            "torch.backends.cudnn",
            "torch.nn.functional.relu",
            "pyarrow.parquet.read_table",
            "torch.distributed.ReduceOp.SUM",
        ),
        *("torch._C._cuda_getDriverVersion", "torch.nn.Nothing"),
    }
    assert set(missing(dict.fromkeys(collected, "here"))) == {"torch._C._cuda_getDriverVersion", "torch.nn.Nothing"}
