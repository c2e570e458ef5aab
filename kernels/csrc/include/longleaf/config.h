// Model and hardware constants that every kernel shares.
#pragma once

namespace longleaf {

constexpr int kLatentDim = 512;  // kv_lora_rank: the value, and the first part of the key
constexpr int kRopeDim = 64;
constexpr int kRowDim = kLatentDim + kRopeDim;  // one cached token

// The most shared memory a block may use: sm_120's limit, kept on sm_90 too.
constexpr int kSharedLimit = 101376;

}  // namespace longleaf
