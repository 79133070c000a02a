// Launches the split kernel that fits the call. Instantiated once per storage type, in inst/.
#pragma once

#include <cuda_runtime.h>

#include "decode_split.h"

namespace lighttransfer::cuda {

template <class T>
void launch_decode_split(const StreamingDecodeParams& p, cudaStream_t stream);

}  // namespace lighttransfer::cuda
