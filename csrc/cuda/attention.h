// The launcher of the prefill kernels, instantiated in inst/ for each head_dim and element type.
#pragma once

#include "../params.h"

namespace lighttransfer::cuda {

// head_dim <= kHeadDim; the columns beyond it are zero-filled.
template <class Element, int kHeadDim>
void launch_prefill(const AttentionParams& p, void* stream);

}  // namespace lighttransfer::cuda
