// The decode kernels' shapes: keys of a tile, and where things lie in shared memory.
#pragma once

#include "decode_split.h"
#include "padded_rows.cuh"

namespace lighttransfer::cuda {

constexpr int kDecodeThreads = 32 * kDecodeWarps;
constexpr int kWarpKeys = kDecodeTile / kDecodeWarps;
static_assert(kWarpKeys == 32, "a lane for each key");

// Shapes that one instantiation fixes. kHeadDim is head_dim rounded up to 64, 96, 128 or 256;
// kGroupTiles n8 tiles hold the query heads.
template <int kHeadDim_, int kGroupTiles_>
struct DecodeShape {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kGroupTiles = kGroupTiles_;
  static constexpr int kHeads = 8 * kGroupTiles;
  static constexpr int kWarpDims = kHeadDim / kDecodeWarps;
  using Rows = PaddedRows<kHeadDim>;

  // Byte offsets in shared memory.
  static constexpr int kWarpTile = kWarpKeys * Rows::kPitch;
  static constexpr int kValues = kDecodeTile * Rows::kPitch;  // keys come first
  static constexpr int kQueries = 2 * kValues;                // a copy per warp: no barrier
  static constexpr int kWarpQueries = kHeads * Rows::kPitch;
  static constexpr int kWeights = kQueries + kDecodeWarps * kWarpQueries;
  static constexpr int kWeightTile = kDecodeTile * 16;                // [key][8 heads]
  static constexpr int kTops = kWeights + kGroupTiles * kWeightTile;  // fp32 [warp][head]
  static constexpr int kBytes = kTops + kDecodeWarps * kHeads * 4;
};

// What a launch derives from its params, once for all CTAs.
struct DecodeLaunch {
  DecodeHeads heads;
  unsigned n_kv_heads, n_sink;
  int head_dim;
  uint32_t capacity;        // slots that a row can address
  int has_mass;             // masses are asked for
  int has_runs;             // no 32 keys from a multiple of 32 on cross a page, and
  int64_t v_from_k;         // keys and values have the same strides: bytes from one to the other
  float scale_log2;         // softmax_scale * log2(e)
  DecodePartial* partials;  // in the workspace
};

}  // namespace lighttransfer::cuda
