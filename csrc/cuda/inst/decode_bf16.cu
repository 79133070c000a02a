#include <cuda_bf16.h>

#include "../decode_launch.cuh"

namespace lighttransfer::cuda {
template void launch_decode_split<__nv_bfloat16>(const StreamingDecodeParams&, cudaStream_t);
}  // namespace lighttransfer::cuda
