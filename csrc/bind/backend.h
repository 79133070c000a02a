// A backend runs an op's params on a device. The binding functions are templates over it, so that
// checks and allocation are written once.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdlib>
#include <type_traits>

#ifndef LIGHTTRANSFER_SIMULATOR
#include "../cpu/kernels.h"
#endif
#ifdef LIGHTTRANSFER_WITH_CUDA
#include "../cuda/kernels.h"
#include "cuda_stream.h"
#endif
#ifdef LIGHTTRANSFER_SIMULATOR
#include "simulator_buffers.h"
#endif
#include "namespace.h"

namespace lighttransfer::bind {

#ifndef LIGHTTRANSFER_SIMULATOR
struct CpuBackend {
  // Lengths and indices that lie in tensors can be checked before the op runs.
  static constexpr bool reads_tensors() { return true; }
  // Kernels load 16 bytes at a time, from aligned addresses only.
  static constexpr bool kLoadsAligned = false;

  explicit CpuBackend(const torch::stable::Tensor&) {}

  template <class Params>
  void run(const Params& params) const {
    cpu::run(params);
  }

  // Scratch memory that an op with params.workspace needs.
  template <class Params>
  int64_t workspace_bytes(const Params& params) const {
    return cpu::workspace_bytes(params);
  }
};
#endif

#ifdef LIGHTTRANSFER_WITH_CUDA
// Makes the tensors' device current for its lifetime and launches on that device's current stream.
class CudaBackend {
 public:
  // Reading a tensor would wait for the device: kernels bound-check for themselves.
#ifdef LIGHTTRANSFER_SIMULATOR
  static bool reads_tensors() { return std::getenv("LIGHTTRANSFER_SIM_UNCHECKED_ROWS") == nullptr; }
#else
  static constexpr bool reads_tensors() { return false; }
#endif
  static constexpr bool kLoadsAligned = true;

  explicit CudaBackend(const torch::stable::Tensor& t) : launch_(t) {}

  template <class Params>
  void run(const Params& params) const {
#ifdef LIGHTTRANSFER_SIMULATOR
    simulator::Buffers buffers(params);
    if constexpr (has_workspace<Params>::value) {
      buffers.bytes(params.workspace, workspace_bytes(params), true, "workspace");
    }
#endif
    cuda::run(params, launch_.stream());
  }

  template <class Params>
  int64_t workspace_bytes(const Params& params) const {
    return cuda::workspace_bytes(params);
  }

 private:
#ifdef LIGHTTRANSFER_SIMULATOR
  template <class P, class = void>
  struct has_workspace : std::false_type {};
  template <class P>
  struct has_workspace<P, std::void_t<decltype(P::workspace)>> : std::true_type {};
#endif
  CudaLaunchScope launch_;
};
#endif

}  // namespace lighttransfer::bind

// Each op says which devices have it: LT_REGISTER_CPU(op) and LT_REGISTER_CUDA(op), with `op` a
// template over the backend. The simulator's build puts the CUDA launchers behind the CPU key.
#define LT_REGISTER(op, Key, Backend)                                \
  STABLE_TORCH_LIBRARY_IMPL(LIGHTTRANSFER_NAMESPACE, Key, library) { \
    library.impl(#op, TORCH_BOX(&op<Backend>));                      \
  }
#ifdef LIGHTTRANSFER_SIMULATOR
#define LT_REGISTER_CPU(op)
#define LT_REGISTER_CUDA(op) LT_REGISTER(op, CPU, CudaBackend)
#else
#define LT_REGISTER_CPU(op) LT_REGISTER(op, CPU, CpuBackend)
#ifdef LIGHTTRANSFER_WITH_CUDA
#define LT_REGISTER_CUDA(op) LT_REGISTER(op, CUDA, CudaBackend)
#else
#define LT_REGISTER_CUDA(op)
#endif
#endif
