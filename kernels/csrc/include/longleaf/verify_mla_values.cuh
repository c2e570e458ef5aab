// The value warps: O^T += V^T P^T (columns x rows), each warp 128 of the 512 columns.
//
// The value fragments of the next tile are read while the current one is multiplied, so a slot is
// free as soon as it has been read. A segment that is a whole item goes straight to the output;
// others become partials that merge.cuh combines in the same launch.
#pragma once

#include "longleaf/merge.cuh"
#include "longleaf/plan.cuh"
#include "longleaf/verify_mla_layout.cuh"

namespace longleaf {

constexpr int kPartialBarrier = 4;  // named barrier of the value warps
constexpr int kColumnTiles = kLatentDim / kValueWarps / 16;  // 16 columns each

template <int RowGroups, class Cache>
class ValueWarp {
  using L = Layout<RowGroups, Cache>;

 public:
  __device__ __forceinline__ ValueWarp(const VerifyMlaParams& p, uint32_t shared, int warp, int lane)
      : p_(p), shared_(shared), lane_(lane), warp_(warp) {
    probs_from_ = shared + L::kFirstHalf + (lane & 15) * 16 + (lane >> 4) * L::kGroupBytes;
    if constexpr (Cache::kIsE4m3) {
      // 16-bit units are two columns: tokens 0-7 and 8-15 of one 16-column tile, then of the next.
      values_from_ = shared + L::kRing + ((lane & 7) + ((lane >> 3) & 1) * 8) * kE4m3Stride +
                     (lane >> 4) * 16 + warp * kColumnTiles * 16;
    } else {
      // A warp's columns are two lines of a row.
      const int row = (lane & 7) + (lane >> 4) * 8, line = 2 * warp, column = (lane >> 3) & 1;
      values_from_ = shared + L::kRing + row * kBf16RowBytes + line * kLineBytes;
      for (int i = 0; i < 2; ++i) places_[i] = (((row + line + i) & 7) ^ column) << 4;
    }
  }

  __device__ __forceinline__ void run(const PlanStart& plan, int gang, int member,
                                      PendingMerges& pending) {
    Cursor<RowGroups> segment(p_, plan, member);
    const int block = gang * p_.gang + member;
    while (segment.next()) {
      skip_queries();
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
        for (int g = 0; g < RowGroups; ++g)
          out_[c][g][0] = out_[c][g][1] = out_[c][g][2] = out_[c][g][3] = 0.f;
      accumulate(segment);
      ptx::mbar_wait(shared_ + L::kStatsFull, segments_ & 1);

      const int first_gang = gang_of(segment.item_begin(), plan.total, plan.gangs);
      const int last_gang =
          gang_of(segment.item_begin() + segment.item.tiles - 1, plan.total, plan.gangs);
      if (first_gang == last_gang) {
        store_output(segment);
        release_stats();
        continue;
      }
      const int place = block * kPartialsPerBlock + (gang == first_gang ? 1 : 0);
      store_partial(place);
      release_stats();
      ptx::named_barrier<32 * kValueWarps>(kPartialBarrier);
      if (warp_ == kValueWarps - 1 && lane_ == 31) {  // the thread that waits in merge_pending
        PendingMerge& merge = pending.merges[pending.count++];
        merge.first_block = first_gang * p_.gang + member;
        merge.splits = last_gang - first_gang + 1;
        merge.split = gang - first_gang;
        merge.first_row = segment.item.first_token * p_.heads + segment.first_row();
        merge.rows = min(L::kRows, segment.item.nodes * p_.heads - segment.first_row());
        announce(p_, merge);
      }
    }
  }

 private:
  // Once `read`, which depends on all that was read, is there.
  __device__ __forceinline__ void release_slot(uint32_t read) {
    __syncwarp();
    if (lane_ == 0) ptx::mbar_arrive_after(shared_ + L::kEmpty + 8 * ring_.slot, read);
  }
  __device__ __forceinline__ void wait_slot() {
    ptx::mbar_wait(shared_ + L::kFull + 8 * ring_.slot, ring_.parity);
  }
  __device__ __forceinline__ void release_stats() {
    __syncwarp();
    if (lane_ == 0) ptx::mbar_arrive(shared_ + L::kStatsEmpty);
    ++segments_;
  }
  __device__ __forceinline__ void skip_queries() {
#pragma unroll 1
    for (int i = 0; i < L::kQuerySlots; ++i) {
      // The others do not count for freeing the slot. They wait next for a tile that comes after
      // scores, so after the queries.
      if (warp_ < kEmptyArrivals - kScoreWarps) {
        wait_slot();
        release_slot(0);
      }
      ring_.advance();
    }
  }

