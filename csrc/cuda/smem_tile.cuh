// Tiles of 16-bit elements in shared memory, and the asynchronous copies that fill them.
#pragma once

#include <cstdint>
#include <cute/swizzle.hpp>

#include "tensor_core.cuh"

namespace lighttransfer::cuda {

// [kRows, kCols], cut into blocks of 64 columns (32 where 64 does not divide kCols) that lie one
// after the other. Within a block the 16-byte chunks of a row are permuted by the row, so that
// eight rows of one chunk, which is what ldmatrix reads at once, fall into different banks.
template <int kRows_, int kCols_>
struct SmemTile {
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kBlockCols = kCols % 64 == 0 ? 64 : 32;
  static constexpr int kBlocks = kCols / kBlockCols;
  static constexpr uint32_t kRowBytes = 2 * kBlockCols;
  static constexpr uint32_t kBlockBytes = kRows * kRowBytes;
  static constexpr uint32_t kBytes = kBlocks * kBlockBytes;
  // The permutation works on address bits 4 to 6: tiles start at multiples of this.
  static constexpr uint32_t kAlignment = 128;
  using Swizzle = cute::Swizzle<kBlockCols == 64 ? 3 : 2, 3, 3>;

  // Byte offset of an element of the first column block.
  static __device__ __forceinline__ uint32_t offset(int row, int col) {
    return 2 * Swizzle::apply(static_cast<uint32_t>(row * kBlockCols + col));
  }

  // The address of (row + rows, col + columns) is within(address of (row, col), columns) +
  // offset_of(rows, columns), where rows is a multiple of 8 and col is below columns' granule, a
  // power of two of at least 8. With both known this costs one instruction at most.
  static __device__ __forceinline__ uint32_t within(uint32_t address, int columns) {
    return address ^ (2 * (columns % kBlockCols));
  }
  static constexpr __device__ __forceinline__ uint32_t offset_of(int rows, int columns) {
    return rows * kRowBytes + columns / kBlockCols * kBlockBytes;
  }

  // ldmatrix addresses of a lane. Matrices in the order (rows 0-7, 8-15) x (columns 0-7, 8-15): an
  // A operand stored row by row, or, transposed, two B operands stored k by k.
  static __device__ __forceinline__ uint32_t lane_rows_first(uint32_t base, int row, int lane) {
    return base + offset(row + lane % 16, lane / 16 * 8);
  }
  // Matrices in the order (columns 0-7, 8-15) x (rows 0-7, 8-15): two B operands stored n by n.
  static __device__ __forceinline__ uint32_t lane_columns_first(uint32_t base, int row, int lane) {
    return base + offset(row + lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
  }
};

// The first `bytes` (0 or 16) from global memory, then zeros; offsets are immediates.
template <int kTo = 0, int kFrom = 0>
__device__ __forceinline__ void copy_16_bytes_async(uint32_t destination, const char* source,
                                                    int bytes) {
  asm volatile(
      "cp.async.cg.shared.global.L2::128B [%0 + %3], [%1 + %4], 16, %2;\n" ::"r"(destination),
      "l"(source), "r"(bytes), "n"(kTo), "n"(kFrom));
}

// Ends a group of copies; wait_for_copies<n>() leaves the n youngest groups on their way.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// All copies that this thread has begun. Its own only: a barrier makes them everybody's.
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;\n" ::: "memory");
}

// Which rows of a tile exist: the others are filled with zeros, as is what lies beyond head_dim.
struct RowRange {
  int begin, end;
};

// One thread's share of copying a tile from global memory: one 16-byte chunk of every
// kRowsPerPass-th row and of every column block. A pass moves by whole permutation periods, so all
// shared addresses are one register plus constants.
template <class Tile, int kThreads>
struct TileCopy {
  static constexpr int kThreadsPerRow = Tile::kBlockCols / 8;
  static constexpr int kRowsPerPass = kThreads / kThreadsPerRow;
  static constexpr int kPasses = Tile::kRows / kRowsPerPass;
  static_assert(kPasses * kRowsPerPass == Tile::kRows && kRowsPerPass % 8 == 0);

  uint32_t destination;  // shared address
  int first_col;

  __device__ __forceinline__ explicit TileCopy(uint32_t tile)
      : destination(tile + Tile::offset(row(), col())), first_col(col()) {}

  // The thread's first row and column.
  static __device__ __forceinline__ int row() { return thread_anew() / kThreadsPerRow; }
  static __device__ __forceinline__ int col() { return thread_anew() % kThreadsPerRow * 8; }

  // `source` is the tile's element (row, col) of this thread; rows are pass_bytes / kRowsPerPass
  // apart.
  __device__ __forceinline__ void copy(const char* source, int64_t pass_bytes, int head_dim) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass, source += pass_bytes) {
#pragma unroll
      for (int block = 0; block < Tile::kBlocks; ++block) {
        const int column = block * Tile::kBlockCols;
        copy_16_bytes_async(destination + Tile::offset_of(pass * kRowsPerPass, column),
                            source + 2 * column, first_col + column < head_dim ? 16 : 0);
      }
    }
  }

  __device__ __forceinline__ void copy(const char* source, int64_t pass_bytes, int head_dim,
                                       RowRange rows) const {
    const int row = this->row(), col = this->col();
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass, source += pass_bytes) {
      const int r = row + pass * kRowsPerPass;
      const bool exists = r >= rows.begin && r < rows.end;
#pragma unroll
      for (int block = 0; block < Tile::kBlocks; ++block) {
        const int column = block * Tile::kBlockCols;
        copy_16_bytes_async(destination + Tile::offset_of(pass * kRowsPerPass, column),
                            source + 2 * column, exists && col + column < head_dim ? 16 : 0);
      }
    }
  }

  // The same, element by element, for rows that do not start at multiples of 16 bytes. Slow and
  // small: it stays out of the loops that matter.
  __device__ __forceinline__ void copy_unaligned(const char* source, int64_t pass_bytes,
                                                 int head_dim, RowRange rows) const {
    const int row = this->row(), col = this->col();
#pragma unroll 1
    for (int i = 0; i < kPasses * Tile::kBlocks; ++i) {
      const int pass = i / Tile::kBlocks, block = i % Tile::kBlocks;
      const int r = row + pass * kRowsPerPass, column = block * Tile::kBlockCols;
      const bool exists = r >= rows.begin && r < rows.end && col + column < head_dim;
      const auto* from = reinterpret_cast<const uint16_t*>(source + pass * pass_bytes + 2 * column);
      uint32_t words[4] = {};
      if (exists) {
#pragma unroll
        for (int w = 0; w < 4; ++w) words[w] = from[2 * w] | uint32_t{from[2 * w + 1]} << 16;
      }
      const uint32_t to = destination + Tile::offset_of(pass * kRowsPerPass, column);
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(words[0]),
                   "r"(words[1]), "r"(words[2]), "r"(words[3])
                   : "memory");
    }
  }
};

}  // namespace lighttransfer::cuda
