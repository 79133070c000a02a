#include <cuda_fp16.h>

#include "../decode_launch.cuh"

namespace lighttransfer::cuda {
template void launch_decode_split<__half>(const StreamingDecodeParams&, cudaStream_t);
}  // namespace lighttransfer::cuda