  // Raw fragments: bf16 as the mma takes them; e4m3 still packed, half as many registers.
  static constexpr int kRaw = Cache::kIsE4m3 ? 2 : 4;
  using Values = uint32_t[kColumnTiles][kRaw];
  using Probs = uint32_t[RowGroups][2];

  __device__ __forceinline__ void load_values(Values& v, int c) {
    const uint32_t from = values_from_ + ring_.slot * L::kSlotBytes;
    if constexpr (Cache::kIsE4m3) {
      if ((c & 1) == 0)
        ptx::ldmatrix_x4_trans(v[c][0], v[c][1], v[c + 1][0], v[c + 1][1], from + c * 16);
    } else {
      ptx::ldmatrix_x4_trans(v[c][0], v[c][1], v[c][2], v[c][3],
                             (from + c / 4 * kLineBytes) | (places_[c / 4] ^ (c % 4 * 32)));
    }
  }
  __device__ __forceinline__ void multiply(const Values& v, const Probs& probs, int c) {
    if constexpr (Cache::kIsE4m3) {
      // Bytes of a register: columns 2g, 2g + 1 of a token, then of the next token.
      const uint32_t low = __byte_perm(v[c][0], 0, 0x3120), high = __byte_perm(v[c][1], 0, 0x3120);
      const uint32_t a[4] = {ptx::e4m3_low_to_f16(low), ptx::e4m3_high_to_f16(low),
                             ptx::e4m3_low_to_f16(high), ptx::e4m3_high_to_f16(high)};
#pragma unroll
      for (int g = 0; g < RowGroups; ++g) Cache::mma(out_[c][g], a, probs[g]);
    } else {
#pragma unroll
      for (int g = 0; g < RowGroups; ++g) Cache::mma(out_[c][g], v[c], probs[g]);
    }
  }
  // The step's own rows under an e4m3 cache, eight a tile: bf16 to f16, columns in `multiply`'s order.
  __device__ __forceinline__ void multiply_tree_e4m3(const Probs& probs, int c) {
    const float scale = __fdividef(1.f, p_.value_scale);
    const uint32_t slot = shared_ + L::kRing + ring_.slot * L::kSlotBytes;
    const int lane = ptx::recompute(lane_);  // runs for few tiles: no address is kept for it
    const int byte = (warp_ * kColumnTiles + c) * 32 + (lane >> 2) * 4;
    const int row = 2 * (lane & 3);
    const uint32_t x = ptx::load_shared(slot + swizzled(row, byte));
    const uint32_t y = ptx::load_shared(slot + swizzled(row + 1, byte));
    const uint32_t a[4] = {bf16_to_f16(__byte_perm(x, y, 0x5410), scale),
                           bf16_to_f16(__byte_perm(x, y, 0x7632), scale), 0, 0};
#pragma unroll
    for (int g = 0; g < RowGroups; ++g) Cache::mma(out_[c][g], a, probs[g]);
  }

  // Once the values of all column tiles are in registers.
  __device__ __forceinline__ void release_slot(const Values& v) {
    uint32_t read = 0;
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) read ^= v[c][0];
    release_slot(read);
  }

