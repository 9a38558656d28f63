import os
import signal
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_grpo_ipc import copies
from async_grpo_ipc.copies import CopyPlan, ThreadedCopy, allow_merging_over_padding
from async_grpo_ipc.layout import ALIGNMENT, contiguous_stride, is_dense, plan_layout, storable_stride, views

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.bool, torch.complex128]
SHAPES = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def tensor_dicts(draw):
    count = draw(st.integers(1, 12))
    tensors = {}
    for index in range(count):
        shape = draw(SHAPES)
        tensor = torch.randint(0, 2, shape).to(draw(st.sampled_from(DTYPES)))
        order = draw(st.permutations(range(len(shape))))
        tensors[f"t{index}"] = tensor.permute(order)
    return tensors


@given(tensor_dicts())
def test_tensors_are_aligned_bucketed_and_apart(tensors):
    layout = plan_layout(tensors)
    assert sorted(spec.name for spec in layout.tensors) == sorted(tensors)
    end = 0
    for spec in layout.tensors:
        assert spec.offset % ALIGNMENT == 0
        assert spec.offset >= end
        end = spec.offset + spec.nbytes
    assert end <= layout.nbytes
    assert len({bucket.dtype for bucket in layout.buckets}) == len(layout.buckets)
    for spec in layout.tensors:
        bucket = next(bucket for bucket in layout.buckets if bucket.dtype == spec.dtype)
        assert bucket.offset <= spec.offset <= spec.offset + spec.nbytes <= bucket.offset + bucket.nbytes


@given(tensor_dicts(), st.booleans())
def test_what_is_copied_in_is_seen_in_the_views(tensors, merging):
    layout = plan_layout(tensors, start=100)
    block = torch.zeros(layout.nbytes, dtype=torch.uint8)
    if merging:
        allow_merging_over_padding(block)
    seen = views(block, layout.tensors)
    sources = [tensors[spec.name] for spec in layout.tensors]
    CopyPlan([seen[spec.name] for spec in layout.tensors], sources, movable=sources).run()
    for name, tensor in tensors.items():
        assert seen[name].dtype == tensor.dtype
        assert seen[name].shape == tensor.shape
        assert torch.equal(seen[name].contiguous(), tensor.contiguous())
    assert not block[:100].any()


@given(SHAPES)
def test_contiguous_stride_is_torchs(shape):
    assert contiguous_stride(shape) == torch.empty(shape).stride()


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.empty(3, 4), True),
        (torch.empty(3, 4).t(), True),
        (torch.empty(2, 3, 4).permute(2, 0, 1), True),
        (torch.empty(()), True),
        (torch.empty(3, 1, 4), True),
        (torch.empty(4, 4)[:, :2], False),
        (torch.empty(1).expand(3), False),
        (torch.empty(6)[::2], False),
    ],
)
def test_only_dense_strides_are_kept(tensor, dense):
    assert is_dense(tensor.shape, tensor.stride()) is dense
    assert storable_stride(tensor) == (tensor.stride() if dense else contiguous_stride(tensor.shape))


def test_neighbours_become_one_copy_over_padding_only_where_that_is_allowed():
    tensors = {f"t{index}": torch.randn(10) for index in range(5)}
    layout = plan_layout(tensors)
    source_block, block = (torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(2))
    sources = list(views(source_block, layout.tensors).values())
    destinations = list(views(block, layout.tensors).values())
    assert pieces(CopyPlan(destinations, sources, movable=sources)) == 5
    allow_merging_over_padding(block)
    assert pieces(CopyPlan(destinations, sources, movable=sources)) == 1


def test_beside_a_gpu_each_pair_of_dtypes_is_one_fused_copy():
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float16]
    sources = [torch.zeros(3, 2, dtype=dtype, device="meta") for dtype in dtypes]
    destinations = [torch.zeros(3, 2, dtype=torch.bfloat16, device="meta") for _ in dtypes]
    plan = CopyPlan(destinations, sources, movable=sources)
    lists = [step.args for step in plan._steps]
    assert [len(into) for into, _ in lists] == [2, 1, 1]
    assert all(len({one.dtype for one in tensors}) == 1 for pair in lists for tensors in pair)
    plan.run()


def pieces(plan: CopyPlan) -> int:
    (copy,) = plan._steps
    return sum(len(destinations) for destinations, _ in copy.portions)


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=20), st.integers(1, 5), st.integers(1, 300), st.integers(0, 9)
)
def test_a_copy_in_portions_is_complete(sizes, threads, portion, offset):
    """Whatever the alignment: tensors at odd offsets are copied by bytes."""
    pairs = [
        (torch.zeros(size + offset, dtype=torch.uint8)[offset:], torch.randint(1, 99, (size,), dtype=torch.uint8))
        for size in sizes
    ]
    with (
        mock.patch.object(copies, "BYTES_WORTH_A_THREAD", 1),
        mock.patch.object(copies, "PORTION_BYTES", portion),
        mock.patch.object(copies, "PIECE_ELEMENTS", 7),
        mock.patch.object(torch, "get_num_threads", lambda: threads),
    ):
        copy = ThreadedCopy(pairs)
    assert copy.threads <= threads
    assert all(len(destinations) == len(sources) for destinations, sources in copy.portions)
    copy()
    assert all(torch.equal(into, out_of) for into, out_of in pairs)


def test_a_forked_child_copies_with_threads_of_its_own():
    """The parent's threads are not there in the child: waiting for them would never end."""
    with mock.patch.object(copies, "BYTES_WORTH_A_THREAD", 1), mock.patch.object(torch, "get_num_threads", lambda: 2):
        copy = ThreadedCopy([(torch.zeros(100), torch.ones(100))])
    copy()
    if (pid := os.fork()) == 0:
        signal.alarm(60)
        copy()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def test_strangers_between_destinations_survive():
    """A user's flat buffer may have something that is not published where our slots have padding."""
    flat = torch.arange(128, dtype=torch.float32)
    destinations = [flat[:10], flat[64:70]]
    source = torch.full((128,), -1.0)
    CopyPlan(destinations, [source[:10], source[64:70]], movable=destinations).run()
    assert torch.equal(flat[10:64], torch.arange(10, 64, dtype=torch.float32))
    assert (flat[:10] == -1).all() and (flat[64:70] == -1).all()


def test_a_cast_is_planned_for_floating_point_only():
    layout = plan_layout({"w": torch.zeros(3), "i": torch.zeros(3, dtype=torch.int8)}, dtype=torch.bfloat16)
    assert {spec.name: spec.dtype for spec in layout.tensors} == {"w": torch.bfloat16, "i": torch.int8}
    assert layout.payload_bytes == 9
