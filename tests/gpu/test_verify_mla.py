"""verify_mla against a float32 reference: shapes, masks, splits, batches, graphs."""

import pytest

pytest.importorskip("torch")

import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from longleaf_kernels.verify import WorkSplit, verify_mla, verify_workspace
from tests.gpu.verify_cases import (
    SCALE,
    SPARE_SLOTS,
    Case,
    Shape,
    make_case,
    relative_error,
    row_errors,
    row_pointer,
)

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
ROW_ERROR = 8e-3
"""Of the worst row: rounding of weights, parts and results to bfloat16 gives some 3e-3. The
reference reads the same stored e4m3 values, so it holds for those too."""
LSE_ERROR, LSE_RELATIVE = 1e-3, 1e-5  # sums run in float32; scores of hundreds round more
SCALED_LSE_ERROR = 3e-3
"""Where an e4m3 cache has a scale, the step's own rows are divided by it and rounded to float16:
2^-12 of each of 576 products of a score of deviation 1.7 is some 3e-4; this is its tail."""
NAN = float("nan")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(torch.seed() % 2**31)


@pytest.fixture(scope="module")
def workspace() -> torch.Tensor:
    return verify_workspace(DEVICE)


def check(case: Case, workspace: torch.Tensor, split: WorkSplit | None = None) -> float:
    """Assert that a case is right and that running it again gives the same bits."""
    out, lse = case.run(workspace, split)
    again, lse_again = case.run(workspace, split)
    reference, lse_reference = case.reference()
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)
    errors = row_errors(out, reference)
    assert (errors < ROW_ERROR).all(), worst(errors)
    off = (lse - lse_reference).abs()
    bound = LSE_ERROR if case.shape.kv_scale == 1 else SCALED_LSE_ERROR
    assert (off <= bound + LSE_RELATIVE * lse_reference.abs()).all(), worst(off)
    return float(errors.max())


def worst(errors: torch.Tensor) -> str:
    """Say where [T, H] errors are greatest, NaN first."""
    place = int(errors.nan_to_num(float("inf")).argmax())
    node, head = divmod(place, errors.shape[1])
    return f"node {node}, head {head}: {float(errors[node, head]):.2e}"


@pytest.mark.parametrize("tree", ["random", "spine", "star"])
@pytest.mark.parametrize(
    "prefix", [0, 1, 15, 16, 17, 31, 32, 33, 1023, 1024, 1025, 65_537, 200_000]
)
def test_prefix_lengths(prefix: int, tree: str, workspace: torch.Tensor) -> None:
    check(make_case(Shape([prefix], 9, tree=tree), DEVICE), workspace)


@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("nodes", [1, 2, 9, 17, 32, 64, 65, 128])
def test_rows(nodes: int, heads: int, workspace: torch.Tensor) -> None:
    check(make_case(Shape([3001], nodes, heads), DEVICE), workspace)


@pytest.mark.parametrize("pool", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("nodes", [9, 17])
def test_many_runs_give_the_same_bits(
    nodes: int, pool: torch.dtype, workspace: torch.Tensor
) -> None:
    """128 heads: every block goes from one row tile to the next, and merges both."""
    case = make_case(Shape([3001], nodes, 128, pool=pool), DEVICE)
    first, lse = case.run(workspace)
    for _ in range(200):
        again, lse_again = case.run(workspace)
        assert int((first != again).sum()) == 0
        assert torch.equal(lse, lse_again)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 9, 64])
def test_sharp_softmax(nodes: int, workspace: torch.Tensor) -> None:
    """Scores of hundreds: the softmax's reference must move, by both pairs of warps."""
    check(make_case(Shape([5000], nodes, query_scale=40.0), DEVICE), workspace)


