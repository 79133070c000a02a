// The tile of a decode step: up to kTile cached keys of one KV head against a block of kHeads of
// its query heads, one head to a group of four lanes.
#pragma once

#include "simd_dot.h"

namespace lighttransfer::cpu::LIGHTTRANSFER_ISA {
namespace {

constexpr int kTile = 64;
constexpr int kMaxHeadDim = 256;
// A score vector holds kGroups heads and 4 keys; kVecs of them make a block of heads.
constexpr int kVecs = kLanes == 16 ? 1 : 2;
constexpr int kHeads = kVecs * kGroups;
// Keys whose sums, and pairs of column vectors whose outputs, are in registers at a time.
constexpr int kKeys = 4;
constexpr int kPairs = kLanes == 16 ? 2 : 1;

// Scores of a tile: vector i * kVecs + w holds, in group g, head w * kGroups + g's scores of the
// keys 4i .. 4i + 3. So the score of head h for key i is at scores[at(h, i)].
struct TileScores {
  alignas(64) float values[kTile * kHeads];

  static constexpr int at(int h, int i) { return i / 4 * (4 * kHeads) + 4 * h + i % 4; }
  Vec get(int i, int w) const { return load<F32>(values + (i * kVecs + w) * kLanes); }
  void set(int i, int w, Vec v) { store<F32>(values + (i * kVecs + w) * kLanes, v); }
};

}  // namespace
}  // namespace lighttransfer::cpu::LIGHTTRANSFER_ISA
