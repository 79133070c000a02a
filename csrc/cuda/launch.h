// Launch checks shared by all launchers.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace lighttransfer::cuda {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string("lighttransfer: CUDA error in ") + what + ": " +
                           cudaGetErrorString(status));
}

// After every <<<>>>: a launch that was refused says so here; nothing waits for the kernel.
inline void check_launch(const char* kernel) {
  check(cudaGetLastError(), kernel);
}

inline cudaStream_t as_stream(void* stream) {
  return static_cast<cudaStream_t>(stream);
}

template <class T>
constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

}  // namespace lighttransfer::cuda
