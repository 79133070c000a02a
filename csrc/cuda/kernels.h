// The CUDA backend: cuda::run(params, stream) for every op. Launchers are plain C++ functions; no
// torch, and no CUDA header either. `stream` is a cudaStream_t. A failed launch throws.
#pragma once

#include "../params.h"

namespace lighttransfer::cuda {

void run(const RetainedMassParams& p, void* stream);
void run(const LazyRatioParams& p, void* stream);
void run(const AppendKvParams& p, void* stream);
void run(const CompactKvParams& p, void* stream);
void run(const GatherKvParams& p, void* stream);
void run(const StreamingDecodeParams& p, void* stream);
int64_t workspace_bytes(const StreamingDecodeParams& p);
void run(const AttentionParams& p, void* stream);
void run(const MergeStatesParams& p, void* stream);

}  // namespace lighttransfer::cuda
