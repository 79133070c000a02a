// The algebra of attention states. A state is (out, lse): a softmax-weighted mean of values and the
// log-sum-exp of its scores; two states over disjoint keys merge into the state of their union.
#pragma once

#include <cmath>

#include "window.h"

namespace lighttransfer {

// The weights of a merge: out = weight_a * out_a + weight_b * out_b.
struct MergeWeights {
  float weight_a;
  float weight_b;
  float lse;
};

// lse = -inf is the empty state, the identity of the merge: the other side comes back with a weight
// of exactly 1 (callers copy instead of multiplying, so that it comes back bit for bit).
LT_HOST_DEVICE inline MergeWeights merge_weights(float lse_a, float lse_b) {
  if (lse_b == -INFINITY) return {1.0f, 0.0f, lse_a};
  if (lse_a == -INFINITY) return {0.0f, 1.0f, lse_b};
  const float top = lse_a > lse_b ? lse_a : lse_b;
  const float a = expf(lse_a - top);
  const float b = expf(lse_b - top);
  const float sum = a + b;
  return {a / sum, b / sum, top + logf(sum)};
}

}  // namespace lighttransfer
