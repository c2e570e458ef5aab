// Chooses the work split of a verify-attention launch and dispatches to the instances.
#include "verify_mla.h"

#include <cuda.h>

#include <algorithm>
#include <cmath>

#include "longleaf/verify_mla_launch.h"

namespace longleaf {
namespace {

constexpr int kMaxRows = kMaxRowGroups * kRowsPerGroup;
constexpr size_t kStatsBytes = kPartialsPerBlock * kMaxRows * sizeof(float2);
constexpr size_t kPartialBytes = kPartialsPerBlock * kMaxRowGroups * kUnitsPerGroup * sizeof(uint4);
constexpr int kDefaultMinTiles = 2;

size_t counters_bytes(int blocks) {
  constexpr size_t kAlign = 256;
  return (blocks * sizeof(unsigned) + kAlign - 1) / kAlign * kAlign;
}

int multiprocessors(int* count) {
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess)
    status = cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
  return status;
}

// The driver's function, found at run time so that the library links no driver.
int encode_function(decltype(&cuTensorMapEncodeTiled)* encode) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t status = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  *encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  if (status == cudaSuccess && found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  return status;
}

// Rows of 576 bf16 as nine lines of 128 bytes, copied `box` rows at a time and swizzled.
int encode_rows(const void* base, int64_t rows, int box, TensorMap* map) {
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap) && alignof(TensorMap) >= alignof(CUtensorMap));
  constexpr cuuint32_t kLine = 64, kLines = kRowDim / kLine;  // elements
  constexpr cuuint64_t kElement = sizeof(uint16_t);
  decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  if (const int status = encode_function(&encode); status != LONGLEAF_OK) return status;
  const cuuint64_t sizes[] = {kLine, kLines, static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {kLine * kElement, kRowDim * kElement};  // bytes
  const cuuint32_t boxes[] = {kLine, kLines, static_cast<cuuint32_t>(box)};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result = encode(
      reinterpret_cast<CUtensorMap*>(map), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
      const_cast<void*>(base), sizes, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? LONGLEAF_OK : LONGLEAF_BAD_ARGUMENT;
}

struct Split {
  int row_groups, gang, gangs, rounds;
};

// Time of a tile, in arbitrary units, by the number of row groups: a fixed part and a part that
// grows with them, as measured.
double tile_cost(int row_groups) { return 330.0 + 75.0 * row_groups; }

// A request of `rows` rows takes `tiles` row tiles, in rounds of `gang` blocks side by side. More
// blocks in a gang share each read of the cache; a gang that divides the work badly idles blocks.
Split choose_split(int rows, int blocks, int row_groups, int gang) {
  Split best{};
  double best_cost = HUGE_VAL;
  for (int groups = 1; groups <= kMaxRowGroups; ++groups) {
    if (row_groups && groups != row_groups) continue;
    const int tiles = (rows + groups * kRowsPerGroup - 1) / (groups * kRowsPerGroup);
    for (int width = std::min(tiles, blocks); width >= 1; --width) {
      if (gang && width != std::min(gang, std::min(tiles, blocks))) continue;
      const int rounds = (tiles + width - 1) / width, gangs = blocks / width;
      const double cost = rounds * (1 + 0.02 * (rounds - 1)) / gangs * tile_cost(groups);
      if (cost < best_cost) {
        best_cost = cost;
        best = {groups, width, gangs, rounds};
      }
    }
  }
  return best;
}

template <class Cache>
cudaError_t dispatch(int row_groups, const VerifyMlaParams& params, cudaStream_t stream) {
  switch (row_groups) {
    case 1: return launch_verify_mla<1, Cache>(params, stream);
    case 2: return launch_verify_mla<2, Cache>(params, stream);
    case 3: return launch_verify_mla<3, Cache>(params, stream);
    case 4: return launch_verify_mla<4, Cache>(params, stream);
    default: return launch_verify_mla<5, Cache>(params, stream);
  }
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Scores are in the base of exp2. A bf16 cache has no scale of its own: valid() takes 1 alone.
float logit_scale(const longleaf_verify_mla_args& a) {
  return a.softmax_scale * 1.4426950408889634f * a.kv_scale;
}

bool valid(const longleaf_verify_mla_args& a) {
  const bool pointers = a.q && a.kv_pool && a.kv_indptr && a.kv_indices && a.tree_kv && a.out &&
                        a.workspace && (a.page_size == 1 || a.page_indptr) && aligned(a.q) &&
                        aligned(a.kv_pool) && aligned(a.tree_kv) && aligned(a.out) &&
                        aligned(a.workspace);
  // Never more than 2^20 rows a request, so the products of the other lines cannot overflow.
  const bool sizes = a.batch > 0 && a.nodes > 0 && a.heads > 0 && a.slots > 0 && a.indices >= 0 &&
                     static_cast<int64_t>(a.nodes) * a.heads <= (1 << 20) && a.slots <= INT32_MAX &&
                     a.indices <= INT32_MAX && a.tokens <= INT32_MAX / a.heads &&
                     a.nodes <= a.tokens &&
                     (a.q_indptr ? a.tokens <= static_cast<int64_t>(a.batch) * a.nodes
                                 : a.tokens == static_cast<int64_t>(a.batch) * a.nodes);
  return pointers && sizes &&
         (a.page_size == 1 || a.page_size == 64) && a.row_groups >= 0 &&
         a.row_groups <= kMaxRowGroups && a.gang >= 0 && a.min_tiles >= 0 && a.softmax_scale > 0 &&
         std::isfinite(a.softmax_scale) && a.kv_scale > 0 && std::isfinite(a.kv_scale) &&
         (a.e4m3 || a.kv_scale == 1.f) && std::isfinite(logit_scale(a));
}

}  // namespace
}  // namespace longleaf

