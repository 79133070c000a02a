// Rows of 16-bit elements in shared memory, an odd number of 16-byte chunks apart: eight rows of
// one chunk, which is what ldmatrix reads at once, lie in different banks.
#pragma once

#include "smem_tile.cuh"

namespace lighttransfer::cuda {

template <int kCols>
struct PaddedRows {
  static constexpr int kPitch = 2 * kCols + 16;  // bytes from row to row

  // How a warp copies rows: in each pass a lane brings chunks of one row, 16 * kLanesPerRow bytes
  // apart, of kRowsPerPass rows.
  static constexpr int kLanesPerRow = kCols % 64 == 0 ? 8 : 4;
  static constexpr int kRowsPerPass = 32 / kLanesPerRow;
  static constexpr int kChunksPerLane = kCols / 8 / kLanesPerRow;

  // The lane's row in a pass. Where two rows share a quarter of the warp, they are four apart:
  // neighbours would meet in a bank.
  static __device__ __forceinline__ int row(unsigned lane) {
    if constexpr (kLanesPerRow == 8) return lane / 8;
    return lane / 8 | (lane & 4);
  }
  static __device__ __forceinline__ int col(unsigned lane) { return lane % kLanesPerRow * 8; }
  // Byte offset of the lane's first chunk.
  static __device__ __forceinline__ uint32_t offset(unsigned lane) {
    return row(lane) * kPitch + col(lane) * 2;
  }

  // Byte offsets for the two orders of ldmatrix's four matrices (see SmemTile).
  static __device__ __forceinline__ uint32_t lane_rows_first(unsigned lane) {
    return lane % 16 * kPitch + lane / 16 * 16;
  }
  static __device__ __forceinline__ uint32_t lane_columns_first(unsigned lane) {
    return (lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * 16;
  }
  // Eight rows, 32 columns: the B operands of two steps.
  static __device__ __forceinline__ uint32_t lane_one_row(unsigned lane) {
    return lane % 8 * kPitch + lane / 8 * 16;
  }

  // How many bytes of each of its chunks a lane copies: what lies beyond head_dim becomes zeros.
  struct ChunkBytes {
    int of[kChunksPerLane];
    __device__ __forceinline__ ChunkBytes(unsigned lane, int head_dim) {
#pragma unroll
      for (int c = 0; c < kChunksPerLane; ++c) {
        of[c] = col(lane) + c * kLanesPerRow * 8 < head_dim ? 16 : 0;
      }
    }
  };

  // The lane's share of pass kPass. `to` is the address of its first chunk in the first pass,
  // `source` that chunk of this pass' row; the row becomes zeros where it does not exist.
  template <int kPass>
  static __device__ __forceinline__ void copy(uint32_t to, const char* source,
                                              const ChunkBytes& bytes, bool exists = true) {
    static_for<kChunksPerLane>([&](auto c) {
      constexpr int kOffset = c * kLanesPerRow * 16;
      copy_16_bytes_async<kPass * kRowsPerPass * kPitch + kOffset, kOffset>(
          to, source, exists ? bytes.of[c] : 0);
    });
  }
};

}  // namespace lighttransfer::cuda
