// The prefill kernels' tile shapes and what a launch passes to them beyond AttentionParams.
#pragma once

#include "../params.h"
#include "row_tile.cuh"
#include "smem_tile.cuh"

namespace lighttransfer::cuda {

template <int kHeadDim_>
struct PrefillShape {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = 128;
  static constexpr int kBlockN = 64;
  // 32 rows a warp keep the tensor cores rather than shared memory busy; at head_dim 256 the output
  // of 32 rows would fill the register file.
  static constexpr int kRowsPerWarp = kHeadDim > 128 ? 16 : 32;
  static constexpr int kThreads = kBlockM / kRowsPerWarp * 32;
  static constexpr bool kQueriesInRegisters = kHeadDim <= 64;
  // Where registers are scarce the compiler spends them on weights ahead of their time, and waits
  // for every operand from V: a fence behind half of the products lets it begin anew.
  static constexpr bool kFencesProducts = kHeadDim == 128;

  using QTile = SmemTile<kBlockM, kHeadDim>;
  using KvTile = SmemTile<kBlockN, kHeadDim>;
  static constexpr uint32_t kK = QTile::kBytes;  // offsets in shared memory
  static constexpr uint32_t kV = kK + KvTile::kBytes;
  static constexpr uint32_t kPartials = kV + KvTile::kBytes;
  // The sums of two segments for each row, with their shifts.
  static constexpr uint32_t kRowTile = kPartials + 2 * kBlockM * sizeof(float2);
  static constexpr uint32_t kSmemBytes = kRowTile + sizeof(RowTile);
};

struct PrefillArgs {
  AttentionParams p;
  int row_tiles;
  bool aligned;  // q, k and v rows start at multiples of 16 bytes
  float scale_log2;
  int64_t q_pass, k_pass, v_pass;  // bytes between the rows of two passes of a TileCopy
  int64_t k_tile, v_tile;          // bytes between two tiles of keys
};

}  // namespace lighttransfer::cuda
