"""Test on two or more GPUs: kernels in bfloat16 over NCCL have the same errors as on one GPU."""

from __future__ import annotations

import pytest
import torch

from support.rank_pool import RankPool
from support.split_contract import gpu_errors
from support.split_kernels import Scan, scan_errors
from support.split_overlap import gpu_errors_by_head_groups

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture(scope="module")
def gpus():
    pool = RankPool(min(4, torch.cuda.device_count()), timeout=300.0, backend="nccl")
    yield pool
    pool.close()


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["gated delta rule", "ssd", "short convolution", "attention", "window and sinks"])
def test_errors_are_those_of_one_gpu(gpus, name, packed, layout):
    require_errors_of_one_gpu(gpus, gpu_errors, name, layout, packed)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["gated delta rule", "ssd", "attention"])
def test_exchanges_by_head_groups_have_the_errors_of_one_gpu(gpus, name, packed, layout):
    require_errors_of_one_gpu(gpus, gpu_errors_by_head_groups, name, layout, packed)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("decay", [0.001, 0.2])
@pytest.mark.parametrize(
    "call", [Scan(sizes=(128, 128)), Scan(sizes=(64, 64)), Scan(sizes=(128, 256)), Scan("ssd", sizes=(128, 128))]
)
def test_segments_across_gpus_have_the_errors_of_one_gpu(gpus, call, decay, layout):
    given = {"tokens": 2048, "segment": 256, "heads": (2, 4), "dtype": torch.bfloat16, "impl": None, "device": "cuda"}
    require_errors_of_one_gpu(gpus, scan_errors, call._replace(layout=layout, decay=decay, **given))


def require_errors_of_one_gpu(gpus, measure, *args):
    for size in {2, gpus.most}:
        for tensor, (split, single) in gpus(size, measure, *args).items():
            assert split <= 1.5 * single + 1e-3, f"{tensor} on {size} GPUs: {split:.1e}, on one {single:.1e}"
