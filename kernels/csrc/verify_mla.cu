// Chooses the work split of a verify-attention launch and dispatches to the instances.
#include "verify_mla.h"

#include <algorithm>
#include <cmath>

#include "longleaf/verify_mla_launch.h"

namespace longleaf {
namespace {

constexpr int kMaxRows = kMaxRowGroups * kRowsPerGroup;
constexpr size_t kStatsBytes = kPartialsPerBlock * kMaxRows * sizeof(float2);
constexpr size_t kPartialBytes = kPartialsPerBlock * kMaxRowGroups * kUnitsPerGroup * sizeof(uint4);
constexpr int kDefaultMinTiles = 3;

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

bool valid(const longleaf_verify_mla_args& a) {
  const bool pointers = a.q && a.kv_pool && a.kv_indptr && a.kv_indices && a.tree_kv && a.out &&
                        a.workspace && (a.page_size == 1 || a.page_indptr) && aligned(a.q) &&
                        aligned(a.kv_pool) && aligned(a.tree_kv) && aligned(a.out) &&
                        aligned(a.workspace);
  return pointers && a.batch > 0 && a.nodes > 0 && a.heads > 0 &&
         static_cast<int64_t>(a.nodes) * a.heads <= (1 << 20) &&
         (a.page_size == 1 || a.page_size == 64) && a.row_groups >= 0 &&
         a.row_groups <= kMaxRowGroups && a.gang >= 0 && a.min_tiles >= 0 && a.softmax_scale > 0 &&
         a.kv_scale > 0;
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
  p.q = static_cast<const uint16_t*>(args->q);
  p.kv_pool = args->kv_pool;
  p.kv_indptr = args->kv_indptr;
  p.kv_indices = args->kv_indices;
  p.page_indptr = args->page_size == 1 ? args->kv_indptr : args->page_indptr;
  p.tree_kv = static_cast<const uint16_t*>(args->tree_kv);
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
  p.nodes = args->nodes;
  p.heads = args->heads;
  p.visible_words = (args->nodes + 63) / 64;
  p.page_log2 = args->page_size == 64 ? 6 : 0;
  p.index_is_wide = args->wide_indices;
  p.gang = split.gang;
  p.gangs = split.gangs;
  p.rounds = split.rounds;
  p.min_tiles = args->min_tiles ? args->min_tiles : kDefaultMinTiles;
  p.value_scale = args->e4m3 ? args->kv_scale : 1.f;
  p.logit_scale = args->softmax_scale * 1.4426950408889634f * p.value_scale;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return args->e4m3 ? dispatch<E4m3Cache>(split.row_groups, p, cuda_stream)
                    : dispatch<Bf16Cache>(split.row_groups, p, cuda_stream);
}
