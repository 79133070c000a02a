#ifndef LIGHTTRANSFER_SIMULATOR
#include <torch/csrc/stable/library.h>

#include <string>

#include "../cpu/kernels.h"
#include "namespace.h"

namespace lighttransfer::bind {
namespace {

std::string cpu_isa() {
  return cpu::isa_name();
}

}  // namespace

// No tensor says which backend is meant.
STABLE_TORCH_LIBRARY_IMPL(LIGHTTRANSFER_NAMESPACE, CompositeExplicitAutograd, library) {
  library.impl("cpu_isa", TORCH_BOX(&cpu_isa));
}

}  // namespace lighttransfer::bind
#endif
