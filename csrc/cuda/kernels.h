// The CUDA backend: cuda::run(params, stream) for every op. Launchers are plain C++ functions; no
// torch, and no CUDA header either. `stream` is a cudaStream_t. A failed launch throws.
#pragma once

#include "../params.h"

namespace lighttransfer::cuda {

void run(const AttentionParams& p, void* stream);
void run(const MergeStatesParams& p, void* stream);

}  // namespace lighttransfer::cuda