@pytest.mark.parametrize("row_groups", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("gang", [1, 2, 5])
@pytest.mark.parametrize("min_tiles", [1, 7, 1000])
def test_every_work_split_is_right(
    row_groups: int, gang: int, min_tiles: int, workspace: torch.Tensor
) -> None:
    case = make_case(Shape([1500, 0, 40, 700], 11), DEVICE)
    check(case, workspace, WorkSplit(row_groups, gang, min_tiles))


@pytest.mark.parametrize("indices", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_size", [1, 64])
def test_pages_and_index_types(
    indices: torch.dtype, page_size: int, workspace: torch.Tensor
) -> None:
    shape = Shape([1, 63, 64, 65, 10_000, 0], 9, indices=indices, page_size=page_size)
    check(make_case(shape, DEVICE), workspace)


@pytest.mark.parametrize("kv_scale", [1.0, 0.125, 0.013])
@pytest.mark.parametrize("prefixes", [[0], [1], [33], [1024], [65_537], [3000, 5, 0, 129]], ids=str)
@pytest.mark.parametrize("nodes", [1, 9, 32])
def test_e4m3(nodes: int, prefixes: list[int], kv_scale: float, workspace: torch.Tensor) -> None:
    shape = Shape(prefixes, nodes, pool=torch.float8_e4m3fn, kv_scale=kv_scale)
    check(make_case(shape, DEVICE), workspace)


def test_batch_of_one_long_and_many_short(workspace: torch.Tensor) -> None:
    check(make_case(Shape([185_000] + [1000] * 31, 9), DEVICE), workspace)


def test_batch_of_64(workspace: torch.Tensor) -> None:
    lengths = [int(10 ** (5 * i / 64)) - 1 for i in range(64)]
    check(make_case(Shape(lengths, 9), DEVICE), workspace)


@pytest.mark.parametrize("tree", ["random", "causal"])
def test_ragged_requests(tree: str, workspace: torch.Tensor) -> None:
    counts = [1, 40, 7, 128, 16]
    check(make_case(Shape([900, 0, 5000, 33, 64], counts, tree=tree), DEVICE), workspace)


@pytest.mark.parametrize("nodes", [1, 16, 63, 200, 512])
@pytest.mark.parametrize("prefix", [0, 5000])
def test_causal_extend(nodes: int, prefix: int, workspace: torch.Tensor) -> None:
    check(make_case(Shape([prefix, prefix], nodes, tree="causal"), DEVICE), workspace)


def test_causal_is_a_spine(workspace: torch.Tensor) -> None:
    case = make_case(Shape([777, 1000], 30, tree="spine"), DEVICE)
    spine, _ = case.run(workspace)
    case.arguments["visible"] = None
    causal, _ = case.run(workspace)
    assert relative_error(causal, spine.float()) < 1e-6


def test_a_node_that_sees_nothing(workspace: torch.Tensor) -> None:
    case = make_case(Shape([0], 4), DEVICE)
    visible = case.arguments["visible"]
    assert isinstance(visible, torch.Tensor)
    visible[2] = 0
    out, lse = case.run(workspace)
    assert (out[2] == 0).all()
    assert (lse[2] == float("-inf")).all()
    assert torch.isfinite(lse[[0, 1, 3]]).all()


def test_graph_replays_with_other_lengths(workspace: torch.Tensor) -> None:
    """200 replays of one captured launch; lengths and indices change in place."""
    case = make_case(Shape([4000, 4000, 4000], 9), DEVICE)
    pool_rows = case.arguments["kv_pool"]
    assert isinstance(pool_rows, torch.Tensor)
    slots = torch.cat(case.prefix_slots)
    indptr, indices = (case.arguments[name] for name in ("kv_indptr", "kv_indices"))
    assert isinstance(indptr, torch.Tensor)
    assert isinstance(indices, torch.Tensor)
    out = torch.empty((27, 8, 512), dtype=torch.bfloat16, device=DEVICE)
    arguments = dict(case.arguments, scale=SCALE, workspace=workspace, out=out)
    verify_mla(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verify_mla(**arguments)
    for replay in range(200):
        lengths = [int(torch.randint(0, 4000, ())) if replay % 3 else replay for _ in range(3)]
        chosen = slots[torch.randperm(len(slots), device=DEVICE)[: sum(lengths)]]
        indptr.copy_(row_pointer(lengths, DEVICE))
        indices.fill_(-(2**30))  # an index past the end would be read as an illegal address
        indices[: len(chosen)] = chosen.to(indices.dtype)
        out.fill_(float("nan"))
        graph.replay()
        if replay % 10 == 0:
            case.prefix_slots = list(chosen.split(lengths))
            errors = row_errors(out, case.reference()[0])
            assert (errors < ROW_ERROR).all(), worst(errors)
        assert torch.isfinite(out).all()


def test_unused_slots_hold_nan() -> None:
    case = make_case(Shape([100], 1), DEVICE)
    pool = case.arguments["kv_pool"]
    assert isinstance(pool, torch.Tensor)
    assert pool.isnan().all(-1).sum() == SPARE_SLOTS


def split_boundaries(prefix: int, tree_tiles: int, split: WorkSplit) -> list[int]:
    """Return the prefix tokens at which the splits of one request begin (csrc plan.cuh)."""
    gangs = torch.cuda.get_device_properties(DEVICE).multi_processor_count // split.gang
    tiles = -(-prefix // 16) + tree_tiles
    gangs = max(1, min(gangs, tiles // 2))
    length, longer = divmod(tiles, gangs)
    return [16 * (gang * length + min(gang, longer)) for gang in range(1, gangs)]


@pytest.mark.parametrize("pool", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("prefix", [33, 4000, 65_537, 185_001])
def test_no_token_of_a_boundary_is_lost(
    prefix: int, page_size: int, pool: torch.dtype, workspace: torch.Tensor
) -> None:
    """One cached key equals one row's query and outweighs all others: lost, the row is wrong."""
    nodes, heads, split = 20, 8, WorkSplit(row_groups=5, gang=4)
    case = make_case(Shape([prefix], nodes, heads, pool=pool, page_size=page_size), DEVICE)
    assert nodes * heads <= split.row_groups * 8 * split.gang  # one round
    starts = split_boundaries(prefix, -(-nodes // (16 if pool == torch.bfloat16 else 8)), split)
    near = [0, 1, 15, 16, 31, 32, prefix // 16 * 16, prefix - 2, prefix - 1]
    near += [start + step for start in starts for step in (-1, 0)]
    places = sorted({place for place in near if 0 <= place < prefix})
    q, cached = case.arguments["q"], case.arguments["kv_pool"]
    assert isinstance(q, torch.Tensor)
    assert isinstance(cached, torch.Tensor)
    assert 6 <= len(places) <= nodes * heads
    needles = q.view(-1, q.shape[-1])[: len(places)]
    cached.view(-1, q.shape[-1])[case.prefix_slots[0][places]] = needles.to(pool)
    lse = case.reference()[1].flatten()[: len(places)]
    assert (lse > 25).all()  # the others' sum is about e^14 at most
    check(case, workspace, split)


@pytest.mark.parametrize("pool", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("nodes", [9, [5, 20, 3], [16, 8, 17]], ids=str)
@pytest.mark.parametrize("value", [NAN, float("inf"), 3e38])
def test_what_one_request_holds_reaches_no_other(
    value: float, nodes: int | list[int], pool: torch.dtype, workspace: torch.Tensor
) -> None:
    """The second request is of NaN or infinity, and so are rows after the last request."""
    case = make_case(Shape([70, 33, 40], nodes, pool=pool), DEVICE)
    names = ("q", "tree_kv", "visible", "kv_pool")
    q, rows, visible, cached = (case.arguments[name] for name in names)
    assert isinstance(q, torch.Tensor)
    assert isinstance(rows, torch.Tensor)
    assert isinstance(visible, torch.Tensor)
    assert isinstance(cached, torch.Tensor)
    reference, lse_reference = case.reference()
    first, count, total = case.node_counts[0], case.node_counts[1], sum(case.node_counts)
    sick = torch.zeros(total, dtype=torch.bool, device=DEVICE)
    sick[first : first + count] = True
    q[sick], rows[sick] = value, value
    slots = case.prefix_slots[1]
    cached[slots] = torch.full((len(slots), cached.shape[1]), NAN, device=DEVICE).to(pool)
    if not isinstance(nodes, int):
        padding = 3
        case.arguments |= {
            "q": torch.cat([q, q.new_full((padding, *q.shape[1:]), value)]),
            "tree_kv": torch.cat([rows, rows.new_full((padding, rows.shape[1]), value)]),
            "visible": torch.cat([visible, visible.new_full((padding, visible.shape[1]), -1)]),
        }
    out, lse = case.run(workspace)
    assert (row_errors(out[:total], reference)[~sick] < ROW_ERROR).all()
    assert (lse[:total] - lse_reference)[~sick].abs().max() < LSE_ERROR
    assert out[total:].isnan().all()  # as `run` made them


@pytest.mark.parametrize("pool", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_wrong_lengths_end_and_the_workspace_stays_good(
    pool: torch.dtype, workspace: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(Shape([900, 40, 300], [9, 5, 2], pool=pool), DEVICE)
    good = dict(case.arguments)
    most = 2**31 - 1
    for wrong in ([0, -5, 7, 3], [0, 9000, 20, 40], [-most, most, -most, most]):
        for name in ("kv_indptr", "q_indptr"):
            values = torch.tensor(wrong, dtype=torch.int32, device=DEVICE)
            case.arguments = good | {name: values}
            case.run(workspace)
            torch.cuda.synchronize()
            monkeypatch.setenv("LONGLEAF_CHECK_LENGTHS", "1")
            with pytest.raises(ValueError, match=name):
                case.run(workspace)
            monkeypatch.delenv("LONGLEAF_CHECK_LENGTHS")
    case.arguments = good
    check(case, workspace)
    monkeypatch.setenv("LONGLEAF_CHECK_LENGTHS", "1")
    check(case, workspace)