  // Waits for the probabilities of the next tile; returns whether references of even and of odd
  // groups' rows moved. Can be called again for the same tile.
  __device__ __forceinline__ uint2 take_probs(Probs& probs) {
    const int buffer = count_ & 1;
    ptx::mbar_wait(shared_ + L::kProbsFull + 8 * buffer, (count_ >> 1) & 1);
    const uint32_t buffer_at = buffer * RowGroups * L::kGroupBytes;
    const uint32_t moved_at = shared_ + L::kFirstHalf + buffer_at + L::kMoved;
    const uint2 moved = make_uint2(
        ptx::load_shared(moved_at),
        RowGroups > 1 ? ptx::load_shared(moved_at + L::kGroupBytes) : 0);
    const uint32_t from = probs_from_ + buffer_at;
#pragma unroll
    for (int g = 0; g + 1 < RowGroups; g += 2)
      ptx::ldmatrix_x4_trans(probs[g][0], probs[g][1], probs[g + 1][0], probs[g + 1][1],
                             from + g * L::kGroupBytes);
    if (RowGroups & 1)
      ptx::ldmatrix_x2_trans(
          probs[RowGroups - 1][0], probs[RowGroups - 1][1],
          from + (RowGroups - 1) * L::kGroupBytes - (lane_ >> 4) * L::kGroupBytes);
    return moved;
  }
  __device__ __forceinline__ void rescale(uint2 moved) {
#pragma unroll
    for (int g = 0; g < RowGroups; ++g) {
      if (!(g & 1 ? moved.y : moved.x)) continue;
      const float2 f = ptx::load_shared_f2(
          shared_ + L::kRescale +
          ((count_ & 1) * L::kRows + g * kRowsPerGroup + 2 * (lane_ & 3)) * 4);
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c) {
        out_[c][g][0] *= f.x;
        out_[c][g][1] *= f.y;
        out_[c][g][2] *= f.x;
        out_[c][g][3] *= f.y;
      }
    }
  }
  __device__ __forceinline__ void release_probs() {
    __syncwarp();
    if (lane_ == 0) ptx::mbar_arrive(shared_ + L::kProbsEmpty + 8 * (count_ & 1));
    ++count_;
  }

  __device__ __forceinline__ void accumulate(const Cursor<RowGroups>& segment) {
    // Tiles whose values are prefetched as fragments; e4m3 leaves the bf16 tree rows out.
    const int end = Cache::kIsE4m3 ? min(segment.end_tile, segment.item.prefix_tiles)
                                   : segment.end_tile;
    int tile = segment.first_tile;
    if (tile < end) {
      Values values;
      wait_slot();
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c) load_values(values, c);
      release_slot(values);
      ring_.advance();

      // The rare rescaling stays out of the loop over tiles: leave it, rescale, come back.
      int rescaled = -1;
      uint2 moved;
      Probs probs;
      while (true) {
        for (; tile + 1 < end; ++tile) {
          moved = take_probs(probs);
          if (__builtin_expect((moved.x | moved.y) != 0 && rescaled != tile, 0)) break;
          wait_slot();
#pragma unroll
          for (int c = 0; c < kColumnTiles; ++c) {
            multiply(values, probs, c);
            if (!Cache::kIsE4m3) load_values(values, c);
            if (Cache::kIsE4m3 && (c & 1)) load_values(values, c - 1);
            if (c == 0) release_probs();
          }
          release_slot(values);
          ring_.advance();
        }
        if (tile + 1 == end) break;
        rescale(moved);
        rescaled = tile;
      }
      moved = take_probs(probs);
      if (moved.x | moved.y) rescale(moved);
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c) multiply(values, probs, c);
      release_probs();
      ++tile;
    }
    if constexpr (Cache::kIsE4m3) {
      for (; tile < segment.end_tile; ++tile) {
        Probs probs;
        wait_slot();
        const uint2 moved = take_probs(probs);
        if (moved.x | moved.y) rescale(moved);
#pragma unroll
        for (int c = 0; c < kColumnTiles; ++c) multiply_tree_e4m3(probs, c);
        release_probs();
        release_slot(__float_as_uint(out_[kColumnTiles - 1][RowGroups - 1][0]));
        ring_.advance();
      }
    }
  }

  // Reference (log2 units) and sum of rows 2t, 2t + 1 of a group.
  __device__ __forceinline__ void row_stats(int g, float2& reference, float2& sum) const {
    const uint32_t at = shared_ + (g * kRowsPerGroup + 2 * (lane_ & 3)) * 4;
    reference = ptx::load_shared_f2(at + L::kReference);
    sum = ptx::load_shared_f2(at + L::kSum);
  }

  __device__ __forceinline__ void store_partial(int place) {
    uint4* to = p_.partials + static_cast<size_t>(place) * RowGroups * kUnitsPerGroup +
                warp_ * (kColumnTiles / 2) * 32 + lane_;
#pragma unroll
    for (int g = 0; g < RowGroups; ++g)
#pragma unroll
      for (int c = 0; c < kColumnTiles; c += 2)
        __stcg(to + g * kUnitsPerGroup + c / 2 * 32,
               make_uint4(ptx::pack_bf16(out_[c][g][0], out_[c][g][1]),
                          ptx::pack_bf16(out_[c][g][2], out_[c][g][3]),
                          ptx::pack_bf16(out_[c + 1][g][0], out_[c + 1][g][1]),
                          ptx::pack_bf16(out_[c + 1][g][2], out_[c + 1][g][3])));
    if (warp_ != 0) return;
#pragma unroll
    for (int g = 0; g < RowGroups; ++g) {
      float2 reference, sum;
      row_stats(g, reference, sum);
      if (lane_ < 4)
        __stcg(reinterpret_cast<float4*>(p_.stats + static_cast<size_t>(place) * L::kRows +
                                         g * kRowsPerGroup + 2 * lane_),
               make_float4(reference.x, sum.x, reference.y, sum.y));
    }
  }

  // Normalises and stores a segment that is a whole item.
  __device__ __forceinline__ void store_output(const Cursor<RowGroups>& segment) {
    const int rows = segment.item.nodes * p_.heads - segment.first_row();
    const size_t first = static_cast<size_t>(segment.item.first_token) * p_.heads + segment.first_row();
#pragma unroll
    for (int g = 0; g < RowGroups; ++g) {
      float2 reference, sum;
      row_stats(g, reference, sum);
      const float scale[2] = {sum.x > 0.f ? __fdividef(p_.value_scale, sum.x) : 0.f,
                              sum.y > 0.f ? __fdividef(p_.value_scale, sum.y) : 0.f};
      const int row = g * kRowsPerGroup + 2 * (lane_ & 3);
      if (p_.lse && warp_ == 0 && lane_ < 4) {
        if (row < rows) p_.lse[first + row] = natural_lse(reference.x, sum.x);
        if (row + 1 < rows) p_.lse[first + row + 1] = natural_lse(reference.y, sum.y);
      }
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c) {
        const float(&o)[4] = out_[c][g];
        const int column = (warp_ * kColumnTiles + c) * 16;
        if constexpr (Cache::kIsE4m3) {  // a lane holds columns 2g, 2g + 1 of rows 2t, 2t + 1
          const int at = column + 2 * (lane_ >> 2);
#pragma unroll
          for (int j = 0; j < 2; ++j)
            if (row + j < rows)
              *reinterpret_cast<uint32_t*>(p_.out + (first + row + j) * kLatentDim + at) =
                  ptx::pack_bf16(o[j] * scale[j], o[2 + j] * scale[j]);
        } else {  // columns g and g + 8: transposing gives row g, columns 2t, 2t + 1
          const uint32_t low = ptx::transpose_8x8(ptx::pack_bf16(o[0] * scale[0], o[1] * scale[1]));
          const uint32_t high = ptx::transpose_8x8(ptx::pack_bf16(o[2] * scale[0], o[3] * scale[1]));
          const int own_row = g * kRowsPerGroup + (lane_ >> 2);
          if (own_row < rows) {
            uint16_t* to = p_.out + (first + own_row) * kLatentDim + column + 2 * (lane_ & 3);
            *reinterpret_cast<uint32_t*>(to) = low;
            *reinterpret_cast<uint32_t*>(to + 8) = high;
          }
        }
      }
    }
  }

  const VerifyMlaParams& p_;
  const uint32_t shared_;
  const int lane_, warp_;
  uint32_t probs_from_, values_from_;
  uint32_t places_[2];  // of the first columns of the warp's lines
  RingCursor<L::kSlots> ring_;
  int count_ = 0;     // tiles so far
  int segments_ = 0;  // finished
  float out_[kColumnTiles][RowGroups][4];
};

}  // namespace longleaf