int longleaf_verify_mla_workspace(size_t* bytes) {
  using namespace longleaf;
  int blocks = 0;
  const int status = multiprocessors(&blocks);
  if (status == LONGLEAF_OK) *bytes = counters_bytes(blocks) + blocks * (kStatsBytes + kPartialBytes);
  return status;
}

int longleaf_verify_mla(const longleaf_verify_mla_args* args, void* stream) {
  using namespace longleaf;
  if (!args || !valid(*args)) return LONGLEAF_BAD_ARGUMENT;
  int blocks = 0;
  if (const int status = multiprocessors(&blocks); status != LONGLEAF_OK) return status;
  const Split split = choose_split(args->nodes * args->heads, blocks, args->row_groups, args->gang);

  VerifyMlaParams p{};
  int status = encode_rows(args->q, args->tokens * args->heads, kRowsPerBox, &p.q_rows);
  if (status == LONGLEAF_OK)
    status = encode_rows(args->tree_kv, args->tokens, 1, &p.tree_rows);
  if (status == LONGLEAF_OK && !args->e4m3)
    status = encode_rows(args->kv_pool, args->slots, 1, &p.pool_rows);
  if (status != LONGLEAF_OK) return status;
  p.kv_pool = args->kv_pool;
  p.kv_indptr = args->kv_indptr;
  p.kv_indices = args->kv_indices;
  p.page_indptr = args->page_size == 1 ? args->kv_indptr : args->page_indptr;
  p.visible = static_cast<const uint64_t*>(args->visible);
  p.q_indptr = args->q_indptr;
  p.out = static_cast<uint16_t*>(args->out);
  p.lse = args->lse;
  char* workspace = static_cast<char*>(args->workspace);
  p.counters = reinterpret_cast<unsigned*>(workspace);
  workspace += counters_bytes(blocks);
  p.partials = reinterpret_cast<uint4*>(workspace);
  workspace += blocks * kPartialBytes;
  p.stats = reinterpret_cast<float2*>(workspace);
  p.batch = args->batch;
  p.tokens = static_cast<int>(args->tokens);
  p.entries = static_cast<int>(args->indices);
  // Less than a tile below the limit, so that rounding up to tiles stays within an int.
  p.max_prefix_tokens = static_cast<int>(
      std::min<int64_t>(args->indices * args->page_size, INT32_MAX - kTileTokens));
  p.nodes = args->nodes;
  p.heads = args->heads;
  p.visible_words = (args->nodes + 63) / 64;
  p.page_log2 = args->page_size == 64 ? 6 : 0;
  p.index_is_wide = args->wide_indices != 0;
  p.tree_tile_log2 = tree_tile_log2(args->e4m3 != 0);
  p.gang = split.gang;
  p.gangs = split.gangs;
  p.rounds = split.rounds;
  p.min_tiles = args->min_tiles ? args->min_tiles : kDefaultMinTiles;
  p.value_scale = args->e4m3 ? args->kv_scale : 1.f;
  p.logit_scale = logit_scale(*args);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return args->e4m3 ? dispatch<E4m3Cache>(split.row_groups, p, cuda_stream)
                    : dispatch<Bf16Cache>(split.row_groups, p, cuda_stream);
}
