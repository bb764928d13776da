"""What the coverage of an architecture counts."""

from __future__ import annotations

import pytest
import torch
from nvgemm_fusion.bench.architectures import ARCHITECTURES, Architecture
from nvgemm_fusion.bench.coverage import row_of, table_of


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)

    def forward(self, x):
        return (self.down(torch.nn.functional.gelu(self.up(x))),)


TINY = Architecture("tiny", lambda: (Mlp(), {"x": torch.randn(32, 64)}))


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_row_counts_what_each_can_fuse(instant_kernels, mode):
    row = row_of(TINY, mode)
    assert row["model"] == "tiny" and row["mode"] == mode
    assert row["gemms"] == (2 if mode == "inference" else 5)
    assert row["fused"] >= row["fused_stock"] >= 1
    assert row["with_pointwise_reader"] >= row["fused"]
    assert "no reader" in row["reasons"]
    assert [len(column._cells) for column in table_of([row]).columns] == [2] * 7


def test_the_architectures_are_there():
    """Ten of them; `python -m nvgemm_fusion.bench.coverage` compiles them, in about ten minutes."""
    assert len({architecture.name for architecture in ARCHITECTURES}) == 10
